"""Flower's own privacy mods and wrappers: refused by name where they do not cover all that a method sends.

A mod or wrapper clips and noises one record of a message, the weights. Whatever else an upload holds passes as it is.
fedkeep's own differential privacy (the settings dp_clip and dp_noise) covers whole uploads and needs none of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from flwr.serverapp.strategy import Strategy as FlowerStrategy

from fedkeep.engine.settings import Settings
from fedkeep.errors import ConfigError, MethodError
from fedkeep.method import FedAvg
from fedkeep.tree import Tree

LOCAL_DP = "LocalDpMod"
COVERS_WEIGHTS = (LOCAL_DP, "fixedclipping_mod")
NOT_SUPPORTED = {
    "adaptiveclipping_mod": "it reports its clipping in a metric, and fedkeep's replies have none",
    "secagg_mod": "it uses an older protocol, and the server needs each upload separately",
    "secaggplus_mod": "it uses an older protocol, and the server needs each upload separately",
}
WRAPPER_PREFIX = "DifferentialPrivacy"


def mod_names(mods: Iterable[Any] | None) -> tuple[str, ...]:
    """Return the names of Flower's privacy mods among these."""
    names = [getattr(mod, "__name__", type(mod).__name__) for mod in mods or ()]
    return tuple(name for name in names if name in COVERS_WEIGHTS or name in NOT_SUPPORTED)


def require_usable_mods(names: Collection[str], report_loss: bool) -> None:
    """Raise if one of the mods cannot work with fedkeep, or if the app discloses more than they cover."""
    for name in names:
        if name in NOT_SUPPORTED:
            raise ConfigError(
                f"{name} does not work with fedkeep: {NOT_SUPPORTED[name]}",
                key="mods",
                value=name,
                valid=COVERS_WEIGHTS,
            )
    if names and report_loss:
        raise ConfigError(
            f"report_loss sends the training loss, which {next(iter(names))} neither clips nor noises",
            key="report_loss",
            value=True,
        )


def covered_upload(method: FedAvg, upload: Tree, names: Collection[str]) -> Tree:
    """Return the upload as it may be sent under these mods; raise if it holds more than weights.

    Under LocalDpMod the server must not learn n either, so every client claims one example.
    """
    _require_only_weights(method, upload, names)
    if LOCAL_DP in names and "n" in upload:
        return {**upload, "n": torch.ones_like(upload["n"])}
    return upload


def is_privacy_wrapper(outer: FlowerStrategy) -> bool:
    """Return whether this is one of Flower's wrappers for differential privacy."""
    return any(cls.__name__.startswith(WRAPPER_PREFIX) for cls in type(outer).__mro__)


def require_covered(outer: FlowerStrategy, method: FedAvg, settings: Settings) -> None:
    """Raise unless a wrapper for differential privacy covers everything that the server makes of the uploads."""
    if not is_privacy_wrapper(outer):
        return
    name = type(outer).__name__
    if not settings.plain_mean:
        raise ConfigError(
            f"{name} computes its noise for a plain mean: use it without dp_clip, dp_noise and aggregation",
            key="wrap",
            value=name,
        )
    if method.averaged != ("params",) or method.uses("aggregate"):
        raise MethodError(
            f"{name} noises the weights alone, after {method.name} has made more of the uploads than their mean: use "
            "dp_clip and dp_noise instead, which cover it where that is possible",
            key="wrap",
            value=method.name,
        )


def require_covered_uploads(outer: FlowerStrategy, method: FedAvg, uploads: Iterable[Tree]) -> None:
    """Raise if uploads hold more than the weights that a wrapper for differential privacy clips."""
    if is_privacy_wrapper(outer):
        for upload in uploads:
            _require_only_weights(method, upload, [type(outer).__name__])


def _require_only_weights(method: FedAvg, upload: Tree, names: Collection[str]) -> None:
    extra = sorted(upload.keys() - {"params", "n"})
    if extra and names:
        raise MethodError(
            f"{next(iter(names))} covers the weights alone, but {method.name} also uploads {', '.join(extra)}",
            key="mods",
            value=method.name,
        )
