"""Methods of fedkeep in a real federation, on Flower.

    app = fedkeep.flower.client_app("fedkeep", model_fn, data_fn)     # on the nodes
    app = fedkeep.flower.server_app("fedkeep", model_fn, test_fn)     # on the server

    strategy = fedkeep.flower.forgetting(strategy, model, test_data, run_dir="runs/app")    # in an app of your own

The clients call the same `train_one` as the simulation, the server the same `aggregate`; only the transport of trees
between them differs.
"""

try:
    import flwr  # noqa: F401
except ImportError as error:
    from fedkeep._util.optional import install_command

    raise ImportError(f"fedkeep.flower needs Flower: {install_command('flower', 'flwr')}") from error

from fedkeep.flower.client import client_app
from fedkeep.flower.observe import forgetting
from fedkeep.flower.round_loop import drive
from fedkeep.flower.server import server_app
from fedkeep.flower.strategy import Strategy
from fedkeep.flower.update_checks import Limits

__all__ = ["Limits", "Strategy", "client_app", "drive", "forgetting", "server_app"]
