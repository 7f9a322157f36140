"""Dropout on a CUDA device: the draws are those of the CPU, and graphs of stacked steps train as the loop does."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from support.problems import Problem, gap
from torch import nn

import fedkeep as fk
from fedkeep import tree
from fedkeep._util import counter_random
from fedkeep._util.counter_random import stream
from fedkeep.engine.gpu import layers
from fedkeep.engine.gpu.kernels import has_triton
from fedkeep.engine.mapping import map_clients, one_stream_each

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

KEYS = torch.tensor([0, -1, 1234567890123456789, -(2**63)])
SHAPES = [(5,), (33, 64), (5, 7), (4, 3, 9), (4, 3, 5, 6), (4, 3, 1, 1), (2, 1, 3, 4, 5), (3, 4096, 33)]


@pytest.mark.parametrize("batch", [None, 2])
@pytest.mark.parametrize("p", [1e-6, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_draws_are_those_of_the_cpu(shape: tuple[int, ...], p: float, batch: int | None) -> None:
    def draw(key: torch.Tensor) -> torch.Tensor:
        return counter_random.kept(key, stream(7), shape, p, batch)

    assert torch.equal(torch.stack([draw(key) for key in KEYS]), torch.vmap(draw)(KEYS.cuda()).cpu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_computes_what_torch_computes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if not has_triton(torch.device("cuda", 0)):
        pytest.skip("there is no Triton for this GPU")
    draw = torch.Generator("cuda").manual_seed(0)
    given, weight = (torch.randn(len(KEYS), *shape, generator=draw, device="cuda").to(dtype) for _ in range(2))
    given[0].view(-1)[:2] = torch.tensor([torch.nan, torch.inf])
    for p, batch in ((0.1, None), (0.5, 2), (0.9, None)):
        outcomes = []
        for each, drop in (
            (map_clients, counter_random.drop),
            (map_clients, layers.drop),
            (layers.vmap_with_kernels, layers.drop),
            (one_stream_each, layers.drop),
        ):
            x = given.clone().requires_grad_()
            y = each(lambda x, key, drop=drop, p=p, batch=batch: drop(x, key, stream(3), p, batch), x, KEYS.cuda())
            outcomes.append(torch.stack([y.detach(), torch.autograd.grad((y * weight).sum(), x)[0]]))
        rounding = 2**-7 if dtype == torch.bfloat16 else 0.0
        for outcome in outcomes[1:]:
            torch.testing.assert_close(outcome, outcomes[0], rtol=rounding, atol=0, equal_nan=True)


def cnn() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Dropout2d(0.3), nn.Conv2d(6, 6, 3), nn.GroupNorm(2, 6), nn.ReLU(),
        nn.Dropout(0.2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(24, 4),
    )  # fmt: skip


class Encoder(nn.Module):
    """A transformer's encoder, or an LSTM, which `vmap` does not support, before it."""

    def __init__(self, recurrent: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reader = nn.LSTM(4, 4, batch_first=True) if recurrent else None
        self.encoder, self.out = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2, batch_first=True), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x[:, 0] if self.reader is None else self.reader(x[:, 0])[0]
        return self.out(self.encoder(rows).mean(1))


MODELS = {"cnn": cnn, "encoder": lambda: Encoder(False), "recurrent": lambda: Encoder(True)}


@pytest.mark.parametrize("name", ["fedavg", "fedsam", "fedka", "fedavg_finetune"])
@pytest.mark.parametrize("model", MODELS)
def test_stacked_with_graphs_equals_the_loop_on_the_cpu(problem: Problem, model: str, name: str) -> None:
    own, method = dataclasses.replace(problem, model=MODELS[model]()), fk.methods.get(name)()
    cpu = own.run(method, engine="loop", device="cpu")
    gpu = own.run(method, engine="auto", device="cuda", deterministic=True)
    assert gpu.engine.name == "stacked"
    assert (gpu.engine.each is one_stream_each) == (model == "recurrent")
    assert gpu.engine.graphs.works
    assert gap(cpu.server, tree.to(gpu.server, "cpu")) < 1e-9


@pytest.mark.parametrize("autocast", [None, "bfloat16"])
def test_with_our_kernels_training_is_as_close_as_without(problem: Problem, autocast: str | None) -> None:
    """In float32 with TF32, next to float64 on the CPU: other draws would be ten times as far away."""
    own = dataclasses.replace(problem, model=cnn())

    def moved(**changes: Any) -> tree.Tree:
        sim = own.run(fk.methods.FedNTD(), rounds=1, **changes)
        return tree.to(tree.sub(sim.params, sim.task.init), "cpu", torch.float64)

    exact = moved(engine="loop", device="cpu")
    ours = moved(engine="stacked", device="cuda", dtype="float32", autocast=autocast)
    norm = tree.dot(exact, exact).sqrt()
    gaps = tree.sub(exact, ours)
    assert float(tree.dot(gaps, gaps).sqrt() / norm) < 0.05
    other = tree.sub(exact, moved(engine="loop", device="cpu", seed=6))
    assert float(tree.dot(other, other).sqrt() / norm) > 0.2
