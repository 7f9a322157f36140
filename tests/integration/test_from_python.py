"""The commands from Python: `fk.run`, `fk.sweep`, `fk.compare` and `fk.report`, and what `fk.` offers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.cli import fedkeep
from support.errors import raises
from support.problems import same
from support.runs import SMALL

import fedkeep as fk
from fedkeep._util.json import to_json
from fedkeep.errors import ConfigError, FedkeepError, RunError, UnsupportedMethod
from fedkeep.runs.files import to_toml


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.toml").write_bytes(to_toml({**SMALL, "method": "fedntd"}))
    return tmp_path


def test_a_file_is_run_as_the_command_runs_it() -> None:
    rounds = []
    history = fk.run("my.toml", lr=0.1, callbacks=lambda simulation, record: rounds.append(record["round"]))
    assert history.folder == Path("runs/my-lr=0.1")
    assert rounds == [1, 2, 3]
    done = fedkeep("run", "my.toml", "lr=0.1", "--runs", "cli")
    assert done.returncode == 0, done.stderr
    assert same(fk.load_run("cli/my-lr=0.1").params, history.params)
    again = fk.run("my.toml", ["lr=0.1"], callbacks=lambda simulation, record: rounds.append(record["round"]))
    assert rounds == [1, 2, 3], "a finished run is loaded"
    assert same(again.params, history.params)


def test_changes_are_values_tables_or_overrides() -> None:
    history = fk.run(
        "my.toml", ["split.s=3"], name="x", method="fedavg", data={"source": "digits"}, rounds=1, seed=4, clip_norm=1.5
    )
    about = fk.load_run("runs/x").about
    assert (about["method"], about["data"]) == ({"name": "fedavg"}, {"source": "digits"})
    assert (about["split"]["s"], about["train"]["clip_norm"], about["seed"]) == (3, 1.5, 4)
    assert history.method == "fedavg"
    with raises(ConfigError, "rouns"):
        fk.run("my.toml", rouns=3)
    with raises(ConfigError, "train.rounds"):
        fk.run({**SMALL, "method": "fedavg"}, name="x", rounds="many")


def test_a_sweep_returns_its_histories_and_its_failures() -> None:
    result = fk.sweep("my.toml", {"method": ["fedavg", "fedntd"], "seed": range(2)}, rounds=1)
    assert list(result) == [f"my-rounds=1-method={m}-seed={s}" for m in ("fedavg", "fedntd") for s in (0, 1)]
    assert [history.method for history in result.values()] == ["fedavg"] * 2 + ["fedntd"] * 2
    assert all((path / "experiment.toml").exists() for path in result.folders)
    failed = fk.sweep("my.toml", {"lr": [0.1, 1e30]}, name="f", rounds=1)
    assert (list(failed), list(failed.failures)) == (["f-lr=0.1"], ["f-lr=1e+30"])
    assert "f-lr=1e+30" in repr(failed)
    with raises(ConfigError, "seed"):
        fk.sweep("my.toml", {"seed": 3})
    with raises(ConfigError, "seed"):
        fk.sweep("my.toml", {"seed": [3]}, seed=2)
    with raises(UnsupportedMethod):
        fk.sweep("my.toml", {"method": ["fedavg", "fedreg"]}, optimizer="adam")


def test_a_comparison_is_what_the_command_prints(folder: Path) -> None:
    result = fk.sweep("my.toml", {"method": ["fedavg", "fedntd"], "seed": range(2)}, rounds=2)
    comparison = fk.compare(result.folders, against="fedavg")
    printed = fedkeep("compare", "runs", "--against", "fedavg", "--json")
    assert json.loads(to_json(comparison.as_data())) == json.loads(printed.stdout)
    rows = comparison.rows
    assert {(row["label"], row["runs"], row["status"]) for row in rows} == {
        ("fedavg", 2, "finished"),
        ("fedntd", 2, "finished"),
    }
    assert rows[0]["final"] >= rows[1]["final"]
    final = {row["label"]: row["final"] for row in rows}
    assert final["fedavg"] == pytest.approx(sum(result[name].accuracy[-1] for name in list(result)[:2]) / 2)
    assert list(comparison.to_pandas()["method"]) == list(final)
    assert comparison.to_markdown() == fedkeep("compare", "runs", "--markdown").stdout.rstrip("\n")
    assert comparison.sentences[0] in comparison._repr_html_()
    assert all(text in repr(comparison) for text in ("fedavg", "final %", comparison.sentences[0]))
    with raises(FedkeepError, "against", valid=["fedavg", "fedntd"]):
        fk.compare("runs", against="fedprox")
    report = fk.report("runs", folder / "page.html")
    assert report.path.read_text().startswith("<!doctype html>")
    assert json.loads(fedkeep("report", "runs", "--json").stdout)["problems"] == report.problems
    assert report.headline in repr(report)


def test_every_public_name_is_an_attribute_and_importing_fedkeep_imports_no_torch() -> None:
    code = "import sys, fedkeep as fk; assert 'torch' not in sys.modules; [getattr(fk, name) for name in fk.__all__]"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_is_no_folder_is_refused() -> None:
    for function in (fk.compare, fk.report):
        with raises(RunError, "run", mentions=["no run folder is given"]):
            function([])
    with raises(RunError, "run", mentions=["by its folder, not as a History"]):
        fk.compare([fk.History("fedavg", {})])
