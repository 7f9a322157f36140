"""Private interfaces of other packages that fedkeep uses, each with a fallback.

They can change in any release. `tests/unit/test_private_apis.py` tests each one, with and without it. Two more are used
in place, since they are plain attributes: `nn.Module._parameters` (fedkeep.task) and `ClientApp._registered_funcs`
(fedkeep.flower.client).
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

fused_sgd: Any = getattr(torch, "_fused_sgd_", None)
fused_adam: Any = getattr(torch, "_fused_adam_", None)


def is_batched(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is inside `vmap`; without torch's own test, by the tensor's representation."""
    functorch = getattr(torch._C, "_functorch", None)
    if functorch is not None and hasattr(functorch, "is_batchedtensor"):
        return bool(functorch.is_batchedtensor(tensor))
    return "BatchedTensor" in repr(tensor)


def terminate_workers(pool: ProcessPoolExecutor) -> None:
    """End a pool's processes at once; without access to them, they end with their current task."""
    if hasattr(pool, "terminate_workers"):  # public since Python 3.14
        pool.terminate_workers()
        return
    for worker in list((getattr(pool, "_processes", None) or {}).values()):
        worker.terminate()
