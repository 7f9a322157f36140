"""Keyed dropout: every function by which a model can call it, compared with what torch defines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedkeep as fk
from fedkeep._util import dropout as dropout_module
from fedkeep._util.dropout import keyed, keyed_dropout, may_drop
from fedkeep.engine.gpu.layers import use_kernels
from fedkeep.task import Task

KEY = torch.tensor(1234567890123456789)
RARELY = 1e-12  # rounds to 2^-32: nothing of a small tensor is dropped


def call(function: Callable[[], Any], key: Tensor = KEY, n_examples: int = 4) -> Any:
    with keyed(key), keyed_dropout(n_examples):
        return function()


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float64)


ELEMENTS = {
    "F.dropout": lambda x: F.dropout(x, 0.25),
    "F.dropout in place": lambda x: F.dropout(x.clone(), 0.25, inplace=True),
    "nn.Dropout": nn.Dropout(0.25),
    "torch.dropout": lambda x: torch.dropout(x, 0.25, True),
    "torch.dropout_": lambda x: torch.dropout_(x.clone(), p=0.25, train=True),
}
CHANNELS = {
    "nn.Dropout1d": (nn.Dropout1d(0.25), (64, 32, 5)),
    "nn.Dropout1d of one example": (nn.Dropout1d(0.25), (2048, 5)),
    "nn.Dropout2d": (nn.Dropout2d(0.25), (64, 32, 2, 3)),
    "nn.Dropout2d in place": (lambda x: nn.Dropout2d(0.25, inplace=True)(x.clone()), (64, 32, 2, 3)),
    "nn.Dropout3d": (nn.Dropout3d(0.25), (64, 32, 2, 1, 2)),
    "nn.Dropout3d of one example": (nn.Dropout3d(0.25), (2048, 2, 1, 2)),
    "torch.feature_dropout": (lambda x: torch.feature_dropout(x, 0.25, True), (64, 32, 2, 3)),
}


@pytest.mark.parametrize("function", ELEMENTS.values(), ids=ELEMENTS)
def test_elements_are_dropped_and_the_others_scaled(function: Callable[[Tensor], Tensor]) -> None:
    state, x = torch.get_rng_state(), ones(64, 32)
    out = call(lambda: function(x))
    assert set(out.unique().tolist()) == {0.0, 1 / 0.75}
    assert abs(float((out == 0).double().mean()) - 0.25) < 4 * (0.25 * 0.75 / x.numel()) ** 0.5
    assert torch.equal(out, call(lambda: function(x)))
    assert not torch.equal(out, call(lambda: function(x), KEY + 1))
    assert torch.equal(out, call(lambda: F.dropout(x, 0.25))), "the same draws by whatever name"
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(("function", "shape"), CHANNELS.values(), ids=CHANNELS)
def test_whole_channels_are_dropped(function: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> None:
    out = call(lambda: function(ones(*shape))).reshape(2048, -1)
    assert torch.equal(out, out[:, :1].expand_as(out))
    assert abs(float((out[:, 0] == 0).double().mean()) - 0.25) < 4 * (0.25 * 0.75 / 2048) ** 0.5


@pytest.mark.parametrize("function", [F.alpha_dropout, F.feature_alpha_dropout, torch.alpha_dropout])
def test_alpha_dropout_keeps_mean_and_variance(function: Any) -> None:
    x = torch.randn(300, 400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    out = call(lambda: function(x, 0.2, True))
    assert abs(float(out.mean())) < 0.02
    assert abs(float(out.var()) - 1) < 0.02
    values, counts = out.unique(return_counts=True)
    off = float(values[counts.argmax()])  # what dropped elements become
    torch.manual_seed(0)
    values, counts = function(x, 0.2, True).unique(return_counts=True)
    assert off == pytest.approx(float(values[counts.argmax()]), rel=1e-12), "torch's value"


@pytest.mark.parametrize("function", [F.dropout, F.dropout2d, F.alpha_dropout])
def test_nothing_and_everything_may_be_dropped(function: Any) -> None:
    x = torch.randn(4, 3, 2, 2)
    assert call(lambda: function(x, 0.0, True)) is x
    assert call(lambda: function(x, 0.5, False)) is x
    assert not call(lambda: function(x, 1.0, True)).any()
    with pytest.raises(ValueError, match="between 0 and 1"):
        call(lambda: function(x, 1.5, True))


def test_calls_are_numbered_and_passes_start_again() -> None:
    first, second = call(lambda: [F.dropout(ones(64, 64)) for _ in range(2)])
    assert not torch.equal(first, second)
    with keyed(KEY):
        for expected in (first, second):  # two calls of a model within one loss
            with keyed_dropout(4):
                assert torch.equal(F.dropout(ones(64, 64)), expected)


def test_without_a_key_torch_draws() -> None:
    torch.manual_seed(0)
    expected = F.dropout(ones(9))
    torch.manual_seed(0)
    with keyed_dropout(4):
        assert torch.equal(F.dropout(ones(9)), expected)


# Attention


ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "mask": {"attn_mask": torch.rand(4, 1, 5, 6, generator=torch.Generator().manual_seed(1)) > 0.4},
    "added mask": {"attn_mask": torch.randn(5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)},
    "a row without keys": {"attn_mask": (torch.arange(5) != 2)[:, None].expand(5, 6)},
}


@pytest.mark.parametrize("options", ATTENTION.values(), ids=ATTENTION)
def test_attention_is_torchs_but_for_the_draws(options: dict[str, Any]) -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(4, 2, n, 3, generator=draw, dtype=torch.float64).requires_grad_() for n in (5, 6, 6))
    expected = F.scaled_dot_product_attention(q, k, v, **options)
    assert torch.equal(call(lambda: F.scaled_dot_product_attention(q, k, v, **options)), expected)
    ours = call(lambda: F.scaled_dot_product_attention(q, k, v, dropout_p=RARELY, **options))
    assert torch.allclose(ours, expected, rtol=1e-9, atol=1e-12)
    weight = torch.randn(ours.shape, generator=draw, dtype=torch.float64)
    gradients = [torch.autograd.grad((out * weight).sum(), (q, k, v)) for out in (ours, expected)]
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(*gradients, strict=True))
    dropped = call(lambda: F.scaled_dot_product_attention(q, k, torch.ones_like(v), dropout_p=0.5, **options))
    assert not torch.allclose(dropped, dropped[:, :, :1])


def test_attention_with_fewer_heads_of_keys() -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(4, heads, 5, 3, generator=draw, dtype=torch.float64) for heads in (6, 2, 2))
    expected = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    ours = call(lambda: F.scaled_dot_product_attention(q, k, v, dropout_p=RARELY, enable_gqa=True))
    assert torch.allclose(ours, expected, rtol=1e-9)


def test_a_row_of_minus_infinity_gives_no_nan() -> None:
    mask = torch.zeros(5, 6, dtype=torch.float64)
    mask[2] = -torch.inf
    q, k, v = (torch.randn(4, 2, n, 3, dtype=torch.float64).requires_grad_() for n in (5, 6, 6))
    out = call(lambda: F.scaled_dot_product_attention(q, k, v, mask, dropout_p=0.1))
    assert all(t.isfinite().all() for t in (out, *torch.autograd.grad(out.sum(), (q, k, v))))


@pytest.mark.parametrize("need_weights", [True, False])
def test_multi_head_attention_is_keyed_inside(need_weights: bool) -> None:
    torch.manual_seed(0)
    layer, x = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True).double(), torch.randn(4, 5, 8).double()
    state = torch.get_rng_state()
    first, again = (call(lambda: layer(x, x, x, need_weights=need_weights)[0]) for _ in range(2))
    assert torch.equal(first, again)
    assert torch.equal(state, torch.get_rng_state())
    layer.dropout = RARELY
    expected = layer.eval()(x, x, x, need_weights=need_weights)[0]
    assert torch.allclose(call(lambda: layer.train()(x, x, x, need_weights=need_weights)[0]), expected, rtol=1e-9)


def test_a_torch_in_which_it_cannot_be_keyed_draws_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropout_module, "_visible_attention", None)
    layer, x = nn.MultiheadAttention(8, 2, dropout=0.5), torch.randn(4, 5, 8)
    first, again = (call(lambda: layer(x, x, x)[0]) for _ in range(2))
    assert not torch.equal(first, again)


# Which models it is for


class Own(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (nn.Sequential(nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2), nn.LSTM(2, 2)), False),
        (nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.AlphaDropout(0.1))), True),
        (nn.MultiheadAttention(4, 2), False),
        (nn.MultiheadAttention(4, 2, dropout=0.1), True),
        (nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0), False),
        (nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1), True),
        (nn.Sequential(Own()), True),
    ],
)
def test_whether_a_model_may_drop(model: nn.Module, expected: bool) -> None:
    assert may_drop(model) is expected


def test_models_without_dropout_pay_nothing() -> None:
    for name in ("mlp", "cnn_fedntd", "resnet8"):
        assert not may_drop(fk.models.build(name, (3, 32, 32), 10)), name


def test_evaluation_and_steps_without_dropout_enter_no_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> Any:
        raise AssertionError("dropout is replaced where there is none")

    x = torch.randn(4, 3)
    with keyed(KEY):
        monkeypatch.setattr("fedkeep.task.task.keyed_dropout", refuse)
        plain = Task(nn.Linear(3, 2), 2, 1)
        plain.apply(plain.init, x, train=True)
        task = Task(nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 2)), 2, 1)
        task.apply(task.init, x)
        with pytest.raises(AssertionError, match="replaced"):
            task.apply(task.init, x, train=True)


def test_it_works_within_the_replacements_of_a_gpu() -> None:
    x = torch.randn(4, 3)
    assert torch.equal(call(lambda: use_kernels(lambda: F.dropout(x))), use_kernels(lambda: call(lambda: F.dropout(x))))
