"""Tables of methods on a terminal. No number is ever cut: a table that is too wide is split into several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fedkeep._util.text import format_megabytes, format_reached, printable
from fedkeep.analysis.compare import HIGHER_IS_BETTER, rank_groups
from fedkeep.analysis.groups import FRACTIONS, Group, bytes_to, rounds_to
from fedkeep.analysis.measures import format_measure, heading
from fedkeep.analysis.metric_columns import Column, format_cell, rank_column
from fedkeep.analysis.personal import measured_groups, personal_columns

MEASURES = (*HIGHER_IS_BETTER, "bytes", "seconds")
DIGITS = {"forgetting": 2, "round_forgetting": 2}  # fewer than elsewhere, so that a table fits into 80 columns
CAPTION = (
    "forgetting: best earlier minus final accuracy, mean over classes; per round: mean loss from one round to the "
    "next; MB: total communication; s: seconds per run"
)
MARKS = {1: "¹", 2: "²"}
STYLES = {1: "bold", 2: "underline"}


class MethodTable:
    """One row per method; on a terminal that is too narrow, several tables below each other, some columns in each."""

    def __init__(self, title: str, heads: Sequence[str], rows: Mapping[str, Sequence[Text]], caption: str) -> None:
        self.title, self.heads, self.rows, self.caption = title, heads, rows, caption

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        cells = zip(*self.rows.values(), strict=True)
        widths = [max(len(head), *map(len, column)) for head, column in zip(self.heads, cells, strict=True)]
        longest_word = max(len(word) for name in self.rows for word in name.split())
        name_width = max(1, min(20, longest_word, options.max_width - max(widths) - 5))  # 5: borders and padding
        first, title = 0, self.title
        while first < len(widths):
            last, room = first, options.max_width - name_width - 3
            while last < len(widths) and (room := room - widths[last] - 2) >= 0:
                last += 1
            last = max(last, first + 1)
            yield self._table(title, name_width, dict(enumerate(widths[first:last], start=first)))
            first, title = last, ""
        yield Padding(Text(self.caption, style="dim italic"), (0, 0, 0, 1))

    def _table(self, title: str, name_width: int, widths: Mapping[int, int]) -> Table:
        table = Table(
            title=Text(title) if title else None,
            title_justify="left",
            title_style="bold",
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
        )
        table.add_column("method", style="bold", overflow="fold", min_width=name_width)
        for column in widths:
            table.add_column(Text(self.heads[column]), justify="right", no_wrap=True)
        for name, cells in self.rows.items():
            table.add_row(Text(name), *(_right_aligned(cells[column], width) for column, width in widths.items()))
        return table


def _right_aligned(cell: Text, width: int) -> Text:
    """Pad a cell on its left; aligned by the table, it would lose the trailing space that keeps digits in line."""
    padded = Text(" " * (width - len(cell))) + cell
    padded.justify = "left"
    return padded


def comparison(title: str, groups: Mapping[str, Group]) -> MethodTable:
    """Return the table of methods by name: accuracy, forgetting and cost, mean±standard deviation over several runs."""
    places = rank_groups(groups)
    ranked = any(places.values())

    def cell(name: str, key: str) -> Text:
        group = groups[name]
        if key not in HIGHER_IS_BETTER:
            return Text(format_measure(key, group.mean[key]))
        place = places[key].get(name, 0)
        text = format_measure(key, group.mean[key], group.spread[key], DIGITS.get(key))
        number = Text(text, style=STYLES.get(place, ""))
        return number + Text(MARKS.get(place, " " if ranked else ""))  # the space keeps digits in line

    rows = {name: [cell(name, key) for key in MEASURES] for name in groups}
    marks = f"{MARKS[1]} best, {MARKS[2]} second best; " if ranked else ""
    return MethodTable(title, [heading(key) for key in MEASURES], rows, marks + CAPTION)


def chosen_metrics(title: str, groups: Mapping[str, Group], columns: Sequence[Column]) -> MethodTable:
    """Return the table of methods by name with the columns that the user chose."""
    places = {column.key: rank_column(column, groups) for column in columns}
    ranked = any(places.values())

    def cell(name: str, column: Column) -> Text:
        place = places[column.key].get(name, 0)
        number = Text(column.cell(groups[name], DIGITS.get(column.metric)), style=STYLES.get(place, ""))
        return number + Text(MARKS.get(place, " " if ranked else ""))  # the space keeps digits in line

    rows = {name: [cell(name, column) for column in columns] for name in groups}
    unknown = "; -: not recorded" if any(str(cell).strip() == "-" for row in rows.values() for cell in row) else ""
    marks = f"{MARKS[1]} best, {MARKS[2]} second best; " if ranked else ""
    return MethodTable(
        title, [column.head for column in columns], rows, f"{marks}metrics of the last evaluated round{unknown}"
    )


def site_table(metric: str, by_group: Mapping[str, Mapping[str, np.ndarray]]) -> MethodTable:
    """Return the table of a metric by site; the rows are methods by name."""
    sites = list(dict.fromkeys(site for values in by_group.values() for site in values))
    rows = {
        name: [Text(format_cell(metric, values.get(site, np.array([])))) for site in sites]
        for name, values in by_group.items()
    }
    caption = "of the global model on each site's own test examples, in the last evaluated round"
    return MethodTable(f"{heading(metric)} by site", [printable(site) for site in sites], rows, caption)


def print_personal(console: Console, groups: Sequence[Group]) -> None:
    """Print what groups recorded of personalised accuracy: a title that says how, and a row per group and model."""
    for measured in measured_groups(groups):
        columns = personal_columns(measured)
        rows = {row.name: [Text(cell) for cell in row.cells(columns)] for row in measured.rows}
        console.print()
        console.print(Text(measured.title, style="bold"))
        console.print(MethodTable("", list(columns.values()), rows, measured.caption))


def target_table(groups: Mapping[str, Group], target: float) -> MethodTable:
    """Return what a target accuracy A takes, by name: the rounds to fractions of it (Flashback's table 1), and MB."""
    rows = {}
    for name, group in groups.items():
        rounds = rounds_to(group, target)
        cells = [format_reached(rounds[x]) for x in FRACTIONS]
        rows[name] = [Text(cell) for cell in (*cells, format_reached(bytes_to(group, target), format_megabytes))]
    caption = "until the test accuracy first reaches that fraction of A; median over runs; - not reached"
    heads = [*(f"rounds to {x:g} A" for x in FRACTIONS), "MB to A"]
    return MethodTable(f"A = {target:g}", heads, rows, caption)
