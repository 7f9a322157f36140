"""Output of `fedkeep reproduce` without a table: a line per table, or those of one paper with their columns."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from fedkeep.data.sources import named
from fedkeep.reproduce.cells import Job
from fedkeep.reproduce.spec import Table


@dataclass(frozen=True)
class Size:
    """How many runs a table has with the default number of seeds, how many of them exist, and their rounds."""

    runs: int
    made: int
    rounds: tuple[int, ...]

    @classmethod
    def of(cls, table: Table, folder: Path) -> Size:
        """Return the size of a table, with the ended runs in a folder, more seeds included."""
        columns, rows = table.select(None, None)
        job = Job(table, columns, [row for row in rows if table.rows[row].absent is None], 1, folder)
        made, seeds = 0, job.seeds_on_disk()
        if seeds:
            results, _ = job.with_all_seeds().load_existing()
            made = sum(len(cells.histories) + len(cells.diverged) for cells in results.cells.values())
        rounds = {table.changes(column, table.baseline)["train"]["rounds"] for column in columns}
        return cls(len(columns) * len(job.rows) * max(table.seeds, seeds), made, tuple(sorted(rounds)))


def print_overview(console: Console, tables: Sequence[Table], runs: Path) -> None:
    """Print one line per table or figure, by paper. On a terminal, a line that is too long is cut."""
    sizes = {table.name: Size.of(table, runs) for table in tables}
    shown = {table.name: _columns(table, sizes[table.name]) for table in tables}
    widths = [max(map(len, column)) for column in zip(*shown.values(), ("table", "runs", "rounds", ""), strict=True)]

    def line(cells: Sequence[str], style: str = "") -> Text:
        name, numbers, title = cells[0], cells[1:3], cells[3]
        padded = [number.rjust(width) for number, width in zip(numbers, widths[1:3], strict=True)]
        return Text("  ".join([f"  {name.ljust(widths[0])}", *padded, title]), style=style)

    _print_line(console, line(("table", "runs", "rounds", "what it shows"), "dim"))
    for paper, of_paper in itertools.groupby(tables, key=lambda table: table.paper_name):
        listed = list(of_paper)
        _print_line(console, Text(paper, style="bold") + Text(f"  {_citation(listed[-1])}", style="not bold"))
        for table in listed:
            _print_line(console, line(shown[table.name]))
    _print_footer(console, tables, runs, any(size.made for size in sizes.values()))


def _columns(table: Table, size: Size) -> tuple[str, str, str, str]:
    runs = f"{size.made} of {size.runs}" if size.made else str(size.runs)
    rounds = str(size.rounds[0]) if len(size.rounds) == 1 else f"{size.rounds[0]}-{size.rounds[-1]}"
    return table.name, runs, rounds, table.title


def _print_line(console: Console, text: Text) -> None:
    if console.is_terminal:
        text.truncate(console.width, overflow="ellipsis")
    console.print(text, soft_wrap=True, highlight=False)


def _citation(table: Table) -> str:
    """Return the citation of a table's paper, without the number of the table."""
    return re.split(r", (?:tables?|figures?|appendix) ", table.paper)[0]


def _print_footer(console: Console, tables: Sequence[Table], runs: Path, some_made: bool) -> None:
    missing = sorted({name for table in tables for name in _missing_sources(table)})
    made = "6 of 9 means that six have ended" if some_made else "none has ended yet"
    texts = [
        f"Runs are those of all seeds, mostly 3; {made} (in --runs {runs}).",
        "fedkeep reproduce TABLE runs one (--quick: in a minute); --show prints it.",
        "fedkeep reproduce PAPER lists the columns and methods of a paper's tables.",
    ]
    if missing:
        texts.append(f"Data that is not available: {', '.join(missing)}. Data folder: {_data_folder()}")
    for text in texts:
        console.print(text, style="dim", markup=False, highlight=False)


def print_details(console: Console, tables: Sequence[Table]) -> None:
    """List tables with their methods and columns, and which data sets are not available."""
    for table in tables:
        console.print(Text(table.name, style="bold") + Text(f"  {table.title}", style="not bold"))
        console.print(f"  {table.paper}", style="dim", highlight=False, markup=False)
        rows = [name if row.absent is None else f"({row.label})" for name, row in table.rows.items()]
        console.print(f"  methods: {', '.join(rows)}", highlight=False, markup=False)
        grid, missing = Grid(box=None, show_header=False, padding=(0, 2, 0, 2)), _missing_sources(table)
        for name, column in table.columns.items():
            status = Text("data not available", style="dim") if _source(table, name) in missing else ""
            grid.add_row(Text(name), Text(column.label), status)
        console.print(grid)
    text = f"Methods in brackets are not in fedkeep yet. Data folder: {_data_folder()}"
    console.print(text, style="dim", markup=False)
    console.print("fedkeep reproduce TABLE runs one; --quick runs it on small data in about a minute.", style="dim")


def _missing_sources(table: Table) -> set[str]:
    """Return the data sets of a table that are not available."""
    sources = {_source(table, column) for column in table.columns}
    return {source for source in sources if named.how_to_get(source) is not None}


def _source(table: Table, column: str) -> str:
    data = table.changes(column, table.baseline)["data"]
    return str(data if isinstance(data, str) else data["source"])


def _data_folder() -> str:
    return f"{named.data_root(None)} ($FEDKEEP_DATA)."
