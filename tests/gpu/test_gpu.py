"""The stacked engine on a CUDA device, for every method, against the loop engine on the CPU."""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.batch_norm import Net, with_unequal_clients
from support.methods import METHODS
from support.problems import Problem, gap
from torch import nn

import fedkeep as fk
from fedkeep import tree
from fedkeep.data.augment import Augment
from fedkeep.engine.device import numerics
from fedkeep.engine.gpu import layers
from fedkeep.engine.mapping import map_clients, one_stream_each

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.mark.parametrize("name", METHODS)
def test_stacked_on_the_gpu_equals_loop_on_the_cpu(problem: Problem, name: str) -> None:
    method = METHODS[name]()
    cpu = problem.run(method, engine="loop", device="cpu")
    gpu = problem.run(method, engine="stacked", device="cuda", deterministic=True)
    assert gap(cpu.server, tree.to(gpu.server, "cpu")) < 1e-10
    assert cpu.history.records[-1]["confusion"] == gpu.history.records[-1]["confusion"]


@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
@pytest.mark.parametrize("kind", ["median", "trimmed_mean", "clip", "krum", "multi_krum", "private"])
def test_robust_and_private_aggregation_on_the_gpu_equal_the_cpu(problem: Problem, name: str, kind: str) -> None:
    changes: dict[str, Any] = {"participation": 6, "aggregation": kind}
    if kind == "private":
        pytest.importorskip("opacus", reason="the accountant needs the extra privacy")
        changes = {"dp_clip": 0.5, "dp_noise": 1.0}
    cpu = problem.run(METHODS[name](), engine="loop", device="cpu", **changes)
    gpu = problem.run(METHODS[name](), engine="stacked", device="cuda", deterministic=True, **changes)
    assert gap(cpu.server, tree.to(gpu.server, "cpu")) < 1e-9


@pytest.mark.parametrize("padding", ["zeros", "reflect"])
def test_augmentation_on_the_gpu_equals_the_cpu(problem: Problem, padding: Any) -> None:
    changes = {"augment": Augment(crop=1, flip=True, cutout=2, padding=padding)}
    cpu = problem.run(fk.methods.FedNTD(), engine="loop", **changes)
    gpu = problem.run(fk.methods.FedNTD(), engine="stacked", device="cuda", **changes)
    assert gap(cpu.server, tree.to(gpu.server, "cpu")) < 1e-10


@pytest.mark.parametrize("frozen", [False, True], ids=["batch statistics", "frozen"])
@pytest.mark.parametrize("name", ["fedavg", "fedntd", "scaffold", "moon"])
def test_batch_norm_on_the_gpu_equals_the_cpu(problem: Problem, name: str, frozen: bool) -> None:
    torch.manual_seed(0)
    model = Net(track_running_stats=frozen)
    if frozen:
        for norm in (model.first, model.second):
            norm.running_mean.uniform_(-1, 1)
            norm.running_var.uniform_(0.5, 2)
            norm.eval()
    unequal = with_unequal_clients(problem, model)
    method, changes = METHODS[name](), {"batch_size": 5, "participation": 1.0}
    cpu = unequal.run(method, engine="loop", device="cpu", **changes)
    gpu = unequal.run(method, engine="stacked", device="cuda", deterministic=True, **changes)
    assert gap(cpu.server, tree.to(gpu.server, "cpu")) < 1e-9


@pytest.mark.parametrize("name", ["flashback", "feddf", "fedavg_finetune"])
def test_the_average_as_a_candidate_on_the_gpu_equals_the_cpu(problem: Problem, name: str) -> None:
    method = dataclasses.replace(METHODS[name](), include_average=True)
    cpu = problem.run(method, engine="loop", device="cpu")
    gpu = problem.run(method, engine="stacked", device="cuda", deterministic=True)
    assert gap(cpu.server, tree.to(gpu.server, "cpu")) < 1e-10


def test_instruments_on_the_gpu_equal_the_cpu(problem: Problem) -> None:
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


def test_auto_chooses_the_gpu_and_the_stacked_engine() -> None:
    data = fk.data.load("digits") if _has_sklearn() else None
    if data is None:
        pytest.skip("scikit-learn is not installed")
    clients = fk.data.partition.iid(data.y_train, 10)
    history = fk.simulate("fedntd", "cnn_fedntd", data, clients, rounds=2, participation=4, epochs=1)
    assert history.settings["engine"] == "stacked"
    assert all(w.device.type == "cpu" for w in tree.leaves(history.params))


def test_the_random_state_of_the_gpu_is_unchanged(problem: Problem) -> None:
    torch.cuda.manual_seed(3)
    before = torch.cuda.get_rng_state()
    problem.run(fk.methods.FedAvg(), engine="loop", device="cuda")
    assert torch.equal(before, torch.cuda.get_rng_state())


# CUDA graphs


def test_graphs_compute_clients_that_may_have_finished(problem: Problem) -> None:
    sim = problem.run(fk.methods.FedNTD(), engine="stacked", device="cuda", participation=1.0)
    graphs = sim.engine.graphs
    assert graphs.works
    captured = {sizes for static in graphs.static.values() for sizes in static.graphs}
    assert any(certainly_live < computed for computed, certainly_live, _ in captured), "the clients differ in size"


def test_graphs_are_captured_again_for_cohorts_that_outgrow_the_buffers() -> None:
    """Buffers that are too small are freed with the memory pool of their graphs; the next capture must not use it."""
    x, y = np.zeros((444, 1, 4, 4), np.uint8), np.arange(444) % 4
    clients = np.split(np.arange(444), [4, 44])
    settings = fk.Settings(engine="stacked", device="cuda", epochs=1, batch_size=4)
    sim = fk.Simulation("fedavg", "mlp", fk.data.from_arrays(x, y, x, y), clients, settings)
    shared = sim.method.broadcast(sim.server)
    for client in range(3):
        sim.engine.train(shared, [sim.job(client, 1)], 0.1)
        assert sim.engine.graphs.works


def test_graphs_of_another_run_are_not_freed_during_a_capture(problem: Problem) -> None:
    """They are part of a reference cycle, so the garbage collector frees them, at any time."""
    before = gc.get_threshold()
    try:
        for _ in range(4):
            sim = problem.run(fk.methods.FedNTD(), engine="stacked", device="cuda", rounds=1)
            assert sim.engine.graphs.works
            del sim
            gc.set_threshold(5)
    finally:
        gc.set_threshold(*before)


@dataclasses.dataclass(frozen=True)
class Listing(fk.methods.FedAvg):
    """Makes a tensor from Python numbers in every step, which cannot be captured in a graph."""

    def loss(self, visit, params, batch):
        task = visit.task
        weights = torch.tensor([1.0] * task.n_classes, dtype=task.dtype, device=batch["y"].device)
        z = task.apply(params, batch["x"], train=True)
        return fk.losses.masked_mean(task.criterion(z, batch["y"]) * weights[batch["y"]], batch["mask"])


def test_a_step_that_cannot_be_captured_runs_without_graphs(problem: Problem, caplog: pytest.LogCaptureFixture) -> None:
    gpu = problem.run(Listing(), engine="stacked", device="cuda")
    assert not gpu.engine.graphs.works
    assert [r.levelname for r in caplog.records if r.name == "fedkeep"] == ["WARNING"]
    cpu = problem.run(fk.methods.FedAvg(), engine="loop", device="cpu")
    assert gap(cpu.server, tree.to(gpu.server, "cpu")) < 1e-10


class Recurrent(nn.Module):
    """Reads an image row by row; `vmap` does not support it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm, self.out = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(x[:, 0])[0][:, -1])


class Gated(nn.Module):
    """Looks at its inputs, which neither `vmap` nor a graph supports. Both branches compute the same."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.out = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        return self.out(x * 2 if (x > 0).all() else x + x)


@pytest.mark.parametrize("model", [Recurrent, Gated])
@pytest.mark.parametrize("name", ["fedntd", "scaffold", "fedcurv"])
def test_a_module_that_cannot_be_vmapped_runs_on_streams(problem: Problem, name: str, model: type[nn.Module]) -> None:
    own = dataclasses.replace(problem, model=model())
    method = fk.methods.get(name)()
    gpu = own.run(method, engine="auto", device="cuda")
    assert gpu.engine.name == "stacked"
    assert gpu.engine.each is one_stream_each
    cpu = own.run(method, engine="loop", device="cpu")
    assert gap(cpu.server, tree.to(gpu.server, "cpu")) < 1e-9


def test_resume_on_the_gpu_is_bit_identical(problem: Problem, tmp_path: Path) -> None:
    """In float32, with graphs and our own kernels, interrupted after two of four rounds."""

    def run(folder: Path, stop_after: int | None) -> fk.Simulation:
        settings = {**problem.settings, "dtype": "float32", "engine": "stacked", "device": "cuda", "rounds": 4}
        stop = (lambda sim, record: sim.stop() if record["round"] == stop_after else None,)
        given = (fk.methods.Scaffold(), fk.models.build("cnn_fedntd", (1, 4, 4), 4), problem.data, problem.clients)
        if (folder / "experiment.toml").exists():
            method, model, data, clients = given
            return fk.resume(folder, method=method, model=model, data=data, clients=clients)
        return fk.simulate(*given, **settings, deterministic=True, run_dir=folder, checkpoint_every=1, callbacks=stop)

    whole = run(tmp_path / "whole", None)
    run(tmp_path / "parts", 2)
    resumed = run(tmp_path / "parts", None)
    assert all(torch.equal(a, b) for a, b in zip(*(tree.leaves(h.params) for h in (whole, resumed)), strict=True))


# Layers of our own


def net(p: tree.Tree, x: torch.Tensor) -> torch.Tensor:
    """Padded and strided convolutions, with bias and without; pooling that leaves a rest; a dense layer."""
    h = F.max_pool2d(F.relu(F.conv2d(x, p["w1"], p["b1"], padding=2)), 2)
    h = F.relu(F.conv2d(h, p["w2"], stride=2, padding=1))
    h = F.max_pool2d(F.conv2d(h, p["w3"], p["b3"]), 2)
    return F.linear(h.flatten(1), p["w4"], p["b4"])


def error(exact: tree.Tree, found: tree.Tree) -> float:
    """Return the distance of two trees, relative to the norm of the first."""
    pairs = list(zip(tree.leaves(exact), tree.leaves(tree.to(found, torch.float64)), strict=True))
    return float(sum((a - b).square().sum() for a, b in pairs) / sum(a.square().sum() for a, _ in pairs)) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layers_equal_torch(dtype: torch.dtype) -> None:
    """Compared with float64, our error is about that of torch's own layers in TF32."""
    K, B = 3, 5
    shapes = {"w1": (20, 3, 5, 5), "b1": (20,), "w2": (33, 20, 3, 3), "w3": (16, 33, 1, 1), "b3": (16,)}
    shapes |= {"w4": (7, 16 * 4 * 3), "b4": (7,)}
    draw = torch.Generator("cuda").manual_seed(0)
    given = {n: torch.randn(K, *s, device="cuda", generator=draw) / s[-1] for n, s in shapes.items()}
    x = torch.randn(K, B, 3, 31, 29, device="cuda", generator=draw)

    def outcome(each: Any, dtype: torch.dtype) -> tree.Tree:
        params = {n: w.to(dtype).requires_grad_() for n, w in given.items()}
        z = each(net, params, x.to(dtype))
        return {"z": z.detach(), **dict(zip(params, torch.autograd.grad(z.sum(), params.values()), strict=True))}

    with numerics(fk.Settings(tf32=True), torch.device("cuda")):
        exact, ours, theirs = (
            outcome(map_clients, torch.float64),
            outcome(layers.vmap_with_kernels, dtype),
            outcome(map_clients, dtype),
        )
    for name in exact:
        off = [error({"": exact[name]}, {"": found[name]}) for found in (ours, theirs)]
        assert off[0] < 2 * off[1] + 2e-2, (name, off)


NETWORKS = ["cnn_fedntd", "cnn_fedssd", "resnet8", "resnet10 with BatchNorm"]


@pytest.mark.parametrize(
    ("method", "model", "autocast"),
    # with augmentation and autocast, torch's own convolutions refuse the teacher's weights under vmap
    [
        *(("fedntd", model, autocast) for model in NETWORKS for autocast in (None, "bfloat16")),
        ("fedntd", "reflect padding", None),
        *((method, "cnn_fedntd", autocast) for method in ("fedkeep", "gcfed") for autocast in (None, "bfloat16")),
    ],
)
def test_the_papers_networks_train_alike_with_and_without_our_layers(
    method: str, model: str, autocast: str | None
) -> None:
    network: Any = model
    augment = Augment()
    if model == "resnet10 with BatchNorm":
        network = fk.models.build("resnet10", (3, 32, 32), 10, norm="batch")
    elif model == "reflect padding":
        network, augment = "cnn_fedntd", Augment(crop=4, flip=True, padding="reflect")
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (60, 3, 32, 32), np.uint8), np.arange(60) % 10
    data = fk.data.from_arrays(x, y, x, y)
    clients = [np.arange(0, 25), np.arange(25, 60)]

    def moved(each: Any = None, **changes: Any) -> tree.Tree:
        settings = fk.Settings(rounds=1, participation=2, epochs=1, batch_size=10, lr=0.01, augment=augment, **changes)
        sim = fk.Simulation(method, network, data, clients, settings)
        if each is not None:
            assert sim.engine.each is layers.vmap_with_kernels
            sim.engine.each, sim.task.accelerator.kernels = each, each is layers.vmap_with_kernels
        sim.run()
        return tree.to(tree.sub(sim.params, sim.task.init), "cpu", torch.float64)

    exact = moved(engine="loop", device="cpu", dtype="float64")
    how = {"engine": "stacked", "device": "cuda", "autocast": autocast}
    ours, theirs = (error(exact, moved(each, **how)) for each in (layers.vmap_with_kernels, map_clients))
    assert ours < 2 * theirs + 0.03, (ours, theirs)


def _has_sklearn() -> bool:
    try:
        import sklearn  # noqa: F401
    except ImportError:
        return False
    return True
