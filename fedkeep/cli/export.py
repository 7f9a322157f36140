"""The commands `fedkeep export` and `fedkeep plot`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from fedkeep._util.json import to_json
from fedkeep.cli.options import AsJson, Runs
from fedkeep.runs.reading import find_runs


def export(
    folders: Runs,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="A .csv file, or .parquet (extra data); without it, CSV is printed."),
    ] = None,
    one_row_a_round: Annotated[
        bool, typer.Option("--wide", help="A row per round and a column per measure, clients left out.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write every per-round figure of runs into one table: run, method, seed, round, measure, class, client, value.

    Example: fedkeep export runs/ -o figures.csv
    """
    from fedkeep.analysis.export import COLUMNS, long_table, require_table_file, wide_table, write_csv, write_table

    if output is not None:
        require_table_file(output)
    paths = find_runs(folders)
    columns, rows = wide_table(paths) if one_row_a_round else (list(COLUMNS), long_table(paths))
    if output is None and as_json:
        print(to_json(list(rows)))
    elif output is None:
        write_csv(sys.stdout, columns, rows)
    else:
        number = write_table(output, columns, rows)
        found = {"file": str(output), "runs": len(paths), "rows": number, "columns": columns}
        print(to_json(found, indent=2) if as_json else f"{output}: {number} rows of {len(paths)} runs")


def plot(
    folders: Runs,
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to draw into.")] = Path("plots"),
    formats: Annotated[str, typer.Option("--format", help="pdf, png, svg: one or several, with commas.")] = "pdf,png",
    only: Annotated[
        str, typer.Option(help="Some of accuracy, classes, round_forgetting, where, split, with commas.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Draw runs for print (extra plots): accuracy, classes over rounds, round forgetting, where it happens, the split.

    Example: fedkeep plot runs/ -o figures --format pdf
    """
    from fedkeep.plots.runs import plot as plot_runs

    files = plot_runs(folders, output, formats, [name.strip() for name in only.split(",") if name.strip()])
    if as_json:
        print(to_json([str(file) for file in files], indent=2))
    else:
        for file in files:
            print(file)
