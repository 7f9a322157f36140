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
        typer.Option("--output", "-o", help="A .csv file, or .parquet (needs the extra data). Default: print CSV."),
    ] = None,
    wide: Annotated[
        bool, typer.Option("--wide", help="One row per round and one column per measure, without single clients.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Export every number of every round as one table: run, method, seed, round, measure, class, client, value.

    Example: fedkeep export runs/ -o figures.csv
    """
    from fedkeep.analysis.export import COLUMNS, long_table, require_table_file, wide_table, write_csv, write_table

    if output is not None:
        require_table_file(output)
    paths = find_runs(folders)
    columns, rows = wide_table(paths) if wide else (list(COLUMNS), long_table(paths))
    if output is None and as_json:
        print(to_json(list(rows)))
    elif output is None:
        write_csv(sys.stdout, columns, rows)
    else:
        number = write_table(output, columns, rows)
        summary = {"file": str(output), "runs": len(paths), "rows": number, "columns": columns}
        print(to_json(summary, indent=2) if as_json else f"{output}: {number} rows from {len(paths)} runs")


def plot(
    folders: Runs,
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder for the plots.")] = Path("plots"),
    formats: Annotated[str, typer.Option("--format", help="pdf, png, svg; separated by commas.")] = "pdf,png",
    only: Annotated[
        str, typer.Option(help="Some of accuracy, classes, round_forgetting, where, split; separated by commas.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Plot runs (extra plots): accuracy, class accuracies, round forgetting, phase of forgetting, split.

    Example: fedkeep plot runs/ -o figures --format pdf
    """
    from fedkeep.plots.runs import plot as plot_runs

    files = plot_runs(folders, output, formats, [name.strip() for name in only.split(",") if name.strip()])
    if as_json:
        print(to_json([str(file) for file in files], indent=2))
    else:
        for file in files:
            print(file)
