"""On a CUDA device: every method, stacked there, against the loop on the CPU."""

from __future__ import annotations

import pytest
import torch
from conftest import Problem, gap

import fedkeep as fk
from fedkeep import tree
from fedkeep.data.augment import Augment

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]


@pytest.mark.parametrize("name", fk.methods.REGISTRY)
def test_stacked_on_the_gpu_equals_the_loop_on_the_cpu(problem: Problem, name: str) -> None:
    method = fk.methods.get(name)()
    cpu = problem.run(method, engine="loop", device="cpu")
    gpu = problem.run(method, engine="stacked", device="cuda", deterministic=True)
    assert gap(cpu.server, tree.to(gpu.server, "cpu")) < 1e-10
    assert cpu.history.records[-1]["confusion"] == gpu.history.records[-1]["confusion"]


def test_augmentation_on_the_gpu_equals_that_on_the_cpu(problem: Problem) -> None:
    changes = {"augment": Augment(crop=1, flip=True, cutout=2)}
    cpu = problem.run(fk.methods.FedNTD(), engine="loop", **changes)
    gpu = problem.run(fk.methods.FedNTD(), engine="stacked", device="cuda", **changes)
    assert gap(cpu.server, tree.to(gpu.server, "cpu")) < 1e-10


def test_instruments_on_the_gpu_see_what_those_on_the_cpu_see(problem: Problem) -> None:
    pytest.importorskip("scipy", reason="loss surfaces need scipy")
    method, options = fk.methods.FedNTD(), fk.instruments.Options(samples=8, steps=3)
    what = "where,divergence,alignment,gradients,losses,surface"
    cpu, gpu = (
        fk.instruments.analyse(problem.run(method, engine=engine, device=device), what, options)
        for engine, device in (("loop", "cpu"), ("stacked", "cuda"))
    )
    assert cpu["where"] == gpu["where"]
    assert cpu["alignment"] == gpu["alignment"]
    assert gpu["divergence"]["weight_divergence"] == pytest.approx(cpu["divergence"]["weight_divergence"], rel=1e-8)
    assert gpu["gradients"]["diversity"] == pytest.approx(cpu["gradients"]["diversity"], rel=1e-8)
    assert gpu["surface"]["eigenvalues"] == pytest.approx(cpu["surface"]["eigenvalues"], rel=1e-3)


def test_auto_takes_the_gpu_and_stacks() -> None:
    data = fk.data.load("digits") if _has_sklearn() else None
    if data is None:
        pytest.skip("scikit-learn is not installed")
    clients = fk.data.partition.iid(data.y_train, 10)
    history = fk.simulate("fedntd", "cnn_fedntd", data, clients, rounds=2, participation=4, epochs=1)
    assert history.settings["engine"] == "stacked"
    assert all(w.device.type == "cpu" for w in tree.leaves(history.params))


def test_the_gpus_random_state_is_left_alone(problem: Problem) -> None:
    torch.cuda.manual_seed(3)
    before = torch.cuda.get_rng_state()
    problem.run(fk.methods.FedAvg(), engine="loop", device="cuda")
    assert torch.equal(before, torch.cuda.get_rng_state())


def _has_sklearn() -> bool:
    try:
        import sklearn  # noqa: F401
    except ImportError:
        return False
    return True
