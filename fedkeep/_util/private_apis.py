"""Private interfaces of other packages that fedkeep uses. They can change in any release.

`tests/unit/test_private_apis.py` tests each one, and its fallback where there is one.

Here, with a fallback:

- `torch._fused_sgd_`, `torch._fused_adam_`: without them, optimisers use their `update` (fedkeep.optim)
- `torch._C._functorch.is_batchedtensor`: without it, the tensor's representation is used

Used in place, without a fallback:

- `nn.Module._parameters` (fedkeep.task), `nn.Module._modules` (fedkeep.models.norm)
- `ClientApp._registered_funcs` (fedkeep.flower.client)
- `flwr.common.config.parse_config_args` and `flatten_dict` (fedkeep.flower.dry_run)
- `flwr.common.constant.ErrorCode.NODE_UNAVAILABLE`, as a number (fedkeep.flower.nodes)
- `flwr.supercore.inflatable`, `flwr.supercore.task_identity` (tests only: tests/support/flower_grid.py)
"""

from __future__ import annotations

from typing import Any

import torch

fused_sgd: Any = getattr(torch, "_fused_sgd_", None)
fused_adam: Any = getattr(torch, "_fused_adam_", None)


def is_batched(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is inside `vmap`."""
    functorch = getattr(torch._C, "_functorch", None)
    if functorch is not None and hasattr(functorch, "is_batchedtensor"):
        return bool(functorch.is_batchedtensor(tensor))
    return "BatchedTensor" in repr(tensor)
