"""The command `fedkeep reproduce`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedkeep._util.json import to_json
from fedkeep.cli.options import AsJson, name_and_overrides
from fedkeep.errors import FedkeepError


def reproduce(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TABLE] [key=value]...", help="A table (or a file of yours), and overrides."),
    ] = None,
    column: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this column; may be repeated, or with commas.")
    ] = None,
    methods: Annotated[str | None, typer.Option(metavar="A,B", help="Only these rows, with commas.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="How often, with seeds 0, 1, ... (3; quick: 1)")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One column on digits: about a minute on a CPU.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Print what there is; run nothing.")] = False,
    runs: Annotated[Path, typer.Option(help="Where run folders are made.")] = Path("runs/reproduce"),
    jobs: Annotated[int, typer.Option(min=1, help="How many runs at a time, each in a process of its own.")] = 1,
    as_json: AsJson = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown tables.")] = False,
) -> None:
    """Run a paper's table and print it beside the paper's own figures; without TABLE, list those there are.

    Runs that are there already are not made again, and an interrupted one is gone on with: the same command again.
    Where a data set is not at hand, its columns are named with how to get it.

    Example: fedkeep reproduce fedntd/table-1 --column cifar10-s2 --methods fedavg,fedntd --seeds 1
    """
    from fedkeep.cli import paper_tables
    from fedkeep.cli.progress import ProgressBar
    from fedkeep.reproduce import against_paper, spec
    from fedkeep.reproduce.cells import Job

    if as_json and markdown:
        raise FedkeepError("--json and --markdown are two forms of the same: choose one")
    table, overrides = _words(words)
    if table is None:
        if as_json:
            print(to_json([found.model_dump(mode="json") for found in spec.all_tables()], indent=2))
        else:
            paper_tables.listing(Console(), spec.all_tables())
        return
    found = spec.load(table)
    wanted = _names(column)
    if quick and wanted not in (None, [found.quick.column]):
        raise FedkeepError(f"--quick has one column, {found.quick.column}: leave --column out")
    columns, rows = found.chosen([found.quick.column] if quick else wanted, _names([methods] if methods else None))
    job = Job(found, columns, rows, seeds or (1 if quick else 3), runs, quick, overrides)
    if show and seeds is None:
        job = dataclasses.replace(job, seeds=max(job.seeds, job.seeds_found()))
    results, todo = job.look()
    if todo and not show:
        with ProgressBar(Console(stderr=True), sum(cell.experiment.train.rounds for cell in todo)) as progress:
            job.run(results, todo, jobs, progress)
    sheets = against_paper.sheets(job, results)
    if as_json:
        told = {"table": found.name, "title": found.title, "paper": found.paper, "notes": found.notes}
        how = {"quick": quick, "overrides": overrides, "folder": str(job.folder(rows[0])), "seeds": job.seeds}
        print(to_json({**told, **how, "columns": [against_paper.as_data(sheet) for sheet in sheets]}, indent=2))
    elif markdown:
        print(paper_tables.as_markdown(job, sheets))
    else:
        paper_tables.on_terminal(Console(), job, sheets, show)
    if results.failed:
        raise typer.Exit(1)
    if not show and not any(sheet.ran for sheet in sheets):
        raise typer.Exit(2)


def _names(given: list[str] | None) -> list[str] | None:
    """Read names that are repeated, or written with commas."""
    return None if given is None else [name.strip() for text in given for name in text.split(",")]


def _words(words: list[str] | None) -> tuple[str | None, list[str]]:
    """Tell the table from the overrides."""
    table, overrides = name_and_overrides(words, "table")
    if overrides and table is None:
        raise FedkeepError(f"{overrides[0]!r} without a table: fedkeep reproduce lists those there are")
    for text in overrides:
        if text.partition("=")[0].strip() in ("seed", "method", "method.name"):
            raise FedkeepError(f"{text!r}: seeds are chosen by --seeds, methods by --methods")
    return table, overrides
