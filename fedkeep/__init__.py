"""fedkeep: federated learning that keeps what it has learned.

import fedkeep as fk

data = fk.data.load("digits")
clients = fk.data.partition.shards(data.y_train, n_clients=20, s=2, seed=0)
history = fk.simulate(fk.methods.FedNTD(beta=1.0, tau=1.0), "mlp", data, clients, rounds=10)
history.summary()
"""

__version__ = "0.1.0"

from fedkeep import data, errors, forgetting, instruments, losses, methods, models, optim, tensorboard, tree
from fedkeep.engine import Settings, Simulation, simulate
from fedkeep.history import History
from fedkeep.resuming import resume
from fedkeep.runs import load_run

__all__ = [
    "History",
    "Settings",
    "Simulation",
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
