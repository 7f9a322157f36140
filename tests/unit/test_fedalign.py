"""FedAlign on images: the estimate of the Lipschitz constant, and the narrow part of a network's last stage."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.errors import raises
from support.problems import gap
from torch import nn

import fedkeep as fk
from fedkeep import models
from fedkeep.engine.mapping import call_one
from fedkeep.engine.settings import Settings
from fedkeep.engine.simulation import Simulation
from fedkeep.errors import MethodError, ModelError
from fedkeep.methods.fedalign import FedAlign, lipschitz
from fedkeep.task import Task


def images(n: int = 40) -> fk.data.Dataset:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(n, 3, 12, 12)).astype(np.float32), np.arange(n) % 4
    return fk.data.from_arrays(x, y, x, y)


def simulation(model: nn.Module, engine: str) -> Simulation:
    settings = Settings(rounds=2, epochs=1, batch_size=6, lr=0.05, dtype="float64", device="cpu", engine=engine)
    return Simulation(FedAlign(), model, images(), [np.arange(17), np.arange(17, 40)], settings)


def test_the_estimate_is_ten_steps_of_the_power_method() -> None:
    """X X' written out, from ones, with the larger maps averaged down to the size of the smaller."""
    rng = torch.Generator().manual_seed(0)
    P = torch.randn(3, 5, 8, 8, generator=rng, dtype=torch.float64).relu()
    Q = torch.randn(3, 7, 4, 4, generator=rng, dtype=torch.float64).relu()
    for b in range(3):
        X = F.avg_pool2d(P, 2)[b].flatten(1) @ Q[b].flatten(1).T / 16
        v, n = torch.ones(5, dtype=torch.float64), torch.zeros(())
        for _ in range(10):
            m = X @ X.T @ v
            n = m.norm()
            v = m / n
        assert float(lipschitz(P, Q)[b]) == pytest.approx(float(n.sqrt()), rel=1e-12)
        assert float(lipschitz(P, Q)[b]) == pytest.approx(float(torch.linalg.matrix_norm(X, 2)), rel=1e-3)


def test_maps_of_zeros_have_a_finite_gradient() -> None:
    P, Q = torch.rand(2, 3, 4, 4), torch.zeros(2, 5, 4, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(lipschitz(P, Q).sum(), Q)
    assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_the_narrow_part_is_a_network_of_the_first_channels(norm: str) -> None:
    model = models.build("resnet8", (3, 12, 12), 4, norm=norm, width=16)
    task, x = Task(model, 4, 2, dtype=torch.float64), torch.rand(6, 3, 12, 12, dtype=torch.float64)
    before, after, logits = task.stages(task.init, x)
    assert torch.equal(logits, task.apply(task.init, x))
    assert (before.shape[1], after.shape[1]) == (32, 64)
    weights, method = task.init, FedAlign()
    narrow = task.last_stage(method.narrow_weights(task, weights), before[:, :8])

    def normed(h: torch.Tensor, name: str) -> torch.Tensor:
        scale, shift = weights[f"{name}.weight"][:16], weights[f"{name}.bias"][:16]
        return F.batch_norm(h, None, None, scale, shift, True) if norm == "batch" else F.group_norm(h, 4, scale, shift)

    branch, first = "body.stage3.0.branch", before[:, :8]
    h = F.conv2d(first, weights[f"{branch}.0.weight"][:16, :8], stride=2, padding=1)
    h = F.conv2d(normed(h, f"{branch}.1").relu(), weights[f"{branch}.3.weight"][:16, :16], padding=1)
    shortcut = F.conv2d(first, weights["body.stage3.0.shortcut.0.weight"][:16, :8], stride=2)
    expected = (normed(h, f"{branch}.4") + normed(shortcut, "body.stage3.0.shortcut.1")).relu()
    assert torch.allclose(narrow, expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("name", "options"), [("cnn_fedntd", {"hidden": [8]}), ("resnet8", {"norm": "batch", "width": 4})]
)
def test_stacked_equals_loop_on_images(name: str, options: dict) -> None:
    model = models.build(name, (3, 12, 12), 4, **options)
    loop, stacked = (simulation(model, engine) for engine in ("loop", "stacked"))
    loop.run(), stacked.run()
    assert gap(loop.server, stacked.server) < 1e-9


def test_the_alignment_reaches_the_narrow_part_alone() -> None:
    sim = simulation(models.build("resnet8", (3, 12, 12), 4, width=16), "loop")
    batch = {"x": sim.eval_inputs(sim.x[:6]), "y": sim.y[:6], "mask": torch.ones(6).bool()}
    grads = []
    for mu in (0.0, 0.45):
        local = dataclasses.replace(sim.local, method=FedAlign(mu=mu))
        trees = {"params": sim.params, "batch": batch, "shared": {}, "facts": {}, "local": {}}
        grads.append(local.gradients.compute(trees, call_one)[1])
    name = "body.stage3.0.branch.0.weight"
    changed = (grads[0][name] != grads[1][name]).nonzero()
    assert len(changed)
    assert int(changed[:, 0].max()) < 16
    assert int(changed[:, 1].max()) < 8
    assert all(torch.equal(grads[0][key], grads[1][key]) for key in grads[0] if "stage3" not in key)


def test_models_whose_last_stage_cannot_be_used_are_refused() -> None:
    plain = nn.Sequential(nn.Flatten(), nn.Linear(432, 4))
    with raises(ModelError, key="model.last_stage"):
        simulation(plain, "loop")
    grouped = nn.Sequential(nn.Conv2d(3, 6, 3, groups=3), nn.ReLU(), nn.Flatten(), nn.Linear(600, 4))
    grouped.last_stage = ("0", "1")
    with raises(MethodError, key="method.width"):
        simulation(grouped, "loop")
    uneven = nn.Sequential(nn.Conv2d(3, 12, 3), nn.GroupNorm(2, 12), nn.Flatten(), nn.Linear(1200, 4))
    uneven.last_stage = ("0", "1")
    with raises(MethodError, key="method.width"):
        simulation(uneven, "loop")
