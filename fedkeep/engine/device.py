"""Device and numerics of a run: torch's global flags are set for a round and restored after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fedkeep._util.text import did_you_mean
from fedkeep.engine import distributed
from fedkeep.engine.settings import SMALL_MODEL, Settings
from fedkeep.errors import FedkeepError
from fedkeep.task import Task

_BYTES_AT_A_TIME = 1 << 27  # of inputs in one pass on a GPU


def resolve_device(name: str) -> torch.device:
    """Return the device of this name; `auto` is this process's GPU, or the CPU if there is none."""
    try:
        if name == "auto":
            device = distributed.local_device() if torch.cuda.is_available() else torch.device("cpu")
        else:
            device = torch.device(name)
        if device.type == "meta":  # it has no numbers
            raise RuntimeError(name)
    except (RuntimeError, TypeError):
        valid = ["auto", "cpu", "cuda", "cuda:0"]
        raise FedkeepError(
            f"unknown device {name!r}: {did_you_mean(str(name), valid)}", key="device", value=name, valid=valid
        ) from None
    try:
        torch.empty(0, device=device)
    except Exception as error:
        raise FedkeepError(
            f"device = {name!r} is not available: {str(error).splitlines()[0]}", key="device", value=name
        ) from None
    return device


def threads(settings: Settings, task: Task) -> int:
    """Return the number of CPU threads: the setting, or 1 for a small model, or torch's number.

    The operations of a small model are too short to share. On an idle machine threads that wait for each other cost
    little; on a busy one, rounds took up to ten times as long.
    """
    if settings.threads is not None:
        return settings.threads
    return 1 if task.device.type == "cpu" and task.n_weights <= SMALL_MODEL else torch.get_num_threads()


def eval_batch_size(example_bytes: int, most: int) -> int:
    """Return the batch size for evaluation on a GPU: 128 MiB of examples, at most `most`.

    >>> eval_batch_size(3 * 32 * 32 * 4, 10_000), eval_batch_size(3 * 224 * 224 * 4, 10_000)
    (10000, 222)
    """
    return max(1, min(most, _BYTES_AT_A_TIME // max(1, example_bytes)))


@contextmanager
def numerics(settings: Settings, device: torch.device, threads: int | None = None) -> Iterator[None]:
    """Apply the settings inside the block: TF32 on a GPU, deterministic algorithms, the number of threads."""
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
        if settings.deterministic:  # otherwise untouched: setting it, even to its own value, imports torch's compiler
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
