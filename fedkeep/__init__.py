"""fedkeep: federated learning that keeps what it has learned.

import fedkeep as fk

data = fk.data.load("digits")
clients = fk.data.partition.shards(data.y_train, n_clients=20, s=2, seed=0)
history = fk.simulate(fk.methods.FedKeep(), "mlp", data, clients, rounds=10)
history.summary()
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedkeep._util.version import __version__

if TYPE_CHECKING:
    from fedkeep import (
        data,
        errors,
        forgetting,
        instruments,
        losses,
        methods,
        metrics,
        models,
        optim,
        testing,
        tree,
    )
    from fedkeep import (
        flower as flower,
    )
    from fedkeep.analysis.comparison import compare
    from fedkeep.engine.profile import Profile
    from fedkeep.engine.settings import Settings
    from fedkeep.engine.simulate import simulate
    from fedkeep.engine.simulation import Simulation
    from fedkeep.experiments.from_python import run, sweep
    from fedkeep.experiments.load import load_run
    from fedkeep.experiments.resume import resume
    from fedkeep.reports.page import report
    from fedkeep.runs import tensorboard
    from fedkeep.runs.csv_logger import CSVLogger
    from fedkeep.runs.federation_copy import save_federation
    from fedkeep.runs.history import History
    from fedkeep.runs.mlflow_logger import MLflow
    from fedkeep.runs.tensorboard import TensorBoard
    from fedkeep.runs.wandb_logger import WandB

__all__ = [
    "CSVLogger",
    "History",
    "MLflow",
    "Profile",
    "Settings",
    "Simulation",
    "TensorBoard",
    "WandB",
    "__version__",
    "compare",
    "data",
    "errors",
    "forgetting",
    "instruments",
    "load_run",
    "losses",
    "methods",
    "metrics",
    "models",
    "optim",
    "report",
    "resume",
    "run",
    "save_federation",
    "simulate",
    "sweep",
    "tensorboard",
    "testing",
    "tree",
]

# Imported at first use: the command line must be able to handle a signal before torch is imported.
_MODULE_OF = {
    "CSVLogger": "runs.csv_logger",
    "History": "runs.history",
    "MLflow": "runs.mlflow_logger",
    "Profile": "engine.profile",
    "Settings": "engine.settings",
    "Simulation": "engine.simulation",
    "TensorBoard": "runs.tensorboard",
    "WandB": "runs.wandb_logger",
    "compare": "analysis.comparison",
    "load_run": "experiments.load",
    "report": "reports.page",
    "resume": "experiments.resume",
    "run": "experiments.from_python",
    "save_federation": "runs.federation_copy",
    "simulate": "engine.simulate",
    "sweep": "experiments.from_python",
}


def __getattr__(name: str) -> Any:
    """Import what is used for the first time."""
    if name not in __all__ and name != "flower":  # which a star import leaves out: Flower may not be installed
        raise AttributeError(f"module 'fedkeep' has no attribute {name!r}")
    if name in _MODULE_OF:
        value = getattr(import_module(f"fedkeep.{_MODULE_OF[name]}"), name)
    else:
        value = import_module(f"fedkeep.{'runs.tensorboard' if name == 'tensorboard' else name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, those that are not imported yet too."""
    return sorted({*globals(), *__all__})
