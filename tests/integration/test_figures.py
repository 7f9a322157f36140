"""The papers' figures as files: valid experiments in every cell, and pictures from two rounds on digits."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedkeep.cli.app import app
from fedkeep.reproduce import spec

LAST = ("18", "19", "19-iid")
FIGURES = [
    *(f"fedgkd/figure-{number}" for number in ("2", "3", "4", "5")),
    *(f"fedka/figure-{number}" for number in ("1", "2", "3", "5", "6")),
    *(f"fedntd/figure-{number}" for number in ("2", "4", "6", "8", "10", "14", "15-beta", "15-tau", "17", *LAST)),
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
    args = [name, "--quick", "--methods", list(table.rows)[-1], "--seeds", "1", "train.rounds=2", "train.epochs=1"]
    done = CliRunner().invoke(app, ["reproduce", *args, "--runs", str(tmp_path), "--plots", str(tmp_path / "plots")])
    assert done.exit_code == 0, done.output
    drawn = {path.name for path in (tmp_path / "plots").iterdir()}
    start, column = name.replace("/", "-"), table.quick.column
    expected = {f"{start}-{column}-{plot}.png" for plot in table.plots if plot != "against"}
    expected |= {f"{start}-against-{measure}.png" for measure in table.measures if "against" in table.plots}
    assert drawn == expected
