"""Where a run computes, and how exactly: torch's global flags are set for a round and put back after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fedkeep._util.text import did_you_mean
from fedkeep.engine import distributed
from fedkeep.engine.settings import SMALL_MODEL, Settings
from fedkeep.errors import FedkeepError
from fedkeep.task import Task

_AT_A_TIME = 1 << 27  # bytes of inputs in one pass on a GPU


def resolve_device(name: str) -> torch.device:
    """Return the device of this name; `auto` is this process's GPU, or else the CPU."""
    try:
        if name == "auto":
            device = distributed.local_device() if torch.cuda.is_available() else torch.device("cpu")
        else:
            device = torch.device(name)
    except (RuntimeError, TypeError):
        known = ["auto", "cpu", "cuda", "cuda:0"]
        raise FedkeepError(f"unknown device {name!r}: {did_you_mean(str(name), known)}") from None
    try:
        torch.empty(0, device=device)
    except Exception as error:
        raise FedkeepError(f"device = {name!r} is not there: {str(error).splitlines()[0]}") from None
    return device


def threads(settings: Settings, task: Task) -> int:
    """Return how many threads the CPU computes with: those asked for, or one for a small model, or else torch's.

    The operations of a small model are too short to share. Threads that wait for each other lose little on an idle
    machine; on a busy one, rounds were seen to take ten times as long.
    """
    if settings.threads is not None:
        return settings.threads
    return 1 if task.device.type == "cpu" and task.n_weights <= SMALL_MODEL else torch.get_num_threads()


def eval_batch_size(example: int, most: int) -> int:
    """Return how many examples of so many bytes go through a model on a GPU at once: 128 MiB of them, or `most`.

    >>> at_a_time(3 * 32 * 32 * 4, 10_000), at_a_time(3 * 224 * 224 * 4, 10_000)
    (10000, 222)
    """
    return max(1, min(most, _AT_A_TIME // max(1, example)))


@contextmanager
def numerics(settings: Settings, device: torch.device, threads: int | None = None) -> Iterator[None]:
    """Compute as the settings say: on a GPU with TF32 or not, deterministically or not, with so many threads."""
    before = torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    convolutions = torch.backends.cudnn.allow_tf32
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if settings.tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = settings.tf32
    if threads is not None and threads != before:
        torch.set_num_threads(threads)
    if settings.deterministic:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)
        if device.type == "cuda":
            torch.set_float32_matmul_precision(precision)
            torch.backends.cudnn.allow_tf32 = convolutions
        if settings.deterministic:  # else untouched: setting it, even to what it is, imports torch's compiler
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
