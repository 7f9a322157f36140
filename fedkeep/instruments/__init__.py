"""Instruments that measure where a round forgets, and why, from models and data.

The formulas are pure functions of arrays or of trees of weights. `analyse` applies them to a run: it loads the global
model of a checkpoint, trains the next round as a trial and does not modify the run. `Every` does the same every n
rounds during a run. Formulas that need only class accuracies are in `fedkeep.forgetting`.
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
from fedkeep.instruments.options import Options
from fedkeep.instruments.study import CHEAP, STUDIES, analyse
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
