"""Server training on a CUDA device: replayed from graphs, it gives what called steps give."""

from __future__ import annotations

import pytest
import torch
from support.problems import Problem, gap
from torch import nn

import fedkeep as fk
from fedkeep import optim, server_training, tree
from fedkeep.engine.gpu.accelerator import GpuAccelerator
from fedkeep.task import Accelerator, Public, Task

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


def make_task(p_drop: float = 0.0, dtype: torch.dtype = torch.float32, activation: nn.Module | None = None) -> Task:
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(130, 1, 8, 8, generator=rng).to("cuda", dtype), (torch.arange(130) % 4).to("cuda")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 6, 3),
            activation or nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(p_drop),
            nn.Linear(216, 20),
            nn.ReLU(),
            nn.Linear(20, 4),
        )
    return Task(model, 4, 1, Public(x[:110], y[:110], x[110:], y[110:]), device="cuda", dtype=dtype)


def train(task: Task, accelerator: Accelerator, optimizer: optim.Optimizer, **changes) -> tree.Tree:
    task.accelerator = accelerator

    def loss(w: tree.Tree, at: torch.Tensor) -> torch.Tensor:
        return task.criterion(task.apply(w, task.public.x[at], train=True), task.public.y[at]).mean()

    def check(w: tree.Tree) -> torch.Tensor:
        return server_training.validation_loss(task, w, task.public)

    how = {"lr": lambda step: 0.05, "batch_size": 25, "steps": 123, "patience": 10, **changes}
    options = server_training.Options(optimizer, **how)
    return server_training.train(task, task.init, loss, check, 110, 0, options)


@pytest.mark.parametrize("patience", [1, 10, 1000])
@pytest.mark.parametrize("optimizer", [optim.SGD(), optim.SGD(0.9), optim.Adam()], ids=["sgd", "momentum", "adam"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_replayed_steps_give_the_same_weights(optimizer: optim.Optimizer, dtype: torch.dtype, patience: int) -> None:
    task, accelerator = make_task(dtype=dtype), GpuAccelerator(torch.device("cuda", 0))
    called = train(task, Accelerator(), optimizer, patience=patience)
    for _ in range(3):  # the second and the third use the memory pool of the one before
        replayed = train(task, accelerator, optimizer, patience=patience)
        assert gap(called, replayed) < (1e-10 if dtype == torch.float64 else 1e-3)  # cuDNN adds in any order
    assert accelerator.works
    assert accelerator._newest is not None


def test_steps_with_dropout_are_replayed_with_the_draws_of_called_ones() -> None:
    task, accelerator = make_task(0.5, torch.float64), GpuAccelerator(torch.device("cuda", 0))
    called, replayed = (train(task, one, optim.SGD()) for one in (Accelerator(), accelerator))
    assert gap(called, replayed) < 1e-10
    assert accelerator._newest is not None
    assert accelerator.works


def test_steps_that_draw_other_random_numbers_are_called() -> None:
    task, accelerator = make_task(0.0, torch.float64, nn.RReLU()), GpuAccelerator(torch.device("cuda", 0))
    called, replayed = (train(task, one, optim.SGD()) for one in (Accelerator(), accelerator))
    assert gap(called, replayed) < 1e-10
    assert accelerator.works


def test_graphs_of_later_rounds_need_no_more_memory() -> None:
    task, accelerator = make_task(), GpuAccelerator(torch.device("cuda", 0))
    for _ in range(2):
        train(task, accelerator, optim.Adam())
    before = torch.cuda.memory_reserved()
    for _ in range(10):
        train(task, accelerator, optim.Adam())
    assert torch.cuda.memory_reserved() == before


def test_a_step_that_cannot_be_captured_is_called(problem: Problem, caplog: pytest.LogCaptureFixture) -> None:
    def reads_a_number(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        float(z.sum())
        return fk.losses.cross_entropy(z, y)

    simulation = problem.simulation(fk.methods.FedAvgFinetune(), device="cuda", engine="loop")
    plain = problem.run(fk.methods.FedAvgFinetune(), device="cuda", engine="loop")
    simulation.task.criterion = reads_a_number
    simulation.run()
    assert not simulation.task.accelerator.works
    assert sum("a step on the server cannot be captured" in message for message in caplog.messages) == 1
    assert all(torch.allclose(a, b) for a, b in zip(*map(tree.leaves, (simulation.params, plain.params)), strict=True))


def test_all_models_at_once_have_the_logits_of_each() -> None:
    task = make_task(dtype=torch.float64)
    stacked = tree.stack([tree.scale(task.init, float(k)) for k in range(3)])
    each = torch.stack([server_training.logits(task, tree.take(stacked, k), task.public.x) for k in range(3)])
    assert torch.allclose(server_training.ensemble(task, stacked, task.public.x), each)


def test_models_that_vmap_does_not_support_are_computed_one_after_another() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells, self.out = nn.LSTM(8, 4, batch_first=True), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.cells(x[:, 0])[0][:, -1])

    task = Task(Recurrent(), 4, 1, device="cuda")
    stacked = tree.stack([tree.scale(task.init, float(k)) for k in range(3)])
    assert server_training.ensemble(task, stacked, make_task().public.x).shape == (3, 110, 4)
