"""Triton kernels for a stack of models: one launch for all clients.

`TRITON_INTERPRET=1` runs them on the CPU, as `make test-kernels` does.
"""

from __future__ import annotations

import functools
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch


@functools.cache
def kernels() -> Any:
    """Import the kernels, and with them Triton, on first use; each module is an attribute."""
    names = ("convolution", "dense", "dropout", "factors", "group_norm", "losses", "pooling", "updates")
    return SimpleNamespace(**{name: import_module(f"{__name__}.{name}") for name in names})


@functools.cache
def has_triton(device: torch.device) -> bool:
    """Return whether kernels can run on this device: a GPU from 2020 on, and Triton is installed."""
    return (
        device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0) and find_spec("triton") is not None
    )
