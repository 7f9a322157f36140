"""Names of classes and clients: shown wherever a run is, whatever they contain."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.cells import cell_len
from support.runs import group_runs
from typer.testing import CliRunner

import fedkeep as fk
from fedkeep.analysis.export import long_table
from fedkeep.analysis.sentences import nothing_learned
from fedkeep.cli import heatmap
from fedkeep.cli.app import app
from fedkeep.cli.progress import RunProgress
from fedkeep.instruments.summary import sentences
from fedkeep.runs.reading import _class_names

CLASSES = ("benign", "\x1b[31mred\nalert " + "x" * 40, "良性")
HOSPITALS = ("Aachen", "Bonn $n_{x}$", "Köln")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose model predicts class 0 for every example."""
    rng = np.random.default_rng(0)
    y = np.arange(90) % 3
    y[:30] = 0
    x = torch.from_numpy(rng.normal(size=(90, 2)).astype("float32"))
    ids = np.array(HOSPITALS, dtype=object)[np.arange(90) // 2 % 3]
    data = fk.data.from_arrays(x, y, x[:30], y[:30] * 0 + np.arange(30) % 3, ids=ids, class_names=CLASSES)
    model = torch.nn.Linear(2, 3)
    torch.nn.init.zeros_(model.weight)
    with torch.no_grad():
        model.bias.copy_(torch.tensor([50.0, 0.0, 0.0]))
    path = tmp_path_factory.mktemp("runs") / "named"
    every = fk.instruments.Every(1, "confusion,surface", fk.instruments.Options(steps=3))
    fk.simulate(
        "fedavg", model, data, fk.data.partition.by_id(data.ids), rounds=2, participation=1.0, lr=1e-6,
        eval_local_every=1, run_dir=path, callbacks=[every],
    )  # fmt: skip
    return path


def test_heat_maps_have_the_names_on_one_line_each(folder: Path) -> None:
    drawn = heatmap.heat_map("named", fk.load_run(folder)).plain
    _, *rows = drawn.splitlines()
    assert len(rows) == 3
    assert len({cell_len(row) for row in rows}) == 1
    assert rows[0].startswith("  benign")
    assert "良性" in rows[2]
    assert "\x1b" not in drawn
    counts = heatmap.label_count_map(np.ones((4, 3), dtype=int), 80, CLASSES).plain.splitlines()
    assert counts[0].startswith("benign")
    run = RunProgress()
    run.class_names = CLASSES
    run.update({"round": 1, "confusion": np.eye(3).tolist()})
    assert "benign" in run.strip().plain
    assert "\x1b" not in run.strip().plain


def test_names_that_do_not_fit_the_records_are_not_used(folder: Path) -> None:
    history = fk.load_run(folder)
    for names, used in ((["a"], None), (["a", "b", "c"], ("a", "b", "c")), (["a", 1, "c"], None), ("abc", None)):
        assert _class_names({}, {"made_by": {"class_names": names}}, history.records) == used


def test_an_export_has_the_names(folder: Path) -> None:
    rows = list(long_table([folder]))
    assert {(r["class"], r["class_name"]) for r in rows} == {(None, None), *enumerate(CLASSES)}
    assert {(r["client"], r["client_name"]) for r in rows} == {(None, None), *enumerate(HOSPITALS)}


def test_sentences_have_the_names(folder: Path) -> None:
    groups = group_runs([folder])
    assert "all predict benign." in nothing_learned(groups)
    history = groups[0].runs[0].history
    analysis = {"round": 3, "clients": [0, 1], "confusion": history.instruments[-1]["confusion"]}
    start, confusion = sentences(analysis, history)
    assert "Cohort: Aachen, Bonn $n_{x}$." in start
    assert confusion.endswith("in the model of Aachen.")
    assert sentences(analysis)[1].endswith("in the model of client 0.")


def test_plots_have_the_names(folder: Path) -> None:
    pytest.importorskip("matplotlib", reason="plotting needs the extra plots")
    from fedkeep.plots import runs, style

    groups = group_runs([folder])

    def texts(name: str) -> str:
        with style.plot_style():
            fig = runs.ALL_PLOTS[name](groups)
            fig.canvas.draw()
        axes = [label.get_text() for a in fig.axes for label in (*a.get_xticklabels(), *a.get_yticklabels(), a.title)]
        titles = [a.get_title(loc="left") for a in fig.axes]
        return "|".join([*axes, *titles])

    for name in ("classes", "where", "split", "anatomy", "client", "visits", "degree", "confusion"):
        assert "benign" in texts(name), name
        assert "\x1b" not in texts(name)
    for name in ("split", "anatomy", "client", "visits", "degree", "confusion", "surfaces"):
        assert any(hospital in texts(name) for hospital in HOSPITALS), name


def test_partition_shows_the_names(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="tables need the extra data")
    rows = "".join(f"{i / 7},{'mf'[i % 2]},{('Bonn', 'Ulm')[i % 2]},{('ill', 'well')[i % 3 % 2]}\n" for i in range(60))
    (tmp_path / "a.csv").write_text(f"age,sex,site,state\n{rows}")
    args = [f"data={tmp_path / 'a.csv'}", "data.y=state", "data.ids=site", "split=by_id"]
    done = CliRunner().invoke(app, ["partition", *args, "-o", str(tmp_path / "a.svg")])
    assert "the examples are age, sex, the classes state, their owners site" in done.stderr
    shown = done.stdout
    assert shown.startswith("ill ")
    assert "0 Bonn, 1 Ulm" in shown
    picture = (tmp_path / "a.svg").read_text().replace("&#160;", " ")
    assert "ill" in picture
    assert "0 Bonn, 1 Ulm" in picture
    table = json.loads(CliRunner().invoke(app, ["partition", *args, "--json"]).stdout)
    assert (table["class_names"], table["client_names"]) == (["ill", "well"], ["Bonn", "Ulm"])
    counts = np.array(table["label_counts"])
    assert table["heterogeneity"] == pytest.approx(fk.data.partition.heterogeneity(counts))


def test_owners_that_are_numbers_are_named_as_ids() -> None:
    clients = fk.data.partition.by_id([17, 4, 17])
    assert [clients.name(k) for k in range(2)] == ["id 4", "id 17"]
