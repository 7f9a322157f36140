"""Kept runs of tables, and the ledger that is made from them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from support.errors import ANY, raises
from support.progress import Silent
from typer.testing import CliRunner

from fedkeep.cli.app import app
from fedkeep.errors import ConfigError, FedkeepError, RunError
from fedkeep.reproduce import figures, kept, ledger, spec
from fedkeep.reproduce.against_paper import compare_columns
from fedkeep.reproduce.cells import Job
from fedkeep.reproduce.measures import get_measure
from fedkeep.runs.history import History
from fedkeep.runs.reading import load_run

REPOSITORY = Path(__file__).parents[2]
TABLE = """
format = 1
title = "A table"
paper = "Nobody, nowhere"
measures = ["final"]

[setting]
model = "mlp"
data = { source = "digits", public = 4 }
split = { kind = "shards", n_clients = 6, s = 2 }
train = { rounds = 3, participation = 3, epochs = 1, batch_size = 10, lr = 0.05, eval_every = 2 }

[rows]
fedavg = { label = "FedAvg", method = "fedavg" }
better = { label = "Better", method = { name = "fedntd", beta = 0.5 } }
worse = { label = "Worse", method = { name = "fedntd", beta = 1.5 } }
equal = { label = "Equal", method = { name = "fedntd", beta = 2.0 } }
noisy = { label = "Noisy", method = { name = "fedntd", beta = 2.5 } }
once = { label = "Once", method = { name = "fedntd", beta = 3.0 } }
fednew = { label = "FedNew", absent = "not in fedkeep yet" }

[quick]
column = "two"

[columns.two]
label = "Two shards"
explained.worse = "[the page](page.md)"

[columns.two.paper]
fedavg = { final = [50.0, 1.0] }
better = { final = 60.0 }
worse = { final = 60.0 }
equal = { final = [51.9, 0.5] }
noisy = { final = 60.0 }
once = { final = 60.0 }
fednew = { final = 70.0 }

[columns.iid]
label = "Independent"
split = { kind = "iid", n_clients = 6 }
data = { source = "mnist" }
paper.fedavg = { final = 90.0 }
"""


@pytest.fixture
def table(tmp_path: Path) -> spec.Table:
    (tmp_path / "table-0.toml").write_text(TABLE)
    return spec.read(tmp_path / "table-0.toml", "small/table-0")


def finished(table: spec.Table, row: str, seed: int, accuracy: float) -> History:
    """A run of one cell with this final accuracy, on two classes of 100 examples each."""
    about = table.experiment("two", row, seed).to_dict()
    rows = [{"bytes_down": 1, "bytes_up": 2, "seconds": 0.5, "train_loss": None, "total": [100, 100]} for _ in range(2)]
    records = [
        {"round": 2, "hits": [10, 20], **rows[0]},
        {"round": 3, "hits": [round(200 * accuracy) // 2, -(-round(200 * accuracy) // 2)], **rows[1]},
    ]
    return History(about["method"]["name"], about["train"], records, about=about, ended="finished")


# Kept runs


def test_a_kept_file_is_named_on_one_line(table: spec.Table, tmp_path: Path) -> None:
    name = f"{tmp_path.name}/table-0"
    file, folder = tmp_path / "table-0.toml", tmp_path / ("long" * 30)
    kept.write(tmp_path / f"runs/{name}.jsonl.gz", {"two/fedavg-seed-0": finished(table, "fedavg", 0, 0.5)})
    chosen = ["--column", "two", "--methods", "fedavg", "--seeds", "1"]
    places = ["--runs", str(tmp_path / "runs"), "--keep", str(folder)]
    done = CliRunner().invoke(app, ["reproduce", str(file), *chosen, *places], env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    assert f"kept in {folder / name}.jsonl.gz" in done.stderr.splitlines()


def test_a_kept_run_has_its_local_models(tmp_path: Path) -> None:
    text = TABLE.replace("eval_every = 2", "eval_local_every = 2").replace(
        '["final"]', '["final", "local_forgetting", "aggregation_forgetting"]'
    )
    (tmp_path / "table-0.toml").write_text(text)
    job = Job(spec.read(tmp_path / "table-0.toml", "small/table-0"), ["two"], ["fedavg"], 1, tmp_path / "runs")
    results, todo = job.load_existing()
    job.run(results, todo, 1, Silent())
    (file,) = job.keep(tmp_path / "small")
    run = load_run(tmp_path / "runs" / "small" / "table-0" / "two" / "fedavg-seed-0")
    again = kept.read(file)["two/fedavg-seed-0"]
    assert again.anatomy_rounds == run.anatomy_rounds == [2, 3]
    rounds = {number: run.anatomy(number) for number in run.anatomy_rounds}
    for number, anatomy in rounds.items():
        for key, value in anatomy.items():
            assert np.array_equal(again.anatomy(number)[key], value, equal_nan=True), key
    for name in ("local_forgetting", "aggregation_forgetting"):
        value = get_measure(name).from_history(again, None, None)
        assert value == pytest.approx(np.mean([anatomy[name].mean() for anatomy in rounds.values()]))
        assert value > 0
    assert get_measure("local_forgetting").from_history(finished(job.table, "fedavg", 0, 0.5), None, None) is None


def test_a_kept_run_has_the_measures_of_the_run(tmp_path: Path, table: spec.Table) -> None:
    job = Job(table, ["two"], ["fedavg"], 1, tmp_path / "runs")
    results, todo = job.load_existing()
    job.run(results, todo, 1, Silent())
    (file,) = job.keep(tmp_path / "small")
    assert file == tmp_path / "small" / "small" / "table-0.jsonl.gz"
    run = load_run(tmp_path / "runs" / "small" / "table-0" / "two" / "fedavg-seed-0")
    again = kept.read(file)["two/fedavg-seed-0"]
    assert np.array_equal(again.class_accuracy, run.class_accuracy, equal_nan=True)
    assert np.array_equal(again.accuracy, run.accuracy)
    assert again.rounds.tolist() == run.rounds.tolist() == [2, 3], "rounds without a test are not kept"
    ours, theirs = again.summary(), run.summary()
    assert ours["bytes"] == theirs["bytes"]
    assert ours["seconds"] == pytest.approx(theirs["seconds"], abs=0.002)
    assert ours["forgetting"] == theirs["forgetting"]
    assert again.finished
    for name in ("confusion", "cohorts"):
        with raises(FedkeepError, key=name.removesuffix("s"), value=ANY):
            getattr(again, name)
    frame = again.to_pandas()
    assert list(frame)[:5] == ["accuracy", "train_loss", "bytes_down", "bytes_up", "seconds"]
    same = ["accuracy", "train_loss", *list(frame)[5:]]
    assert frame[same].equals(run.to_pandas()[same].round({"train_loss": 4}))
    shown, missing = Job(table, ["two"], ["fedavg"], 1, tmp_path / "small").load_existing()
    assert not missing
    assert shown.cells["two", "fedavg"].histories[0].accuracy[-1] == run.accuracy[-1]


def test_runs_are_added_and_replaced_and_the_file_is_reproducible(tmp_path: Path, table: spec.Table) -> None:
    file = tmp_path / "a.jsonl.gz"
    kept.write(file, {"two/fedavg-seed-1": finished(table, "fedavg", 1, 0.5)})
    kept.write(file, {"two/fedavg-seed-0": finished(table, "fedavg", 0, 0.5)})
    kept.write(file, {"two/fedavg-seed-1": finished(table, "fedavg", 1, 0.75)})
    assert list(kept.read(file)) == ["two/fedavg-seed-0", "two/fedavg-seed-1"]
    assert kept.read(file)["two/fedavg-seed-1"].accuracy[-1] == 0.75
    before = file.read_bytes()
    kept.write(file, {})
    assert file.read_bytes() == before


def test_a_diverged_run_is_kept_and_an_unfinished_one_is_not(tmp_path: Path, table: spec.Table) -> None:
    run = finished(table, "fedavg", 0, 0.5)
    run.ended, run.records = None, run.records[:1]
    with raises(FedkeepError, key="run", value="two/fedavg-seed-0"):
        kept.write(tmp_path / "a.jsonl.gz", {"two/fedavg-seed-0": run})
    run.diverged = "the loss is NaN"
    kept.write(tmp_path / "small" / "table-0.jsonl.gz", {"two/fedavg-seed-0": run})
    results, todo = Job(table, ["two"], ["fedavg"], 1, tmp_path).load_existing()
    assert results.cells["two", "fedavg"].diverged == {0: "the loss is NaN"}
    assert not todo


def test_a_run_that_diverged_before_its_first_evaluated_round_is_kept(tmp_path: Path, table: spec.Table) -> None:
    run = finished(table, "fedavg", 0, 0.5)
    run.ended, run.records, run.diverged = None, [{"round": 0, "confusion": [[1, 0], [0, 1]]}], "the loss is NaN"
    kept.write(tmp_path / "small" / "table-0.jsonl.gz", {"two/fedavg-seed-0": run})
    results, todo = Job(table, ["two"], ["fedavg"], 1, tmp_path).load_existing()
    assert results.cells["two", "fedavg"].diverged == {0: "the loss is NaN"}
    assert not todo


def test_a_run_of_another_experiment_does_not_prevent_keeping_the_others(tmp_path: Path, table: spec.Table) -> None:
    runs = {f"two/fedavg-seed-{seed}": finished(table, "fedavg", seed, 0.5) for seed in (0, 1)}
    runs["two/fedavg-seed-0"].about["train"]["lr"] = 0.5
    kept.write(tmp_path / "small" / "table-0.jsonl.gz", runs)
    (file,) = Job(table, ["two"], ["fedavg"], 2, tmp_path).keep(tmp_path / "again")
    assert list(kept.read(file)) == ["two/fedavg-seed-1"]


def test_kept_runs_of_another_experiment_are_not_used(tmp_path: Path, table: spec.Table) -> None:
    run = finished(table, "fedavg", 0, 0.5)
    run.about["train"]["lr"] = 0.5
    kept.write(tmp_path / "small" / "table-0.jsonl.gz", {"two/fedavg-seed-0": run})
    results, todo = Job(table, ["two"], ["fedavg"], 1, tmp_path).load_existing()
    assert "train.lr is 0.5 there and 0.05 here" in results.cells["two", "fedavg"].failed[0]
    assert not todo


LOCAL = {"round": 2, "cohort": [0, 1], "hits": [[1, 2], [3, 4]], "label_counts": [[5, 5]]}


def change(line: dict) -> dict:
    line["hits"][0][0] = 101
    return line


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: b"no gzip",
        lambda text: gzip.compress(b"no json\n"),
        lambda text: gzip.compress(json.dumps({**json.loads(gzip.decompress(text)), "hits": [[1, 2]]}).encode()),
        lambda text: gzip.compress(json.dumps(change(json.loads(gzip.decompress(text)))).encode()),
        lambda text: gzip.compress(json.dumps({**json.loads(gzip.decompress(text)), "experiment": {}}).encode()),
        lambda text: gzip.compress(json.dumps({**json.loads(gzip.decompress(text)), "local": [LOCAL]}).encode()),
    ],
    ids=["cut", "no gzip", "no JSON", "a round is missing", "too many hits", "no experiment", "a client is missing"],
)
def test_a_damaged_file_is_an_error(tmp_path: Path, table: spec.Table, damage) -> None:
    file = tmp_path / "a.jsonl.gz"
    kept.write(file, {"two/fedavg-seed-0": finished(table, "fedavg", 0, 0.5)})
    file.write_bytes(damage(file.read_bytes()))
    with raises(RunError, key=ANY, value=ANY):
        kept.read(file)


# The ledger


@pytest.fixture
def runs(tmp_path: Path, table: spec.Table) -> Path:
    finals = {"fedavg": [0.5, 0.6], "better": [0.55, 0.65], "worse": [0.4, 0.5], "equal": [0.7, 0.8]}
    finals |= {"noisy": [0.7, 0.5], "once": [0.7]}
    found = {
        f"two/{row}-seed-{seed}": finished(table, row, seed, value)
        for row, values in finals.items()
        for seed, value in enumerate(values)
    }
    kept.write(tmp_path / "runs" / "small" / "table-0.jsonl.gz", found)
    return tmp_path / "runs"


def test_verdicts(runs: Path, table: spec.Table) -> None:
    found = {(entry.column, entry.row.name): entry for entry in ledger.read([table], runs).entries}
    assert {name: entry.verdict for (_, name), entry in found.items() if entry.column == "two"} == {
        "fedavg": "baseline",
        "better": "agrees",
        "worse": "disagrees",
        "equal": "within the paper's noise",  # 1.9 points, twice the larger spread is 2
        "noisy": "within noise here",  # ahead on one seed, behind on the other
        "once": "one seed",
        "fednew": "not run",
    }
    assert found["two", "worse"].reason == "[the page](page.md)"
    assert found["two", "fednew"].reason == "not in fedkeep yet"
    assert found["iid", "fedavg"].reason == "no run on mnist yet"
    assert found["two", "better"].ours_gap == pytest.approx(5)
    assert found["two", "better"].paper_gap == pytest.approx(10)
    assert found["two", "better"].seeds == 2
    assert ledger.totals(list(found.values()))["small"]["agrees"] == 1


def test_a_disagreement_without_an_explanation_says_so(runs: Path, table: spec.Table, tmp_path: Path) -> None:
    (tmp_path / "table-0.toml").write_text(TABLE.replace('explained.worse = "[the page](page.md)"', ""))
    found = ledger.read([spec.read(tmp_path / "table-0.toml", "small/table-0")], runs).entries
    assert [entry.reason for entry in found if entry.verdict == "disagrees"] == ["unexplained"]


def test_runs_without_a_value_or_a_gap_say_why(tmp_path: Path, table: spec.Table) -> None:
    other = finished(table, "worse", 0, 0.5)
    other.about["train"]["lr"] = 0.5
    runs = {"two/better-seed-0": finished(table, "better", 0, 0.5), "two/worse-seed-0": other}
    kept.write(tmp_path / "small" / "table-0.jsonl.gz", runs)
    found = {entry.row.name: entry for entry in ledger.read([table], tmp_path).entries if entry.column == "two"}
    assert (found["better"].verdict, found["better"].reason) == ("not run", "the baseline was not run")
    assert found["worse"].verdict == "not run"
    assert "train.lr is 0.5 there and 0.05 here" in found["worse"].reason
    assert (found["equal"].verdict, found["equal"].reason) == ("not run", "")


@pytest.mark.parametrize("option", [["--quick"], ["--methods", "fedavg"], ["--keep", "x"], ["lr=0.1"], ["--show"]])
def test_options_that_a_ledger_would_ignore_are_errors(option: list[str]) -> None:
    done = CliRunner().invoke(app, ["reproduce", "fedntd/table-1", "--ledger", *option])
    assert isinstance(done.exception, FedkeepError)
    assert "cannot be used with --ledger" in str(done.exception)


def test_a_figure_printed_again_is_counted_once(runs: Path, tmp_path: Path) -> None:
    """Repeated: the same experiment, baseline and figure. A different figure or baseline has its own verdict."""
    text = """
        format = 1
        extends = "table-0"
        title = "The same runs"
        paper = "Nobody, nowhere"
        measures = ["final"]
        quick.column = "again"
        [columns.again]
        extends = "two"
        label = "Two shards again"
        paper.fedavg = { final = 50.0 }
        paper.better = { final = 60.0 }
        paper.worse = { final = 61.0 }
        paper.fednew = { final = 70.0 }
        [columns.longer]
        extends = "two"
        label = "Two shards, longer"
        train.rounds = 4
        paper.fedavg = { final = 50.0 }
    """
    (tmp_path / "table-2.toml").write_text(text)
    found = {
        (entry.column, entry.row.name): entry
        for entry in ledger.read([spec.read(tmp_path / "table-2.toml", "small/table-2")], runs).entries
    }
    assert {key: entry.verdict for key, entry in found.items()} == {
        ("again", "fedavg"): "repeated",
        ("again", "better"): "repeated",
        ("again", "worse"): "disagrees",
        ("again", "fednew"): "repeated",
        ("longer", "fedavg"): "not run",
    }
    assert found["again", "better"].reason == "small/table-0, two"
    assert found["again", "worse"].seeds == 2, "its runs are those of the other table"
    head, columns = text.split("[columns.again]")
    only = columns.split("paper.fedavg")[0] + "paper.better = { final = 60.0 }"
    (tmp_path / "table-2.toml").write_text(f"{head}[rows]\nbetter = {{}}\n[columns.again]{only}")
    [entry] = ledger.read([spec.read(tmp_path / "table-2.toml", "small/table-2")], runs).entries
    assert entry.verdict == "baseline", "with another baseline a figure is not the same comparison"


CLAIMS = """
format = 1
extends = "table-0"
title = "A picture"
paper = "Nobody, nowhere, figure 1"
measures = ["final", "forgetting"]
plots = ["accuracy"]
quick.column = "two"
claims = [
    { claim = "Up", of = "final", better = "equal", than = ["worse", "fedavg", "once", "fednew"], columns = ["two"] },
    { claim = "Down", of = "final", better = "worse", than = ["better", "noisy"], columns = ["two"] },
    { claim = "Less", of = "forgetting", better = "worse", than = ["fedavg"], explained = "[why](page.md)" },
    { claim = "Easy", of = "final", row = "fedavg", better = "iid", than = ["two"] },
]
[columns.two]
extends = "two"
label = "Two shards"
[columns.iid]
extends = "iid"
label = "Independent"
"""


def test_claims_of_a_figure(runs: Path, tmp_path: Path) -> None:
    """Only the sign is known of the paper; a gap to the baseline that the extended table prints is repeated."""
    (tmp_path / "figure-1.toml").write_text(CLAIMS)
    found = ledger.read([spec.read(tmp_path / "figure-1.toml", "small/figure-1")], runs)
    assert found.entries == []
    verdicts = {(entry.claim.claim, entry.better, entry.than): (entry.verdict, entry.reason) for entry in found.claims}
    assert verdicts == {
        ("Up", "Equal, two", "Worse, two"): ("agrees", ""),
        ("Up", "Equal, two", "FedAvg, two"): ("repeated", "small/table-0, two"),
        ("Up", "Equal, two", "Once, two"): ("one seed", ""),
        ("Up", "Equal, two", "FedNew, two"): ("not run", "not in fedkeep yet"),
        ("Down", "Worse, two", "Better, two"): ("disagrees", "unexplained"),
        ("Down", "Worse, two", "Noisy, two"): ("within noise here", ""),
        ("Less", "Worse, two", "FedAvg, two"): ("disagrees", "[why](page.md)"),
        ("Less", "Worse, iid", "FedAvg, iid"): ("not run", ""),
        ("Easy", "FedAvg, Independent", "FedAvg, Two shards"): ("not run", ""),
    }
    assert found.claims[0].gap == pytest.approx(30)
    assert found.claims[0].seeds == 2
    (runs / "small").rename(runs / tmp_path.name)
    command = ["reproduce", str(tmp_path / "figure-1.toml"), "--ledger", "--runs", str(runs)]
    text = CliRunner().invoke(app, command, env={"COLUMNS": "80"}).stdout
    assert "1 agrees, 2 disagrees, 1 within noise here, 1 one seed, 3 not run, 1 repeated" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80
    assert "Up: 1 not run (not in fedkeep yet), 1 repeated" in text
    markdown = CliRunner().invoke(app, [*command, "--markdown"]).stdout
    assert "| Worse, two | Better, two | final % | 2 | -15.00 | disagrees: unexplained |" in markdown
    assert "- Easy: not run" in markdown
    data = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert [claim["verdict"] for claim in data["claims"]] == [verdict for verdict, _ in verdicts.values()]


def test_claims_are_shown_below_the_figures_table(runs: Path, tmp_path: Path) -> None:
    """Those of the selected columns and rows; not for changed settings, of which the paper says nothing."""
    explained = 'label = "Two shards"\nexplained.once = "a reason"'
    (tmp_path / "figure-1.toml").write_text(CLAIMS.replace('label = "Two shards"', explained))
    (runs / "small").rename(runs / tmp_path.name)

    def show(*options: str) -> str:
        command = ["reproduce", str(tmp_path / "figure-1.toml"), "--show", "--runs", str(runs), *options]
        return CliRunner().invoke(app, command, env={"COLUMNS": "80"}).stdout

    out = show()
    assert "makes: 1 agrees, 2 disagrees" in out
    assert "disagrees: unexplained" in out
    assert "| Worse, two | Better, two | final % | 2 | -15.00 | disagrees: unexplained |" in show("--markdown")
    some = json.loads(show("--methods", "equal,worse,once", "--column", "two", "--json"))["claims"]
    assert [(one["better"], one["than"], one["verdict"], one["reason"]) for one in some] == [
        ("Equal, two", "Worse, two", "agrees", ""),
        ("Equal, two", "Once, two", "one seed", "a reason"),
    ]
    assert "Claims" not in show("lr=0.3")
    assert json.loads(show("--quick", "--json"))["claims"] == []


@pytest.mark.parametrize(
    ("old", "new", "key", "value"),
    [
        ('of = "forgetting"', 'of = "best"', "claims[2].of", "best"),
        ('better = "equal"', 'better = "eqal"', "claims[0]", "eqal"),
        ('"noisy"], columns = ["two"]', '"noisy"], columns = ["too"]', "claims[1].columns", "too"),
        ('row = "fedavg"', 'row = "fedavgg"', "claims[3].row", "fedavgg"),
        ('than = ["two"]', 'than = ["three"]', "claims[3]", "three"),
        ('row = "fedavg"', 'row = "fedavg", columns = ["two"]', "claims[3].columns", ["two"]),
    ],
)
def test_a_claim_must_name_what_the_table_has(
    table: spec.Table, tmp_path: Path, old: str, new: str, key: str, value: object
) -> None:
    assert CLAIMS.count(old) == 1
    (tmp_path / "figure-1.toml").write_text(CLAIMS.replace(old, new))
    with raises(ConfigError, key=key, value=value):
        spec.read(tmp_path / "figure-1.toml", "small/figure-1")


def test_an_explanation_must_name_a_row(tmp_path: Path) -> None:
    (tmp_path / "table-0.toml").write_text(TABLE.replace("explained.worse", "explained.worst"))
    with raises(ConfigError, key="columns.two.explained", value="worst", valid=["worse"]):
        spec.read(tmp_path / "table-0.toml", "small/table-0")


def test_the_command_prints_the_ledger(runs: Path, tmp_path: Path) -> None:
    command = ["reproduce", str(tmp_path / "table-0.toml"), "--ledger", "--runs", str(runs)]
    folder = tmp_path.name
    (runs / "small").rename(runs / folder)  # the table is named after its folder
    text = CliRunner().invoke(app, command, env={"COLUMNS": "200"}).stdout
    assert "disagrees: [the page](page.md)" in text
    assert "two, not run: FedNew (not in fedkeep yet)" in text
    assert "iid, not run: all methods (no run on mnist yet)" in text
    data = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert data["totals"][folder]["agrees"] == 1
    assert next(one for one in data["figures"] if one["row"] == "once")["values"] == {"0": 70.0}
    markdown = CliRunner().invoke(app, [*command, "--markdown"]).stdout
    assert (
        "| two | Worse | final % | 60.00 | 45.00±7.07 | 2 | +10.00 | -10.00 | disagrees: [the page](page.md) |"
        in markdown
    )
    narrow = CliRunner().invoke(app, command, env={"COLUMNS": "80"}).stdout.splitlines()
    assert max(map(len, narrow)) <= 80
    assert narrow[0].split() == [folder], "one paper: no column of all papers"
    worse = next(line for line in narrow if "Worse" in line)
    assert worse.split() == ["Worse", "60.00", "45.00±7.07", "2", "+10.00", "-10.00", "disagrees:", "[the"]
    assert any(line.rstrip().endswith("within the paper's noise") for line in narrow)


def test_a_ledger_of_no_folder_is_an_error(tmp_path: Path, table: spec.Table) -> None:
    with raises(RunError, key="--runs", value=ANY):
        ledger.read([table], tmp_path / "nowhere")


def test_a_damaged_file_does_not_end_the_ledger(runs: Path, tmp_path: Path) -> None:
    for name in ("table-0", "table-1"):
        (tmp_path / f"{name}.toml").write_text(TABLE)
    tables = [spec.read(tmp_path / f"{name}.toml", f"small/{name}") for name in ("table-0", "table-1")]
    damaged = runs / "small" / "table-1.jsonl.gz"
    damaged.write_bytes(b"no gzip")
    found = ledger.read(tables, runs)
    assert [text for text in found.problems if str(damaged) in text] == found.problems
    assert len(found.problems) == 1
    assert {entry.verdict for entry in found.entries if entry.table.name == "small/table-1"} == {"not run"}
    assert ledger.totals(found.entries)["small"]["agrees"] == 1
    (runs / "small").rename(runs / tmp_path.name)
    done = CliRunner().invoke(app, ["reproduce", str(tmp_path / "table-1.toml"), "--ledger", "--runs", str(runs)])
    assert done.exit_code == 1
    assert "table-1.jsonl.gz is damaged" in done.stderr
    assert "not run" in done.stdout


# Figures


def test_a_table_is_drawn(runs: Path, table: spec.Table, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plotting needs the extra plots")
    columns, rows = table.select(None, None)
    plotted = table.model_copy(update={"plots": ["accuracy", "against", "local"]})
    job = Job(plotted, columns, rows, 2, runs)
    results, _ = job.load_existing()
    files, skipped = figures.draw(job, results, compare_columns(job, results), tmp_path / "plots")
    assert [file.name for file in files] == ["small-table-0-two-accuracy.png", "small-table-0-against-final.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)
    reasons = dict(text.split(": ", 1) for text in skipped)
    assert reasons["iid-accuracy"] == "no run has finished"
    assert "eval_local_every" in reasons["two-local"]


def test_against_shows_our_means_and_the_papers_figures(runs: Path, table: spec.Table) -> None:
    pytest.importorskip("matplotlib", reason="plotting needs the extra plots")
    columns, rows = table.select(None, None)
    job = Job(table, columns, rows, 2, runs)
    results, _ = job.load_existing()
    axes = figures.against(compare_columns(job, results), "final").axes[0]
    crosses = [line.get_ydata().tolist() for line in axes.lines if line.get_marker() == "x"]
    assert crosses == [[50.0, 90.0], [60.0], [60.0], [51.9], [60.0], [60.0]]
    means = [container.lines[0].get_ydata()[0] for container in axes.containers]
    assert means == pytest.approx([55, 60, 45, 75, 60, 70])  # FedAvg, better, worse, equal, noisy, once


def test_an_unknown_plot_is_refused(tmp_path: Path) -> None:
    (tmp_path / "table-0.toml").write_text(
        TABLE.replace('measures = ["final"]', 'measures = ["final"]\nplots = ["pie"]')
    )
    with raises(ConfigError, key="plots", value="pie", valid=["accuracy", "against"]):
        spec.read(tmp_path / "table-0.toml", "small/table-0")


def test_the_page_is_what_the_command_prints() -> None:
    page = (REPOSITORY / "docs" / "ledger.md").read_text()
    done = CliRunner().invoke(app, ["reproduce", "--ledger", "--markdown", "--runs", str(REPOSITORY / "results")])
    assert done.exit_code == 0, done.stderr
    assert page.partition("<!-- made by fedkeep reproduce --ledger -->\n\n")[2].rstrip() == done.stdout.rstrip()


def test_runs_that_recorded_less_than_others_are_named() -> None:
    """Table 4 has five seeds of the runs of table 6, which recorded the study in three of them."""
    [column] = json.loads(
        CliRunner().invoke(
            app, ["reproduce", "fedkeep/table-6", "--column", "s2", "--methods", "fedavg", "--show", "--json",
                  "--runs", str(REPOSITORY / "results")],
        ).stdout
    )["columns"]  # fmt: skip
    [row] = column["rows"]
    assert len(row["measures"]["forgetting"]["values"]) == 5
    assert len(row["measures"]["recoverable.share"]["values"]) == 3
    assert "3 of 5" in row["note"]
