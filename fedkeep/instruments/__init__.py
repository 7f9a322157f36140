"""Instruments that look at models and data: where a round forgot, and why.

The formulas are pure functions on arrays, or on trees of weights. `analyse` applies them to a run: it takes the global
model of a checkpoint, trains the cohort of the next round aside, and leaves the run as it was. `Every` does the same
every n rounds while a run goes on. Formulas that need class accuracies alone are in `fedkeep.forgetting`.
"""

from fedkeep.instruments.every import Every
from fedkeep.instruments.formulas import (
    alignment,
    class_preference,
    gradient_diversity,
    loss_transition,
    relation,
    separation,
    tsne,
    weight_divergence,
)
from fedkeep.instruments.next_round import NextRound, open_run, train_next_round
from fedkeep.instruments.study import CHEAP, STUDIES, Options, analyse
from fedkeep.instruments.surface import (
    hessian_directions,
    loss_surface,
    loss_under_noise,
    random_directions,
)

__all__ = [
    "CHEAP",
    "STUDIES",
    "Every",
    "NextRound",
    "Options",
    "alignment",
    "analyse",
    "class_preference",
    "gradient_diversity",
    "hessian_directions",
    "loss_surface",
    "loss_transition",
    "loss_under_noise",
    "open_run",
    "random_directions",
    "relation",
    "separation",
    "train_next_round",
    "tsne",
    "weight_divergence",
]
