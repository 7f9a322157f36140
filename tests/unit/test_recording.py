"""Recordings of tensor operations: a replay gives what the function gives, bit for bit, or there is no recording."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fedkeep.engine.recording import NotRecordableError, Recording, record

SEED = torch.Generator().manual_seed(0)


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=SEED)


def check(function: Callable[..., list[Tensor]], *shapes: tuple[int, ...]) -> Recording:
    """Record a function and compare the replays, uncompiled and compiled, with the function on other inputs."""
    first = [numbers(*shape) for shape in shapes]
    outputs, recording = record(function, first)
    assert all(map(torch.equal, outputs, function(*first)))
    for step in range(4):
        if step == 1:
            recording.compile(first)
        inputs = [numbers(*shape) for shape in shapes]
        expected, given = function(*inputs), [t.clone() for t in inputs]
        with torch.no_grad():
            found = recording(inputs)
        assert all(map(torch.equal, found, expected))
        assert all(map(torch.equal, inputs, given)), "a replay changes its inputs"
    return recording


def test_gradients_through_vmap() -> None:
    def gradient(w: Tensor, x: Tensor) -> list[Tensor]:
        w = w.detach().requires_grad_()
        losses = torch.vmap(lambda w, x: (torch.relu(x @ w.t()) ** 2).mean())(w, x)
        return [losses.detach(), *torch.autograd.grad(losses.sum(), [w])]

    recording = check(gradient, (3, 8, 16), (3, 5, 16))
    assert all(call.name.startswith("aten::") for call in recording.calls)


def test_what_has_no_effect_is_left_out_and_equal_calls_are_made_once() -> None:
    def function(x: Tensor) -> list[Tensor]:
        unused = x.exp()
        same = (x.detach() * 1.0 / 1).view(4, 3)
        return [(same + torch.arange(3)).sin() + (same + torch.arange(3)).sin(), unused[:0].clone() * 0 + 1]

    recording = check(function, (4, 3))
    assert [call.name for call in recording.calls].count("aten::sin") == 1
    assert not {"aten::detach", "aten::mul", "aten::arange"} & {call.name for call in recording.calls[:3]}
    assert len(recording.constants) == 1  # arange, computed once


def test_a_product_by_another_number_is_not_left_out() -> None:
    recording = check(lambda x: [x * 2.0, x / 2, torch.full_like(x, 7.0)], (4,))
    assert [call.name for call in recording.calls] == ["aten::mul", "aten::div", "aten::full_like"]


def test_writing_into_a_tensor_is_repeated_in_order() -> None:
    def function(x: Tensor) -> list[Tensor]:
        total = torch.zeros(3)
        before = total.clone()
        total.add_(x)
        view = total.view(3)
        view.mul_(2.0)
        return [total, before, total + view]

    check(function, (3,))


def test_the_same_tensor_as_two_inputs_may_be_two_tensors_later() -> None:
    x, y = numbers(3), numbers(3)
    _, recording = record(lambda a, b: [a - 2 * b], [x, x])
    assert torch.equal(recording([x, y])[0], x - 2 * y)


def test_an_output_may_be_an_input_or_a_constant() -> None:
    constant = numbers(2)
    check(lambda x: [x, constant, x.detach()], (3,))


def test_a_constant_is_read_at_every_replay() -> None:
    constant, x = torch.ones(3), numbers(3)
    _, recording = record(lambda x: [x + constant], [x])
    recording.compile([x])
    constant.fill_(5.0)
    assert torch.equal(recording([x])[0], x + 5)


def transposed_product(x: Tensor, d: Tensor) -> list[Tensor]:
    return [torch.bmm(x.transpose(1, 2), d).transpose(1, 2)]


@pytest.mark.parametrize("k", [1, 7, 40])
@pytest.mark.parametrize("size", [3, 10, 64])
def test_a_transposed_product_is_the_same(k: int, size: int) -> None:
    check(transposed_product, (k, 10, 64), (k, 10, size))


@pytest.mark.parametrize("alike", [True, False])
def test_a_transposed_product_is_rearranged_only_where_it_rounds_alike(
    monkeypatch: pytest.MonkeyPatch, alike: bool
) -> None:
    x, d = (torch.arange(3.0 * 4 * 5).view(3, 4, 5) % 7 for _ in range(2))  # whole numbers are not rounded
    if not alike:
        monkeypatch.setattr(torch, "equal", lambda a, b: False)
    _, recording = record(transposed_product, [x, d])
    assert recording.calls[-1].name == ("aten::bmm" if alike else "aten::transpose")
    [found] = recording([x + 1, d])
    assert found.is_contiguous() == alike
    assert (found == transposed_product(x + 1, d)[0]).all()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: [x * x.sum().item()],
        lambda x: [x if x.sum() > 0 else -x],
        lambda x: [x[x > 0]],
        lambda x: [x[x.nonzero()[:, 0]]],
        lambda x: [x + torch.rand(3)],
        lambda x: [torch.dropout(x, 0.5, True)],
    ],
    ids=["item", "control flow", "mask", "nonzero", "random", "dropout"],
)
def test_what_depends_on_values_or_chance_is_not_recorded(function: Callable[[Tensor], list[Tensor]]) -> None:
    with pytest.raises(NotRecordableError):
        record(function, [numbers(3).abs()])


def test_indices_are_recorded() -> None:
    at = torch.tensor([2, 0, 0])
    check(lambda x: [x[at], x[:, at[1:]]], (3, 4))


def test_without_the_private_functions_torch_jit_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_create_graph_by_tracing")
    recording = check(lambda x: [x.exp().sum()], (3,))
    assert isinstance(recording._run, torch.jit.ScriptFunction)


def test_without_torchscript_the_operations_are_called_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: object, **kwargs: object) -> None:
        raise RuntimeError("not supported")

    monkeypatch.delattr(torch._C, "_create_graph_by_tracing")
    monkeypatch.setattr(torch.jit, "trace", missing)
    recording = check(lambda x: [x.exp().sum()], (3,))
    assert recording._run == recording.run


def test_a_recording_is_freed() -> None:
    kept = torch.jit._state._python_cu
    before = len(kept.get_functions())
    for _ in range(3):
        recording = check(lambda x: [x.exp() + 1], (4,))
        assert isinstance(recording._run, torch.jit.ScriptFunction), "it was compiled"
    assert len(kept.get_functions()) == before, "torch.jit.trace keeps every function until the process ends"
