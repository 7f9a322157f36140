"""Recordings of tensor operations: what a function did once, repeated with other inputs and without its Python code.

While a function runs, every operation that reaches torch's kernels is written down: below autograd and `vmap`, so that
neither of them is repeated. A replay calls the same kernels in the same order and gives the same numbers, bit for bit.
Operations without effect are left out, and equal ones are called once.

A function whose operations depend on the values of its inputs, or on random numbers, cannot be recorded.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fedkeep._util.nested import map_nested
from fedkeep._util.private_apis import trace

_NO_EFFECT_AT_ONE = ("aten::mul", "aten::div")
_SAME_VALUES = ("aten::view", "aten::expand", "aten::_unsafe_view", "aten::alias", "aten::detach", "aten::clone")
_REFUSED = (torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class NotRecordableError(Exception):
    """The operations of a function depend on values, or on random numbers."""


@dataclass(frozen=True)
class Slot:
    """The place of a tensor among the inputs and results of a recording."""

    index: int


@dataclass(frozen=True)
class Call:
    """One operation, with slots in place of tensors. Its results have the slots from `first` on."""

    operation: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    first: int
    number: int  # of results

    @property
    def name(self) -> str:
        """The name of the operation, such as aten::mul."""
        return str(self.operation._schema.name)

    @property
    def slots(self) -> list[int]:
        """The slots that this operation reads."""
        return list(_slots((self.args, list(self.kwargs.values()))))


class Recording:
    """Operations that compute `outputs` from inputs and from tensors that are the same at every replay, `constants`."""

    def __init__(
        self, calls: Sequence[Call], n_inputs: int, constants: dict[int, Tensor], outputs: Sequence[int]
    ) -> None:
        self.calls, self.n_inputs, self.outputs = list(calls), n_inputs, list(outputs)
        used = {slot for call in self.calls for slot in call.slots} | set(self.outputs)
        self.constants = {slot: t for slot, t in constants.items() if slot in used}
        self._run: Callable[..., Sequence[Tensor]] = self.run

    def __call__(self, inputs: Iterable[Tensor]) -> Sequence[Tensor]:
        """Return the outputs for these inputs."""
        return self._run(*inputs, *self.constants.values())

    def run(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Call the operations one by one; the tensors are the inputs and the constants."""
        values: dict[int, Any] = dict(zip([*range(self.n_inputs), *self.constants], tensors, strict=True))
        for call in self.calls:
            result = call.operation(*_filled(call.args, values), **_filled(call.kwargs, values))
            for i, t in enumerate(_tensors(result)):
                values[call.first + i] = t
        return tuple(values[slot] for slot in self.outputs)

    def compile(self, inputs: Sequence[Tensor]) -> None:
        """Let TorchScript's interpreter call the operations from now on, which is faster, if there is one."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated, and without a successor that needs no compiler
            try:
                self._run = trace(self.run, (*inputs, *self.constants.values()))
            except Exception:
                self._run = self.run


def record(function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> tuple[list[Tensor], Recording]:
    """Call a function; return what it returned, and the recording of what it did. Raise if it cannot be repeated."""
    inputs = [t.detach() for t in inputs]  # one object per input, also where two are the same tensor
    recorder = _Recorder(inputs)
    with recorder:
        outputs = list(function(*inputs))
    slots = [recorder.slot_of(t).index for t in outputs]
    calls = recorder.calls
    if not any(call.operation._schema.is_mutable for call in calls):
        calls, slots = _simplified(recorder, slots)
        calls = _with_products_in_layout(recorder, calls, slots)
    return outputs, Recording(calls, len(inputs), recorder.constants, slots)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down every operation. Tensors that no operation has returned are constants of the recording."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors: list[Tensor] = list(inputs)  # by slot; kept, so that no two have the same id
        self.slots = {id(t): slot for slot, t in enumerate(self.tensors)}
        self.calls: list[Call] = []
        self.constants: dict[int, Tensor] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: otherwise torch would import its compiler, which takes longer than many rounds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operation and write it down."""
        _require_repeatable(func, args)
        kwargs = kwargs or {}
        slots_of = (self._with_slots(args), self._with_slots(kwargs))
        result = func(*args, **kwargs)
        if not isinstance(result, Tensor | list | tuple) or not all(isinstance(t, Tensor) for t in _tensors(result)):
            raise NotRecordableError(f"{func} returns something else than tensors")
        first = len(self.tensors)
        for t in _tensors(result):
            self.slots[id(t)] = len(self.tensors)
            self.tensors.append(t)
        self.calls.append(Call(func, *slots_of, first, len(self.tensors) - first))
        return result

    def slot_of(self, t: Tensor) -> Slot:
        """Return the tensor's slot; a new one if no operation has returned it."""
        if id(t) not in self.slots:
            self.slots[id(t)] = len(self.tensors)
            self.constants[len(self.tensors)] = t
            self.tensors.append(t)
        return Slot(self.slots[id(t)])

    def new_slot(self) -> int:
        """Return a slot for a result that the function itself did not compute."""
        self.tensors.append(torch.empty(0))
        return len(self.tensors) - 1

    def _with_slots(self, value: Any) -> Any:
        return map_nested(Tensor, self.slot_of, value)


def _require_repeatable(func: Any, args: Any) -> None:
    """Raise if an operation draws random numbers, or if the size of its result depends on values."""
    if func._schema.name == "aten::index" and all(t is None or t.dtype == torch.int64 for t in args[1]):
        return
    if any(tag in func.tags for tag in _REFUSED):
        raise NotRecordableError(f"{func} cannot be repeated")


def _simplified(recorder: _Recorder, outputs: Sequence[int]) -> tuple[list[Call], list[int]]:
    """Return the same calls without those that change nothing, that repeat another, or whose results are not used.

    Only for calls of which none writes into a tensor: then two results may share memory.
    """
    same: dict[int, int] = {}  # slot -> the slot that stands for it
    seen: dict[Any, Call] = {}
    calls: list[Call] = []
    for call in recorder.calls:
        call = replace(call, args=_renamed(call.args, same), kwargs=_renamed(call.kwargs, same))
        source = _without_effect(call, recorder.tensors)
        if source is not None:
            same[call.first] = source
            continue
        key = (call.operation, repr(call.args), repr(call.kwargs))
        if key in seen:
            same.update({call.first + i: seen[key].first + i for i in range(call.number)})
            continue
        seen[key] = call
        if not call.slots and call.number == 1:  # such as arange: the same at every replay
            recorder.constants[call.first] = recorder.tensors[call.first]
            continue
        calls.append(call)
    wanted = [same.get(slot, slot) for slot in outputs]
    return _needed(calls, wanted), wanted


def _needed(calls: Sequence[Call], outputs: Iterable[int]) -> list[Call]:
    """Return the calls on which the outputs depend."""
    needed, kept = set(outputs), []
    for call in reversed(calls):
        if needed.intersection(range(call.first, call.first + call.number)):
            kept.append(call)
            needed.update(call.slots)
    return kept[::-1]


def _with_products_in_layout(recorder: _Recorder, calls: Sequence[Call], outputs: Sequence[int]) -> list[Call]:
    """Compute outputs that are the transpose of a product, (A B)^T, as B^T A^T: then they need not be copied.

    The gradient of a dense layer's weights is one. Only where both are the same here, bit for bit: a product's
    rounding depends on the kernel that serves its shape.
    """
    maker = {call.first: call for call in calls if call.number == 1}
    readers = Counter(slot for call in calls for slot in call.slots)
    rearranged = []
    for call in calls:
        product = maker.get(call.args[0].index) if call.first in outputs and _is_transpose(call) else None
        if product is None or product.name != "aten::bmm" or readers[product.first] > 1 or product.first in outputs:
            rearranged.append(call)
            continue
        a, b = (recorder.tensors[slot] for slot in product.slots)
        if not torch.equal(torch.bmm(b.transpose(1, 2), a.transpose(1, 2)), recorder.tensors[call.first]):
            rearranged.append(call)
            continue
        left, right = (
            Call(call.operation, (Slot(slot), 1, 2), {}, recorder.new_slot(), 1) for slot in product.slots[::-1]
        )
        rearranged += [left, right, Call(product.operation, (Slot(left.first), Slot(right.first)), {}, call.first, 1)]
    return _needed(rearranged, outputs)


def _is_transpose(call: Call) -> bool:
    return call.name == "aten::transpose" and call.args[1:] in ((1, 2), (2, 1))


def _without_effect(call: Call, tensors: Sequence[Tensor]) -> int | None:
    """Return the slot whose values and layout the result of a call has anyway; None if there is none."""
    if not call.args or not isinstance(call.args[0], Slot) or call.number != 1:
        return None
    by_one = call.name in _NO_EFFECT_AT_ONE and len(call.args) == 2 and type(call.args[1]) in (int, float)
    if call.name not in _SAME_VALUES and not (by_one and call.args[1] == 1 and not call.kwargs):
        return None
    before, after = tensors[call.args[0].index], tensors[call.first]
    alike = before.shape == after.shape and before.stride() == after.stride() and before.dtype == after.dtype
    return call.args[0].index if alike else None


def _tensors(result: Any) -> Sequence[Any]:
    return (result,) if isinstance(result, Tensor) else result


def _slots(value: Any) -> Iterable[int]:
    if isinstance(value, Slot):
        yield value.index
    elif type(value) in (list, tuple):
        for each in value:
            yield from _slots(each)


def _renamed(value: Any, same: dict[int, int]) -> Any:
    return map_nested(Slot, lambda slot: Slot(same.get(slot.index, slot.index)), value)


def _filled(value: Any, tensors: dict[int, Any]) -> Any:
    return map_nested(Slot, lambda slot: tensors[slot.index], value)
