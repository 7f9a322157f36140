"""The papers' tables: their specifications, the runs behind them, and what is said of the outcome."""

from __future__ import annotations

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
from typer.testing import CliRunner

from fedkeep.cli.app import app
from fedkeep.cli.paper_tables import cells
from fedkeep.errors import ConfigError, FedkeepError
from fedkeep.experiments import experiment, sweep
from fedkeep.reproduce import against_paper, spec
from fedkeep.reproduce.cells import Job
from fedkeep.reproduce.measures import MEASURES, NEVER
from fedkeep.runs.history import History
from fedkeep.runs.reading import load_run

TABLES = ["fedgkd/table-3", "fedka/table-1", "fedntd/table-1", "fedssd/table-1", "flashback/table-1"]

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
    done = CliRunner().invoke(app, ["reproduce", *args], env={"COLUMNS": "150"})
    if isinstance(done.exception, FedkeepError):
        return 2, str(done.exception)
    return done.exit_code, done.stdout


# Specifications


def test_the_main_table_of_each_paper_is_there() -> None:
    assert spec.names() == TABLES


@pytest.mark.parametrize("name", TABLES)
def test_every_cell_is_a_valid_experiment(name: str) -> None:
    table = spec.load(name)
    for column in table.columns:
        for row, about in table.rows.items():
            if about.absent is None:
                experiment = table.experiment(column, row, 1)
                assert experiment.seed == 1
                assert experiment.train.rounds >= 20
    for row, about in table.rows.items():
        if about.absent is None:
            quick = table.experiment(table.quick.column, row, 0, quick=True)
            assert quick.data["source"] == "digits"
            assert quick.train.rounds <= 40


UNPRINTED = {  # what the papers do not print, or print illegibly: column, measure, rows
    ("cinic10-s2", "forgetting"): ["fedavg", "fedcurv", "fedprox", "fednova", "scaffold", "moon"],
    ("cinic10-a0.1", "forgetting"): ["fedavg", "fedcurv", "fedprox", "fednova", "scaffold", "moon"],
    ("cifar10-a0.05", "forgetting"): ["fednova", "scaffold"],
    ("cifar100-a0.1", "forgetting"): ["moon"],
    **{(column, "final"): ["fedka_printed"] for column in ("cifar10", "cifar100", "tiny_imagenet")},
}


@pytest.mark.parametrize("name", TABLES)
def test_the_papers_figures_are_all_there(name: str) -> None:
    table = spec.load(name)
    for column, about in table.columns.items():
        for measure in table.measures:
            unprinted = [row for row in table.rows if measure not in about.paper.get(row, {})]
            known = [] if name == "fedssd/table-1" else UNPRINTED.get((column, measure), [])
            assert unprinted == known, (column, measure)


def test_some_figures_are_the_printed_ones() -> None:
    ntd = spec.load("fedntd/table-1").columns["cifar10-s2"].paper
    assert ntd["fedntd"]["smoothed"] == spec.Figure(mean=52.61, spread=1.00)
    assert ntd["fedavg"]["forgetting"].mean == 0.59
    assert spec.load("flashback/table-1").columns["cifar10"].paper["fedavg"]["rounds_to_95"].mean is None
    assert spec.load("fedgkd/table-3").columns["cifar100-a0.5"].paper["fedgkd"]["best"].mean == 42.44
    assert spec.load("fedssd/table-1").columns["cifar10"].paper["fedssd"]["rounds_to_fedavg"].mean == 33
    assert spec.load("fedka/table-1").columns["tiny_imagenet"].paper["fedka"]["final"].mean == 11.7


def test_settings_are_the_papers() -> None:
    """Every figure here is of the papers' text: FedNTD B.3 and table 4, FedGKD 5.1, Flashback D and E, FedSSD 5.1."""
    ntd = spec.load("fedntd/table-1").experiment("cifar10-s2", "fedntd", 0)
    train = ntd.train
    assert (train.rounds, train.participation, train.epochs, train.batch_size) == (200, 0.1, 5, 50)
    assert (train.lr, train.momentum, train.weight_decay, train.lr_decay) == (0.01, 0.9, 1e-5, 0.99)
    assert ntd.split == {"kind": "shards", "n_clients": 100, "s": 2}
    cinic = spec.load("fedntd/table-1").experiment("cinic10-a0.1", "fedavg", 0)
    assert (cinic.split["n_clients"], cinic.train.participation, cinic.train.augment.cutout) == (200, 0.05, 0)
    gkd = spec.load("fedgkd/table-3")
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
    ka = spec.load("fedka/table-1")
    assert [ka.experiment("cifar10", r, 0).method["recentre"] for r in ("fedka", "fedka_printed")] == [True, False]


def test_flashbacks_public_set_and_clients_have_the_papers_sizes() -> None:
    """CIFAR-10's 50,000 labels are enough to see the split: 1,125 and 375 on the server, 90% of the rest in use."""
    from fedkeep.data import from_arrays

    given = spec.load("flashback/table-1").experiment("cifar10", "flashback", 0)
    y = np.repeat(np.arange(10), 5000)
    data = from_arrays(y[:, None], y, y[:10, None], y[:10]).with_public(given.data["public"], given.data["validation"])
    assert (len(data.public.y), len(data.public.y_val), len(data.y_train)) == (1125, 375, 48500)
    clients = experiment.SPLITS["dirichlet"](data.y_train, 100, 0.1).hold_out(given.split["validation"])
    assert len(clients.indices) == pytest.approx(0.9 * 48500, abs=100)


def test_a_cell_is_merged_from_the_general_to_the_particular(tmp_path: Path) -> None:
    table = small(tmp_path)
    plain, cell = (table.experiment("two", "fedntd", 0, quick) for quick in (False, True))
    assert (plain.train.lr, plain.train.rounds, plain.method["beta"], plain.method["tau"]) == (0.02, 3, 2.0, 1.0)
    assert (cell.train.lr, cell.train.rounds, cell.method["beta"], cell.method["tau"]) == (0.1, 2, 2.0, 2.0)
    assert plain.model == {"name": "mlp", "projection": 8}
    assert table.experiment("two", "fedavg", 0).model == {"name": "mlp"}
    other = table.experiment("iid", "fedavg", 3, overrides=["lr=0.3"])
    assert other.split == {"kind": "iid", "n_clients": 6}, "another kind of split replaces all of it"
    assert other.data == {"source": "cifar100", "public": 4}, "another source keeps what the server holds"
    assert (other.train.lr, other.seed) == (0.3, 3)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('measures = ["final", ', 'measures = ["finale", ', "did you mean final"),
        ('column = "two"', 'column = "too"', "did you mean two"),
        ("fednew = { final", "fedneu = { final", "did you mean fednew"),
        ("{ final = 60.0 }", "{ best = 60.0 }", "unknown measure of two, fedntd"),
        ('absent = "not in fedkeep yet"', 'label2 = "x"', "label2"),
        (', absent = "not in fedkeep yet"', "", "says in `absent` why"),
        ('"forgetting"]', '"rounds_to_50"]', "has no target"),
        ("format = 1", "format = 2", "format"),
        ("format = 1", "format = ", "line 2"),
        ("final = [50.0, 1.0]", 'final = "high"', "columns.two.paper.fedavg.final"),
    ],
)
def test_a_mistake_in_a_specification_is_named(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in SMALL
    with pytest.raises(ConfigError, match=r"table\.toml: ") as error:
        small(tmp_path, SMALL.replace(old, new))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_mistake_in_a_cell_names_the_cell(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"small/table-0, two, fedntd: unknown key 'method.beto'"):
        small(tmp_path, SMALL.replace("{ beta = 2.0 }", "{ beto = 2.0 }")).experiment("two", "fedntd", 0)


# Measures and comparisons


def history(accuracy: list[float]) -> History:
    """A run of two classes, 100 test examples each, whose accuracy is this over the rounds."""
    records = [{"round": 0, "confusion": [[50, 50], [50, 50]]}]
    for t, a in enumerate(accuracy, start=1):
        right = round(100 * a)
        confusion = [[right, 100 - right], [100 - right, right]]
        records.append({"round": t, "confusion": confusion, "bytes_down": 0, "bytes_up": 0, "seconds": 0.0})
    return History("fedavg", {}, records)


def test_measures() -> None:
    fast, slow = history([0.3, 0.6, 0.8, 0.7]), history([0.2, 0.4, 0.5, 0.6])

    def of(name: str, one: History, first: History | None = None, target: float | None = None) -> float | None:
        return MEASURES[name].take(one, first, target)

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
    assert MEASURES["rounds_to_95"].sum_up([3, NEVER, 5]) == 5
    assert MEASURES["final"].sum_up([1, 2, 6]) == 3


def entry(
    measure: str, ours, theirs, diverged: int = 0, spread: float | None = None
) -> against_paper.MeasureComparison:
    """An entry of one value, or of several seeds' values, of which the last ones diverged."""
    figure = None if theirs is None else spec.Figure(mean=None if theirs == "never" else float(theirs), spread=spread)
    values = {} if ours is None else dict(enumerate(ours if isinstance(ours, list) else [ours]))
    return against_paper.MeasureComparison(
        MEASURES[measure], values, frozenset(range(len(values), len(values) + diverged)), figure
    )


def sheet(measure: str, rows: dict[str, tuple]) -> against_paper.ColumnComparison:
    lines = [against_paper.MethodRow(name, name, {measure: entry(measure, *about)}) for name, about in rows.items()]
    return against_paper.ColumnComparison("c", "C", lines[0], lines, [measure])


def test_signs_and_order_against_the_paper() -> None:
    found = sheet("final", {"avg": (50.0, 40.0), "up": (60.0, 50.0), "down": (55.0, 35.0), "gone": (None, 30.0)})
    gaps = found.gaps("final")
    assert [(g.ours, g.theirs, g.agree) for g in gaps.values()] == [(10, 10, True), (5, -5, False), (None, -10, None)]
    order = found.order("final")
    assert (order.pairs, order.agreeing) == (3, 2), "avg-up and up-down are the paper's, avg-down is not"
    assert (order.best_here, order.best_there) == (("up",), ("up",))
    [said] = against_paper.sentences(found)
    assert "1 of 2 have the paper's sign; not so down (here +5.00, there -5.00)" in said
    assert "2 of 3 pairs" in said


def test_rounds_that_never_came_and_ties() -> None:
    found = sheet("rounds_to_95", {"avg": (NEVER, "never"), "fast": (10.0, 12.0), "slow": (NEVER, "never")})
    gaps = found.gaps("rounds_to_95")
    assert (gaps["fast"].ours, gaps["fast"].agree) == (math.inf, True)
    assert (gaps["slow"].ours, gaps["slow"].agree) == (0, None), "a tie in the paper has no sign"
    assert found.order("rounds_to_95").pairs == 2
    assert found.lines[0].entries["rounds_to_95"].difference is None
    unlike = sheet("rounds_to_95", {"avg": (5.0, "never"), "fast": (NEVER, 12.0)})
    assert "fast (here far worse, there far better)" in against_paper.sentences(unlike)[0]


def test_what_diverged_comes_last() -> None:
    found = sheet("final", {"avg": (50.0, 40.0), "nova": (None, 10.0, 1), "low": (20.0, 15.0)})
    assert found.gaps("final")["nova"].agree is True
    assert (found.order("final").pairs, found.order("final").agreeing) == (3, 3)


def test_one_seed_that_diverged_is_enough_to_come_last() -> None:
    found = sheet("final", {"avg": ([50.0, 50.0], 40.0), "wild": ([90.0], 30.0, 1)})
    assert found.order("final").best_here == ("avg",)
    assert found.gaps("final")["wild"].agree is True
    assert cells(found, found.lines[1])[:3] == ["90.00", "30.00", ""], "the figure is that of the run that ended"
    never = sheet("rounds_to_95", {"avg": ([5.0, 6.0, 7.0], 9), "wild": ([3.0, 4.0], 8, 1)})
    assert cells(never, never.lines[1])[0] == "4 (2 of 3)"


def test_the_median_shown_is_the_one_compared() -> None:
    found = sheet("rounds_to_95", {"avg": ([10.0, 20.0, NEVER], 50), "slow": ([10.0, NEVER, NEVER], 60)})
    assert cells(found, found.lines[0])[:3] == ["20 (2 of 3)", "50", "-30"]
    assert cells(found, found.lines[1]) == ["- (1 of 3)", "60", "", "worse", "-10 ="]


def test_gaps_within_the_papers_spread_have_no_sign() -> None:
    rows = {"avg": (50.0, 40.0, 0, 0.5), "near": (49.0, 40.4, 0, 0.2), "far": (52.0, 41.0, 0, 0.1)}
    found = sheet("final", rows)
    assert [g.agree for g in found.gaps("final").values()] == [None, True]
    assert found.order("final").pairs == 2
    assert cells(found, found.lines[1])[-1] == "+0.40 ~"
    assert "Within the paper's spread, and not counted: near." in against_paper.sentences(found)[0]


def test_plain_data_tells_never_from_not_run() -> None:
    found = sheet("rounds_to_95", {"avg": ([NEVER], 50), "none": (None, "never")})
    rows = {row["row"]: row["measures"]["rounds_to_95"] for row in against_paper.as_data(found)["rows"]}
    assert (rows["avg"]["ours"], rows["none"]["ours"]) == ("never", None)
    assert (rows["avg"]["values"], rows["none"]["paper"]) == ({"0": "never"}, "never")


def test_lower_forgetting_is_better() -> None:
    found = sheet("forgetting", {"avg": (0.5, 0.6), "ntd": (0.3, 0.4)})
    gap = found.gaps("forgetting")["ntd"]
    assert gap.ours == pytest.approx(0.2)
    assert gap.agree
    assert found.order("forgetting").best_here == ("ntd",)


# Running


def looked(job: Job) -> list[str]:
    return [cell.label for cell in job.look()[1]]


class Silent:
    """A progress bar that says nothing, and counts."""

    def __init__(self) -> None:
        self.began: list[str] = []

    def begin(self, name: str) -> None:
        self.began.append(name)

    def __call__(self, *args: object) -> None: ...

    def say(self, text: str) -> None: ...

    def end(self, *args: object) -> None: ...


def test_finished_cells_are_not_run_again_and_the_rest_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDKEEP_DATA", str(tmp_path / "nothing"))
    table = small(tmp_path)
    job = Job(table, ["two", "iid"], list(table.rows), 2, tmp_path / "runs")
    results, todo = job.look()
    labels = ["two/fedavg-seed-0", "two/fedntd-seed-0", "two/fedavg-seed-1", "two/fedntd-seed-1"]
    assert [cell.label for cell in todo] == labels, "seed by seed, and nothing whose data or method is not there"
    assert "this gets it: mkdir" in results.missing["iid"]
    job.run(results, todo[:3], 1, Silent())
    again, rest = job.look()
    assert [cell.label for cell in rest] == labels[3:]
    [two, iid] = against_paper.sheets(job, again)
    assert [line.note for line in two.lines] == [None, "1 of 2 seeds run", "not in fedkeep yet"]
    assert {line.note for line in iid.lines} == {"data not at hand", "not in fedkeep yet"}
    both = [again.cells["two", row].histories[0].accuracy[-1] for row in ("fedavg", "fedntd")]
    gap = two.gaps("final")["fedntd"]
    assert gap.ours == pytest.approx(100 * (both[1] - both[0])), "over the seeds that both have"
    bar = Silent()
    job.run(again, rest, 1, bar)
    assert bar.began == labels[3:]
    assert not looked(job)
    (tmp_path / "runs/small/table-0/two/fedavg-seed-0/checkpoint.safetensors").unlink()
    assert not looked(job), "the rounds of a finished run are enough"


def test_the_baseline_is_read_though_not_asked_for(tmp_path: Path) -> None:
    table = small(tmp_path)
    job = Job(table, ["two"], ["fedavg"], 1, tmp_path)
    job.run(*job.look(), 1, Silent())
    other = Job(table, ["two"], ["fedntd"], 1, tmp_path)
    results, todo = other.look()
    assert [cell.row for cell in todo] == ["fedntd"]
    other.run(results, todo, 1, Silent())
    [found] = against_paper.sheets(other, results)
    assert [line.row for line in found.lines] == ["fedntd"]
    assert found.gaps("final")["fedntd"].ours is not None
    swept = Job(table, ["two"], ["fedntd"], 1, tmp_path, overrides=["method.beta=0.1"])
    results, todo = swept.look()
    assert results.cells["two", "fedavg"].histories, "hyperparameters of others are not FedAvg's concern"
    assert [cell.experiment.method["beta"] for cell in todo] == [0.1]


def test_a_divergence_is_a_result_and_not_repeated(tmp_path: Path) -> None:
    table = small(tmp_path)
    job = Job(table, ["two"], ["fedavg"], 1, tmp_path, overrides=["lr=1e30"])
    assert job.folder("fedavg") == tmp_path / "small" / "table-0-lr=1e30"
    results, todo = job.look()
    job.run(results, todo, 1, Silent())
    for found in (results, job.look()[0]):
        [line] = against_paper.sheets(job, found)[0].lines
        assert line.note == "diverged"
        assert "diverged in round 1" in found.cells["two", "fedavg"].diverged[0]
    assert not looked(job)


def test_several_at_a_time_tell_a_divergence_too(tmp_path: Path) -> None:
    table = small(tmp_path)
    job = Job(table, ["two"], ["fedavg", "fedntd"], 1, tmp_path, overrides=["lr=1e30"])
    results, todo = job.look()

    class Counting(Silent):
        def advance(self, rounds: int) -> None: ...

    job.run(results, todo, 2, Counting())
    assert all(results.cells["two", row].diverged for row in ("fedavg", "fedntd"))
    assert not looked(job)


def test_a_run_that_cannot_be_read_is_its_own_failure(tmp_path: Path) -> None:
    """Another experiment's, damaged, or cut short: the cell says so, the other ones are run."""
    table = small(tmp_path)
    job = Job(table, ["two"], ["fedavg", "fedntd"], 1, tmp_path)
    job.run(*job.look(), 1, Silent())
    changed = small(tmp_path, SMALL.replace("beta = 2.0", "beta = 3.0"))
    found, todo = Job(changed, ["two"], ["fedavg", "fedntd"], 1, tmp_path).look()
    assert "differs in method.beta" in found.cells["two", "fedntd"].failed[0]
    assert not todo
    lines = tmp_path / "small/table-0/two/fedntd-seed-0/rounds.jsonl"
    whole = lines.read_text().splitlines(keepends=True)
    for damage, said in ((whole[:2] + whole[3:], "round 3 follows on 1"), ([*whole[:2], "{]\n"], "damaged")):
        lines.write_text("".join(damage))
        found, todo = job.look()
        assert said in found.cells["two", "fedntd"].failed[0]
        assert found.failed
        assert not todo
    lines.write_text("".join(whole[:3]))
    found, todo = job.look()
    job.run(found, todo, 1, Silent())
    assert "the lines of its last rounds are lost" in found.cells["two", "fedntd"].failed[0]


def test_several_processes_a_run_and_several_runs_exclude_each_other(tmp_path: Path, monkeypatch) -> None:
    job = Job(small(tmp_path), ["two"], ["fedavg"], 1, tmp_path)
    results, todo = job.look()
    monkeypatch.setattr(sweep, "current_ranks", lambda: SimpleNamespace(size=2))
    with pytest.raises(FedkeepError, match="exclude each other"):
        job.run(results, todo, 2, Silent())


# The command


def test_the_listing_names_tables_columns_and_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDKEEP_DATA", str(tmp_path))
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "something").touch()
    (tmp_path / "cifar100").mkdir()
    code, out = run()
    assert code == 0
    for name in TABLES:
        assert name in out
    lines = [line for line in out.splitlines() if line.strip().startswith(("cifar10-", "cifar100-"))]
    assert len(lines) == 16
    for line in lines:
        assert ("data not at hand" in line) == ("cifar100-" in line)
    assert "(FedReg)" in out
    listed = json.loads(run("--json")[1])
    assert [table["name"] for table in listed] == TABLES


@pytest.mark.parametrize("name", TABLES)
def test_quick_shows_every_row_beside_the_papers(name: str, tmp_path: Path) -> None:
    code, out = run(name, "--quick", "--runs", str(tmp_path), "rounds=2", "epochs=1")
    assert code == 0, out
    table = spec.load(name)
    for row in table.rows.values():
        assert row.label in out
    assert "the figures cannot be" in out
    assert "Not the table's setting: rounds=2, epochs=1" in out
    assert "best here" in out
    told = json.loads(run(name, "--quick", "--runs", str(tmp_path), "rounds=2", "epochs=1", "--json")[1])
    [column] = told["columns"]
    assert {row["row"] for row in column["rows"]} == set(table.rows)
    for row in column["rows"]:
        values = [measure["values"] for measure in row["measures"].values()]
        assert all(values) == (table.rows[row["row"]].absent is None), row
    marked = run(name, "--quick", "--runs", str(tmp_path), "rounds=2", "epochs=1", "--show", "--markdown")[1]
    assert marked.count("\n| ") >= len(table.rows)


def test_columns_without_data_say_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDKEEP_DATA", str(tmp_path / "data"))
    code, out = run("fedka/table-1", "--runs", str(tmp_path))
    assert code == 2
    assert out.count("this gets it") == 3
    assert not list(tmp_path.glob("fedka/**/*.toml"))
    code, out = run("fedka/table-1", "--runs", str(tmp_path), "--show")
    assert (code, out.count("61.90")) == (0, 1), "the paper's figures are shown all the same"


def test_a_table_of_ones_own(tmp_path: Path) -> None:
    small(tmp_path)
    file = str(tmp_path / "table.toml")
    code, out = run(file, "--column", "two", "--methods", "fedntd", "--seeds", "2", "--runs", str(tmp_path / "runs"))
    assert code == 0, out
    assert "FedAvg has not been run" in out
    code, out = run(file, "--column", "two,iid", "--show", "--runs", str(tmp_path / "runs"), "--json")
    told = json.loads(out)
    assert told["seeds"] == 3
    assert [column["column"] for column in told["columns"]] == ["two", "iid"]
    [fedntd] = [row for row in told["columns"][0]["rows"] if row["row"] == "fedntd"]
    assert list(fedntd["measures"]["final"]["values"]) == ["0", "1"]
    assert fedntd["note"] == "2 of 3 seeds run"


def test_a_single_round_has_no_forgetting(tmp_path: Path) -> None:
    _, out = run("fedntd/table-1", "--quick", "--methods", "fedavg,fedntd", "--runs", str(tmp_path), "rounds=1")
    assert "nan" not in out


def test_the_papers_example_of_an_override(tmp_path: Path) -> None:
    words = ["fedssd/table-1", "--quick", "--methods", "fedssd", "method.M_max=0.1", "rounds=2", "epochs=1"]
    code, out = run(*words, "--runs", str(tmp_path))
    assert code == 0, out
    assert "Not the table's setting: method.M_max=0.1, rounds=2, epochs=1" in out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["fedntd/table1"], "did you mean fedntd/table-1?"),
        (["fedntd/table-1", "--column", "cifar-s2"], "unknown column 'cifar-s2': did you mean cifar"),
        (["fedntd/table-1", "--methods", "fedavg,fedntf"], "unknown method 'fedntf': did you mean fedntd?"),
        (["fedntd/table-1", "lerning_rate=1"], "unknown key 'lerning_rate'"),
        (["fedntd/table-1", "seed=1"], "seeds are chosen by --seeds"),
        (["lr=1"], "without a table"),
        (["fedntd/table-1", "fedka/table-1"], "one table at a time"),
        (["fedntd/table-1", "--json", "--markdown"], "choose one"),
        (["fedntd/table-1", "--quick", "--column", "mnist-s2"], "--quick has one column"),
    ],
)
def test_bad_input_is_one_line(args: list[str], said: str) -> None:
    code, out = run(*args)
    assert code == 2
    assert said in out
    assert "\n" not in out.strip()


def test_killed_in_the_middle_it_goes_on_to_the_same_figures(tmp_path: Path) -> None:
    def command(runs: str) -> list[str]:
        words = ["fedntd/table-1", "--quick", "--methods", "fedavg,scaffold", "--runs", str(tmp_path / runs)]
        return [sys.executable, "-m", "fedkeep", "reproduce", *words, "epochs=1", "--json"]

    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    whole = subprocess.run(command("whole"), capture_output=True, text=True, check=True, env=env)
    started = subprocess.Popen(command("killed"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
    folder = tmp_path / "killed" / "fedntd" / "table-1-quick-epochs=1" / "cifar10-s2"
    deadline = time.monotonic() + 120
    while not (folder / "scaffold-seed-0" / "checkpoint.safetensors").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    started.send_signal(signal.SIGKILL)
    started.communicate()
    assert len(load_run(folder / "fedavg-seed-0").records) == 41, "the first method had ended"
    ended = (folder / "fedavg-seed-0" / "rounds.jsonl").stat().st_mtime_ns
    code, out = run(*command("killed")[4:-1], "--show")
    assert code == 0
    assert re.search(r"SCAFFOLD: seed 0: \d+ of 40 rounds\n", out), out
    again = subprocess.run(command("killed"), capture_output=True, text=True, check=True, env=env)
    assert (folder / "fedavg-seed-0" / "rounds.jsonl").stat().st_mtime_ns == ended, "it is not run again"
    figures = [json.loads(done.stdout)["columns"] for done in (whole, again)]
    assert figures[0] == figures[1]


def test_the_page_names_every_table_and_measure_and_its_file_can_be_read(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "reproduce.md").read_text()
    for name in [*TABLES, "final", "best", "smoothed", "forgetting", "rounds_to_fedavg"]:
        assert f"`{name}`" in page
    [text] = re.findall(r"```toml\n(.*?)```", page, flags=re.DOTALL)
    table = small(tmp_path, text)
    assert table.experiment("cifar10-s2", "moon", 0).method["mu"] == 5.0
    assert table.experiment("cifar10-s2", "moon", 0, quick=True).split["n_clients"] == 20
