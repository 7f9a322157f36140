"""Data: loading, division among clients, augmentation, and the order of examples."""

from fedkeep.data import partition
from fedkeep.data.augment import Augment, InputPipeline
from fedkeep.data.dataset import Dataset, from_arrays
from fedkeep.data.normalise import FeatureSums, feature_sums, mean_and_std
from fedkeep.data.partition import Partition
from fedkeep.data.plan import ClientPlan, make_plan
from fedkeep.data.reductions import Reduction
from fedkeep.data.seeds import sample_cohort
from fedkeep.data.sources import load
from fedkeep.data.tokenizers import text_form

__all__ = [
    "Augment",
    "ClientPlan",
    "Dataset",
    "FeatureSums",
    "InputPipeline",
    "Partition",
    "Reduction",
    "feature_sums",
    "from_arrays",
    "load",
    "make_plan",
    "mean_and_std",
    "partition",
    "sample_cohort",
    "text_form",
]
