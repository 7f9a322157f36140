"""The commands `fedkeep export` and `fedkeep plot`."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from fedkeep._util.json import to_json
from fedkeep._util.text import printable
from fedkeep.cli.options import AsJson, Runs, require_writable_folder
from fedkeep.errors import FedkeepError, RunError


def export(
    folders: Runs,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="A .csv file, or .parquet (needs the extra data). Default: print CSV."),
    ] = None,
    wide: Annotated[
        bool,
        typer.Option("--wide", help="One row per round, one column per measure, without single clients and sites."),
    ] = False,
    card: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Instead of a table, write a model card and the final weights into FOLDER.",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="With --card: the seed whose weights are written (default: the smallest)."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Export every number of every round as one table: run, method, seed, round, measure, class, client, value, site.

    A run that cannot be read is left out with a warning. Exits with 1 if that run was named itself, and with 2 if no
    run can be read. With --card, write the model of one experiment for others, as the Hugging Face Hub expects it.

    Example: fedkeep export runs/ -o figures.csv
    Example: fedkeep export runs/digits-seed=* --card my-model
    """
    if card is not None:
        _export_card(folders, card, seed, {"--output": output, "--wide": wide}, as_json)
        return
    if seed is not None:
        raise FedkeepError("--seed needs --card", key="--seed", value=seed)
    from fedkeep.analysis.export import COLUMNS, long_table, require_table_file, wide_table, write_csv, write_table
    from fedkeep.runs.reading import find_runs

    if output is not None:
        require_table_file(output)
    paths = find_runs(folders)
    left_out: dict[Path, str] = {}
    columns, rows = wide_table(paths, left_out) if wide else (list(COLUMNS), long_table(paths, left_out))
    rows = _started(rows)
    if len(left_out) == len(paths):
        raise RunError(f"nothing can be exported: {next(iter(left_out.values()))}", key="run", value=str(paths[0]))
    if output is None and as_json:
        print(to_json(list(rows)))
    elif output is None:
        write_csv(sys.stdout, columns, rows)
    else:
        number = write_table(output, columns, rows)
        exported = len(paths) - len(left_out)
        summary = {"file": str(output), "runs": exported, "rows": number, "columns": columns}
        summary["left_out"] = [{"run": printable(path), "reason": reason} for path, reason in left_out.items()]
        line = f"{printable(output)}: {number} rows from {exported} runs"
        print(to_json(summary, indent=2) if as_json else line)
    if any(path in left_out for path in folders):
        raise typer.Exit(1)


def _export_card(
    folders: list[Path], card: Path, seed: int | None, others: Mapping[str, object], as_json: bool
) -> None:
    from fedkeep.analysis.card import CARD, write_card
    from fedkeep.analysis.card_inputs import INPUTS, WEIGHTS

    for option, value in others.items():
        if value:
            raise FedkeepError(f"{option} cannot be used with --card", key=option, value=str(value))
    require_writable_folder(card, key="--card")
    written = write_card(folders, card, seed)
    files = [card / CARD, card / WEIGHTS, card / INPUTS]
    if as_json:
        summary = {"name": written.name, "seeds": sorted(written.group.seeds), "seed_of_weights": written.run.seed}
        print(to_json({**summary, "files": [str(file) for file in files]}, indent=2))
    else:
        for file in files:
            print(printable(file))


def _started(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Return the same rows, with the first one computed: if no run can be read, that is known then."""
    rows = iter(rows)
    first = list(itertools.islice(rows, 1))
    return itertools.chain(first, rows)


def plot(
    folders: Runs,
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder for the plots.")] = Path("plots"),
    formats: Annotated[str, typer.Option("--format", help="pdf, png, svg; separated by commas.")] = "pdf,png",
    only: Annotated[
        str,
        typer.Option(
            help="Some of accuracy, classes, round_forgetting, where, split, local, anatomy, consistency (the default: "
            "all of these), or other plots that docs/reproduce.md names."
        ),
    ] = "",
    methods: Annotated[
        str,
        typer.Option(help="Only these methods or labels, in this order, comma-separated. Default: all, by rank."),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Plot runs (extra plots): accuracy, class accuracies, forgetting, split, local models, and more.

    Example: fedkeep plot runs/ -o figures --format pdf
    """
    from fedkeep.plots.runs import plot as plot_runs

    files = plot_runs(folders, output, formats, _parse_names(only), _parse_names(methods))
    if as_json:
        print(to_json([str(file) for file in files], indent=2))
    else:
        for file in files:
            print(printable(file))


def _parse_names(text: str) -> list[str]:
    """Split names at commas."""
    return [name.strip() for name in text.split(",") if name.strip()]
