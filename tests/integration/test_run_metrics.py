"""Metrics of runs: recorded, saved, read again, by site, and those of the user's own."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as reference
from torch import nn
from typer.testing import CliRunner

import fedkeep as fk
from fedkeep.analysis.export import long_table, wide_table
from fedkeep.analysis.run_set import read_runs
from fedkeep.cli.app import app
from fedkeep.engine.simulation import Simulation
from fedkeep.errors import FedkeepError, ModelError, RunError
from fedkeep.reports.data import page_data

SITES = np.array(["Aachen", "Bonn", "Celle"])
SETTINGS: dict[str, Any] = {"rounds": 2, "participation": 1.0, "epochs": 1, "batch_size": 10, "lr": 0.1}


def make_data(with_sites: bool = True) -> fk.data.Dataset:
    """Return four classes in eight dimensions, owned by three hospitals."""
    rng = np.random.default_rng(0)
    y = np.arange(240) % 4
    x = (rng.normal(size=(240, 8)) + 2 * np.eye(8)[y]).astype(np.float32)
    owners = SITES[rng.integers(0, 3, 240)]
    known = {"ids": owners[:160], "test_ids": owners[160:]} if with_sites else {}
    return fk.data.from_arrays(x[:160], y[:160], x[160:], y[160:], **known)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(8, 4)


def simulate(data: fk.data.Dataset | None = None, **options: Any) -> fk.History:
    data = data or make_data()
    clients = fk.data.partition.by_id(np.arange(160) % 3 if data.ids is None else data.ids)
    return fk.simulate("fedavg", make_model(), data, clients, **{**SETTINGS, **options})


def top2(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (z.topk(2).indices == y[:, None]).any(1).float().mean()


def recalls(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    right = (z.argmax(-1) == y).float()
    return torch.stack([right[y == c].mean() for c in range(z.shape[1])])


def both(z: torch.Tensor, y: torch.Tensor) -> dict[str, float]:
    return {"low": float(z.min()), "high": float(z.max())}


OWN = {"top2": top2, "recalls": recalls, "range": both}


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_metrics_are_those_of_scikit_learn_on_the_final_model(engine: str) -> None:
    data = make_data()
    history = simulate(data, engine=engine, metrics=OWN)
    with torch.no_grad():
        z = history.model(data.x_test)
    y, predicted, p = data.y_test.numpy(), z.argmax(-1).numpy(), z.double().softmax(-1).numpy()
    expected = {
        "balanced_accuracy": reference.balanced_accuracy_score(y, predicted),
        "macro_f1": reference.f1_score(y, predicted, average="macro"),
        "macro_precision": reference.precision_score(y, predicted, average="macro"),
        "auc": reference.roc_auc_score(y, p, multi_class="ovr"),
        "ece": float(fk.metrics.calibration_error(z, data.y_test)),
        "top2": reference.top_k_accuracy_score(y, p, k=2),
        "macro_recalls": reference.recall_score(y, predicted, average="macro"),
        "range_low": float(z.min()),
        "range_high": float(z.max()),
    }
    summary = history.summary()
    assert {key: summary[key] for key in expected} == pytest.approx(expected, rel=1e-5)
    assert np.allclose(history.f1[-1], reference.f1_score(y, predicted, average=None))
    assert np.allclose(history.recall, history.class_accuracy)
    assert np.allclose(history.recall[-1], recalls(z, data.y_test))
    assert np.allclose(history.class_metrics()["recalls"], history.recall)
    assert history.class_auc.shape == history.precision.shape == (2, 4)
    for name in ("auc", "ece", "macro_f1", "balanced_accuracy"):
        assert getattr(history, name)[-1] == history.metrics()[name][-1] == summary[name]


def test_a_row_for_every_site() -> None:
    data = make_data()
    history = simulate(data)
    with torch.no_grad():
        z = history.model(data.x_test)
    rows = history.site_metrics()
    assert [(row["site"], row["client"]) for row in rows] == [("Aachen", 0), ("Bonn", 1), ("Celle", 2)]
    for row in rows:
        own = torch.from_numpy(data.test_ids == row["site"])
        y, predicted = data.y_test[own].numpy(), z[own].argmax(-1).numpy()
        assert row["examples"] == int(own.sum())
        assert row["accuracy"] == pytest.approx(reference.accuracy_score(y, predicted))
        assert row["macro_f1"] == pytest.approx(reference.f1_score(y, predicted, average="macro"))
        assert np.allclose(row["f1"], reference.f1_score(y, predicted, average=None))
        p = z[own].double().softmax(-1).numpy()
        assert row["auc"] == pytest.approx(reference.roc_auc_score(y, p, multi_class="ovr"), rel=1e-5)
        assert row["ece"] == pytest.approx(float(fk.metrics.calibration_error(z[own], data.y_test[own])), rel=1e-4)
    total = sum(row["accuracy"] * row["examples"] for row in rows) / len(data.y_test)
    assert total == pytest.approx(history.accuracy[-1])
    assert history.site_metrics(1) != rows
    with pytest.raises(FedkeepError, match="round 7 has no metrics by site"):
        history.site_metrics(7)
    with pytest.raises(FedkeepError, match="test_ids"):
        simulate(make_data(with_sites=False)).site_metrics()


def test_records_are_saved_with_what_callbacks_add(tmp_path: Path) -> None:
    def add(simulation: Simulation, record: dict[str, Any]) -> None:
        assert simulation.history.records[-1] is record
        record["metrics"]["norm"] = simulation.params["weight"].norm()
        record["metrics"]["bias"] = simulation.params["bias"]
        record["note"] = {"shape": np.array([4, 8]), "nothing": float("nan")}

    history = simulate(metrics=OWN, callbacks=[add], run_dir=tmp_path / "run")
    loaded = fk.load_run(tmp_path / "run")
    assert loaded.records == history.records
    assert loaded.site_names == tuple(SITES)
    assert loaded.records[-1]["note"] == {"shape": [4, 8], "nothing": None}
    weight = history.params["weight"]
    assert loaded.summary()["norm"] == pytest.approx(float(weight.norm()))
    assert loaded.class_metrics()["bias"][-1].tolist() == history.params["bias"].tolist()
    assert "norm" not in loaded.records[0].get("metrics", {})  # callbacks are called after rounds
    assert loaded.about["made_by"]["metrics"].keys() == OWN.keys()
    plain = simulate(callbacks=[lambda simulation, record: None])
    assert all("metrics" not in record for record in plain.records)
    pandas = pytest.importorskip("pandas")
    frame = loaded.to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert frame["norm"].iloc[-1] == loaded.summary()["norm"]
    assert {"macro_f1", "auc", "ece", "top2", "macro_recalls", "f1_3", "recalls_0"} <= set(frame.columns)


@pytest.mark.parametrize(
    ("change", "key", "message"),
    [
        ({"note": torch.nn.ReLU()}, "note", "a callback added note to the record, which a run folder cannot hold"),
        ({("a", 1): 1}, "('a', 1)", "the key must be a text"),
        ({"metrics": {"far": "away"}}, "metrics.far", r'record\["metrics"\]\["far"\] must be a number or one number'),
        ({"metrics": {"bias": [1, 2, 3]}}, "metrics.bias", "one number for each of 4 classes, not 3 numbers"),
        ({"metrics": {"final": 1.0}}, "metrics.final", "metrics.final: every run has a number of that name"),
        ({"metrics": None}, "metrics", "a dict of numbers by name; it is None"),
        ({"train_loss": torch.tensor(1.0)}, "train_loss", "a callback changed train_loss of the record"),
    ],
)
def test_what_cannot_be_saved_is_refused(tmp_path: Path, change: dict[Any, Any], key: str, message: str) -> None:
    refused_and_saved_as_measured(tmp_path, lambda simulation, record: record.update(change), key, message)


@pytest.mark.parametrize("key", ["metrics", "train_loss"])
def test_a_callback_that_removes_something_is_refused(tmp_path: Path, key: str) -> None:
    refused_and_saved_as_measured(tmp_path, lambda simulation, record: record.pop(key), key, "removed")


def refused_and_saved_as_measured(path: Path, callback: Any, key: str, message: str) -> None:
    """Require a callback to be refused, before the next is called, and the round to be saved as it was measured."""
    simulations, called = [], []

    def keep(simulation: Simulation, record: dict[str, Any]) -> None:
        simulations.append(simulation)
        record["metrics"]["kept"] = 1.0

    with pytest.raises(FedkeepError, match=message) as refused:
        simulate(callbacks=[keep, callback, lambda *given: called.append(given)], metrics=[top2], run_dir=path / "run")
    assert (refused.value.key, called) == (key, [])
    assert "\n" not in str(refused.value)
    [_, record] = fk.load_run(path / "run").records
    assert record == simulations[0].history.records[-1]
    assert record["train_loss"] > 0
    assert record["metrics"].keys() == {"top2"}


def test_a_logger_gets_metrics_as_they_are_saved() -> None:
    found = []
    callbacks = [
        lambda simulation, record: record["metrics"].update(norm=torch.tensor(2.0)),
        lambda simulation, record: found.append(record["metrics"]["norm"]),
    ]
    simulate(callbacks=callbacks, rounds=1)
    assert found == [2.0]
    assert isinstance(found[0], float)


def test_a_resumed_run_has_the_same_records(tmp_path: Path) -> None:
    def stop(simulation: Simulation, record: dict[str, Any]) -> None:
        record["metrics"]["norm"] = float(simulation.params["weight"].norm())
        if simulation.round == 1 and simulation.settings.rounds == 3 and stopping:
            simulation.stop()

    data, path = make_data(), tmp_path / "run"
    clients = fk.data.partition.by_id(data.ids)
    stopping = False
    whole = simulate(data, metrics=OWN, callbacks=[stop], rounds=3)
    stopping = True
    simulate(data, metrics=OWN, callbacks=[stop], rounds=3, run_dir=path)
    given = {"model": make_model(), "data": data, "clients": clients, "callbacks": [stop]}
    with pytest.raises(RunError, match="was started with other metrics: top2, recalls, range; pass the same functions"):
        fk.resume(path, **given)
    with pytest.raises(RunError, match="the metric top2 is not the one that"):
        fk.resume(path, metrics={**OWN, "top2": lambda z, y: 0.5}, **given)
    stopping = False
    again = {**SETTINGS, "rounds": 3, "run_dir": path, "resume": True}
    with pytest.raises(RunError, match="was started with other metrics"):
        fk.simulate("fedavg", make_model(), data, clients, metrics=[top2], **again)
    resumed = fk.resume(path, metrics=OWN, **given)
    for record in (*whole.records, *resumed.records):
        record.pop("seconds", None)
    assert resumed.records == whole.records
    finished = fk.simulate("fedavg", make_model(), data, clients, metrics=OWN, **again)
    assert finished.metrics()["top2"].tolist() == whole.metrics()["top2"].tolist()
    with pytest.raises(RunError, match="was started with other metrics"):
        fk.simulate("fedavg", make_model(), data, clients, **again)


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"m": lambda z, y: float("nan")}, "the metric m is NaN or infinite on 8 examples"),
        ({"m": lambda z, y: 1 / 0}, r"the metric m fails on logits \(8, 4\) and labels \(8,\): ZeroDivisionError"),
        ({"m": lambda z, y: z}, "the metric m fails on .* it must return a number, one number per class, or a dict"),
        ({"m": lambda z, y: [1.0, 2.0]}, "it must return .*, not 2 numbers"),
        ({"m": lambda z, y: {}}, "it returns an empty dict"),
        ({"m": lambda z, y: "good"}, "it must return .*, not 'good'"),
        ({"m": 3}, "the metric m must be a function"),
        ({"auc": top2}, "metrics.auc: every run has a number of that name"),
        ({"top 2": top2}, "'top 2' cannot be a metric's name"),
        ([lambda z, y: 1.0], "cannot be a metric's name"),
        ([top2, top2], "two metrics are called top2"),
        ({"a": lambda z, y: {"b": 1.0}, "a_b": lambda z, y: 2.0}, "two metrics would be called a_b"),
        ({"a": lambda z, y: {1: 1.0, "1": 2.0}}, "two metrics would be called a_1"),
        (7, "metrics = 7: write a table of names"),
        ("math:nothing", "the module math has no nothing"),
    ],
)
def test_a_wrong_metric_is_refused_before_the_first_round(metrics: Any, message: str) -> None:
    with pytest.raises(FedkeepError, match=message) as refused:
        simulate(metrics=metrics)
    assert str(refused.value.key).startswith("metrics")
    assert "\n" not in str(refused.value)


def test_metrics_are_given_as_functions_or_by_name() -> None:
    assert simulate(metrics=[top2], rounds=1).summary()["top2"] > 0.5
    assert simulate(metrics="torch.nn.functional:cross_entropy", rounds=1).summary()["cross_entropy"] == pytest.approx(
        simulate(rounds=1).records[-1]["test_loss"], rel=1e-5
    )


def test_a_metric_that_fails_later_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    def fragile(z: torch.Tensor, y: torch.Tensor) -> float:
        calls.append(len(y))
        if len(calls) == 3:
            raise ValueError("too late")
        return float("nan") if len(calls) == 4 else 1.0

    with caplog.at_level(logging.WARNING, "fedkeep"):
        history = simulate(metrics={"fragile": fragile, "top2": top2}, rounds=3)
    assert "round 1: the metric fragile failed and is not recorded: ValueError: too late" in caplog.text
    assert calls == [8, 80, 80, 80, 80]  # the trial, the untrained model, three rounds
    assert np.array_equal(history.metrics()["fragile"], [np.nan, np.nan, 1.0], equal_nan=True)
    assert np.isfinite(history.metrics()["top2"]).all()


def test_an_invalid_metric_in_a_file_is_damage(tmp_path: Path) -> None:
    from fedkeep.runs.records import _unpacked

    simulate(metrics=OWN, run_dir=tmp_path / "run")
    line = json.loads((tmp_path / "run" / "rounds.jsonl").read_text().splitlines()[-1])
    for key, value in {
        "auc": [0.5],
        "ece": "low",
        "metrics": {"top2": "high"},
        "sites": {**line["sites"], "auc": [0.5]},
    }.items():
        with pytest.raises(RunError, match="incomplete or invalid"):
            _unpacked("here", "rounds.jsonl", {**line, key: value}, 1)


@pytest.fixture(scope="module")
def two_methods(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods with two seeds each, on hospitals and named classes; one run has a metric of its own."""
    folder = tmp_path_factory.mktemp("runs")
    data = dataclasses.replace(make_data(), class_names=("benign", "malignant", "other", "none"))
    clients = fk.data.partition.by_id(data.ids)
    for method, lr in (("fedavg", 0.001), ("fedprox", 0.1)):
        for seed in (0, 1):
            options = {**SETTINGS, "lr": lr, "seed": seed, "label": method, "run_dir": folder / f"{method}-{seed}"}
            fk.simulate(method, make_model(), data, clients, metrics=OWN if method == "fedavg" else None, **options)
    return folder


def run(*args: str) -> str:
    result = CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    return result.stdout


def test_compare_shows_the_metrics_that_are_chosen(two_methods: Path) -> None:
    chosen = "final,macro_f1,auc,ece,top2,macro_recalls,recall.malignant,f1.0"
    table = run("compare", two_methods, "--metrics", chosen, "--markdown").splitlines()
    assert table[0] == (
        "| method | final % | macro F1 % | AUC | ECE | top2 | macro_recalls | recall malignant % | F1 benign % | runs |"
    )
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table[2:]]
    by_method = {row[0]: row[1:] for row in cells}
    fedavg = [fk.load_run(two_methods / f"fedavg-{seed}") for seed in (0, 1)]
    mean, spread = (f([history.auc[-1] for history in fedavg]) for f in (np.mean, lambda v: np.std(v, ddof=1)))
    assert by_method["fedavg"][2] == f"<u>{mean:.3f}±{spread:.3f}</u>"
    assert by_method["fedprox"][2].startswith("**")
    assert by_method["fedprox"][4:6] == ["-", "-"], "it has no metrics of its own"
    assert by_method["fedavg"][-2] == f"<u>{100 * np.mean([h.f1[-1][0] for h in fedavg]):.1f}±" + (
        f"{100 * np.std([h.f1[-1][0] for h in fedavg], ddof=1):.1f}</u>"
    )
    text = run("compare", two_methods, "--metrics", "auc,top2")
    assert "-: not recorded" in text
    assert "smoothed" not in text
    assert "AUC" not in run("compare", two_methods)


def test_compare_shows_a_metric_by_site(two_methods: Path) -> None:
    text = run("compare", two_methods, "--sites", "macro_f1")
    assert "macro F1 % by site" in text
    assert all(site in text for site in SITES)
    data = json.loads(run("compare", two_methods, "--sites", "auc", "--metrics", "f1.1", "--json"))
    group = next(g for g in data["problems"][0]["groups"] if g["label"] == "fedavg")
    histories = [fk.load_run(two_methods / name) for name in group["runs"]]
    assert group["sites"]["auc"]["Bonn"] == [history.site_metrics()[1]["auc"] for history in histories]
    assert group["metrics"]["f1.1"]["runs"] == [history.f1[-1][1] for history in histories]
    assert group["mean"]["macro_f1"] == pytest.approx(np.mean([history.macro_f1[-1] for history in histories]))
    comparison = fk.compare(two_methods, metrics=["macro_f1", "recall.malignant"], sites="auc")
    assert comparison.as_data()["problems"][0]["groups"][0]["sites"] == group["sites"]
    row = next(row for row in comparison.rows if row["label"] == "fedavg")
    assert row["recall.malignant"] == pytest.approx(np.mean([history.recall[-1][1] for history in histories]))
    assert "recall malignant %" in repr(comparison)
    with pytest.raises(FedkeepError, match=r"^metrics: no run has the metric 'nothing'"):
        fk.compare(two_methods, metrics="nothing")
    markdown = run("compare", two_methods, "--sites", "ece", "--markdown")
    assert "| ECE | Aachen | Bonn | Celle |" in markdown


def test_a_class_is_looked_up_by_its_name_in_every_run(tmp_path: Path) -> None:
    data = dataclasses.replace(make_data(), class_names=("benign", "malignant", "other", "none"), name="one")
    again = dataclasses.replace(data, class_names=("left", "right", "benign", "malignant"), name="two")
    one, two = simulate(data, run_dir=tmp_path / "one"), simulate(again, run_dir=tmp_path / "two")
    expected = {"f1.malignant": [one.f1[-1][1], two.f1[-1][3]], "f1.0": [one.f1[-1][0], two.f1[-1][0]]}
    assert expected["f1.malignant"][0] != expected["f1.malignant"][1]
    comparison = fk.compare([tmp_path / "one", tmp_path / "two"], metrics="f1.malignant,f1.0,f1.left")
    columns = {key: [row[key] for row in comparison.rows] for key in (*expected, "f1.left")}
    assert {key: columns[key] for key in expected} == expected
    assert np.isnan(columns["f1.left"]).tolist() == [True, False], "one of the runs has no such class"
    assert [column.head for column in comparison.chosen.columns] == ["F1 malignant %", "F1 0 %", "F1 left %"]


def test_a_measure_has_one_heading_and_one_number_of_digits(two_methods: Path) -> None:
    usual, chosen = (fk.compare(two_methods, metrics=names) for names in (None, "final,forgetting,round_forgetting"))
    row = next(row for row in usual.rows if row["label"] == "fedavg")
    for measure, head in (("forgetting", "forgetting"), ("round_forgetting", "per round")):
        cell = f"{row[measure]:.3f}±{row[f'{measure}_std']:.3f}"
        for text in (repr(usual), repr(chosen), usual.to_markdown(), chosen.to_markdown(), usual._repr_html_()):
            assert cell in text
            assert head in text
        [problem] = page_data(read_runs([two_methods]))["problems"]
        [column] = [column for column in problem["columns"] if column["head"] == head]
        assert cell in [shown["text"] for shown in column["cells"]]
        narrow = f"{row[measure]:.2f}±{row[f'{measure}_std']:.2f}"
        assert narrow in run("compare", two_methods)
        assert narrow in run("compare", two_methods, "--metrics", measure)


def test_the_page_has_tables_of_metrics_and_sites(two_methods: Path) -> None:
    [problem] = page_data(read_runs([two_methods]))["problems"]
    columns = {column["head"]: column for column in problem["columns"]}
    assert [c["head"] for c in problem["columns"] if c.get("part") == "sites"] == list(SITES)
    assert {"macro F1 %", "AUC", "ECE"} <= {c["head"] for c in problem["columns"] if c.get("part") == "metrics"}
    fedavg = [group["label"] for group in problem["groups"]].index("fedavg")
    bonn = [fk.load_run(two_methods / f"fedavg-{seed}").site_metrics()[1]["accuracy"] for seed in (0, 1)]
    assert columns["Bonn"]["cells"][fedavg]["value"] == pytest.approx(np.mean(bonn))


def test_sites_that_are_numbers_are_matched_with_their_clients() -> None:
    data = make_data()
    numbered = {name: number for number, name in enumerate(SITES)}
    ids, test_ids = (np.array([numbered[name] for name in owners]) for owners in (data.ids, data.test_ids))
    rows = simulate(dataclasses.replace(data, ids=ids, test_ids=test_ids)).site_metrics()
    assert [(row["site"], row["client"]) for row in rows] == [("id 0", 0), ("id 1", 1), ("id 2", 2)]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--metrics", "macro_f2", "no run has the metric 'macro_f2': did you mean macro_f1?"),
        ("--metrics", "f1", "it has a value for each class, such as f1.0"),
        ("--metrics", "f1.7", "f1.7 names no class: valid: benign, malignant, other, none"),
        ("--metrics", ",", "--metrics is empty"),
        ("--sites", "f1", "--sites: unknown metric 'f1': valid: examples, accuracy"),
    ],
)
def test_compare_refuses_unknown_metrics(two_methods: Path, option: str, value: str, message: str) -> None:
    with pytest.raises(FedkeepError, match=re.escape(message)) as refused:
        CliRunner().invoke(app, ["compare", str(two_methods), option, value], catch_exceptions=False)
    assert refused.value.key == option


def test_export_has_a_row_for_every_metric(two_methods: Path, tmp_path: Path) -> None:
    columns, rows = [], list(long_table([two_methods / "fedavg-0"]))
    last = [row for row in rows if row["round"] == 2]
    history = fk.load_run(two_methods / "fedavg-0")

    def values(measure: str, **where: Any) -> list[float]:
        return [r["value"] for r in last if r["measure"] == measure and all(r[k] == v for k, v in where.items())]

    for name, column in history.metrics().items():
        if not name.startswith("macro_recalls"):
            assert values(name) == [column[-1]], name
    for name in ("precision", "f1", "class_auc", "recalls"):
        assert values(name) == history.class_metrics()[name][-1].tolist()
    bonn = history.site_metrics()[1]
    assert values("site_auc", site="Bonn", client=1) == [bonn["auc"]]
    assert values("site_recall", site="Bonn") == bonn["recall"].tolist()
    columns, wide = wide_table([two_methods / "fedavg-0"])
    assert {"macro_f1", "auc", "f1_3", "top2", "recalls_0"} <= set(columns)
    assert not any(column.startswith("site") for column in columns)
    assert len(wide) == 3


def test_an_experiment_names_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_metrics_of_a_test.py").write_text("def half(z, y):\n    return 0.5\n")
    name = "own_metrics_of_a_test:half"
    small = ["digits", "rounds=2", "epochs=1", "participation=2", "method=fedavg"]
    text = run("run", *small, f"metrics.half={name}", "--name", "one")
    assert re.search(r"method +half", text)
    history = fk.load_run("runs/one")
    assert history.metrics()["half"].tolist() == [0.5, 0.5]
    assert history.about["metrics"] == {"half": name}
    assert "metrics" not in fk.load_run("runs/one").records[-1]["metrics"]
    run("run", *small, f"metrics={name}", "--name", "one")  # the same experiment
    for override, message in {
        "metrics=own_metrics_of_a_test:hafl": "did you mean half?",
        "metrics.half=half": "write package.module:function",
        "metrics.auc=own_metrics_of_a_test:half": "every run has a number of that name",
        "metrics=3": "metrics = 3: write a table of names",
    }.items():
        with pytest.raises(FedkeepError, match=re.escape(message)):
            CliRunner().invoke(app, ["run", *small, override, "--name", "two"], catch_exceptions=False)
    other = CliRunner().invoke(app, ["run", *small, "--name", "one"])
    assert other.exit_code == 2
    assert "holds another experiment: metrics" in " ".join(other.output.split())


def test_one_logit_is_refused_and_two_logits_are_the_same_model() -> None:
    data = make_data(with_sites=False)
    binary = dataclasses.replace(data, y_train=data.y_train % 2, y_test=data.y_test % 2, n_classes=2)
    torch.manual_seed(0)
    one = nn.Linear(8, 1)
    for model in (one, nn.Sequential(one, nn.Flatten(0))):
        with pytest.raises(ModelError, match=r"one logit per example.*fedkeep.models.two_logits\(model\)"):
            fk.simulate("fedavg", model, binary, [np.arange(160)], **SETTINGS)
    x, y = binary.x_train, binary.y_train
    two = fk.models.two_logits(one)
    expected = nn.functional.binary_cross_entropy_with_logits(one(x).squeeze(1), y.float())
    loss = nn.functional.cross_entropy(two(x), y)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    ours, theirs = (torch.autograd.grad(value, one.weight)[0] for value in (loss, expected))
    assert torch.allclose(ours, theirs, atol=1e-7)
    history = fk.simulate("fedavg", two, binary, [np.arange(160)], **SETTINGS)
    z = history.model(binary.x_test)[:, 1].detach().numpy()
    assert history.auc[-1] == pytest.approx(reference.roc_auc_score(binary.y_test.numpy(), z))
    with pytest.raises(ModelError, match="one logit per example, not"):
        fk.models.two_logits(nn.Linear(8, 2))(x)
    featured = fk.models.two_logits(fk.models.build("mlp", (8,), 1))
    assert torch.allclose(featured.head(featured.features(x)), featured(x))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("criterion", "message"),
    [
        (nn.BCEWithLogitsLoss(), "BCEWithLogitsLoss is for one logit or several labels per example"),
        (nn.functional.binary_cross_entropy_with_logits, "one logit or several labels per example"),
        (nn.MultiLabelSoftMarginLoss(), "several labels per example"),
        (nn.MSELoss(), "MSELoss is for regression"),
        (nn.functional.l1_loss, "l1_loss is for regression"),
    ],
)
def test_losses_of_other_problems_are_refused(criterion: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message) as refused:
        simulate(criterion=criterion)
    assert refused.value.key == "criterion"


def test_thousands_of_owners_are_not_recorded() -> None:
    data = make_data()
    many = fk.data.from_arrays(
        np.tile(data.x_train, (2, 1)), np.tile(data.y_train, 2), np.tile(data.x_test, (3, 1)), np.tile(data.y_test, 3),
        test_ids=np.arange(240),
    )  # fmt: skip
    history = fk.simulate("fedavg", make_model(), many, [np.arange(320)], **{**SETTINGS, "rounds": 1})
    assert "sites" not in history.records[-1]
    assert history.site_names == ()


def test_loggers_write_metrics(tmp_path: Path) -> None:
    def add(simulation: Simulation, record: dict[str, Any]) -> None:
        record["metrics"]["norm"] = 2.0

    log = tmp_path / "log.csv"
    history = simulate(metrics=OWN, callbacks=[add, fk.CSVLogger(log)])
    head, *rows = [line.split(",") for line in log.read_text().splitlines()]
    last = {name: float(value) for name, value in zip(head, rows[-1], strict=True) if value}
    assert last["norm"] == 2.0
    for name in ("accuracy", "macro_f1", "auc", "ece", "top2", "range_low"):
        assert last[name] == history.metrics()[name][-1]
    assert last["recalls_3"] == history.class_metrics()["recalls"][-1][3]
    assert len(head) == len(set(head))
