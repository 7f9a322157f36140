"""Recoverable forgetting: the fit of the bias, the values by hand, and everything that shows them."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from support.analysed import results_of, resume_analysed, run_analysed
from support.cli import fedkeep
from support.errors import raises
from support.problems import Problem, same
from torch import nn

import fedkeep as fk
from fedkeep import instruments as ins
from fedkeep.analysis.export import long_table
from fedkeep.analysis.recoverable import Course
from fedkeep.analysis.run_set import read_runs
from fedkeep.cli.analyse import analyse as cli_analyse
from fedkeep.engine.class_bias import fit_class_bias
from fedkeep.errors import ConfigError, FedkeepError, MethodError
from fedkeep.experiments.experiment import Experiment
from fedkeep.experiments.run import run
from fedkeep.instruments.recoverable import fitting_half
from fedkeep.instruments.summary import sentences
from fedkeep.reports.data import page_data
from fedkeep.reproduce.measures import get_measure
from fedkeep.runs.folder import RunFolder
from fedkeep.runs.reading import read_instruments


def objective(bias: np.ndarray, z: np.ndarray, y: np.ndarray, penalty: float) -> tuple[float, np.ndarray]:
    """Return the mean cross-entropy of z + b plus the penalty, and its gradient, in numpy."""
    shifted = z + bias
    shifted = shifted - shifted.max(1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    truth = np.eye(z.shape[1])[y]
    loss = -(log_p * truth).sum(1).mean() + penalty * (bias**2).sum()
    return float(loss), (np.exp(log_p) - truth).mean(0) + 2 * penalty * bias


@pytest.mark.parametrize(
    ("n", "classes", "scale", "known"), [(200, 10, 1.0, 10), (50, 4, 40.0, 4), (30, 6, 3.0, 2), (1, 3, 2.0, 3)]
)
def test_the_fit_is_the_minimum(n: int, classes: int, scale: float, known: int) -> None:
    """Against scipy, and by the gradient: balanced and absent classes, extreme logits, a single example."""
    rng = np.random.default_rng(n)
    z, y = scale * rng.normal(size=(n, classes)) + rng.normal(size=classes), rng.integers(0, known, n)
    bias = fit_class_bias(torch.from_numpy(z), torch.from_numpy(y)).numpy()
    loss, gradient = objective(bias, z, y, 0.005)
    assert np.abs(gradient).max() <= 1e-9
    found = minimize(
        objective, np.zeros(classes), (z, y, 0.005), "L-BFGS-B", True, options={"ftol": 1e-15, "gtol": 1e-9}
    )
    assert loss <= found.fun + 1e-12
    assert np.abs(bias - found.x).max() < 1e-5


def test_logits_without_a_fit_have_no_bias() -> None:
    y = torch.tensor([0, 1])
    assert fit_class_bias(torch.tensor([[1.0, float("nan")], [0.0, 1.0]]), y).tolist() == [0, 0]
    assert fit_class_bias(torch.zeros(0, 2), y[:0]).tolist() == [0, 0]


# Values by hand


def shifted(bias: list[float], public: bool) -> fk.Simulation:
    """Return a federation whose model copies its input, the class as a unit vector, and adds a bias."""
    y = np.arange(24) % 3
    data = fk.data.from_arrays(np.eye(3)[y], y, np.eye(3)[y], y, n_classes=3)
    model = nn.Linear(3, 3)
    with torch.no_grad():
        model.weight.copy_(torch.eye(3))
        model.bias.copy_(torch.tensor(bias))
    data = data.with_public(2) if public else data
    return fk.Simulation("fedavg", model, data, [np.arange(12)], fk.Settings(dtype="float64", participation=1))


@pytest.mark.parametrize("public", [True, False])
def test_a_shift_of_the_logits_is_recovered(public: bool) -> None:
    """Logits e_y + (3, 0, 0): always class 0. The best bias evens the classes out again, so all are right."""
    simulation = shifted([3.0, 0.0, 0.0], public)
    result = ins.analyse(simulation, "recoverable", ins.Options(fit_on_test=not public))
    found = result["recoverable"]
    assert result["clients"] == []
    assert (found["before"], found["after"]) == ([1, 0, 0], [1, 1, 1])
    assert found["accuracy"] == {"before": pytest.approx(1 / 3), "after": 1}
    assert (found["n_fitted"], found["n_measured"]) == ((6, 24) if public else (12, 12))
    assert -2 < found["bias"][0] < -1.5, "-2 without the penalty"
    assert found["bias"][1] == pytest.approx(found["bias"][2])
    assert sum(found["bias"]) == pytest.approx(0, abs=1e-8), "the penalty alone sees their sum"
    assert math.isnan(found["share"]), "one round"
    text = sentences(result)[1]
    assert "33.3% to 100.0%" in text
    assert ("other 12" in text) == (not public)


def test_halves_share_no_example_and_have_every_class() -> None:
    y = torch.from_numpy(np.random.default_rng(0).integers(0, 5, 101))
    half = fitting_half(y)
    counts = torch.bincount(y[half], minlength=5), torch.bincount(y[~half], minlength=5)
    assert (counts[0] > 0).all()
    assert set((counts[1] - counts[0]).tolist()) <= {0, 1}
    assert torch.equal(half, fitting_half(y))


def line(number: int, before: Any, after: Any, fitted_on: str = "public set") -> dict[str, Any]:
    accuracy = {"before": 0.5, "after": 0.5}
    study = {"fitted_on": fitted_on, "bias": [0, 0], "before": before, "after": after, "accuracy": accuracy}
    return {"after_round": number, "recoverable": study}


def test_the_course_by_hand() -> None:
    """Before: class 0 falls from 0.9 to 0.1, class 1 from 0.4 to 0.2: 0.5. After: 0.8 to 0.7 and 0.5 to 0.4: 0.1."""
    course = Course.of(
        [
            line(1, [0.0, 0.0], [0.0, 0.0], "half of the test set"),
            line(2, [0.9, 0.2], [0.8, 0.5]),
            line(4, [0.3, 0.4], [0.6, 0.5]),
            line(6, [0.1, 0.2], [0.7, 0.4]),
        ]
    )
    assert course is not None
    assert course.rounds.tolist() == [2, 4, 6], "other examples do not count"
    assert course.forgetting("before") == pytest.approx(0.5)
    assert course.forgetting("after") == pytest.approx(0.1)
    assert course.share == pytest.approx(0.8)
    assert course.round_forgetting("before") == pytest.approx((0.3 + 0.2) / 2)
    assert course.forgetting_so_far("before")[1:] == pytest.approx([0.2, 0.5])
    assert Course.of([{"after_round": 1, "losses": {}}, {"after_round": 1, "recoverable": {"fitted_on": None}}]) is None
    kept = Course.of([line(1, [0.5, None], [0.5, None]), line(2, [0.5, None], [0.5, None])])
    assert kept is not None
    assert math.isnan(kept.share), "nothing is forgotten"


# During runs


def test_both_engines_record_the_same(problem: Problem) -> None:
    found = {}
    for engine in ("loop", "stacked"):
        callback = ins.Every(1, "recoverable")
        sim = problem.simulation(fk.methods.FedNTD(), engine=engine)
        sim.callbacks = (callback,)
        sim.run()
        found[engine] = Course.of(callback.values)
        assert found[engine].class_accuracy["before"].tolist() == sim.history.class_accuracy.tolist()
        assert callback.values[-1]["recoverable"]["forgetting"]["before"] == sim.history.summary()["forgetting"]
        assert same(problem.run(fk.methods.FedNTD(), engine=engine).server, sim.server)
    assert found["loop"].bias == pytest.approx(found["stacked"].bias, abs=1e-8)
    assert found["loop"].class_accuracy["after"].tolist() == found["stacked"].class_accuracy["after"].tolist()


@pytest.fixture
def folder(problem: Problem, tmp_path: Path) -> Path:
    return run_analysed(problem, "scaffold", 1, "recoverable", tmp_path / "run")


def test_a_resumed_run_records_the_same(problem: Problem, folder: Path, tmp_path: Path) -> None:
    other = resume_analysed(problem, "scaffold", 1, "recoverable", tmp_path / "other")
    whole, resumed = results_of("recoverable", folder, other)
    assert whole == resumed
    assert whole[-1]["rounds"] == 4


def test_analysis_tables_export_and_report_show_it(problem: Problem, folder: Path) -> None:
    last = read_instruments(folder)[-1]["recoverable"]
    analysis = ins.analyse(folder, "recoverable", model=problem.model, data=problem.data, clients=problem.clients)
    assert json.loads(json.dumps(analysis["recoverable"])) == last
    history = fk.load_run(folder)
    for name, value in (
        ("recoverable.forgetting.after", last["forgetting"]["after"]),
        ("recoverable.share", last["share"]),
    ):
        measure = get_measure(name)
        assert measure.from_history(history, None, None) == value
        assert not measure.higher_is_better
    assert get_measure("recoverable.accuracy.after").higher_is_better
    assert get_measure("recoverable.test_half.share").from_history(history, None, None) is None
    rows = [row for row in long_table([folder]) if row["measure"] == "recoverable_bias"]
    assert [row["value"] for row in rows][-4:] == last["bias"]
    [run] = page_data(read_runs([folder]))["problems"][0]["groups"][0]["runs"]
    assert run["recoverable"]["share"] == last["share"]
    assert run["recoverable"]["forgetting"]["before"][-1] == pytest.approx(last["forgetting"]["before"], abs=1e-4)


def test_a_run_without_labelled_examples_is_refused(problem: Problem) -> None:
    bare = dataclasses.replace(problem, data=dataclasses.replace(problem.data, public=None))
    sim = bare.simulation(fk.methods.FedAvg())
    sim.callbacks = (ins.Every(3, "recoverable"),)
    with raises(FedkeepError, key="recoverable", mentions=["public", "--fit-on-test"]):
        sim.step()
    analysis = ins.analyse(sim, "recoverable")
    assert analysis["recoverable"] == {"fitted_on": None}
    assert "--fit-on-test" in sentences(analysis)[1]
    assert ins.analyse(sim, "recoverable", ins.Options(fit_on_test=True))["recoverable"]["n_fitted"] > 0


# The bias as a read-out


@pytest.mark.parametrize("average", [None, 2])
@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_the_read_out_is_tested_and_returned_and_training_does_not_change(
    problem: Problem, engine: str, average: int | None
) -> None:
    """The tested model is the one of a run without it, with the bias that the study fits added to its last layer."""
    options: dict[str, Any] = {"engine": engine, "average_weights": average}
    callback = ins.Every(1, "recoverable")
    plain = problem.simulation(fk.methods.FedNTD(), **options)
    plain.callbacks = (callback,)
    plain.run()
    sim = problem.run(fk.methods.FedNTD(), read_out="bias", **options)
    assert same(plain.server, {key: value for key, value in sim.server.items() if key != "read_out"})
    added = sim.history.params["classifier.bias"] - plain.history.params["classifier.bias"]
    assert added.tolist() == pytest.approx(callback.values[-1]["recoverable"]["bias"], abs=1e-12)
    assert dict(sim.history.model.named_parameters())["classifier.bias"].equal(sim.history.params["classifier.bias"])
    rest = [name for name in sim.history.params if name != "classifier.bias"]
    assert all(sim.history.params[name].equal(plain.history.params[name]) for name in rest)
    course = Course.of(callback.values)
    assert course is not None
    assert sim.history.class_accuracy.tolist() == course.class_accuracy["after"].tolist()


def test_no_hook_of_a_method_sees_the_read_out(problem: Problem) -> None:
    for method in (fk.methods.FedACG(), fk.methods.Flashback()):
        plain, biased = (problem.run(method, read_out=kind) for kind in (None, "bias"))
        assert same(plain.server, {key: value for key, value in biased.server.items() if key != "read_out"})

    class Taken(fk.methods.FedAvg):
        def init_server(self, task, params):
            return {"params": params, "read_out": torch.zeros(1)}

    with raises(MethodError, key="init_server"):
        problem.simulation(Taken())


def test_a_run_with_a_read_out_resumes_bit_for_bit_and_loads_it(problem: Problem, tmp_path: Path) -> None:
    whole = problem.run(fk.methods.Scaffold(), read_out="bias", rounds=4)
    with RunFolder.create(tmp_path / "run", {"checkpoint_every": 1}) as folder:
        problem.simulation(fk.methods.Scaffold(), read_out="bias", rounds=2).attach(folder).run()
    with RunFolder.open(tmp_path / "run") as folder:
        resumed = problem.simulation(fk.methods.Scaffold(), read_out="bias", rounds=4).attach(folder)
        resumed.run()
    assert same(whole.server, resumed.server)
    assert same(whole.history.params, resumed.history.params)
    assert whole.history.accuracy.tolist() == resumed.history.accuracy.tolist()
    parts = (problem.model, problem.data, problem.clients)
    history = fk.simulate("fedavg", *parts, run_dir=tmp_path / "own", **{**problem.settings, "read_out": "bias"})
    assert same(history.params, fk.load_run(tmp_path / "own").params)


class Unbiased(nn.Module):
    """A model whose last layer has no bias, and whose hidden layer is as wide as there are classes."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.last = nn.Linear(16, 4), nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.hidden(x.flatten(1)).relu())


def test_a_read_out_is_refused_where_it_cannot_work(problem: Problem) -> None:
    with raises(FedkeepError, key="read_out", value="mean", valid=["bias"]):
        fk.Settings(read_out="mean")
    bare = dataclasses.replace(problem, data=dataclasses.replace(problem.data, public=None))
    with raises(ConfigError, key="read_out", mentions=["public"]):
        bare.simulation(fk.methods.FedAvg(), read_out="bias")
    with raises(ConfigError, key="read_out", mentions=["Linear"]):
        dataclasses.replace(problem, model=Unbiased()).simulation(fk.methods.FedAvg(), read_out="bias")


def test_half_precision_finds_the_last_layer(problem: Problem) -> None:
    for options in ({"dtype": "bfloat16"}, {"dtype": "float32", "autocast": "bfloat16"}):
        sim = problem.simulation(fk.methods.FedAvg(), read_out="bias", **options)
        assert list(sim.server["read_out"]) == ["classifier.bias"]


def test_a_federation_carries_the_read_out_bit_for_bit(three: Problem, tmp_path: Path) -> None:
    flower_grid = pytest.importorskip("support.flower_grid", reason="Flower is not installed")
    method = fk.methods.FedAvg()
    alone = three.run(method, read_out="bias")
    strategy = flower_grid.strategy_of(three, method, read_out="bias", run_dir=tmp_path / "run")
    strategy.start(flower_grid.grid_of(three, method))
    assert same(alone.server, strategy.federation.state.server)
    assert same(alone.history.params, fk.load_run(tmp_path / "run").params)
    records = strategy.federation.state.history.records
    assert [r["confusion"] for r in alone.history.records] == [r["confusion"] for r in records]
    bare = dataclasses.replace(three, data=dataclasses.replace(three.data, public=None))
    with raises(ConfigError, key="read_out", mentions=["public"]):
        flower_grid.strategy_of(bare, method, read_out="bias")


def test_the_command_line_refuses_it_before_a_run_without_examples(tmp_path: Path) -> None:
    either = ["run", "digits", "method=fedavg", "rounds=2", "--runs", str(tmp_path)]
    run = [*either, "data.public=none"]
    for args, mentioned in (
        ([*run, "--instruments", "recoverable"], ["data.public", "--fit-on-test"]),
        ([*run, "read_out=bias"], ["read_out", "data.public"]),
        ([*run, "--fit-on-test"], ["--instruments recoverable"]),
        ([*either, "data.public=0.1", "--instruments", "recoverable", "--fit-on-test"], ["no effect", "public set"]),
        (["tune", *run[1:], "read_out=bias"], ["read_out", "data.public"]),
    ):
        refused = fedkeep(*args)
        assert refused.returncode == 2
        assert refused.stderr.count("\n") == 1
        assert all(text in refused.stderr for text in mentioned), refused.stderr
    assert list(tmp_path.iterdir()) == []


def test_analyse_says_that_fit_on_test_has_no_effect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(Experiment.load("digits", ["method=fedavg", "rounds=1"]), tmp_path / "run")
    for asked in (True, False):
        cli_analyse(tmp_path / "run", "recoverable", fit_on_test=asked, as_json=True)
        shown = capsys.readouterr()
        assert ("no effect" in shown.err) == asked
        assert json.loads(shown.out)["recoverable"]["fitted_on"] == "public set"
    with raises(FedkeepError, key="--fit-on-test", mentions=["--what recoverable"]):
        cli_analyse(tmp_path / "run", "where", fit_on_test=True)


def test_analyse_without_a_plot_is_refused(folder: Path, tmp_path: Path) -> None:
    refused = fedkeep("analyse", str(folder), "--what", "recoverable", "-o", str(tmp_path / "plots"))
    assert refused.returncode == 2
    assert "there is no plot of recoverable" in refused.stderr
    assert not (tmp_path / "plots").exists()
