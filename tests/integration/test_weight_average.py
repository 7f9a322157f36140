"""The average of the global weights over rounds: what is tested and saved, in every runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.errors import raises
from support.methods import METHODS
from support.problems import Problem, gap, same

import fedkeep as fk
from fedkeep import tree
from fedkeep.analysis.identity import Identity
from fedkeep.engine.evaluate import evaluate
from fedkeep.engine.settings import Settings
from fedkeep.errors import ConfigError, FedkeepError, MethodError, RunError
from fedkeep.experiments.experiment import Experiment
from fedkeep.instruments.next_round import train_next_round
from fedkeep.runs.folder import RunFolder
from fedkeep.runs.packed import as_table

KINDS = [0.6, 3]


def weights_of_rounds(sim: fk.Simulation) -> list[tree.Tree]:
    """Run a simulation; return the weights from which clients start after each round."""
    seen: list[tree.Tree] = []
    sim.callbacks = (lambda sim, record: seen.append(tree.map(torch.clone, sim.server["params"])),)
    sim.run()
    return seen


def by_hand(rounds: list[tree.Tree], kind: float | int) -> tree.Tree:
    """Return the mean of the last rounds, or sum_t (1 - r_t) prod_{s > t} r_s w_t with r_t = min(rho, 1 - 1/t)."""
    if isinstance(kind, int):
        shares = [1 / len(rounds[-kind:])] * len(rounds[-kind:])
    else:
        keeps = [min(kind, 1 - 1 / t) for t in range(1, len(rounds) + 1)]
        shares = []
        for t, keep in enumerate(keeps):
            share = 1 - keep
            for later in keeps[t + 1 :]:
                share *= later
            shares.append(share)
    used = rounds[-len(shares) :]
    return {name: sum(share * w[name] for share, w in zip(shares, used, strict=True)) for name in used[0]}


@pytest.mark.parametrize("rounds", [1, 2, 5])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_the_average_is_tested_and_returned_and_training_does_not_change(
    problem: Problem, engine: str, kind: float | int, rounds: int
) -> None:
    options: dict[str, Any] = {"engine": engine, "rounds": rounds}
    sim = problem.simulation(fk.methods.FedNTD(), average_weights=kind, **options)
    expected = by_hand(weights_of_rounds(sim), kind)
    assert gap(expected, sim.history.params) < 1e-12
    assert gap(expected, dict(sim.history.model.named_parameters())) < 1e-12
    confusion, loss = evaluate(sim.task, sim.history.params, sim.x_test, sim.y_test, sim.eval_inputs)
    assert sim.history.records[-1]["confusion"] == as_table(confusion)
    assert sim.history.records[-1]["test_loss"] == pytest.approx(float(loss) / len(sim.y_test), rel=1e-12)
    plain = problem.run(fk.methods.FedNTD(), **options)
    assert same(plain.server["params"], sim.server["params"])
    assert (gap(plain.history.params, sim.history.params) > 1e-6) == (rounds > 1)


@pytest.mark.parametrize("name", ["scaffold", "fedacg", "flashback", "every_hook"])
def test_no_hook_of_a_method_sees_the_average(problem: Problem, name: str) -> None:
    plain, averaged = (problem.run(METHODS[name](), average_weights=kind) for kind in (None, 3))
    assert same(plain.server, {key: value for key, value in averaged.server.items() if key != "average_weights"})
    for k in plain.state.clients:
        assert same(plain.state.clients[k], averaged.state.clients[k])


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_resumes_bit_for_bit_and_loads_the_average(problem: Problem, tmp_path: Path, kind: float | int) -> None:
    options: dict[str, Any] = {"average_weights": kind, "rounds": 5}
    whole = problem.run(fk.methods.Scaffold(), **options)
    with RunFolder.create(tmp_path / "run", {"checkpoint_every": 1}) as folder:
        problem.simulation(fk.methods.Scaffold(), **{**options, "rounds": 2}).attach(folder).run()
    with RunFolder.open(tmp_path / "run") as folder:
        resumed = problem.simulation(fk.methods.Scaffold(), **options).attach(folder)
        resumed.run()
    assert same(whole.server, resumed.server)
    assert same(whole.history.params, resumed.history.params)
    assert whole.history.accuracy.tolist() == resumed.history.accuracy.tolist()


def test_a_run_folder_returns_the_average_and_is_another_experiment(problem: Problem, tmp_path: Path) -> None:
    options = {**problem.settings, "seed": 5}
    histories = {
        kind: fk.simulate("fedavg", problem.model, problem.data, problem.clients, run_dir=tmp_path / str(kind),
                          **{**options, "average_weights": kind})
        for kind in (None, 0.6, 3)
    }  # fmt: skip
    loaded = {kind: fk.load_run(tmp_path / str(kind)) for kind in histories}
    for kind, history in histories.items():
        assert same(history.params, loaded[kind].params)
    assert len({Identity(history).key for history in loaded.values()}) == 3
    assert len({Identity(history).problem_key for history in loaded.values()}) == 1


def test_a_round_without_clients_changes_nothing(problem: Problem) -> None:
    cohorts = [[0, 1], [2], [3, 4]]
    empty = [own if k != 2 else own[:0] for k, own in enumerate(problem.clients)]
    sim = Problem(problem.model, problem.data, empty, problem.settings).simulation(
        fk.methods.FedAvg(), average_weights=2, cohorts=cohorts
    )
    first, _, last = weights_of_rounds(sim)
    assert gap(by_hand([first, last], 2), sim.params) < 1e-12


def test_half_precision_is_averaged_in_float32(problem: Problem) -> None:
    for kind in KINDS:
        sim = problem.run(fk.methods.FedAvg(), average_weights=kind, dtype="bfloat16")
        assert {leaf.dtype for leaf in tree.leaves(sim.server["average_weights"]["weights"])} == {torch.float32}
        assert {leaf.dtype for leaf in tree.leaves(sim.history.params)} == {torch.bfloat16}


def test_instruments_study_the_weights_from_which_clients_start(problem: Problem) -> None:
    sims = [problem.run(fk.methods.FedAvg(), average_weights=kind, rounds=3) for kind in (None, 3)]
    before = [train_next_round(sim).before for sim in sims]
    assert same(before[0], before[1])


@pytest.mark.parametrize("value", [0, 1, 1.0, 0.0, -0.5, 2.5, True, "0.9", 10**6])
def test_other_values_are_refused(value: Any) -> None:
    with raises(FedkeepError, key="average_weights", value=value):
        Settings(average_weights=value)


def test_an_experiment_file_sets_it() -> None:
    tables = {"method": {"name": "fedavg"}, "model": {"name": "mlp"}, "data": {"source": "digits"}}
    split = {"kind": "iid", "n_clients": 4}
    for kind in KINDS:
        given = Experiment.from_dict({**tables, "split": split, "train": {"average_weights": kind}}).train
        assert given.average_weights == kind
        assert type(given.average_weights) is type(kind)
    with raises(ConfigError, key="train.average_weights"):
        Experiment.from_dict({**tables, "split": split, "train": {"average_weights": 1.5}})


def test_a_method_cannot_use_its_name(problem: Problem) -> None:
    class Taken(fk.methods.FedAvg):
        def init_server(self, task, params):
            return {"params": params, "average_weights": torch.zeros(1)}

    with raises(MethodError, key="init_server"):
        problem.simulation(Taken())


# On Flower


@pytest.mark.parametrize("kind", KINDS)
def test_a_federation_carries_it_bit_for_bit(three: Problem, kind: float | int, tmp_path: Path) -> None:
    flower_grid = pytest.importorskip("support.flower_grid", reason="Flower is not installed")
    method = fk.methods.FedACG()
    alone = three.run(method, average_weights=kind)
    strategy = flower_grid.strategy_of(three, method, average_weights=kind, run_dir=tmp_path / "run")
    result = strategy.start(flower_grid.grid_of(three, method))
    state = strategy.federation.state
    assert same(alone.server, state.server)
    assert same(alone.history.params, state.params)
    assert same(alone.history.params, fk.load_run(tmp_path / "run").params)
    arrays = {name: torch.from_numpy(array.numpy()) for name, array in result.arrays.items()}
    assert gap(alone.history.params, arrays) < 1e-6
    assert [r["confusion"] for r in alone.history.records] == [r["confusion"] for r in state.history.records]


def test_a_federation_refuses_what_would_not_be_averaged(three: Problem) -> None:
    flower_grid = pytest.importorskip("support.flower_grid", reason="Flower is not installed")
    from flwr.app import ConfigRecord
    from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping

    from fedkeep.flower import drive

    method = fk.methods.FedAvg()
    strategy = flower_grid.strategy_of(three, method, average_weights=3)
    with raises(ConfigError, key="wrap", mentions=["average_weights"]):
        wrapped = DifferentialPrivacyServerSideFixedClipping(strategy, 0.0, 1.0, 3)
        drive(strategy, wrapped, flower_grid.grid_of(three, method))
    strategy = flower_grid.strategy_of(three, method)
    with raises(RunError, key="average_weights", value=3):
        strategy.start(flower_grid.grid_of(three, method), train_config=ConfigRecord({"average-weights": 3}))
