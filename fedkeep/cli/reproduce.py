"""The command `fedkeep reproduce`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fedkeep._util.json import to_json
from fedkeep.cli.options import AsJson, JobsOption, name_and_overrides
from fedkeep.cli.signals import hint
from fedkeep.errors import FedkeepError

if TYPE_CHECKING:
    from fedkeep.reproduce.against_paper import ColumnComparison
    from fedkeep.reproduce.cells import Job, Results
    from fedkeep.reproduce.spec import Table


def reproduce(
    args: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TABLE|PAPER] [key=value]...",
            help="A table's name or TOML file, and overrides; or a paper to list.",
        ),
    ] = None,
    column: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only these columns, comma-separated; can be repeated.")
    ] = None,
    methods: Annotated[str | None, typer.Option(metavar="A,B", help="Only these methods, comma-separated.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Number of seeds (default: 3, or the table's)")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Run one column on digits: about a minute on a CPU.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Print existing results; run nothing.")] = False,
    ledger: Annotated[
        bool,
        typer.Option("--ledger", help="Print every figure of all tables, or of some, with a verdict; run nothing."),
    ] = False,
    generated: Annotated[
        bool,
        typer.Option(
            "--generated",
            help="Try two rounds on random data of the data sets' size; print time and memory, keep nothing.",
        ),
    ] = False,
    examples: Annotated[
        int | None, typer.Option(min=1, help="With --generated: fewer training examples than the data set has.")
    ] = None,
    runs: Annotated[Path, typer.Option(help="Folder of the run folders.")] = Path("runs/reproduce"),
    keep: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Also write the ended runs into small files in this folder.")
    ] = None,
    plots: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Draw the runs into this folder (figures: also without it, into plots/; extra plots).",
        ),
    ] = None,
    jobs: JobsOption = "auto",
    as_json: AsJson = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown tables.")] = False,
) -> None:
    """Run a paper's table and print it next to the paper's figures; without TABLE, list the tables.

    Finished runs are not repeated; to resume an interrupted table, repeat the command.
    For a data set that is not available, the output shows how to get it.

    Example: fedkeep reproduce fedntd/table-1 --column cifar10-s2 --methods fedavg,fedntd --seeds 1
    """
    from fedkeep.cli import claims, paper_tables
    from fedkeep.cli.progress import ProgressBar
    from fedkeep.reproduce import against_paper, spec
    from fedkeep.reproduce.cells import Job
    from fedkeep.reproduce.ledger import claim_entries

    if as_json and markdown:
        raise FedkeepError("--json and --markdown exclude each other", key="--json", valid=("--json", "--markdown"))
    name, overrides = _table_and_overrides(args)
    running = {"--seeds": seeds, "--quick": quick, "--show": show, "--keep": keep, "--plots": plots}
    choosing = {"--column": column, "--methods": methods, "an override": overrides, "--generated": generated}
    paper = name is not None and name.lower() in spec.papers()
    if ledger:
        _refuse("--ledger", {**running, **choosing, "--examples": examples})
        chosen = _chosen_tables(name)
        table = chosen[0]
        if name and not paper and not table.claims and not any(column.paper for column in table.columns.values()):
            message = f"{name} has no printed figures and no claims, so the ledger has nothing of it"
            raise FedkeepError(message, key="table", value=name)
        _print_ledger(chosen, runs, as_json, markdown)
        return
    if name is None or paper:
        given = {**running, **choosing, "--examples": examples, "--markdown": markdown}
        if wrong := [option for option, value in given.items() if value]:
            raise FedkeepError(f"{wrong[0]} needs a table; fedkeep reproduce lists the available ones", key="table")
        _print_listing(name, runs, as_json)
        return
    if generated:
        _refuse("--generated", {**running, "--markdown": markdown})
        _try_generated(
            name, _parse_names(column), _parse_names([methods] if methods else None), overrides, examples, as_json
        )
        return
    if examples is not None:
        raise FedkeepError("--examples needs --generated", key="--examples", value=examples)
    table = spec.load(name)
    wanted_columns = _parse_names(column)
    if quick and wanted_columns not in (None, [table.quick.column]):
        raise FedkeepError(
            f"--quick has only the column {table.quick.column}: omit --column",
            key="--column",
            value=wanted_columns,
            valid=[table.quick.column],
        )
    wanted_rows = _parse_names([methods]) if methods else None
    columns, rows = table.select([table.quick.column] if quick else wanted_columns, wanted_rows)
    job = Job(table, columns, rows, seeds or (1 if quick else table.seeds), runs, quick, overrides)
    if show and seeds is None:
        job = job.with_all_seeds()
    results, todo = job.load_existing()
    if todo and not show:
        rounds = sum(cell.experiment.train.rounds for cell in todo)
        with hint("repeat the command to resume"), ProgressBar(Console(stderr=True), rounds) as progress:
            job.run(results, todo, jobs, progress)
    if keep is not None:
        for file in job.keep(keep):
            Console(stderr=True).print(f"kept in {file}", highlight=False, markup=False, soft_wrap=True)
    comparisons = against_paper.compare_columns(job, results)
    judged = [] if paper_tables.disclaimers(job) else claim_entries(table, comparisons)
    drawing = plots is not None or bool(table.plots and not show)
    drawn = _draw(job, results, comparisons, plots or Path("plots")) if drawing else []
    if as_json:
        about = {"table": table.name, "title": table.title, "paper": table.paper, "notes": table.notes}
        options = {"quick": quick, "overrides": overrides, "folder": str(job.folder(rows[0])), "seeds": job.seeds}
        data = [against_paper.as_data(comparison) for comparison in comparisons]
        print(to_json({**about, **options, "columns": data, "claims": claims.as_data(judged)}, indent=2))
    elif markdown:
        print(paper_tables.format_markdown(job, comparisons))
        if judged:
            print("\n" + claims.format_claims_of_figure(judged))
    else:
        paper_tables.print_table(Console(), job, comparisons, show)
        claims.print_claims_of_figure(Console(), judged)
    if results.failed:
        raise typer.Exit(1)
    if not show and not any(comparison.has_results for comparison in comparisons):
        raise typer.Exit(2)
    if drawing and not drawn:
        raise typer.Exit(1 if todo and not show else 2)


def _chosen_tables(name: str | None) -> list[Table]:
    """Return the table of this name, those of the paper, or all."""
    from fedkeep.reproduce import spec

    if name is None:
        return list(spec.all_tables())
    return spec.of_paper(name) or [spec.load(name)]


def _print_listing(paper: str | None, runs: Path, as_json: bool) -> None:
    """List all tables in a line each, or those of a paper in full."""
    from fedkeep.cli import table_listing

    tables = _chosen_tables(paper)
    if as_json:
        print(to_json([table.model_dump(mode="json") for table in tables], indent=2))
    elif paper is None:
        table_listing.print_overview(Console(), tables, runs)
    else:
        table_listing.print_details(Console(), tables)


def _refuse(what: str, options: dict[str, object]) -> None:
    """Raise if one of these options was given: it would have no effect."""
    for option, value in options.items():
        if value:
            raise FedkeepError(f"{option} cannot be used with {what}", key=option, value=str(value))


def _try_generated(
    name: str,
    wanted_columns: list[str] | None,
    wanted_rows: list[str] | None,
    overrides: list[str],
    examples: int | None,
    as_json: bool,
) -> None:
    """Try cells on generated data; without names, those of the columns whose data is not available."""
    from fedkeep.cli import trials as output
    from fedkeep.cli.progress import ProgressBar
    from fedkeep.reproduce import spec, trials

    table = spec.load(name)
    columns, rows = table.select(wanted_columns or trials.columns_without_data(table), wanted_rows)
    if not columns:
        raise FedkeepError(
            f"the data of all columns of {table.name} is available: choose some with --column", key="--column"
        )
    rows = [row for row in rows if table.rows[row].absent is None]
    rounds = trials.ROUNDS * len(columns) * len(rows)
    with ProgressBar(Console(stderr=True), rounds) as progress:
        found = []
        for trial in trials.try_cells(table, columns, rows, overrides, examples, progress):
            progress.show(output.format_line(trial))
            found.append(trial)
    if as_json:
        print(to_json(output.as_data(table, found), indent=2))
    else:
        output.print_trials(Console(), table, found)
    if any(trial.failed is not None for trial in found):
        raise typer.Exit(1)


def _draw(job: Job, results: Results, comparisons: list[ColumnComparison], folder: Path) -> list[Path]:
    """Draw the runs, print the files or why there are none, and return the files."""
    from fedkeep.reproduce.figures import draw

    console = Console(stderr=True)
    files, skipped = draw(job, results, comparisons, folder)
    texts = [*map(str, files), *(f"not drawn: {reason}" for reason in skipped)]
    texts += [] if files else [f"fedkeep: nothing was drawn into {folder}"]
    for text in texts:
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    return files


def _print_ledger(tables: list[Table], runs: Path, as_json: bool, markdown: bool) -> None:
    from fedkeep.cli import claims
    from fedkeep.cli import ledger as output
    from fedkeep.reproduce.ledger import read

    found = read(tables, runs)
    without_claims = [table.name for table in tables if table.plots and not table.claims]
    if as_json:
        print(to_json({**output.as_data(found.entries), "claims": claims.as_data(found.claims)}, indent=2))
    elif markdown:
        print(output.format_markdown(found.entries))
        print("\n" + claims.format_markdown(found.claims, without_claims))
    else:
        output.print_ledger(Console(), found.entries)
        claims.print_claims(Console(), found.claims, without_claims)
    for text in found.problems:
        Console(stderr=True).print(f"fedkeep: {text}", highlight=False, markup=False, soft_wrap=True)
    if found.problems:
        raise typer.Exit(1)


def _parse_names(values: list[str] | None) -> list[str] | None:
    """Split comma-separated names of an option that can be repeated."""
    return None if values is None else [name.strip() for text in values for name in text.split(",")]


def _table_and_overrides(args: list[str] | None) -> tuple[str | None, list[str]]:
    """Split the arguments into the table's name and the overrides."""
    table, overrides = name_and_overrides(args, "table")
    if overrides and table is None:
        raise FedkeepError(
            f"{overrides[0]!r} needs a table; fedkeep reproduce lists the available ones",
            key="table",
            value=overrides[0],
        )
    for text in overrides:
        key = text.partition("=")[0].strip()
        if key in ("seed", "method", "method.name"):
            option = "--seeds" if key == "seed" else "--methods"
            raise FedkeepError(f"{text!r} cannot be overridden here: use {option}", key=key, value=text, valid=[option])
    return (table.rstrip("/") or table) if table else table, overrides  # fedntd/ is fedntd
