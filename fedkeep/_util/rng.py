"""Global random states: seeding torch for modules that draw random numbers themselves, and leaving all as they were."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch on this device inside the block; afterwards every random state is as it was before."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        for one in devices:
            with torch.cuda.device(one):
                torch.cuda.manual_seed(seed)
        yield


def random_state(device: torch.device) -> torch.Tensor:
    """Return torch's random state on this device."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


@contextmanager
def preserved() -> Iterator[None]:
    """Leave the global random states of Python, numpy and torch as they were before the block."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 (it may be the user's)
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = range(torch.cuda.device_count()) if in_use else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
