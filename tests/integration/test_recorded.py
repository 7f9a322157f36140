"""Tables that record instruments: their values as measures, from run folders and from kept runs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.errors import raises
from support.progress import Silent

from fedkeep.errors import ConfigError, FedkeepError
from fedkeep.instruments import analyse, every
from fedkeep.reproduce import spec
from fedkeep.reproduce.against_paper import compare_columns
from fedkeep.reproduce.cells import Job

CLIENTS, DIVERSITY = "alignment.layers.last.clients", "gradients.diversity"
TABLE = f"""
format = 1
title = "A table with instruments"
paper = "Nobody, nowhere"
measures = ["{CLIENTS}", "{DIVERSITY}", "final"]
instruments = {{ what = ["alignment", "gradients"], every = 2 }}

[setting]
model = "mlp"
data = {{ source = "digits" }}
split = {{ kind = "shards", n_clients = 6, s = 2 }}
train = {{ rounds = 3, participation = 3, epochs = 1, batch_size = 20, lr = 0.05 }}

[rows]
fedavg = {{ label = "FedAvg", method = "fedavg" }}

[quick]
column = "two"

[columns.two]
label = "Two shards"
paper.fedavg = {{ "{CLIENTS}" = 0.5 }}
"""


def read(folder: Path, text: str = TABLE) -> spec.Table:
    (folder / "table-0.toml").write_text(text)
    return spec.read(folder / "table-0.toml", "small/table-0")


def run(table: spec.Table, runs: Path) -> dict[str, float | None]:
    """Run what is left of a table, keep it, and return its values."""
    job = Job(table, ["two"], ["fedavg"], 1, runs)
    results, todo = job.load_existing()
    if todo:
        job.run(results, todo, 1, Silent())
    job.keep(runs.parent / "kept")
    [column] = compare_columns(job, results)
    return {name: measure.ours for name, measure in column.rows[0].measures.items()}


def test_recorded_values_are_measures_of_runs_and_of_kept_runs(tmp_path: Path) -> None:
    table = read(tmp_path)
    values = run(table, tmp_path / "runs")
    folder = tmp_path / "runs" / "small" / "table-0" / "two" / "fedavg-seed-0"
    expected = analyse(folder, "alignment,gradients")  # the trial round after the checkpoint of round 3
    assert values[CLIENTS] == np.mean(expected["alignment"]["layers"]["classifier"]["clients"])
    assert values[DIVERSITY] == pytest.approx(expected["gradients"]["diversity"], rel=1e-9)
    kept = Job(table, ["two"], ["fedavg"], 1, tmp_path / "kept")
    results, todo = kept.load_existing()
    assert not todo
    [column] = compare_columns(kept, results)
    assert {name: measure.ours for name, measure in column.rows[0].measures.items()} == values


def test_a_finished_run_without_values_is_analysed_and_not_repeated(tmp_path: Path) -> None:
    plain = TABLE.replace(f'"{CLIENTS}", "{DIVERSITY}", ', "").replace(f'"{CLIENTS}" = 0.5', "")
    without = "\n".join(line for line in plain.splitlines() if not line.startswith("instruments"))
    final = run(read(tmp_path, without), tmp_path / "runs")["final"]
    folder = tmp_path / "runs" / "small" / "table-0" / "two" / "fedavg-seed-0"
    written = (folder / "rounds.jsonl").read_bytes()
    values = run(read(tmp_path), tmp_path / "runs")
    assert values["final"] == final
    assert values[CLIENTS] == np.mean(analyse(folder, "alignment")["alignment"]["layers"]["classifier"]["clients"])
    assert (folder / "rounds.jsonl").read_bytes() == written


def test_instruments_need_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(every, "current_ranks", lambda: SimpleNamespace(size=2))
    with raises(FedkeepError, key="instruments", value=2):
        run(read(tmp_path), tmp_path / "runs")


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ('what = ["alignment", "gradients"]', 'what = ["alignment"]', "instruments.what"),
        ('"gradients"]', '"gradient"]', "instruments"),
        ("every = 2", "options = { spans = 1 }", "instruments"),
        ("every = 2", "every = 0", "instruments.every"),
    ],
)
def test_a_mistake_in_the_instruments_raises(tmp_path: Path, old: str, new: str, key: str) -> None:
    with raises(ConfigError, key=key):
        read(tmp_path, TABLE.replace(old, new))
