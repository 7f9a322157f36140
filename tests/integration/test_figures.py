"""The papers' figures as files: valid experiments in every cell, and pictures from two rounds on digits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fedkeep.cli.app import app
from fedkeep.data import from_arrays, partition
from fedkeep.plots import features
from fedkeep.plots.style import plot_style
from fedkeep.reproduce import spec

LAST = ("18", "19", "19-iid")
FIGURES = [
    *(f"fedgkd/figure-{number}" for number in ("2", "3", "4", "5")),
    *(f"fedka/figure-{number}" for number in ("1", "2", "3", "5", "6")),
    "fedkeep/figure-1",
    *(f"fedntd/figure-{number}" for number in ("2", "4", "6", "8", "10", "12", "14", "15-beta", "15-tau", "17", *LAST)),
    *(f"fedssd/figure-{number}" for number in ("2", "4", "7", "8", "9")),
    *(f"flashback/figure-{number}" for number in ("1", "2", "5", "6", "8", "9", "12", "13")),
]


def test_the_figures_that_are_available() -> None:
    assert [name for name in spec.names() if "/figure-" in name] == FIGURES


@pytest.mark.parametrize("name", FIGURES)
def test_every_cell_is_a_valid_experiment(name: str) -> None:
    table = spec.load(name)
    assert table.plots
    for row in table.rows:
        for column in table.columns:
            assert table.experiment(column, row, seed=1).train.rounds >= 20
        assert table.experiment(table.quick.column, row, seed=0, quick=True).data["source"] in ("digits", "squares")


@pytest.mark.parametrize("name", FIGURES)
def test_two_rounds_end_in_pictures(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plotting needs the extra plots")
    table = spec.load(name)
    row = list(table.rows)[-1]
    reductions = table.experiment(table.quick.column, row, 0, quick=True).train.reductions or ()
    rounds = max([2, *(one.round for one in reductions)])
    args = [name, "--quick", "--methods", row, "--seeds", "1", f"train.rounds={rounds}", "train.epochs=1"]
    done = CliRunner().invoke(app, ["reproduce", *args, "--runs", str(tmp_path), "--plots", str(tmp_path / "plots")])
    assert done.exit_code == 0, done.output
    drawn = {path.name for path in (tmp_path / "plots").iterdir()}
    start, column = name.replace("/", "-"), table.quick.column
    expected = {f"{start}-{column}-{plot}.png" for plot in table.plots if plot != "against"}
    expected |= {f"{start}-against-{measure}.png" for measure in table.measures if "against" in table.plots}
    assert drawn == expected


def test_a_tsne_picture_can_be_read() -> None:
    """The quick pictures have enough points; all have a legend of classes, and few points are drawn larger."""
    pytest.importorskip("matplotlib", reason="plotting needs the extra plots")
    tables = [spec.load(name) for name in FIGURES]
    samples = [one.options["samples"] for table in tables if (one := table.recorded(quick=True)) and "tsne" in one.what]
    assert len(samples) == 3
    assert min(samples) >= 80
    rng = np.random.default_rng(0)
    for number in (8, 400):
        y = [0, 1, 2, 3] * (number // 4)
        points = rng.standard_normal((3, number, 2)).tolist()
        result = {"models": ["before", "client 5", "after"], "y": y, "points": points}
        with plot_style():
            fig = features.by_class_and_model([("FedAvg", result), ("FedNTD", result)])
        left, right = fig.axes[:2]
        assert [text.get_text() for text in fig.legends[0].get_texts()] == ["0", "1", "2", "3"]
        names = [text.get_text() for text in right.get_legend().get_texts()]
        assert names == ["global before", "client 5", "global after"]
        drawn = np.concatenate(points)
        for text, size in zip(left.texts, (one.get_sizes()[0] for one in left.collections), strict=True):
            assert np.abs(drawn - text.xy).sum(1).min() == 0, "the number of a class is at one of its points"
            assert size == (16 if number == 8 else 4)


def test_pictures_of_no_runs_end_with_code_2(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plotting needs the extra plots")
    (tmp_path / "runs").mkdir()
    args = ["reproduce", "fedntd/figure-10", "--show", "--runs", str(tmp_path / "runs")]
    done = CliRunner().invoke(app, [*args, "--plots", str(tmp_path / "plots")])
    assert done.exit_code == 2, done.output
    assert f"nothing was drawn into {tmp_path / 'plots'}" in done.output
    assert not (tmp_path / "plots").exists()
    assert CliRunner().invoke(app, args).exit_code == 0, "without --plots, a figure is shown as a table"


def test_fedkas_figure_3_reduces_a_non_dominant_and_a_dominant_class() -> None:
    """CIFAR-10 without one example per class: the numbers of a split depend on the sizes of the classes alone."""
    table, y = spec.load("fedka/figure-3"), np.arange(10 * 4999) % 10
    cells = {row: table.experiment("cifar10", row, seed=2) for row in ("non-dominant", "dominant")}
    for cell, first, share in zip(cells.values(), (14, 794), (0.0026, 0.146), strict=True):
        split = {key: value for key, value in cell.split.items() if key != "kind"}
        counts = partition.dirichlet(y, **split).label_counts(y)[0]
        numbers = [first, *(one.keep for one in cell.train.reductions)]
        assert counts[cell.train.reductions[0].class_id] == first
        assert first / counts.sum() == pytest.approx(share, rel=0.01)
        assert numbers == sorted(numbers, reverse=True)
        assert {(one.client, one.class_id) for one in cell.train.reductions} == {(0, 3 if first == 14 else 7)}


def test_flashbacks_public_sets_have_the_papers_sizes() -> None:
    table, y = spec.load("flashback/figure-12"), np.arange(50_000) % 10
    for column, size in {"public-450": 450, "public-1125": 1125, "unbalanced-1283": 1283, "public-9000": 9000}.items():
        options = table.experiment(column, "public", seed=0).data
        data = from_arrays(y[:, None], y, y[:10, None], y[:10])
        data = data.with_public(options["public"], options["validation"], alpha=options.get("public_alpha"))
        assert len(data.only_public().y_train) == size
        counts = np.bincount(data.public.y, minlength=10)
        assert (counts.max() > 2 * size / 10) == (column == "unbalanced-1283")
