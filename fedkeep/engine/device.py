"""Where a run computes, and how exactly: torch's global flags are set for a round and put back after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fedkeep.engine import ranks
from fedkeep.engine.settings import Settings
from fedkeep.errors import FedkeepError, nearest


def find(name: str) -> torch.device:
    """Return the device of this name; `auto` is this process's GPU, or else the CPU."""
    try:
        if name == "auto":
            device = ranks.local_device() if torch.cuda.is_available() else torch.device("cpu")
        else:
            device = torch.device(name)
    except (RuntimeError, TypeError):
        known = ["auto", "cpu", "cuda", "cuda:0"]
        raise FedkeepError(f"unknown device {name!r}: {nearest(str(name), known)}") from None
    try:
        torch.empty(0, device=device)
    except Exception as error:
        raise FedkeepError(f"device = {name!r} is not there: {str(error).splitlines()[0]}") from None
    return device


@contextmanager
def numerics(settings: Settings) -> Iterator[None]:
    """Compute as the settings say: TF32 or not, deterministically or not."""
    precision = torch.get_float32_matmul_precision()
    convolutions = torch.backends.cudnn.allow_tf32
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.set_float32_matmul_precision("high" if settings.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = settings.tf32
    if settings.deterministic:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = convolutions
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
