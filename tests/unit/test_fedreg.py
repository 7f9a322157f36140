"""FedReg's pseudo data, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.errors import raises
from support.problems import Problem
from support.texts import make_text_problem

import fedkeep as fk
from fedkeep.data import make_plan
from fedkeep.errors import MethodError
from fedkeep.method import Visit


def test_pseudo_data_are_less_sure_and_perturbed_data_are_close(problem: Problem) -> None:
    sim = problem.run(fk.methods.FedReg())
    x, y, shared = sim.local.inputs(sim.x), sim.y, sim.method.broadcast(sim.server)
    made = sim.method.rehearse(Visit("rehearse", sim.task, shared, local={}), x, y)
    before, after = (sim.task.criterion(sim.task.apply(sim.params, inputs), y) for inputs in (x, made["x_s"]))
    assert bool((after > before).all())
    assert float((made["x_s"] - x).abs().max()) <= 10 * 0.1 + 1e-12
    assert float((made["x_p"] - x).abs().max()) <= 10 * 0.001 + 1e-12
    assert torch.equal(made["z_s"], sim.task.apply(sim.params, made["x_s"]))


def test_rehearsal_is_one_order_in_every_epoch() -> None:
    plan = make_plan(seed=0, round=1, client=3, n=5, epochs=3, batch_size=2)
    epochs = [plan.rehearsal[s : s + 3].reshape(-1)[:5].tolist() for s in (0, 3, 6)]
    assert epochs[0] == epochs[1] == epochs[2]
    assert sorted(epochs[0]) == list(range(5))
    assert epochs[0] != plan.index[:3].reshape(-1)[:5].tolist()
    dropped = make_plan(seed=0, round=1, client=3, n=5, epochs=2, batch_size=2, drop_last=True)
    assert len(set(dropped.rehearsal[:2].reshape(-1).tolist())) == 4


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_adam_is_refused(problem: Problem, name: str) -> None:
    with raises(MethodError, "optimizer", name, valid=("sgd",), mentions=["fedreg", 'optimizer = "sgd"']):
        problem.simulation(fk.methods.FedReg(), optimizer=name)


def test_tokens_are_refused_before_a_folder_is_made(tmp_path: Path) -> None:
    texts = make_text_problem()
    with raises(MethodError, "data", mentions=["fedreg", "tokens"]):
        fk.simulate("fedreg", texts.model, texts.data, texts.clients, run_dir=tmp_path / "run", engine="loop")
    with raises(MethodError, "accumulate", mentions=["feddistill"]):
        fk.simulate(
            "feddistill", texts.model, texts.data, texts.clients,
            run_dir=tmp_path / "run", engine="loop", accumulate=2,
        )  # fmt: skip
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "x", [torch.zeros(2, 3, dtype=torch.int64), {"ids": torch.zeros(2, 3)}], ids=["tokens", "dict"]
)
def test_tokens_are_refused(problem: Problem, x) -> None:
    sim = problem.simulation(fk.methods.FedReg())
    visit = Visit("rehearse", sim.task, sim.method.broadcast(sim.server), local={})
    with raises(MethodError, "data", mentions=["fedreg", "tokens"]):
        sim.method.rehearse(visit, x, torch.zeros(2, dtype=torch.int64))
