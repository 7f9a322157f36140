"""Reproduction of papers' tables: specifications, runs, comparisons with the paper, and the command."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console
from support.cli import fedkeep
from support.errors import ANY, raises
from support.progress import Silent
from typer.testing import CliRunner

from fedkeep.cli import table_listing
from fedkeep.cli.app import app
from fedkeep.cli.paper_tables import row_cells
from fedkeep.data import partition
from fedkeep.errors import ConfigError, FedkeepError
from fedkeep.experiments import jobs
from fedkeep.reproduce import against_paper, spec
from fedkeep.reproduce.cells import Job
from fedkeep.reproduce.measures import MEASURES, NEVER, get_measure
from fedkeep.reproduce.recorded import is_recorded
from fedkeep.runs.history import History
from fedkeep.runs.reading import load_run

MAIN_TABLES = ["fedgkd/table-3", "fedka/table-1", "fedntd/table-1", "fedssd/table-1", "flashback/table-1"]
OWN_TABLES = [f"fedkeep/table-{number}" for number in range(1, 7)]
TABLES = [
    *(f"fedgkd/table-{n}" for n in (3, 4, 5, 6, 7, 8, 9, "9-sst5")),
    *(f"fedka/table-{n}" for n in range(1, 10)),
    *OWN_TABLES,
    *(f"fedntd/table-{n}" for n in (1, 2, 8, 9, 10, 11, 12, 13, 14, "g3")),
    *(f"fedssd/table-{n}" for n in (1, 2, 3)),
    "flashback/table-1",
]

SMALL = """
format = 1
title = "A small table"
paper = "Nobody, nowhere"
measures = ["final", "forgetting"]

[setting]
model = "mlp"
data = { source = "digits", public = 4 }
split = { kind = "shards", n_clients = 6, s = 2 }
train = { rounds = 3, participation = 3, epochs = 1, batch_size = 10, lr = 0.05, momentum = 0.0 }

[rows]
fedavg = { label = "FedAvg", method = "fedavg" }
fedntd = { label = "FedNTD", method = { name = "fedntd", beta = 0.5 } }
fednew = { label = "FedNew", absent = "not in fedkeep yet" }

[quick]
column = "two"
train = { rounds = 2, lr = 0.1 }
rows.fedntd = { method = { tau = 2.0 } }

[columns.two]
label = "Two shards"
train = { lr = 0.02 }
rows.fedntd = { method = { beta = 2.0 }, model = { projection = 8 } }

[columns.two.paper]
fedavg = { final = [50.0, 1.0], forgetting = 0.5 }
fedntd = { final = 60.0 }
fednew = { final = 70.0 }

[columns.iid]
label = "Independent"
data = { source = "cifar100" }
split = { kind = "iid", n_clients = 6 }
"""


def small(tmp_path: Path, text: str = SMALL) -> spec.Table:
    (tmp_path / "table.toml").write_text(text)
    return spec.read(tmp_path / "table.toml", "small/table-0")


def run(*args: str) -> tuple[int, str]:
    """Run `fedkeep reproduce` in this process; return its exit code and output, or raise its error."""
    done = CliRunner().invoke(app, ["reproduce", *args], env={"COLUMNS": "150"})
    if isinstance(done.exception, FedkeepError):
        raise done.exception
    return done.exit_code, done.stdout


# Specifications


def test_the_tables_that_are_available() -> None:
    found = [name for name in spec.names() if "/figure-" not in name]
    assert found == TABLES, "and table-10 after table-9"


@pytest.mark.parametrize("name", TABLES)
def test_every_cell_is_a_valid_experiment(name: str) -> None:
    table = spec.load(name)
    for column in table.columns:
        for row, about in table.rows.items():
            if about.absent is None:
                experiment = table.experiment(column, row, 1)
                assert experiment.seed == 1
                assert experiment.train.rounds >= (10 if experiment.model["name"] == "transformer" else 20)
    for row, about in table.rows.items():
        if about.absent is None:
            quick = table.experiment(table.quick.column, row, 0, quick=True)
            assert quick.data["source"] in ("digits", "wards")
            assert quick.train.rounds * quick.train.epochs <= 160


UNPRINTED = {  # figures that the papers do not print, or print illegibly: table, column, measure, rows
    ("fedntd/table-1", "cinic10-s2", "forgetting"): ["fedavg", "fedcurv", "fedprox", "fednova", "scaffold", "moon"],
    ("fedntd/table-1", "cinic10-a0.1", "forgetting"): ["fedavg", "fedcurv", "fedprox", "fednova", "scaffold", "moon"],
    ("fedntd/table-1", "cifar10-a0.05", "forgetting"): ["fednova", "scaffold"],
    ("fedntd/table-1", "cifar100-a0.1", "forgetting"): ["moon"],
    ("fedntd/table-9", "a0.1-e20", "forgetting"): ["fednova"],
    ("fedntd/table-11", "a0.1-c0.5", "forgetting"): ["scaffold"],
    ("fedntd/table-11", "a0.1-c1.0", "forgetting"): ["scaffold"],
    ("fedka/table-6", "cifar100", "final"): ["fedka_missing"],
}
OTHER_READINGS = {  # rows that are not in the papers' tables: other readings of a row that is, and other methods
    "fedgkd/table-4": ["fedntd", "fedkeep", "feddistill_described", "fedgen_described"],
    **{f"fedssd/table-{n}": ["fedssd_printed", "fedssd_outside", "fedssd_chosen", "fedssd_inside"] for n in (1, 2)},
    "fedssd/table-3": [f"{row}-{alpha}" for row in ("mse_sum", "fedssd_outside") for alpha in (0.01, 0.1, 0.5)],
    **{f"fedka/table-{n}": ["fedka_printed"] for n in (1, 2, 3, 4, 5, 8)},
    **{f"fedgkd/table-{n}": ["feddistill_described", "fedgen_described"] for n in (3, 5, 6)},
    "fedntd/table-1": ["fedprox_released", "moon_released"],
    **{f"fedntd/table-{n}": ["fedprox_released"] for n in (8, 9, 10, 11)},
    "fedntd/table-g3": ["moon_released"],
}


@pytest.mark.parametrize("name", [name for name in TABLES if name not in OWN_TABLES])
def test_the_papers_figures_are_complete(name: str) -> None:
    table = spec.load(name)
    for column, about in table.columns.items():
        for measure in table.measures:
            if measure == "last10" or measure.startswith("personal."):  # ours, next to the papers' last round
                continue
            unprinted = [row for row in table.rows if measure not in about.paper.get(row, {})]
            known = UNPRINTED.get((name, column, measure), []) + OTHER_READINGS.get(name, [])
            assert sorted(unprinted) == sorted(known), (column, measure)


def test_figures_equal_the_printed_ones() -> None:
    ntd = spec.load("fedntd/table-1").columns["cifar10-s2"].paper
    assert ntd["fedntd"]["smoothed"] == spec.Figure(mean=52.61, spread=1.00)
    assert ntd["fedavg"]["forgetting"].mean == 0.59
    assert spec.load("flashback/table-1").columns["cifar10"].paper["fedavg"]["rounds_to_95"].mean is None
    assert spec.load("fedgkd/table-3").columns["cifar100-a0.5"].paper["fedgkd"]["best"].mean == 42.44
    assert spec.load("fedssd/table-1").columns["cifar10"].paper["fedssd"]["rounds_to_fedavg"].mean == 33
    assert spec.load("fedka/table-1").columns["tiny_imagenet"].paper["fedka"]["final"].mean == 11.7
    assert spec.load("fedntd/table-8").columns["s2-e20"].paper["scaffold"]["smoothed"].mean == 62.80
    assert spec.load("fedntd/table-11").columns["a0.1-c1.0"].paper["fedavg"]["forgetting"].mean == 0.04
    assert spec.load("fedntd/table-14").columns["cifar10-s2"].paper["mse-0.3"]["forgetting"].failed
    assert spec.load("fedgkd/table-5").columns["a0.5-c0.4"].paper["fedgkd_vote"]["final"].mean == 75.75
    assert spec.load("fedgkd/table-6").columns["cifar10-a0.1"].paper["fedavg"]["at_100"].spread == 2.29
    assert spec.load("fedssd/table-2").columns["k2"].paper["moon"]["final"].mean == 45.15
    assert spec.load("fedka/table-7").columns["cifar10"].paper["fedka_hard"]["at_10"].mean == 52.2


def test_repeated_figures_are_equal() -> None:
    """Columns that repeat a column of the main table have its means, which catches errors in copying."""
    repeated = {
        "fedntd": [
            ("table-8", "s2-e5", "cifar10-s2"),
            ("table-9", "a0.1-e5", "cifar10-a0.1"),
            ("table-10", "s2-c0.1", "cifar10-s2"),
            ("table-11", "a0.1-c0.1", "cifar10-a0.1"),
            ("table-14", "cifar10-s2", "cifar10-s2"),
        ],
        "fedgkd": [("table-5", "a0.5-c0.2", "cifar10-a0.5"), ("table-9", "cifar100-a0.1", "cifar100-a0.1")],
        "fedssd": [("table-2", "a0.5", "cifar10"), ("table-3", "cifar10", "cifar10")],
        "fedka": [
            *(("table-3", "c1.0", "cifar10"), ("table-4", "e10", "cifar10"), ("table-5", "n10", "cifar10")),
            *(("table-6", name, name) for name in ("cifar10", "cifar100", "tiny_imagenet")),
            ("table-8", "a0.1", "cifar10"),
        ],
    }
    for paper, columns in repeated.items():
        main = spec.load(f"{paper}/table-3" if paper == "fedgkd" else f"{paper}/table-1")
        for table, column, of_main in columns:
            found = spec.load(f"{paper}/{table}").columns[column].paper
            same = [(row, measure) for row in found for measure in found[row] if row in main.rows]
            compared = [
                (found[row][measure].mean, main.columns[of_main].paper[row][measure].mean)
                for row, measure in same
                if measure in main.measures
            ]
            assert compared, (paper, table)
            assert all(one == other for one, other in compared), (paper, table, column)


def test_settings_equal_the_papers() -> None:
    """Numbers from the papers' text: FedNTD B.3 and table 4, FedGKD 5.1, Flashback D and E, FedSSD 5.1."""
    ntd = spec.load("fedntd/table-1").experiment("cifar10-s2", "fedntd", 0)
    train = ntd.train
    assert (train.rounds, train.participation, train.epochs, train.batch_size) == (200, 0.1, 5, 50)
    assert (train.lr, train.momentum, train.weight_decay, train.lr_decay) == (0.01, 0.9, 1e-5, 0.99)
    assert ntd.split == {"kind": "shards", "n_clients": 100, "s": 2}
    rows = ("fedprox", "fedprox_released", "moon", "moon_released")
    assert [spec.load("fedntd/table-1").experiment("mnist-s2", row, 0).method["mu"] for row in rows] == [0.1, 1, 1, 0.1]
    cinic = spec.load("fedntd/table-1").experiment("cinic10-a0.1", "fedavg", 0)
    assert (cinic.split["n_clients"], cinic.train.participation, cinic.train.augment.cutout) == (200, 0.05, 0)
    gkd = spec.load("fedgkd/table-3")
    assert {gkd.experiment(column, "fedgkd", 0).train.clip_norm for column in gkd.columns} == {10}
    assert all(gkd.experiment(column, "fedgkd", 0).split["even"] for column in gkd.columns)
    assert gkd.experiment("cifar10-a0.5", "fedgkd", 0).method["M"] == 1
    assert gkd.experiment("cifar10-a0.1", "fedprox", 0).method["mu"] == 0.01
    assert gkd.experiment("cifar100-a0.1", "fedprox", 0).method["mu"] == 0.001
    assert gkd.experiment("tiny_imagenet-a1", "fedgkd_plus", 0).model == {"name": "resnet50", "projection": 256}
    assert gkd.experiment("tiny_imagenet-a1", "fedgkd", 0).method["gamma"] == 0.1
    flashback = spec.load("flashback/table-1")
    assert flashback.experiment("cifar10", "feddf", 0).train.epochs == 40
    assert flashback.experiment("cifar10", "flashback", 0).method["gamma"] == 0.025
    assert flashback.experiment("cinic10", "flashback", 0).method["gamma"] == 0.1
    assert flashback.experiment("femnist", "fedavg", 0).split == {"kind": "by_id", "validation": 0.176}
    ssd = spec.load("fedssd/table-1")
    assert [ssd.experiment(c, "fedcurv", 0).method["lam"] for c in ssd.columns] == [1e-3, 1e-4, 1e-5]
    for row, form, reduce in (
        ("fedssd_printed", "inside", "sum"),
        ("fedssd_outside", "outside", "sum"),
        ("fedssd", "outside", "mean"),
    ):
        readings = [ssd.experiment(c, row, 0).method for c in ssd.columns]
        assert [reading["M_max"] for reading in readings] == [0.01, 0.001, 0.001]
        assert all((reading["form"], reading["reduce"]) == (form, reduce) for reading in readings)
    assert [ssd.experiment(c, "fedprox", 0).method["mu"] for c in ssd.columns] == [0.01, 0.001, 0.001]
    ka = spec.load("fedka/table-1")
    assert [ka.experiment("cifar10", r, 0).method["recentre"] for r in ("fedka", "fedka_printed")] == [True, False]


def test_flashbacks_public_set_and_clients_have_the_papers_sizes() -> None:
    """Of CIFAR-10's 50,000 labels, 1,125 and 375 are on the server; clients train on 90% of the rest."""
    from fedkeep.data import from_arrays

    cell = spec.load("flashback/table-1").experiment("cifar10", "flashback", 0)
    y = np.repeat(np.arange(10), 5000)
    data = from_arrays(y[:, None], y, y[:10, None], y[:10]).with_public(cell.data["public"], cell.data["validation"])
    assert (len(data.public.y), len(data.public.y_val), len(data.y_train)) == (1125, 375, 48500)
    clients = partition.dirichlet(data.y_train, 100, 0.1).hold_out(cell.split["validation"])
    assert len(clients.indices) == pytest.approx(0.9 * 48500, abs=100)


def test_a_cell_merges_setting_column_quick_and_row(tmp_path: Path) -> None:
    table = small(tmp_path)
    full, quick = (table.experiment("two", "fedntd", 0, quick) for quick in (False, True))
    assert (full.train.lr, full.train.rounds, full.method["beta"], full.method["tau"]) == (0.02, 3, 2.0, 1.0)
    assert (quick.train.lr, quick.train.rounds, quick.method["beta"], quick.method["tau"]) == (0.1, 2, 2.0, 2.0)
    assert full.model == {"name": "mlp", "projection": 8}
    assert table.experiment("two", "fedavg", 0).model == {"name": "mlp"}
    other = table.experiment("iid", "fedavg", 3, overrides=["lr=0.3"])
    assert other.split == {"kind": "iid", "n_clients": 6}, "a different kind of split replaces the whole table"
    assert other.data == {"source": "cifar100", "public": 4}, "a different source keeps the public set"
    assert (other.train.lr, other.seed) == (0.3, 3)


EXTENDING = """
format = 1
extends = "table"
title = "Another small table"
paper = "Nobody, nowhere"
measures = ["final"]

[setting]
train = { epochs = 2 }

[rows]
fedavg = {}
fedntd = { label = "FedNTD, soft", method = { tau = 3.0 } }
hard = { extends = "fedntd", label = "FedNTD, hard", method = { tau = 0.1 } }
fedprox = { label = "FedProx", method = "fedprox" }

[quick]
column = "more"
train = { rounds = 1 }

[columns.more]
extends = "two"
label = "Two shards, more clients"
train = { participation = 6 }

[columns.other]
label = "Another split"
split = { kind = "iid", n_clients = 6 }
"""


def extending(tmp_path: Path, text: str = EXTENDING, extended: str = SMALL) -> spec.Table:
    (tmp_path / "table.toml").write_text(extended)
    (tmp_path / "extending.toml").write_text(text)
    return spec.read(tmp_path / "extending.toml", "small/extending")


def test_a_table_can_extend_another(tmp_path: Path) -> None:
    table = extending(tmp_path)
    assert [row.label for row in table.rows.values()] == ["FedAvg", "FedNTD, soft", "FedNTD, hard", "FedProx"]
    assert list(table.columns) == ["more", "other"]
    assert not table.columns["more"].paper, "figures are never taken from the other table"
    more, other = (table.experiment(column, "fedntd", 0) for column in ("more", "other"))
    assert (more.train.rounds, more.train.epochs, more.train.participation, more.train.lr) == (3, 2, 6, 0.02)
    assert (other.train.rounds, other.train.epochs, other.train.participation, other.train.lr) == (3, 2, 3, 0.05)
    assert (more.split["kind"], other.split["kind"]) == ("shards", "iid")
    assert (more.method["beta"], more.method["tau"], more.model) == (2.0, 3.0, {"name": "mlp", "projection": 8})
    assert (other.method["beta"], other.method["tau"], other.model) == (0.5, 3.0, {"name": "mlp"})
    hard = table.experiment("more", "hard", 0)
    assert (hard.method["beta"], hard.method["tau"]) == (0.5, 0.1), "a column's changes are for the row of that name"
    quick = table.experiment("more", "fedntd", 0, quick=True)
    assert (quick.train.rounds, quick.train.lr, quick.method["tau"]) == (1, 0.1, 2.0)


def test_a_table_without_rows_has_those_of_the_table_that_it_extends(tmp_path: Path) -> None:
    start, rest = EXTENDING.split("[rows]")
    table = extending(tmp_path, start + "[quick]" + rest.split("[quick]")[1])
    rows = {name: row.model_copy(update={"extends": None}) for name, row in table.rows.items()}
    assert rows == small(tmp_path).rows


def test_changes_of_rows_that_an_extending_table_does_not_have_are_left_out(tmp_path: Path) -> None:
    start, rest = EXTENDING.split('fedntd = { label = "FedNTD, soft"')
    table = extending(tmp_path, start + rest.partition("\n")[2])
    assert (table.quick.rows, table.columns["more"].rows) == ({}, {})


@pytest.mark.parametrize(
    ("old", "new", "key", "value", "valid"),
    [
        ('extends = "table"', 'extends = "tabel"', "extends", "tabel", ["table"]),
        ('extends = "table"', 'extends = "extending"', "extends", "extending", ["table"]),
        ('extends = "table"', 'extends = "../small/table"', "extends", "../small/table", ["table"]),
        ('extends = "table"', "extends = 3", "extends", 3, ["table"]),
        ('extends = "two"', 'extends = "too"', "columns.more.extends", "too", ["two", "iid"]),
        ('extends = "fedntd"', 'extends = "fedmtd"', "rows.hard.extends", "fedmtd", ["fedavg", "fedntd", "fednew"]),
        ("fedavg = {}", "fedavk = {}", "rows.fedavk.label", ANY, None),
        ("fedavg = {}", "fedavg = 3", "fedavg", 3, None),
        ("train = { rounds = 1 }", "rows = 3", "rows", 3, None),
    ],
)
def test_a_mistake_in_an_extending_table_raises(tmp_path: Path, old: str, new: str, key: str, value, valid) -> None:
    assert old in EXTENDING
    with raises(ConfigError, key=key, value=value, valid=valid, mentions=[str(tmp_path / "extending.toml")]):
        extending(tmp_path, EXTENDING.replace(old, new))


def test_a_table_that_extends_another_cannot_be_extended(tmp_path: Path) -> None:
    with raises(ConfigError, key="extends", value="table", mentions=["itself"]):
        extending(tmp_path, extended=EXTENDING)


@pytest.mark.parametrize(
    ("old", "new", "key", "value", "valid"),
    [
        ('measures = ["final", ', 'measures = ["finale", ', "measures", "finale", [*MEASURES, "at_<round>"]),
        ('column = "two"', 'column = "too"', "quick.column", "too", ["two", "iid"]),
        ("fednew = { final", "fedneu = { final", "columns.two.paper", "fedneu", ["fedavg", "fedntd", "fednew"]),
        ("rows.fedntd = { method = { tau", "rows.fed = { method = { tau", "quick.rows", "fed", ["fedntd"]),
        ("rows.fedntd = { method = { beta", "rows.fed = { method = { beta", "columns.two.rows", "fed", ["fedntd"]),
        ("{ final = 60.0 }", "{ best = 60.0 }", "columns.two.paper.fedntd", "best", ["final", "forgetting"]),
        ('absent = "not in fedkeep yet"', 'label2 = "x"', "rows.fednew.label2", "x", None),
        (', absent = "not in fedkeep yet"', "", "method", "FedNew", ["method", "absent"]),
        ('"forgetting"]', '"rounds_to_50"]', "columns.two.target", None, None),
        ('label = "Two shards"', 'label = "Two"\nextends = "iid"', "columns.two.extends", "iid", None),
        ("format = 1", "format = 2", "format", 2, None),
        ("format = 1", "format = ", "table.toml", None, None),
        ("final = [50.0, 1.0]", 'final = "high"', "columns.two.paper.fedavg.final", "high", None),
    ],
)
def test_a_mistake_in_a_specification_raises(tmp_path: Path, old: str, new: str, key: str, value, valid) -> None:
    assert old in SMALL
    with raises(ConfigError, key=key, value=value, valid=valid, mentions=[str(tmp_path / "table.toml")]):
        small(tmp_path, SMALL.replace(old, new))


def test_a_syntax_error_in_a_specification_has_its_line(tmp_path: Path) -> None:
    with raises(ConfigError, key="table.toml", mentions=["line 2"]):
        small(tmp_path, SMALL.replace("format = 1", "format = "))


def test_a_mistake_in_a_cell_names_the_cell(tmp_path: Path) -> None:
    with raises(ConfigError, mentions=["small/table-0, two, fedntd", "method.beto"]):
        small(tmp_path, SMALL.replace("{ beta = 2.0 }", "{ beto = 2.0 }")).experiment("two", "fedntd", 0)


# Measures and comparisons


def history(accuracy: list[float]) -> History:
    """A run with these accuracies by round, on two classes with 100 test examples each."""
    records = [{"round": 0, "confusion": [[50, 50], [50, 50]]}]
    for t, a in enumerate(accuracy, start=1):
        right = round(100 * a)
        confusion = [[right, 100 - right], [100 - right, right]]
        records.append({"round": t, "confusion": confusion, "bytes_down": 0, "bytes_up": 0, "seconds": 0.0})
    return History("fedavg", {}, records)


def test_measures() -> None:
    fast, slow = history([0.3, 0.6, 0.8, 0.7]), history([0.2, 0.4, 0.5, 0.6])

    def of(name: str, one: History, baseline: History | None = None, target: float | None = None) -> float | None:
        return get_measure(name).from_history(one, baseline, target)

    assert of("final", fast) == pytest.approx(70)
    assert of("best", fast) == pytest.approx(80)
    assert of("forgetting", fast) == pytest.approx(0.1)
    smoothed = 0.3
    for a in (0.6, 0.8, 0.7):
        smoothed = 0.6 * smoothed + 0.4 * a
    assert of("smoothed", fast) == pytest.approx(100 * smoothed)
    assert of("rounds_to_fedavg", fast, slow) == 2
    assert of("rounds_to_fedavg", slow, fast) == NEVER
    assert of("rounds_to_fedavg", fast) is None
    assert [of(f"rounds_to_{x}", fast, None, 0.8) for x in (50, 75, 95)] == [2, 2, 3]
    assert of("rounds_to_95", slow, None, 0.8) == NEVER
    assert of("rounds_to_95", slow) is None
    assert [of(f"at_{t}", fast) for t in (1, 4, 5)] == [pytest.approx(30), pytest.approx(70), None]
    assert of("last10", fast) == pytest.approx(60)
    assert of("last10", history([0.0] * 5 + [0.5] * 10)) == pytest.approx(50)
    assert of("speed_up", fast, slow) == pytest.approx(2)  # 4 rounds, 2 suffice
    assert of("speed_up", slow, fast) == 0
    assert of("speed_up", fast) is None
    assert of("round_forgetting", fast) == pytest.approx(0.1 / 3)
    assert MEASURES["rounds_to_95"].combine_seeds([3, NEVER, 5]) == 5
    assert MEASURES["final"].combine_seeds([1, 2, 6]) == 3


def test_values_of_instruments_have_headings_of_their_own() -> None:
    recorded = {name for table in spec.all_tables() for name in table.measures if is_recorded(name)}
    heads = {name: get_measure(name).head for name in recorded}
    assert {name: head for name, head in heads.items() if ":" in head or "_" in head or "." in head} == {}
    assert heads["divergence.weight_divergence"] == "weight divergence (L1)"
    assert heads["alignment.layers.first.after"] == "alignment, first layer, global"
    accuracy, one = get_measure("where.clients"), history([0.5])
    one.instruments = [{"where": {"clients": [[0.25, 0.75], [1.0, None]]}}]
    assert (accuracy.head, accuracy.higher_is_better) == ("local accuracy %", True)
    assert accuracy.from_history(one, None, None) == pytest.approx(75), "as per cent, like other accuracies"
    assert get_measure("losses.after").higher_is_better is False
    assert get_measure("neurons.preferences").head == "neurons: preferences"


def comparison(
    measure: str, ours, theirs, diverged: int = 0, spread: float | None = None
) -> against_paper.MeasureComparison:
    """One measure of one method: a list by seed, or a value of two seeds; after these, `diverged` seeds diverged."""
    mean = None if theirs in (None, "never", "failed") else float(theirs)
    figure = None if theirs is None else spec.Figure(mean=mean, spread=spread, failed=theirs == "failed")
    values = {} if ours is None else dict(enumerate(ours if isinstance(ours, list) else [ours] * 2))
    return against_paper.MeasureComparison(
        MEASURES[measure], values, frozenset(range(len(values), len(values) + diverged)), figure
    )


def column_of(measure: str, methods: dict[str, tuple]) -> against_paper.ColumnComparison:
    rows = [
        against_paper.MethodRow(name, name, {measure: comparison(measure, *about)}) for name, about in methods.items()
    ]
    return against_paper.ColumnComparison("c", "C", rows[0], rows, [measure])


def test_signs_and_order_compared_with_the_paper() -> None:
    column = column_of("final", {"avg": (50.0, 40.0), "up": (60.0, 50.0), "down": (55.0, 35.0), "gone": (None, 30.0)})
    gaps = column.gaps("final")
    assert [(g.ours, g.theirs, g.agree) for g in gaps.values()] == [(10, 10, True), (5, -5, False), (None, -10, None)]
    order = column.order("final")
    assert (order.pairs, order.agreeing) == (3, 2), "avg-up and up-down as in the paper, avg-down not"
    assert (order.best_here, order.best_there) == (("up",), ("up",))
    [text] = against_paper.sentences(column)
    for part in ("1 of 2", "down", "+5.00", "-5.00", "2 of 3"):
        assert part in text


def test_targets_never_reached_and_ties() -> None:
    column = column_of("rounds_to_95", {"avg": (NEVER, "never"), "fast": (10.0, 12.0), "slow": (NEVER, "never")})
    gaps = column.gaps("rounds_to_95")
    assert (gaps["fast"].ours, gaps["fast"].agree) == (math.inf, True)
    assert (gaps["slow"].ours, gaps["slow"].agree) == (0, None), "a tie in the paper has no sign"
    assert column.order("rounds_to_95").pairs == 2
    assert column.rows[0].measures["rounds_to_95"].difference is None
    opposite = column_of("rounds_to_95", {"avg": (5.0, "never"), "fast": (NEVER, 12.0)})
    gap = opposite.gaps("rounds_to_95")["fast"]
    assert (gap.ours, gap.theirs, gap.agree) == (-math.inf, math.inf, False)
    [text] = against_paper.sentences(opposite)
    assert "inf" not in text
    data = against_paper.as_data(opposite)["rows"][1]["measures"]["rounds_to_95"]
    assert (data["better_by"], data["paper_better_by"]) == ("far worse", "far better")


def test_diverged_methods_are_last() -> None:
    column = column_of("final", {"avg": (50.0, 40.0), "nova": (None, 10.0, 2), "low": (20.0, 15.0)})
    assert column.gaps("final")["nova"].agree is True
    assert (column.order("final").pairs, column.order("final").agreeing) == (3, 3)


def test_a_method_with_one_diverged_seed_is_last() -> None:
    column = column_of("final", {"avg": ([50.0, 50.0], 40.0), "wild": ([90.0], 30.0, 1)})
    assert column.order("final").best_here == ("avg",)
    gap = column.gaps("final")["wild"]
    assert (gap.ours, gap.verdict) == (-math.inf, "within noise here"), "it is ahead on the other seed"
    assert row_cells(column, column.rows[1])[:3] == ["90.00", "30.00", ""], "the value is that of the finished run"
    never = column_of("rounds_to_95", {"avg": ([5.0, 6.0, 7.0], 9), "wild": ([3.0, 4.0], 8, 1)})
    assert row_cells(never, never.rows[1])[0] == "4 (2 of 3)"


def test_the_printed_median_is_the_compared_one() -> None:
    column = column_of("rounds_to_95", {"avg": ([10.0, 20.0, NEVER], 50), "slow": ([10.0, NEVER, NEVER], 60)})
    assert row_cells(column, column.rows[0])[:3] == ["20 (2 of 3)", "50", "-30"]
    assert row_cells(column, column.rows[1]) == ["- (1 of 3)", "60", "", "worse", "-10 ~"], "seed 0 is a tie"


def test_undecided_gaps_are_not_counted() -> None:
    """The ledger's rule: twice the paper's spread (here 0.5), and one sign on all of our seeds, of at least two."""
    methods = {
        "avg": ([50.0, 52.0], 40.0, 0, 0.5),
        "near": ([49.0, 50.5], 41.0, 0, 0.2),
        "far": ([52.0, 52.5], 41.1, 0, 0.1),
        "mixed": ([53.0, 51.0], 45.0),
        "once": ([53.0], 45.0),
        "gone": (None, 45.0),
    }
    column = column_of("final", methods)
    verdicts = {name: gap.verdict for name, gap in column.gaps("final").items()}
    assert verdicts == {
        "near": "within the paper's noise",
        "far": "agrees",
        "mixed": "within noise here",
        "once": "one seed",
        "gone": "one seed",
    }
    assert [row_cells(column, row)[-1] for row in column.rows] == [
        *("", "+1.00 ~", "+1.10 =", "+5.00 ~", "+5.00 ?", "+5.00"),
    ]
    [text] = against_paper.sentences(column)
    assert "1 of 1 decided gaps to avg have the same sign" in text
    assert "Within the paper's noise, not counted: near. Within noise here, not counted: mixed." in text
    assert "One seed, not counted: once." in text
    assert "gone" not in text
    order = column.order("final")
    assert (order.methods, order.pairs, order.agreeing) == (5, 2, 2), "far-avg and mixed-near; far-near is within noise"
    assert column_of("final", {"avg": (1.0, 2.0), "gone": (None, 3.0)}).order("final").methods == 1


def test_json_distinguishes_never_reached_from_not_run() -> None:
    column = column_of("rounds_to_95", {"avg": ([NEVER], 50), "none": (None, "never")})
    rows = {row["row"]: row["measures"]["rounds_to_95"] for row in against_paper.as_data(column)["rows"]}
    assert (rows["avg"]["ours"], rows["none"]["ours"]) == ("never", None)
    assert (rows["avg"]["values"], rows["none"]["paper"]) == ({"0": "never"}, "never")


def test_a_run_that_failed_in_the_paper_is_the_worst_there() -> None:
    column = column_of("final", {"avg": (50.0, 40.0), "wild": (None, "failed", 2), "low": (20.0, 15.0)})
    gap = column.gaps("final")["wild"]
    assert (gap.ours, gap.theirs, gap.agree) == (-math.inf, -math.inf, True)
    assert (column.order("final").pairs, column.order("final").agreeing) == (3, 3)
    assert row_cells(column, column.rows[1])[:2] == ["diverged", "failed"]
    assert against_paper.as_data(column)["rows"][1]["measures"]["final"]["paper"] == "failed"
    both = column_of("forgetting", {"avg": (0.5, "failed"), "wild": (0.4, "failed")})
    assert both.gaps("forgetting")["wild"].theirs is None, "two failures are not ordered"


def test_a_speed_up_never_reached_is_the_worst() -> None:
    column = column_of("speed_up", {"avg": (1.0, 1.0), "slow": (0.0, "never"), "fast": (2.0, 2.3)})
    assert [gap.agree for gap in column.gaps("speed_up").values()] == [True, True]
    assert row_cells(column, column.rows[1])[:2] == ["0.0±0.0", "-"]


def test_lower_forgetting_is_better() -> None:
    column = column_of("forgetting", {"avg": (0.5, 0.6), "ntd": (0.3, 0.4)})
    gap = column.gaps("forgetting")["ntd"]
    assert gap.ours == pytest.approx(0.2)
    assert gap.agree
    assert column.order("forgetting").best_here == ("ntd",)


# Running


def to_run(job: Job) -> list[str]:
    return [cell.label for cell in job.load_existing()[1]]


def test_finished_cells_are_not_run_again_and_the_others_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDKEEP_DATA", str(tmp_path / "nothing"))
    table = small(tmp_path)
    job = Job(table, ["two", "iid"], list(table.rows), 2, tmp_path / "runs")
    results, todo = job.load_existing()
    labels = ["two/fedavg-seed-0", "two/fedntd-seed-0", "two/fedavg-seed-1", "two/fedntd-seed-1"]
    assert [cell.label for cell in todo] == labels, "seed by seed, without missing data or methods"
    assert "mkdir -p" in results.missing["iid"]
    job.run(results, todo[:3], 1, Silent())
    again, rest = job.load_existing()
    assert [cell.label for cell in rest] == labels[3:]
    [two, iid] = against_paper.compare_columns(job, again)
    finished, partial, absent = [row.note for row in two.rows]
    assert finished is None
    assert "1 of 2" in partial
    assert absent == table.rows["fednew"].absent
    reasons = [results.cells["iid", row].not_run_reason for row in table.rows]
    assert [row.note for row in iid.rows] == reasons
    assert None not in reasons
    both = [again.cells["two", row].histories[0].accuracy[-1] for row in ("fedavg", "fedntd")]
    gap = two.gaps("final")["fedntd"]
    assert gap.ours == pytest.approx(100 * (both[1] - both[0])), "the mean over the seeds that both have"
    progress = Silent()
    job.run(again, rest, 1, progress)
    assert progress.started == labels[3:]
    assert not to_run(job)
    for file in (tmp_path / "runs/small/table-0/two/fedavg-seed-0").glob("checkpoint-*.safetensors"):
        file.unlink()
    assert not to_run(job), "a finished run needs no checkpoint"


def test_runs_of_the_extended_table_are_used_where_the_experiment_is_the_same(tmp_path: Path) -> None:
    same = EXTENDING.replace("epochs = 2", "epochs = 1").replace("participation = 6", "participation = 3")
    table, runs = extending(tmp_path, same), tmp_path / "runs"
    assert table.extended is not None
    other = Job(table.extended, ["two"], ["fedavg", "fedntd"], 2, runs)
    other.run(*other.load_existing(), 1, Silent())
    job = Job(table, ["more"], ["fedavg", "fedntd"], 1, runs).with_all_seeds()
    results, todo = job.load_existing()
    assert sorted(results.cells["more", "fedavg"].histories) == [0, 1], "FedAvg's experiment is that of the other table"
    assert [cell.label for cell in todo] == ["more/fedntd-seed-0", "more/fedntd-seed-1"], "FedNTD has another tau"
    assert job.keep(tmp_path / "kept") == [], "the other table keeps its own runs"
    (kept_file,) = other.keep(tmp_path / "kept")
    from_file = Job(table, ["more"], ["fedavg"], 2, tmp_path / "kept")
    assert kept_file == tmp_path / "kept" / "small" / "table.jsonl.gz"
    assert not to_run(from_file)
    assert from_file.seeds_on_disk() == 2
    assert Job(table, ["more"], ["fedntd"], 1, runs).seeds_on_disk() == 0, "runs that serve no cell do not count"
    assert len(to_run(Job(extending(tmp_path), ["more"], ["fedavg"], 2, runs))) == 2, "with more epochs it is another"
    assert len(to_run(Job(table, ["more"], ["fedavg"], 2, runs, overrides=["lr=0.3"]))) == 2
    other = Job(table.extended, ["two"], ["fedavg"], 1, runs, overrides=["lr=0.3"])
    other.run(*other.load_existing(), 1, Silent())
    assert to_run(Job(table, ["more"], ["fedavg"], 2, runs, overrides=["lr=0.3"])) == ["more/fedavg-seed-1"]


def test_a_table_may_begin_with_another_seed(tmp_path: Path) -> None:
    table = small(tmp_path, SMALL.replace("format = 1", "format = 1\nseeds = 2\nfirst_seed = 1000"))
    job = Job(table, ["two"], ["fedavg"], table.seeds, tmp_path / "runs")
    assert to_run(job) == ["two/fedavg-seed-1000", "two/fedavg-seed-1001"]
    job.run(*job.load_existing(), 1, Silent())
    one = Job(table, ["two"], ["fedavg"], 1, tmp_path / "runs")
    assert one.seeds_on_disk() == one.with_all_seeds().seeds == 2
    (kept_file,) = job.keep(tmp_path / "kept")
    assert Job(table, ["two"], ["fedavg"], 1, kept_file.parent.parent).seeds_on_disk() == 2
    assert sorted(job.load_existing()[0].cells["two", "fedavg"].histories) == [1000, 1001]


def test_cells_that_are_the_same_experiment_share_one_run(tmp_path: Path) -> None:
    """As in a sweep of FedNTD's tau over columns: FedAvg is the same in all of them."""
    head = SMALL.partition("[columns.two]")[0].replace('column = "two"', 'column = "high"')
    columns = [
        f'[columns.{c}]\nlabel = "{c}"\nrows.fedntd = {{ method = {{ tau = {tau} }} }}\n' for c, tau in TAUS.items()
    ]
    table, runs = small(tmp_path, head + "".join(columns)), tmp_path / "runs"
    job = Job(table, list(TAUS), ["fedavg", "fedntd"], 2, runs)
    results, todo = job.load_existing()
    assert [cell.label for cell in todo if cell.row == "fedavg"] == ["low/fedavg-seed-0", "low/fedavg-seed-1"]
    assert len(todo) == 6
    progress = Silent()
    job.run(results, todo, 1, progress)
    assert progress.started == [cell.label for cell in todo]
    for found in (results, job.load_existing()[0]):
        low, high = (found.cells[column, "fedavg"].histories for column in TAUS)
        assert [low[seed].accuracy.tolist() for seed in (0, 1)] == [high[seed].accuracy.tolist() for seed in (0, 1)]
    assert not to_run(job)
    job.keep(tmp_path / "kept")
    assert to_run(Job(table, ["high"], ["fedavg"], 3, tmp_path / "kept")) == ["high/fedavg-seed-2"]
    assert len(to_run(dataclasses.replace(job, overrides=["method.tau=3.0"], rows=["fedntd"]))) == 2, "now they are one"


TAUS = {"low": 1.0, "high": 2.0}


def test_the_baseline_is_loaded_even_if_not_selected(tmp_path: Path) -> None:
    table = small(tmp_path)
    job = Job(table, ["two"], ["fedavg"], 1, tmp_path)
    job.run(*job.load_existing(), 1, Silent())
    other = Job(table, ["two"], ["fedntd"], 1, tmp_path)
    results, todo = other.load_existing()
    assert [cell.row for cell in todo] == ["fedntd"]
    other.run(results, todo, 1, Silent())
    [column] = against_paper.compare_columns(other, results)
    assert [row.name for row in column.rows] == ["fedntd"]
    assert column.gaps("final")["fedntd"].ours is not None
    swept = Job(table, ["two"], ["fedntd"], 1, tmp_path, overrides=["method.beta=0.1"])
    results, todo = swept.load_existing()
    assert results.cells["two", "fedavg"].histories, "the baseline keeps its own hyperparameters"
    assert [cell.experiment.method["beta"] for cell in todo] == [0.1]


def test_a_diverged_run_is_a_result_and_not_repeated(tmp_path: Path) -> None:
    table = small(tmp_path)
    job = Job(table, ["two"], ["fedavg"], 1, tmp_path, overrides=["lr=1e30"])
    assert job.folder("fedavg") == tmp_path / "small" / "table-0-lr=1e30"
    results, todo = job.load_existing()
    job.run(results, todo, 1, Silent())
    for current in (results, job.load_existing()[0]):
        [row] = against_paper.compare_columns(job, current)[0].rows
        assert row_cells(against_paper.compare_columns(job, current)[0], row)[0] == "diverged"
        assert row.note == "diverged"
        assert "round 1" in current.cells["two", "fedavg"].diverged[0]
    assert not to_run(job)


@pytest.mark.usefixtures("forked_workers")
def test_divergence_is_reported_with_several_jobs(tmp_path: Path) -> None:
    table = small(tmp_path)
    job = Job(table, ["two"], ["fedavg", "fedntd"], 1, tmp_path, overrides=["lr=1e30"])
    results, todo = job.load_existing()
    job.run(results, todo, 2, Silent())
    assert all(results.cells["two", row].diverged for row in ("fedavg", "fedntd"))
    assert not to_run(job)


def test_an_unreadable_run_fails_alone(tmp_path: Path) -> None:
    """A run of a different experiment, or a damaged or truncated one, is reported in its cell; the others are run."""
    table = small(tmp_path)
    job = Job(table, ["two"], ["fedavg", "fedntd"], 1, tmp_path)
    job.run(*job.load_existing(), 1, Silent())
    changed = small(tmp_path, SMALL.replace("beta = 2.0", "beta = 3.0"))
    results, todo = Job(changed, ["two"], ["fedavg", "fedntd"], 1, tmp_path).load_existing()
    assert "method.beta" in results.cells["two", "fedntd"].failed[0]
    assert not todo
    lines = tmp_path / "small/table-0/two/fedntd-seed-0/rounds.jsonl"
    whole = lines.read_text().splitlines(keepends=True)
    damages = ((whole[:2] + whole[3:], "round 3"), ([*whole[:2], "{]\n"], "rounds.jsonl"), (whole[:3], "rounds.jsonl"))
    for damage, where in damages:
        lines.write_text("".join(damage))
        results, todo = job.load_existing()
        assert where in results.cells["two", "fedntd"].failed[0]
        assert results.failed
        assert not todo


def test_several_processes_per_run_and_several_jobs_exclude_each_other(tmp_path: Path, monkeypatch) -> None:
    job = Job(small(tmp_path), ["two"], ["fedavg"], 1, tmp_path)
    results, todo = job.load_existing()
    monkeypatch.setattr(jobs, "current_ranks", lambda: SimpleNamespace(size=2))
    with raises(FedkeepError, key="jobs", value=2):
        job.run(results, todo, 2, Silent())


# The command


def test_the_list_has_a_line_per_table_and_fits_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDKEEP_DATA", str(tmp_path))
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "something").touch()
    code, out = run("--runs", str(tmp_path))
    assert code == 0
    lines = out.splitlines()
    assert len(lines) <= len(spec.names()) + len(spec.papers()) + 10
    assert " of 9" not in out
    shown = {line.split()[0]: " ".join(line.split()[1:]) for line in lines if line.startswith("  ")}
    assert [name for name in shown if name != "table"] == spec.names()
    assert shown["fedntd/table-1"] == f"378 200 {spec.load('fedntd/table-1').title}"
    assert shown["fedka/table-1"].startswith("63 20-100 ")
    headings = [line.split()[0] for line in lines if not line.startswith("fedkeep reproduce")]
    assert [word for word in headings if word in spec.papers()] == spec.papers()
    [missing] = [line for line in lines if "tiny_imagenet" in line]
    assert "cifar100" in missing
    assert "cifar10," not in missing
    console = Console(force_terminal=True, file=io.StringIO(), width=60)
    tables = [spec.load(f"fedntd/{name}") for name in ("figure-8", "table-1", "table-2")]
    table_listing.print_overview(console, tables, Path(__file__).parents[2] / "results")
    assert "6 of 9 means" in console.file.getvalue()
    kept = {line.split()[0]: line for line in console.file.getvalue().splitlines()}
    assert " 96 of 378 " in kept["fedntd/table-1"]
    assert " 6 of 6 " in kept["fedntd/figure-8"], "runs of another table that serve this one"
    assert " 18 " in kept["fedntd/table-2"]
    assert kept["fedntd/table-1"].rstrip().endswith("…"), "a terminal shows one line"


def test_a_paper_is_listed_with_columns_and_missing_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDKEEP_DATA", str(tmp_path))
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "something").touch()
    (tmp_path / "cifar100").mkdir()
    out = "".join(run(paper)[1] for paper in spec.papers())
    for name in spec.names():
        assert name in out
    lines = [line.split("  ") for line in out.splitlines() if line.strip().startswith(("cifar10-", "cifar100-"))]
    columns = [name for table in spec.all_tables() for name in table.columns]
    assert len(lines) == sum(name.startswith(("cifar10-", "cifar100-")) for name in columns)
    for line in lines:
        name, _, *status = [part.strip() for part in line if part.strip()]
        assert bool(status) == name.startswith("cifar100-")
    absent = {row.label for table in spec.all_tables() for row in table.rows.values() if row.absent}
    assert all(f"({label})" in out for label in absent)
    listed = json.loads(run("--json")[1])
    assert [table["name"] for table in listed] == spec.names()
    for paper in ("FedKA", "fedka/"):
        assert {table["name"].partition("/")[0] for table in json.loads(run(paper, "--json")[1])} == {"fedka"}
    for options in (["--quick"], ["fedntd", "--seeds", "1"], ["--markdown"], ["fedntd", "rounds=2"], ["--generated"]):
        with raises(FedkeepError, key="table", mentions=["fedkeep reproduce"]):
            run(*options)
    ledger = json.loads(run("fedssd", "--ledger", "--runs", str(tmp_path), "--json")[1])
    assert {figure["table"].partition("/")[0] for figure in ledger["figures"]} == {"fedssd"}


@pytest.mark.parametrize("name", MAIN_TABLES)
def test_quick_shows_our_figures_of_every_row_and_none_of_the_paper(name: str, tmp_path: Path) -> None:
    code, out = run(name, "--quick", "--runs", str(tmp_path), "rounds=2", "epochs=1")
    assert code == 0, out
    table = spec.load(name)
    for row in table.rows.values():
        assert row.label in out
    assert "digits" in out
    assert "rounds=2, epochs=1" in out
    assert out.count("Quick: ") == 1
    assert "paper" not in out.partition(table.paper)[2].lower()
    shown = json.loads(run(name, "--quick", "--runs", str(tmp_path), "rounds=2", "epochs=1", "--json")[1])
    [column] = shown["columns"]
    assert column["found"] == []
    assert {measure["paper"] for row in column["rows"] for measure in row["measures"].values()} == {None}
    assert {row["row"] for row in column["rows"]} == set(table.rows)
    for row in column["rows"]:
        values = [measure["values"] for measure in row["measures"].values()]
        assert all(values) == (table.rows[row["row"]].absent is None), row
    markdown = run(name, "--quick", "--runs", str(tmp_path), "rounds=2", "epochs=1", "--show", "--markdown")[1]
    assert markdown.count("\n| ") >= len(table.rows)


@pytest.mark.parametrize("name", [name for name in TABLES if name not in MAIN_TABLES])
def test_quick_runs_two_rounds_of_every_other_table(name: str, tmp_path: Path) -> None:
    """The baseline and the last row. Tables with `at_10` run ten rounds; later rounds have no value."""
    table = spec.load(name)
    rows = [table.baseline, list(table.rows)[-1]]
    changes = [f"train.rounds={10 if 'at_10' in table.measures else 2}", "train.epochs=1"]
    args = [name, "--quick", "--methods", ",".join(rows), "--seeds", "1", "--runs", str(tmp_path), *changes, "--json"]
    code, out = run(*args)
    assert code == 0, out
    [column] = json.loads(out)["columns"]
    assert [row["row"] for row in column["rows"]] == rows
    for row in column["rows"]:
        for measure, found in row["measures"].items():
            is_later = measure.startswith("at_") and measure != "at_10"
            no_share = measure == "recoverable.share" and list(row["measures"]["forgetting"]["values"].values()) <= [0]
            assert bool(found["values"]) != (is_later or no_share), (row["row"], measure)


@pytest.mark.parametrize(("name", "data"), [("fedkeep/table-5", "wards"), ("fedntd/table-1", "digits")])
def test_a_quick_column_names_the_data_that_it_has(name: str, data: str, tmp_path: Path) -> None:
    [column] = json.loads(run(name, "--quick", "--show", "--runs", str(tmp_path), "--json")[1])["columns"]
    assert column["label"].startswith(f"{data} instead of ")


def test_columns_without_data_show_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDKEEP_DATA", str(tmp_path / "data"))
    code, out = run("fedka/table-1", "--runs", str(tmp_path))
    assert code == 2
    assert out.count("mkdir -p") == 3
    assert not list(tmp_path.glob("fedka/**/*.toml"))
    code, out = run("fedka/table-1", "--runs", str(tmp_path), "--show")
    assert (code, out.count("61.90")) == (0, 1), "the paper's figures are shown anyway"


def test_a_table_from_a_users_file(tmp_path: Path) -> None:
    small(tmp_path)
    file = str(tmp_path / "table.toml")
    code, out = run(file, "--column", "two", "--methods", "fedntd", "--seeds", "2", "--runs", str(tmp_path / "runs"))
    assert code == 0, out
    assert "--methods" in out, "the baseline has not been run"
    code, out = run(file, "--column", "two,iid", "--show", "--runs", str(tmp_path / "runs"), "--json")
    shown = json.loads(out)
    assert shown["seeds"] == 3
    assert [column["column"] for column in shown["columns"]] == ["two", "iid"]
    [fedntd] = [row for row in shown["columns"][0]["rows"] if row["row"] == "fedntd"]
    assert list(fedntd["measures"]["final"]["values"]) == ["0", "1"]
    assert "2 of 3" in fedntd["note"]


def test_a_single_round_prints_no_nan(tmp_path: Path) -> None:
    _, out = run("fedntd/table-1", "--quick", "--methods", "fedavg,fedntd", "--runs", str(tmp_path), "rounds=1")
    assert "nan" not in out


def test_an_override_of_a_hyperparameter_is_shown(tmp_path: Path) -> None:
    args = ["fedssd/table-1", "--quick", "--methods", "fedssd", "method.M_max=0.1", "rounds=2", "epochs=1"]
    code, out = run(*args, "--runs", str(tmp_path))
    assert code == 0, out
    assert "method.M_max=0.1, rounds=2, epochs=1" in out


@pytest.mark.parametrize(
    ("args", "key", "value", "mentions"),
    [
        (["fedntd/table1"], "table", "fedntd/table1", ["did you mean fedntd/table-1?"]),
        (["fedntd/tabel-1"], "table", "fedntd/tabel-1", ["did you mean fedntd/table-1?", "fedntd/table-g3"]),
        (["flashback/figure-4"], "table", ANY, ["figure 4 of flashback is part of flashback/figure-1"]),
        (["FedNTD/Fig-7", "--ledger"], "table", ANY, ["figure 7 of fedntd is part of fedntd/figure-4"]),
        (["fedntd/table-7"], "table", ANY, ["is part of fedntd/table-1"]),
        (["fedntd/figure-20"], "table", ANY, ["is part of fedntd/figure-19 and fedntd/figure-19-iid"]),
        (["fedntd/figure-20a"], "table", ANY, ["is part of fedntd/figure-19-iid"]),
        (["flashback/figure-7"], "table", ANY, ["there is no figure 7 of flashback (valid: flashback/figure-1,"]),
        (["fedtnd"], "table", "fedtnd", ["did you mean fedntd?", "papers: fedgkd, fedka,"]),
        (["fedtnd/figure-7"], "table", ANY, ["unknown paper 'fedtnd'", "did you mean fedntd?"]),
        (["figure-9"], "table", "figure-9", ["fedssd/figure-9, flashback/figure-9"]),
        (["nowhere.toml"], "table", "nowhere.toml", ["there is no file nowhere.toml"]),
        (["fedntd/table-1", "--column", "cifar-s2"], "column", "cifar-s2", ["cifar10-s2"]),
        (["fedntd/table-1", "--methods", "fedavg,fedntf"], "methods", "fedntf", ["fedntd"]),
        (["fedntd/table-1", "lerning_rate=1"], ANY, ANY, ["lerning_rate"]),
        (["fedntd/table-1", "seed=1"], "seed", "seed=1", ["--seeds"]),
        (["fedntd/table-1", "method=fedavg"], "method", "method=fedavg", ["--methods"]),
        (["lr=1"], "table", "lr=1", []),
        (["fedntd/table-1", "fedka/table-1"], ANY, ANY, ["fedntd/table-1", "fedka/table-1"]),
        (["fedntd/table-1", "--json", "--markdown"], "--json", None, ["--json", "--markdown"]),
        (["fedntd/table-1", "--quick", "--column", "mnist-s2"], "--column", ["mnist-s2"], ["cifar10-s2"]),
    ],
)
def test_bad_input_raises_one_line(args: list[str], key, value, mentions: list[str]) -> None:
    with raises(FedkeepError, key=key, value=value, mentions=mentions):
        run(*args)


def test_a_killed_table_is_resumed_to_the_same_results(tmp_path: Path) -> None:
    def command(runs: str) -> list[str]:
        args = ["fedntd/table-1", "--quick", "--methods", "fedavg,scaffold", "--runs", str(tmp_path / runs)]
        return [sys.executable, "-m", "fedkeep", "reproduce", *args, "epochs=1", "--json"]

    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    whole = fedkeep(*command("whole")[3:], env=env)
    started = subprocess.Popen(command("killed"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
    folder = tmp_path / "killed" / "fedntd" / "table-1-quick-epochs=1" / "cifar10-s2"
    deadline = time.monotonic() + 120
    while not list(folder.glob("scaffold-seed-0/checkpoint-*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    started.send_signal(signal.SIGKILL)
    started.communicate()
    assert len(load_run(folder / "fedavg-seed-0").records) == 41, "the first method is finished"
    ended = (folder / "fedavg-seed-0" / "rounds.jsonl").stat().st_mtime_ns
    code, out = run(*command("killed")[4:-1], "--show")
    assert code == 0
    assert re.search(r"SCAFFOLD: .*\b0\b.*\b\d+ of 40\b", out), "the progress of the unfinished run"
    again = fedkeep(*command("killed")[3:], env=env)
    assert (folder / "fedavg-seed-0" / "rounds.jsonl").stat().st_mtime_ns == ended, "a finished run is not repeated"
    figures = [json.loads(done.stdout)["columns"] for done in (whole, again)]
    assert figures[0] == figures[1]


def test_the_page_names_every_table_and_measure_and_its_example_is_valid(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "reproduce.md").read_text()
    for name in [*TABLES, "final", "best", "smoothed", "forgetting", "rounds_to_fedavg"]:
        assert f"`{name}`" in page
    [text] = re.findall(r"```toml\n(.*?)```", page, flags=re.DOTALL)
    table = small(tmp_path, text)
    assert table.experiment("cifar10-s2", "moon", 0).method["mu"] == 5.0
    assert table.experiment("cifar10-s2", "moon", 0, quick=True).split["n_clients"] == 20
