"""Loggers and progress: every round once, also of a resumed run; what they compute, and what they refuse.

Weights & Biases and MLflow are tested with recording stand-ins, and for real where they are installed.
"""

from __future__ import annotations

import csv
import io
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.cli import fedkeep
from support.errors import raises
from support.problems import Problem

import fedkeep as fk
from fedkeep.engine import progress as progress_module
from fedkeep.engine.progress import ProgressLine
from fedkeep.errors import FedkeepError
from fedkeep.runs.round_logger import RoundFigures


def simulate(problem: Problem, *callbacks: Any, **options: Any) -> fk.History:
    settings = {**problem.settings, "rounds": 4, **options}
    return fk.simulate("fedavg", problem.model, problem.data, problem.clients, callbacks=callbacks, **settings)


def resume(problem: Problem, path: Path, *callbacks: Any) -> fk.History:
    parts = {"model": problem.model, "data": problem.data, "clients": problem.clients}
    return fk.resume(path, callbacks=callbacks, **parts)


def stop_after_two(simulation: fk.Simulation, record: dict[str, Any]) -> None:
    if record["round"] == 2:
        simulation.stop()


def test_figures_are_those_of_the_history(problem: Problem) -> None:
    history = simulate(problem, eval_every=1)
    figures, rows = RoundFigures(), []
    for record in history.records:
        rows.append(figures.add(record))
    assert [row["test/accuracy"] for row in rows[1:]] == pytest.approx(history.accuracy.tolist())
    assert rows[-1]["forgetting/so_far"] == pytest.approx(history.summary()["forgetting"])
    expected = fk.forgetting.round_forgetting(history.class_accuracy)
    assert [row["forgetting/round"] for row in rows[2:]] == pytest.approx(expected.tolist())
    assert "forgetting/so_far" not in rows[1]
    assert "round/lr" not in rows[0]


# CSV


def read_csv(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_text())))


def test_the_csv_log_has_a_row_per_round(problem: Problem, tmp_path: Path) -> None:
    history = simulate(problem, fk.CSVLogger(tmp_path / "log.csv"), eval_every=2)
    rows = read_csv(tmp_path / "log.csv")
    assert [row["round"] for row in rows] == ["0", "1", "2", "3", "4"]
    assert [bool(row["accuracy"]) for row in rows] == [True, False, True, False, True]
    assert [float(rows[r]["accuracy"]) for r in (2, 4)] == history.accuracy.tolist()
    assert [float(rows[4][f"class_{c}"]) for c in range(4)] == history.class_accuracy[-1].tolist()
    assert float(rows[4]["forgetting"]) == pytest.approx(history.summary()["forgetting"])
    for key in ("lr", "train_loss", "bytes_up", "seconds"):
        assert [float(row[key]) for row in rows[1:]] == [record[key] for record in history.records[1:]]


def test_a_resumed_run_has_every_row_once(problem: Problem, tmp_path: Path) -> None:
    path = tmp_path / "run"
    simulate(problem, fk.CSVLogger(), stop_after_two, run_dir=path)
    assert len(read_csv(path / "log.csv")) == 3
    history = resume(problem, path, fk.CSVLogger())
    rows = read_csv(path / "log.csv")
    assert [row["round"] for row in rows] == ["0", "1", "2", "3", "4"]
    assert [float(row["accuracy"]) for row in rows[1:]] == history.accuracy.tolist()


def test_a_number_that_appears_later_has_a_column(problem: Problem, tmp_path: Path) -> None:
    def add(simulation: fk.Simulation, record: dict[str, Any]) -> None:
        if record["round"] in (2, 4):
            record["metrics"][f"own_{record['round']}"] = 0.5

    simulate(problem, add, fk.CSVLogger(), run_dir=tmp_path / "whole")
    simulate(problem, add, fk.CSVLogger(), stop_after_two, run_dir=tmp_path / "resumed")
    resume(problem, tmp_path / "resumed", add, fk.CSVLogger())
    whole, resumed = (read_csv(tmp_path / name / "log.csv") for name in ("whole", "resumed"))
    assert [row["own_2"] for row in whole] == ["", "", "0.5", "", ""]
    assert [row["own_4"] for row in whole] == ["", "", "", "", "0.5"]
    assert [list(row) for row in whole] == [list(row) for row in resumed], "the same columns in the same order"
    assert all(a[key] == b[key] for a, b in zip(whole, resumed, strict=True) for key in a if key != "seconds")


def test_the_log_of_a_finished_run_is_written_when_it_is_resumed(problem: Problem, tmp_path: Path) -> None:
    history = simulate(problem, run_dir=tmp_path / "run")
    resume(problem, tmp_path / "run", fk.CSVLogger())
    rows = read_csv(tmp_path / "run" / "log.csv")
    assert [row["round"] for row in rows] == ["0", "1", "2", "3", "4"]
    assert [float(row["accuracy"]) for row in rows[1:]] == history.accuracy.tolist()


def test_one_csv_logger_serves_one_run_after_another(problem: Problem, tmp_path: Path) -> None:
    logger = fk.CSVLogger()
    for name in ("a", "b"):
        simulate(problem, logger, run_dir=tmp_path / name)
    assert all(len(read_csv(tmp_path / name / "log.csv")) == 5 for name in ("a", "b"))


def test_the_csv_log_needs_a_place_that_can_be_written(problem: Problem, tmp_path: Path) -> None:
    with raises(FedkeepError, key="file", mentions=["run_dir"]):
        simulate(problem, fk.CSVLogger())
    (tmp_path / "link.csv").symlink_to(tmp_path / "other.csv")
    with raises(FedkeepError, key="link.csv"):
        simulate(problem, fk.CSVLogger(tmp_path / "link.csv"))


def test_the_command_writes_the_csv_log(tmp_path: Path) -> None:
    done = fedkeep("run", "digits", "rounds=2", "epochs=1", "batch_size=60", "eval_every=3", "--csv", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    [run] = (tmp_path / "runs").iterdir()
    log = (run / "log.csv").read_text()
    assert [row["round"] for row in read_csv(run / "log.csv")] == ["0", "1", "2"]
    rounds = (run / "rounds.jsonl").read_bytes()
    (run / "log.csv").unlink()
    done = fedkeep("resume", str(run), "--csv", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (run / "log.csv").read_text() == log
    assert (run / "rounds.jsonl").read_bytes() == rounds, "nothing is trained again"


# Weights & Biases


class FakeWandB(ModuleType):
    """Records the calls of one run; a resumed run continues after the steps that the server has."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.inits: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.exit_codes: list[int] = []
        self.Settings = SimpleNamespace

    def init(self, **options: Any) -> Any:
        self.inits.append(options)
        steps = [step for step, _ in self.logged]
        resumed = options.get("resume") == "allow" and bool(steps)
        return SimpleNamespace(
            step=max(steps, default=-1) + 1 if resumed else 0,
            resumed=resumed,
            log=lambda figures, step: self.logged.append((step, figures)),
            finish=lambda exit_code: self.exit_codes.append(exit_code),
        )


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandB:
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return fake


def test_wandb_is_offline_unless_the_environment_says_otherwise(
    problem: Problem, wandb: FakeWandB, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    history = simulate(problem, fk.WandB(project="p", tags=["t"]), run_dir=tmp_path / "run")
    [options] = wandb.inits
    expected = {"mode": "offline", "project": "p", "tags": ["t"], "name": "run", "dir": str(tmp_path / "run")}
    assert {key: options[key] for key in expected} == expected
    assert options["config"]["method.name"] == "fedavg"
    assert options["config"]["train.lr"] == 0.1
    assert [step for step, _ in wandb.logged] == [0, 1, 2, 3, 4]
    assert [figures["test/accuracy"] for _, figures in wandb.logged[1:]] == pytest.approx(history.accuracy.tolist())
    assert wandb.exit_codes == [0]
    monkeypatch.setenv("WANDB_MODE", "online")
    simulate(problem, fk.WandB())
    assert wandb.inits[-1]["mode"] == "online"


def test_a_resumed_run_continues_its_wandb_log(
    problem: Problem, wandb: FakeWandB, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    simulate(problem, fk.WandB(), stop_after_two, run_dir=tmp_path / "run")
    resume(problem, tmp_path / "run", fk.WandB())
    assert [step for step, _ in wandb.logged] == [0, 1, 2, 3, 4]
    assert wandb.inits[0]["id"] == wandb.inits[1]["id"]


def test_an_offline_wandb_log_is_replaced_by_that_of_the_resumed_run(
    problem: Problem, wandb: FakeWandB, tmp_path: Path
) -> None:
    simulate(problem, fk.WandB(), stop_after_two, run_dir=tmp_path / "run")
    logs = tmp_path / "run" / "wandb"
    own, other = logs / f"offline-run-2026-{wandb.inits[0]['id']}", logs / "offline-run-2026-another"
    for folder in (own, other):
        folder.mkdir(parents=True)
    resume(problem, tmp_path / "run", fk.WandB())
    assert [step for step, _ in wandb.logged[3:]] == [0, 1, 2, 3, 4]
    assert not own.exists()
    assert other.exists()


def test_a_failed_run_is_a_failed_run_in_wandb(problem: Problem, wandb: FakeWandB) -> None:
    def fail(simulation: fk.Simulation, record: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(problem, fk.WandB(), fail)
    assert wandb.exit_codes == [1]


def test_wandb_for_real(problem: Problem, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="needs the extra wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    simulate(problem, fk.WandB(), stop_after_two, run_dir=tmp_path / "run")
    resume(problem, tmp_path / "run", fk.WandB())
    [log] = (tmp_path / "run" / "wandb").glob("offline-run-*")
    [file] = log.glob("*.wandb")
    assert b"test/accuracy" in file.read_bytes()


# MLflow


class FakeMLflow(ModuleType):
    """Runs with tags, parameters and metrics in memory, as MLflow's client gives access to them."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.runs: list[Any] = []
        self.exceptions = SimpleNamespace(MlflowException=type("MlflowException", (Exception,), {}))
        self.uris: list[str | None] = []

    def MlflowClient(self, tracking_uri: str | None = None) -> FakeMLflow:  # noqa: N802
        self.uris.append(tracking_uri)
        if tracking_uri == "wrong":
            raise self.exceptions.MlflowException("no such store")
        return self

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id="7") if self.runs else None

    def create_experiment(self, name: str) -> str:
        return "7"

    def create_run(self, experiment: str, run_name: str | None, tags: dict[str, str] | None) -> Any:
        data = SimpleNamespace(tags=dict(tags or {}), metrics=[], params={})
        info = SimpleNamespace(run_id=str(len(self.runs)), name=run_name, status="RUNNING")
        self.runs.append(SimpleNamespace(info=info, data=data))
        return self.runs[-1]

    def search_runs(self, experiments: list[str], filter_string: str, max_results: int) -> list[Any]:
        return [run for run in self.runs if f"= '{run.data.tags.get('fedkeep.run')}'" in filter_string]

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        assert len(metrics) <= 1000
        assert len(params) <= 100
        self.runs[int(run_id)].data.metrics += [(name, step) for name, _, _, step in metrics]
        self.runs[int(run_id)].data.params.update(params)

    def set_tag(self, run_id: str, key: str, value: str) -> None:
        self.runs[int(run_id)].data.tags[key] = value

    def update_run(self, run_id: str, status: str) -> None:
        self.runs[int(run_id)].info.status = status

    set_terminated = update_run


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> FakeMLflow:
    fake, entities = FakeMLflow(), ModuleType("mlflow.entities")
    entities.Metric = lambda *values: values  # type: ignore[attr-defined]
    entities.Param = lambda *values: values  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    return fake


def test_a_resumed_run_continues_its_mlflow_log(problem: Problem, mlflow: FakeMLflow, tmp_path: Path) -> None:
    simulate(problem, fk.MLflow(), stop_after_two, run_dir=tmp_path / "run")
    resume(problem, tmp_path / "run", fk.MLflow())
    simulate(problem, fk.MLflow(tracking_uri="here"), run_dir=tmp_path / "other")
    first, second = mlflow.runs
    for run in (first, second):
        assert [step for name, step in run.data.metrics if name == "test/accuracy"] == [0, 1, 2, 3, 4]
        assert run.info.status == "FINISHED"
    assert first.data.params["method.name"] == "fedavg"
    assert first.info.name == "run"
    assert mlflow.uris == [None, None, "here"]


def test_a_store_that_cannot_be_used_is_an_error_of_ours(mlflow: FakeMLflow) -> None:
    with raises(FedkeepError, key="mlflow", mentions=["no such store"]):
        fk.MLflow(tracking_uri="wrong")


def test_mlflow_for_real(problem: Problem, tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="needs the extra mlflow")
    from mlflow import MlflowClient

    store = f"sqlite:///{tmp_path}/mlflow.db"
    simulate(problem, fk.MLflow(tracking_uri=store), stop_after_two, run_dir=tmp_path / "run")
    history = resume(problem, tmp_path / "run", fk.MLflow(tracking_uri=store))
    client = MlflowClient(tracking_uri=store)
    [run] = client.search_runs([client.get_experiment_by_name("fedkeep").experiment_id])
    logged = client.get_metric_history(run.info.run_id, "test/accuracy")
    assert [metric.step for metric in logged] == [0, 1, 2, 3, 4]
    assert [metric.value for metric in logged[1:]] == pytest.approx(history.accuracy.tolist())
    assert (run.info.status, run.data.params["train.rounds"]) == ("FINISHED", "4")


@pytest.mark.parametrize(("logger", "package"), [("WandB", "wandb"), ("MLflow", "mlflow")])
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, logger: str, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with raises(FedkeepError, key=package, mentions=[f"{package}, which is not installed: pip install"]):
        getattr(fk, logger)()


# Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_one_line_that_is_overwritten(
    problem: Problem, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(progress_module, "_SECONDS_BETWEEN_UPDATES", 0.0)
    terminal = Terminal()
    history = simulate(problem, ProgressLine(terminal), stop_after_two, run_dir=tmp_path / "run")
    shown = terminal.getvalue()
    assert shown.count("\n") == 1
    assert shown.endswith("\n")
    first, last = shown.strip("\r\n").split("\r")
    assert first.startswith("fedavg: round 1/4, accuracy 0.")
    assert "time left" in first
    assert f"round 2/4, accuracy {history.accuracy[-1]:.3f}, forgetting" in last
    resumed = Terminal()
    resume(problem, tmp_path / "run", ProgressLine(resumed))
    assert "round 3/4" in resumed.getvalue()
    assert "time left" not in resumed.getvalue().split("\r")[-1]


@pytest.mark.parametrize(("progress", "terminal", "shown"), [
    (None, True, True), (None, False, False), (True, False, True), (False, True, False),
])  # fmt: skip
def test_progress_is_shown_where_somebody_looks(
    problem: Problem, monkeypatch: pytest.MonkeyPatch, progress: bool | None, terminal: bool, shown: bool
) -> None:
    stream = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    simulate(problem, progress=progress)
    assert bool(stream.getvalue()) == shown
    assert ("\r" in stream.getvalue()) == (shown and terminal)


def test_a_notebook_shows_progress_as_the_output_of_its_cell(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    def display(data: dict[str, str], raw: bool, display_id: bool = False) -> Any:
        shown.append(data["text/plain"])
        return SimpleNamespace(update=display)

    module = ModuleType("IPython.display")
    module.display = display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    stream = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()
    monkeypatch.setattr(sys, "stderr", stream)
    simulate(problem)
    assert stream.getvalue() == ""
    assert shown[0].startswith("fedavg: round 1/4")
    assert shown[-1].startswith("fedavg: round 4/4")


def test_progress_changes_no_number_and_survives_a_closed_terminal(problem: Problem) -> None:
    terminal = Terminal()
    terminal.close()
    shown, plain = simulate(problem, ProgressLine(terminal)), simulate(problem)
    assert np.array_equal(shown.confusion, plain.confusion)
    with raises(FedkeepError, key="progress", value="yes"):
        simulate(problem, progress="yes")
