"""A Flower ServerApp that runs a method of fedkeep from the app's config."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Strategy as FlowerStrategy
from torch import Tensor, nn

from fedkeep import losses
from fedkeep.errors import ConfigError
from fedkeep.flower.round_loop import drive
from fedkeep.flower.strategy import Strategy
from fedkeep.method import FedAvg

_OWN = {  # keys of the app's config, and the arguments that they set
    "num-clients": "num_clients",
    "run-dir": "run_dir",
    "round-timeout": "timeout",
    "min-replies": "min_replies",
    "attempts": "attempts",
    "patience": "patience",
}


def server_app(
    method: FedAvg | str | None,
    model_fn: Callable[[], nn.Module],
    data_fn: Callable[..., Any] | None = None,
    *,
    criterion: Callable[[Tensor, Tensor], Tensor] = losses.cross_entropy,
    wrap: Callable[[Strategy], FlowerStrategy] | None = None,
    **options: Any,
) -> ServerApp:
    """Make the ServerApp of a federation.

    `method` and `model_fn` are as in `client_app`. `data_fn()`, or `data_fn(context)`, returns what the server tests
    with: (x, y), or a data set with a test part and, for the methods that need one, a public part. The options are
    those of `Strategy` and the settings of `fedkeep.simulate`. The app's config comes before them: `num-clients`,
    `run-dir`, `round-timeout`, `min-replies`, `attempts`, `patience`, `seed`, and the tables `method` and `train`.
    `wrap` may put one of Flower's wrappers around the strategy.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        _speak()
        config = context.run_config
        said = {argument: config[key] for key, argument in _OWN.items() if key in config}
        if "num_clients" not in {**options, **said}:
            raise ConfigError("how many clients are there? say num-clients in the app's config")
        data = (lambda: _call(data_fn, context)) if data_fn else None
        strategy = Strategy(
            method,  # type: ignore[arg-type]
            model_fn,
            data_fn=data,
            criterion=criterion,
            run_config=config,
            **{**options, **said},
        )
        drive(strategy, wrap(strategy) if wrap else strategy, grid)

    return app


def _call(data_fn: Callable[..., Any], context: Context) -> Any:
    return data_fn(context) if inspect.signature(data_fn).parameters else data_fn()


def _speak() -> None:
    """Let the log of an app be read: an app has no user at the terminal, `flwr log` shows what it writes."""
    logger = logging.getLogger("fedkeep")
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("fedkeep: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
