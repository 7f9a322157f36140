"""The trial step that chooses the engine: it runs what training runs, and names what cannot be stacked."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
import torch
from support.errors import raises
from support.problems import Problem, gap, make_problem, same
from torch import Tensor, nn

import fedkeep as fk
from fedkeep import tree
from fedkeep.engine.mapping import one_stream_each
from fedkeep.engine.stacked import Stacked
from fedkeep.errors import EngineError, MethodError
from fedkeep.task import Task

METHODS = ["fedavg", "fedntd", "scaffold", "fedcurv"]


class Gate(nn.Module):
    """Looks at its inputs, which `vmap` does not support. The two branches compute the same."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if (x > 0).all() else x + x


class Gated(nn.Module):
    """A dense layer, with a gate before it (a module of its own, or the model itself) or without one."""

    def __init__(self, gate: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.flat, self.out = nn.Sequential(nn.Flatten()), nn.Linear(16, 4)
        if gate == "inside":
            self.flat.append(Gate())
        self.gate = gate

    def forward(self, x: Tensor) -> Tensor:
        x = self.flat(x)
        if self.gate == "own":
            x = x * 2 if (x > 0).all() else x + x
        return self.out(2 * x if self.gate == "none" else x)


class Attentive(nn.Module):
    """An encoder with a padding mask; the culprit is not the layer that was called last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.embed = nn.Linear(4, 4)
        self.encoder, self.out = nn.TransformerEncoder(layer, 1), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = x[:, 0]
        return self.out(self.encoder(self.embed(rows), src_key_padding_mask=rows.sum(-1) > 5).mean(1))


def with_model(model: nn.Module) -> Problem:
    return dataclasses.replace(make_problem(), model=model)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(("gate", "culprit"), [("own", "the model (Gated)"), ("inside", "flat.1 (Gate)")])
def test_a_model_that_looks_at_its_inputs_is_trained_in_the_loop(
    caplog: pytest.LogCaptureFixture, name: str, gate: str, culprit: str
) -> None:
    method, problem = fk.methods.get(name)(), with_model(Gated(gate))
    with caplog.at_level(logging.WARNING, "fedkeep"):
        auto = problem.run(method, engine="auto")
    assert auto.engine.name == "loop"
    assert culprit in caplog.text
    assert same(auto.server, problem.run(method, engine="loop").server)
    assert gap(auto.server, with_model(Gated("none")).run(method, engine="loop").server) < 1e-12
    with raises(EngineError, key="engine", value="stacked", mentions=[culprit]):
        problem.simulation(method, engine="stacked")


def test_the_module_in_which_it_happens_is_named(caplog: pytest.LogCaptureFixture) -> None:
    problem = with_model(Attentive())
    with caplog.at_level(logging.WARNING, "fedkeep"):
        assert problem.run(fk.methods.FedAvg(), engine="auto").engine.name == "loop"
    assert "encoder (TransformerEncoder)" in caplog.text


def test_a_criterion_that_looks_at_its_values_is_found() -> None:
    def gated(z: Tensor, y: Tensor) -> Tensor:
        values = fk.losses.cross_entropy(z, y)
        return 2 * values if bool((values > 0).all()) else values

    problem = make_problem()
    args = (fk.methods.FedAvg(), problem.model, problem.data, problem.clients)
    history = fk.simulate(*args, **{**problem.settings, "engine": "auto"}, criterion=gated)
    assert history.settings["engine"] == "loop"
    with raises(EngineError, key="engine", mentions=["local training"]):
        fk.simulate(*args, **{**problem.settings, "engine": "stacked"}, criterion=gated)


@dataclasses.dataclass(frozen=True)
class Looking(fk.methods.FedAvg):
    """Looks at what it measures."""

    def measure(self, visit: Any, params: Any, batch: Any) -> Any:
        return {"count": batch["mask"].sum() if bool(batch["mask"].all()) else batch["mask"].sum() * 1}


def test_a_hook_that_cannot_be_stacked_is_found(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fedkeep"):
        assert make_problem().run(Looking(), engine="auto").engine.name == "loop"
    assert "measure" in caplog.text


@dataclasses.dataclass(frozen=True)
class Wrong(fk.methods.FedAvg):
    """Does not return a pair."""

    def finish(self, visit: Any, params: Any, measured: Any) -> Any:
        return {"params": params}


@pytest.mark.parametrize("engine", ["auto", "stacked", "loop"])
def test_an_error_of_the_method_stays_one(engine: str) -> None:
    with raises(MethodError, key="finish"):
        make_problem().run(Wrong(), engine=engine)


def test_the_trial_changes_nothing() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    simulation = make_problem().simulation(fk.methods.Scaffold(), engine="stacked")
    assert torch.equal(torch.get_rng_state(), before)
    assert same(simulation.params, simulation.task.init)
    assert not any(
        m._forward_hooks or m._forward_pre_hooks for whole in simulation.task.modules for m in whole.modules()
    )


@pytest.mark.parametrize("name", sorted(fk.methods.discover()))
def test_every_method_is_stacked_on_a_small_model(name: str) -> None:
    assert make_problem().simulation(fk.methods.get(name)(), engine="auto").engine.name == "stacked"


# Gradients of single examples


def test_gradients_of_single_examples_are_the_same_with_and_without_vmap() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(7, 6, dtype=torch.float64), torch.arange(7) % 3
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    mapped, plain = (Task(model, 3, 1, dtype=torch.float64) for _ in range(2))
    plain._maps_examples = False
    assert gap(*(task.example_gradients(task.init, x, y) for task in (mapped, plain))) < 1e-14
    for i in range(7):
        model.double().zero_grad()
        fk.losses.cross_entropy(model(x[i : i + 1]), y[i : i + 1]).sum().backward()
        own = {name: p.grad for name, p in model.named_parameters()}
        assert gap(own, tree.take(mapped.example_gradients(mapped.init, x, y), i)) < 1e-14


class Recurrent(nn.Module):
    """`vmap` does not support its LSTM."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm, self.out = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x[:, 0])[0][:, -1])


@pytest.mark.parametrize("name", ["fedcurv", "fedka", "fedntd"])
def test_stacked_clients_one_after_another_equal_the_loop(name: str) -> None:
    """As on a GPU, where each client has a stream."""
    problem = with_model(Recurrent())
    loop, stacked = (problem.simulation(fk.methods.get(name)(), engine="loop") for _ in range(2))
    stacked.engine = Stacked(stacked.local, stacked.x, stacked.y, one_stream_each)
    assert gap(loop.run().params, stacked.run().params) < 1e-12


# Hugging Face transformers


class Classifier(nn.Module):
    """A small DistilBERT with random weights."""

    def __init__(self, frozen: bool, dropout: float) -> None:
        transformers = pytest.importorskip("transformers")
        super().__init__()
        torch.manual_seed(0)
        config = transformers.DistilBertConfig(
            vocab_size=50, dim=16, hidden_dim=32, n_layers=1, n_heads=2, num_labels=3, max_position_embeddings=8,
            dropout=dropout, attention_dropout=dropout, seq_classif_dropout=dropout,
        )  # fmt: skip
        self.net = transformers.DistilBertForSequenceClassification(config)
        self.net.distilbert.requires_grad_(not frozen)

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        return self.net(**x).logits


@pytest.mark.parametrize("name", ["fedavg", "fedcurv"])
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_hugging_face_model_is_trained_in_the_loop(name: str, frozen: bool, dropout: float) -> None:
    model, draw = Classifier(frozen, dropout), torch.Generator().manual_seed(0)
    words = torch.randint(0, 50, (24, 6), generator=draw)
    real = torch.arange(6) < torch.randint(2, 7, (24, 1), generator=draw)
    x, y = {"input_ids": words, "attention_mask": real.long()}, torch.arange(24) % 3
    data, clients = fk.data.from_arrays(x, y, x, y), fk.data.partition.iid(y, 3, seed=0)
    args: dict[str, Any] = {"rounds": 1, "participation": 2, "batch_size": 5}
    history = fk.simulate(name, model, data, clients, **args)
    assert history.settings["engine"] == "loop"
    with raises(EngineError, key="engine", mentions=["(DistilBertModel)"]):
        fk.simulate(name, model, data, clients, **args, engine="stacked")
