"""Private interfaces of other packages that fedkeep uses. They can change in any release.

`tests/unit/test_private_apis.py` tests each one, and its fallback where there is one.

Here, with a fallback:

- `torch._fused_sgd_`, `torch._fused_adam_`, `torch._fused_adamw_`: without them, optimisers use their `update`
  (fedkeep.optim)
- `torch._C._functorch.is_batchedtensor`: without it, the tensor's representation is used
- `torch._C._functorch.get_interpreter_stack`: without it, some transform is assumed, and torch's own layers are used
- `torch.autograd._profiler_enabled`: without it, the parts of every round are marked for a profiler
- `has_torch_function`, as `F.multi_head_attention_forward` calls it: without it, the dropout inside of that function is
  torch's own (fedkeep._util.dropout)
- `torch._C._create_graph_by_tracing` and `torch._C.CompilationUnit`: without them, recordings are traced by
  `torch.jit.trace`, which never frees their memory (fedkeep.engine.recording)

Used in place, without a fallback:

- `Tensor._make_wrapper_subclass` (here), `torch._C.DisableTorchFunctionSubclass` (fedkeep.engine.gpu.deferred),
  `torch._C._disabled_torch_function_impl` (fedkeep.engine.gpu.products)
- `torch.utils._python_dispatch.TorchDispatchMode` (fedkeep.engine.recording)
- `nn.Module._parameters` (fedkeep._util.functional_module), `nn.Module._modules` (fedkeep.models.norm)
- `ClientApp._registered_funcs` (fedkeep.flower.client)
- `flwr.common.config.parse_config_args` and `flatten_dict` (fedkeep.flower.dry_run)
- `flwr.common.constant.ErrorCode.NODE_UNAVAILABLE`, as a number (fedkeep.flower.nodes)
- `flwr.supercore.inflatable`, `flwr.supercore.task_identity` (tests only: tests/support/flower_grid.py)
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

fused_sgd: Any = getattr(torch, "_fused_sgd_", None)
fused_adam: Any = getattr(torch, "_fused_adam_", None)
fused_adamw: Any = getattr(torch, "_fused_adamw_", None)
profiler_enabled: Callable[[], bool] = getattr(torch.autograd, "_profiler_enabled", lambda: True)


def is_batched(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is inside `vmap`."""
    functorch = getattr(torch._C, "_functorch", None)
    if functorch is not None and hasattr(functorch, "is_batchedtensor"):
        return bool(functorch.is_batchedtensor(tensor))
    return "BatchedTensor" in repr(tensor)


def active_transforms() -> tuple[str, ...]:
    """Return the names of torch.func's transforms that are active here, such as "vmap", the outermost first."""
    functorch = getattr(torch._C, "_functorch", None)
    if functorch is None or not hasattr(functorch, "get_interpreter_stack"):
        return ("unknown",)
    return tuple(str(one.key()).rpartition(".")[2].lower() for one in functorch.get_interpreter_stack() or ())


def trace(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> Any:
    """Return a function for TorchScript's interpreter that calls the operations `function` calls for these inputs.

    `torch.jit.trace` adds every function to a table of the whole process, which keeps it for ever: megabytes for a
    training step, in every run. A compilation unit of its own is freed together with the function.
    """
    create_graph = getattr(torch._C, "_create_graph_by_tracing", None)
    if create_graph is None or not hasattr(torch._C.CompilationUnit, "create_function"):
        return torch.jit.trace(function, tuple(inputs), check_trace=False)  # type: ignore[no-untyped-call]
    graph, _ = create_graph(function, tuple(inputs), lambda tensor: "", True, False, None, [])
    return torch._C.CompilationUnit().create_function("recording", graph)


def without_override_check(function: Any) -> Any:
    """Return a copy of one of torch's Python functions that does not ask whether something replaces it.

    With it, a `TorchFunctionMode` sees what the function calls. None if the function does not ask in the known way.
    """
    if "has_torch_function" not in function.__code__.co_names:
        return None
    names = {**function.__globals__, "has_torch_function": lambda tensors: False}
    copy = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def wrapper_tensor(kind: Any, shape: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Return a tensor of a subclass that has a shape and a type, but no data."""
    return torch.Tensor._make_wrapper_subclass(kind, tuple(shape), dtype=dtype, device=device)
