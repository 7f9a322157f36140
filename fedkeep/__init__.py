"""fedkeep: federated learning that keeps what it has learned.

import fedkeep as fk

data = fk.data.load("digits")
clients = fk.data.partition.shards(data.y_train, n_clients=20, s=2, seed=0)
history = fk.simulate(fk.methods.FedNTD(beta=1.0, tau=1.0), "mlp", data, clients, rounds=10)
history.summary()
"""

from fedkeep import data, errors, forgetting, instruments, losses, methods, models, optim, tree
from fedkeep._util.version import __version__
from fedkeep.engine.settings import Settings
from fedkeep.engine.simulate import simulate
from fedkeep.engine.simulation import Simulation
from fedkeep.experiments.resume import resume
from fedkeep.runs import tensorboard
from fedkeep.runs.history import History
from fedkeep.runs.reading import load_run
from fedkeep.runs.tensorboard import TensorBoard

__all__ = [
    "History",
    "Settings",
    "Simulation",
    "TensorBoard",
    "__version__",
    "data",
    "errors",
    "forgetting",
    "instruments",
    "load_run",
    "losses",
    "methods",
    "models",
    "optim",
    "resume",
    "simulate",
    "tensorboard",
    "tree",
]
