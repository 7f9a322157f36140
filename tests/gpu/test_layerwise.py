"""Squared gradients of single examples on a CUDA device."""

from __future__ import annotations

import pytest
import torch
from support.problems import gap

import fedkeep as fk
from fedkeep import models, tree
from fedkeep.engine.device import numerics
from fedkeep.engine.settings import Settings
from fedkeep.task import Task

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in models.REGISTRY if name not in models.TEXT_MODELS])
def test_all_models_are_computed_layer_by_layer(name: str, autocast: torch.dtype | None) -> None:
    """In float32 with TF32, which the trial must not mistake for a difference."""
    task = Task(models.build(name, (3, 32, 32), 4), 4, 1, device="cuda", autocast=autocast)
    x, y = torch.randn(8, 3, 32, 32, device="cuda"), torch.arange(8, device="cuda") % 4
    with numerics(Settings(tf32=True), torch.device("cuda")):
        task.squared_gradients(task.init, x, y, torch.ones(8, device="cuda"))
    assert all(layers is not None for layers in task.gradients.layers.values())


def test_a_stack_of_clients_equals_the_cpu() -> None:
    model = models.build("cnn_fedntd", (3, 32, 32), 4)
    cpu, gpu = (Task(model, 4, 1, device=device, dtype=torch.float64) for device in ("cpu", "cuda"))
    x, y = torch.randn(2, 8, 3, 32, 32, dtype=torch.float64), torch.randint(4, (2, 8))
    clients = [tree.stack([cpu.init, tree.scale(cpu.init, 0.9)]), x, y, torch.rand(2, 8, dtype=torch.float64)]
    expected = torch.vmap(cpu.squared_gradients)(*clients)
    found = torch.vmap(gpu.squared_gradients)(*(tree.to(part, "cuda") for part in clients))
    assert gap(expected, tree.to(found, "cpu")) < 1e-12


def test_fedcurv_computes_layer_by_layer_in_a_simulation() -> None:
    problem = fk.testing.small_problem(device="cuda", engine="stacked")
    layers = problem.run(fk.methods.FedCurv()).task.gradients.layers
    assert layers
    assert all(found is not None for found in layers.values())
