"""Data that changes during a run: what is left, in both engines; resumed, compared, and refused on Flower."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.errors import raises
from support.problems import Problem, gap, make_problem, same
from support.runs import assert_same_run

import fedkeep as fk
from fedkeep import instruments
from fedkeep.analysis.groups import Group
from fedkeep.analysis.run_set import read_runs
from fedkeep.data import Partition, Reduction
from fedkeep.data.reductions import ClientExamples
from fedkeep.errors import ConfigError, FedkeepError
from fedkeep.experiments.experiment import Experiment
from fedkeep.experiments.run import run
from fedkeep.forgetting import forgetting_degree
from fedkeep.plots.runs import ALL_PLOTS
from fedkeep.plots.style import plot_style

CLIENT = 3  # of the small problem; it has two classes
LESS = {"round": 2, "client": 1, "class_id": 3, "keep": 2}
TABLES: dict[str, Any] = {
    "method": "scaffold",
    "model": "mlp",
    "data": "digits",
    "split": {"kind": "iid", "n_clients": 4},
    "train": {"rounds": 3, "participation": 4, "epochs": 1, "batch_size": 60, "reductions": [LESS]},
    "checkpoint_every": 1,
}


def test_the_first_examples_of_a_class_are_left_from_the_round_on() -> None:
    """Client 0 has examples 0 to 7 of classes 0, 1, 0, 1, ...; client 1 has 8 and 9."""
    y = np.arange(10) % 2
    clients = Partition(np.arange(10), np.array([0, 8, 10]))
    steps = (Reduction(4, 0, 1, 0), Reduction(2, 0, 1, 0.5), Reduction(3, 0, 1, np.int64(1)), Reduction(5, 0, 0, 0))
    examples = ClientExamples(clients, y, 2, (*steps, Reduction(6, 0, 1, 9)))
    expected = {1: list(range(8)), 2: [0, 1, 2, 3, 4, 6], 3: [0, 1, 2, 4, 6], 4: [0, 2, 4, 6], 5: [], 6: [1, 3, 5, 7]}
    for number, left in expected.items():
        assert examples.of(0, number).tolist() == left
        assert examples.size(0, number) == len(left)
        assert examples.of(1, number).tolist() == [8, 9]


@pytest.fixture
def problem() -> Problem:
    """All clients take part; from round 2 on, client CLIENT has no example of its first class, one of its second."""
    problem = make_problem()
    y = problem.data.y_train.numpy()[problem.clients[CLIENT]]
    reductions = [{"round": 2, "client": CLIENT, "class_id": int(c), "keep": k} for k, c in enumerate(np.unique(y))]
    problem.settings.update(participation=len(problem.clients), rounds=3, reductions=reductions)
    return problem


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedka"])
def test_both_engines_train_on_what_is_left(problem: Problem, method: str) -> None:
    loop, stacked = (problem.run(fk.methods.get(method)(), engine=engine) for engine in ("loop", "stacked"))
    assert gap(loop.server, stacked.server) < 1e-12
    problem.settings["reductions"] = None
    assert gap(loop.server, problem.run(fk.methods.get(method)()).server) > 1e-6


def test_label_counts_are_those_of_the_round(problem: Problem) -> None:
    problem.settings["eval_local_every"] = 1
    simulation = problem.simulation(fk.methods.FedAvg())
    simulation.step()
    trial = instruments.train_next_round(simulation)
    simulation.run()
    rounds = [simulation.history.local(t) for t in (1, 2)]
    before, after = (a["label_counts"][a["ids"].tolist().index(CLIENT)] for a in rounds)
    left = np.flatnonzero(before)
    assert after[left].tolist() == [min(k, before[c]) for k, c in enumerate(left)]
    assert trial.label_counts[trial.ids.index(CLIENT)].tolist() == after.tolist()
    assert len(trial.own_examples(CLIENT)[1]) == after.sum()


def test_the_plot_shows_the_class_that_is_reduced(problem: Problem) -> None:
    pytest.importorskip("matplotlib", reason="plotting needs the extra plots")
    problem.settings["eval_local_every"] = 1
    history = problem.run(fk.methods.FedAvg()).history
    with plot_style():
        degree, examples = ALL_PLOTS["reduced"]([Group.of_histories("FedAvg", [history])]).axes
    rounds = [history.anatomy(t) for t in (1, 2, 3)]
    c, at = problem.settings["reductions"][0]["class_id"], [a["ids"].tolist().index(CLIENT) for a in rounds]
    lost = [forgetting_degree(a["before"], a["clients"][k])[c] for a, k in zip(rounds, at, strict=True)]
    assert degree.lines[1].get_ydata().tolist() == lost
    counts = examples.lines[0].get_ydata().tolist()
    assert counts == [a["label_counts"][k][c] for a, k in zip(rounds, at, strict=True)]
    assert counts[0] > counts[1] == 0


def test_a_client_without_examples_is_skipped(problem: Problem) -> None:
    classes = range(problem.data.n_classes)
    problem.settings["reductions"] = [Reduction(3, CLIENT, c, 0) for c in classes]
    records = problem.run(fk.methods.FedAvg()).history.records
    assert [record["skipped"] for record in records[1:]] == [[], [], [CLIENT]]


def test_a_run_with_reductions_is_resumed_bit_for_bit_and_is_an_experiment_of_its_own(tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    run(Experiment.from_dict(TABLES), whole)

    def stop(simulation: fk.Simulation, record: dict[str, Any]) -> None:
        if record["round"] == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(Experiment.from_dict(TABLES), stopped, [stop])
    fk.resume(stopped)
    assert_same_run(whole, stopped)
    assert tomllib.loads((whole / "experiment.toml").read_text())["train"]["reductions"] == [LESS]
    without = {**TABLES, "train": {**TABLES["train"], "reductions": []}}
    with raises(ConfigError, key="train.reductions"):
        run(Experiment.from_dict(without), whole)
    other = run(Experiment.from_dict(without), tmp_path / "other")
    assert not same(fk.load_run(whole).params, other.params)
    assert len(read_runs([tmp_path / "whole", tmp_path / "other"]).problems) == 2


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ([{**LESS, "round": 0}], "reductions.round"),
        ([{**LESS, "keep": 1.5}], "reductions.keep"),
        ([{**LESS, "keep": -1}], "reductions.keep"),
        ([{**LESS, "client": "a"}], "reductions.client"),
        ([{**LESS, "klass": 1}], "reductions"),
        ([{"round": 1}], "reductions"),
        ([LESS, {**LESS, "keep": 1}], "reductions"),
        ([LESS["round"]], "reductions"),
        (LESS, "reductions"),
    ],
)
def test_invalid_reductions_raise(given: Any, key: str) -> None:
    with raises(FedkeepError, key=key):
        fk.Settings(reductions=given)
    with raises(ConfigError, key=f"train.{key}"):
        Experiment.from_dict({**TABLES, "train": {"reductions": given}})


@pytest.mark.parametrize("change", [{"client": 99}, {"class_id": 99}])
def test_reductions_of_an_unknown_client_or_class_raise(problem: Problem, change: dict[str, int]) -> None:
    problem.settings["reductions"] = [{**LESS, **change}]
    [name] = change
    with raises(FedkeepError, key=f"reductions.{name}", value=99):
        problem.simulation(fk.methods.FedAvg())


def test_a_reduction_after_the_last_round_is_refused(problem: Problem) -> None:
    problem.settings.update(rounds=1, reductions=[LESS])
    with raises(FedkeepError, key="reductions.round", value=2, mentions=["rounds = 1"]):
        fk.simulate(fk.methods.FedAvg(), problem.model, problem.data, problem.clients, **problem.settings)
    tables = {**TABLES, "train": {**TABLES["train"], "rounds": 1}}
    with raises(ConfigError, key="train.reductions.round", value=2, mentions=["train.rounds = 1"]):
        Experiment.from_dict(tables)
    assert Experiment.from_dict({**tables, "made_by": {}}).train.rounds == 1, "an existing run is read as it is"


def test_a_federation_refuses_reductions() -> None:
    pytest.importorskip("flwr")
    from fedkeep.flower.messages import resolve_settings

    with raises(ConfigError, key="reductions"):
        resolve_settings({"reductions": [LESS]}, {})
