"""Metrics of runs: recorded, saved, read again, by site, and those of the user's own."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as reference
from torch import nn

import fedkeep as fk
from fedkeep.engine.simulation import Simulation
from fedkeep.errors import FedkeepError, RunError

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
    ("key", "value", "message"),
    [
        ("note", torch.nn.ReLU(), "a callback added note to the record, which a run folder cannot hold"),
        ("metrics", {"far": "away"}, r'record\["metrics"\]\["far"\] must be a number or one number per class'),
        ("metrics", {"final": 1.0}, "metrics.final: every run has a number of that name"),
    ],
)
def test_what_cannot_be_saved_is_refused(tmp_path: Path, key: str, value: Any, message: str) -> None:
    with pytest.raises(FedkeepError, match=message):
        simulate(callbacks=[lambda s, record: record.update({key: value})], run_dir=tmp_path / "run")
    assert len(fk.load_run(tmp_path / "run").records) == 1


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
    resumed = fk.resume(path, metrics=OWN, **given)
    for record in (*whole.records, *resumed.records):
        record.pop("seconds", None)
    assert resumed.records == whole.records


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
        (7, "metrics must be a dict of functions by name, not 7"),
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


def test_thousands_of_owners_are_not_recorded() -> None:
    data = make_data()
    many = fk.data.from_arrays(
        np.tile(data.x_train, (2, 1)), np.tile(data.y_train, 2), np.tile(data.x_test, (3, 1)), np.tile(data.y_test, 3),
        test_ids=np.arange(240),
    )  # fmt: skip
    history = fk.simulate("fedavg", make_model(), many, [np.arange(320)], **{**SETTINGS, "rounds": 1})
    assert "sites" not in history.records[-1]
    assert history.site_names == ()
