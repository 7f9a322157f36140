"""Generated data of the size of a data set, and trials of a table's cells on it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.errors import raises
from typer.testing import CliRunner

from fedkeep.cli.app import app
from fedkeep.data import load
from fedkeep.data.sources import generated, named
from fedkeep.errors import ConfigError, DataError, FedkeepError
from fedkeep.reproduce import spec, trials

TABLE = """
format = 1
title = "A small table"
paper = "Nobody, nowhere"
measures = ["final"]

[setting]
model = { name = "mlp", hidden = [8] }
data = { source = "cifar100" }
split = { kind = "iid", n_clients = 6 }
train = { rounds = 30, participation = 3, epochs = 1, batch_size = 50, device = "cpu" }

[rows]
fedavg = { label = "FedAvg", method = "fedavg" }
scaffold = { label = "SCAFFOLD", method = "scaffold", train = { lr = 1e30 } }
fednew = { label = "FedNew", absent = "not in fedkeep yet" }

[quick]
column = "iid"

[columns.iid]
label = "Independent"

[columns.writers]
label = "A client a writer"
data = { source = "femnist", test = 0.15, min_per_id = 50, public_ids = 2 }
split = "by_id"

[columns.small]
label = "Digits"
data = { source = "digits" }
"""


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDKEEP_DATA", str(tmp_path / "nothing"))
    path = tmp_path / "table-0.toml"
    path.write_text(TABLE)
    return path


def test_generated_data_has_the_size_of_the_data_set() -> None:
    data = load("generated:mnist")
    assert data.name == "generated:mnist"
    assert (data.x_train.shape, len(data.y_test)) == ((60_000, 1, 28, 28), 10_000)
    assert np.bincount(data.y_train).tolist() == [6_000] * 10
    assert data.mean.flatten().tolist() == pytest.approx(named.NAMED["mnist"].mean)
    assert generated.FORMS.keys() == named.NAMED.keys()
    fewer = load("generated:Tiny-ImageNet:400", public=1)
    assert (fewer.n_classes, len(fewer.y_train), len(fewer.y_test)) == (200, 200, 200)
    assert fewer.x_train.shape[1:] == (3, 64, 64)
    assert len(load("generated:cinic10:300", merge_validation=True).y_test) == 150, "a test set of half the size"


def test_generated_writers_have_different_sizes() -> None:
    data = load("generated:femnist:20000", test=0.15)
    sizes = np.unique(data.ids, return_counts=True)[1]
    assert len(sizes) == 3_550 * 20_000 // 805_263
    assert sizes.mean() == pytest.approx(0.85 * 226.8, rel=0.02)
    assert sizes.std() > 40
    assert len(data.y_test) == pytest.approx(0.15 * 20_000, rel=0.05)


@pytest.mark.parametrize("source", ["generated:imagenet", "generated:mnist:x", "generated:mnist:60001"])
def test_generated_data_that_cannot_be_is_an_error(source: str) -> None:
    with raises(DataError, key="source"):
        load(source)


def test_cells_are_tried_for_two_rounds(table: Path) -> None:
    read = spec.read(table, "small/table-0")
    assert trials.columns_without_data(read) == ["iid", "writers"], "digits need no files"
    first, diverged = trials.try_cells(read, ["iid"], ["fedavg", "scaffold"], ["data.public=2"], examples=500)
    assert (first.source, first.n_examples, first.n_clients) == ("generated:cifar100:500", 300, 6)
    assert (len(first.seconds), first.device, first.failed) == (2, "cpu", None)
    assert 50 << 20 < first.memory < 8 << 30
    assert "diverged in round" in diverged.failed, "one that fails does not stop the others"
    with raises(ConfigError, key="data.source", value="digits"):
        trials.trial_experiment(read, "small", "fedavg")


def test_the_command_prints_time_and_memory_and_writes_nothing(table: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    command = ["reproduce", str(table), "--generated", "--methods", "fedavg", "--examples", "3000"]
    done = CliRunner().invoke(app, [*command, "--runs", str(tmp_path / "runs")], env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    assert "generated:cifar100:3000, 3,000 examples of 6 clients" in done.stdout
    assert "generated:femnist:3000" in done.stdout
    assert done.stdout.count(" GiB CPU") == 2
    done = CliRunner().invoke(app, [*command, "--column", "iid", "--json", "lr=1e30"])
    [trial] = json.loads(done.stdout)["trials"]
    assert done.exit_code == 1
    assert trial["failed"]
    assert sorted(tmp_path.rglob("*")) == before


def test_options_that_a_trial_would_ignore_are_errors(table: Path) -> None:
    for args in (["--keep", "x"], ["--show"], ["--quick"], ["--seeds", "2"], ["--ledger"], ["--markdown"]):
        done = CliRunner().invoke(app, ["reproduce", str(table), "--generated", *args])
        assert isinstance(done.exception, FedkeepError), args
        assert "cannot be used with" in str(done.exception)
