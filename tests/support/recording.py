"""CUDA graphs on a CPU: a step's operations are recorded and replayed on the same tensors, without calling the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedkeep.engine.gpu.accelerator import GpuAccelerator


class RecordingAccelerator(GpuAccelerator):
    """The GPU's accelerator with a recorder in place of CUDA graphs; counts what it records and replays."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.recorded = self.replayed = 0

    def record(self, step: Callable[[], None]) -> Callable[[], None] | None:
        recorder = _Recorder()
        try:
            with recorder:
                step()
        except _NotRecordableError:
            return None
        finally:
            recorder.undo()
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            recorder.replay()

        return replay


class _NotRecordableError(Exception):
    pass


class _Recorder(TorchDispatchMode):
    """Records operations with their arguments and results. As in a CUDA graph, every result has a fixed address."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict, Any]] = []
        self.before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            raise _NotRecordableError("the host reads a number")
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = args[place] if place < len(args) else kwargs[argument.name]
                self.before += [(t, t.detach().clone()) for t in tree_leaves(written)]
        result = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, result))
        return result

    @torch.no_grad()
    def undo(self) -> None:
        """Restore what the recorded step has overwritten: a capture computes nothing."""
        for t, value in reversed(self.before):
            t.copy_(value)

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, result in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
