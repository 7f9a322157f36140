"""Data: where it comes from, who gets what, how it is augmented, and in which order it is used."""

from fedkeep.data import partition
from fedkeep.data.augment import Augment, InputPipeline
from fedkeep.data.dataset import Dataset, from_arrays
from fedkeep.data.partition import Partition
from fedkeep.data.plan import ClientPlan, make_plan
from fedkeep.data.seeds import sample_cohort
from fedkeep.data.sources import load

__all__ = [
    "Augment",
    "ClientPlan",
    "Dataset",
    "InputPipeline",
    "Partition",
    "from_arrays",
    "load",
    "make_plan",
    "partition",
    "sample_cohort",
]
