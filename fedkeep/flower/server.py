"""Flower ServerApp that runs a fedkeep method as the app's config says."""

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
from fedkeep.flower.strategy import Strategy
from fedkeep.method import FedAvg

CONFIG_ARGUMENTS = {  # keys of the app's config, and the arguments of Strategy that they set
    "num-clients": "num_clients",
    "run-dir": "run_dir",
    "keep": "keep",
    "from-round": "from_round",
    "round-timeout": "timeout",
    "min-replies": "min_replies",
    "attempts": "attempts",
    "patience": "patience",
    "max-examples": "max_examples",
    "client-keys": "client_keys",
    "trial": "trial",
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

    Parameters
    ----------
    method
        One of `fedkeep.methods`, or its name; None if the app's config has `method.name`.
    model_fn
        Returns the model, as in `client_app`.
    data_fn
        `data_fn()` or `data_fn(context)` returns the server's data: (x, y) to test with, or a data set with a test part
        and, for the methods that need one, a public part.
    criterion
        The loss of logits and labels, per example, as in `client_app`.
    wrap
        Returns one of Flower's wrappers around the strategy, for example for differential privacy.
    **options
        Other arguments of `Strategy`, and the settings of `fedkeep.simulate`. The app's config takes precedence:
        `num-clients`, `run-dir`, `keep`, `from-round`, `round-timeout`, `min-replies`, `attempts`, `patience`,
        `max-examples`, `client-keys`, `trial`, `seed`, and the tables `method` and `train`.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        configure_logging()
        config = context.run_config
        arguments = {**options, **{name: config[key] for key, name in CONFIG_ARGUMENTS.items() if key in config}}
        if "num_clients" not in arguments:
            raise ConfigError("the app's config lacks num-clients, the number of clients in all", key="num-clients")
        strategy = Strategy(
            method,  # type: ignore[arg-type]
            model_fn,
            data_fn=(lambda: _call(data_fn, context)) if data_fn else None,
            criterion=criterion,
            run_config=config,
            **arguments,
        )
        strategy.start(grid, outer=wrap(strategy) if wrap else None)

    return app


def configure_logging() -> None:
    """Write fedkeep's log to stderr, which `flwr log` shows, unless the app has configured logging itself."""
    logger = logging.getLogger("fedkeep")
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("fedkeep: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


def _call(data_fn: Callable[..., Any], context: Context) -> Any:
    return data_fn(context) if inspect.signature(data_fn).parameters else data_fn()
