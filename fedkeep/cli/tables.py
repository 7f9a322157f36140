"""The table of methods on a terminal: best and second best marked, and never a number cut, however narrow."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fedkeep.analysis.compare import HIGHER_IS_BETTER, ranks
from fedkeep.runs.history import History

HEADS = {
    "final": "final %",
    "best": "best %",
    "smoothed": "smoothed %",
    "forgetting": "forgetting",
    "round_forgetting": "per round",
    "bytes": "MB",
    "seconds": "s",
}
CAPTION = (
    "forgetting: best earlier minus final accuracy, mean over classes; per round: mean loss from one round to the "
    "next; MB: moved in all; s: seconds a run"
)
MARKS = {1: "¹", 2: "²"}
STYLES = {1: "bold", 2: "underline"}


def spread(values: Sequence[float], digits: int, scale: float = 1.0) -> str:
    """Write mean±standard deviation over seeds.

    >>> spread([0.5, 0.7], 1, scale=100)
    '60.0±14.1'
    >>> spread([0.5], 2)
    '0.50'
    """
    scaled = np.asarray(values, dtype=float) * scale
    text = f"{scaled.mean():.{digits}f}"
    return text if len(scaled) == 1 else f"{text}±{scaled.std(ddof=1):.{digits}f}"


class Comparison:
    """A row per method where the terminal is wide enough, else a block per method with a line per measure.

    Between the two, the columns from `costs` on go into a table of their own.
    """

    def __init__(
        self,
        title: str,
        heads: Sequence[str],
        rows: Mapping[str, Sequence[Text]],
        caption: str,
        costs: int | None = None,
    ) -> None:
        self.title, self.heads, self.rows, self.caption, self.costs = title, heads, rows, caption, costs

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        split = len(self.heads) if self.costs is None else self.costs
        if self._width(0, None) <= options.max_width:
            yield self._table(0, None, self.title)
        elif self._width(0, split) <= options.max_width:
            yield self._table(0, split, self.title)
            yield self._table(split, None, "")
        else:
            yield self._blocks()
        yield Padding(Text(self.caption, style="dim italic"), (0, 0, 0, 1))

    def _name_width(self) -> int:
        return min(20, max(len(word) for name in self.rows for word in name.split()))

    def _widths(self) -> list[int]:
        columns = zip(*self.rows.values(), strict=True)
        return [max(len(head), *map(len, cells)) for head, cells in zip(self.heads, columns, strict=True)]

    def _width(self, first: int, last: int | None) -> int:
        # Every column has a space of padding on its right and a border on its left; the last a border on its right too.
        return 1 + sum(width + 2 for width in [self._name_width(), *self._widths()[first:last]])

    def _table(self, first: int, last: int | None, title: str) -> Table:
        table = Table(
            title=title or None, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
        )
        table.add_column("method", style="bold", overflow="fold", min_width=self._name_width())
        for head in self.heads[first:last]:
            table.add_column(head, justify="right", no_wrap=True)
        widths = self._widths()[first:last]
        for name, cells in self.rows.items():
            shown = cells[first:last]
            table.add_row(Text(name), *(_below(cell, width) for cell, width in zip(shown, widths, strict=True)))
        return table

    def _blocks(self) -> Table:
        table = Table(title=self.title or None, title_justify="left", title_style="bold", box=None, show_header=False)
        table.add_column(overflow="fold")
        table.add_column(no_wrap=True)
        width = max(self._widths())
        for name, cells in self.rows.items():
            table.add_row(Text(name, style="bold"), "")
            for head, cell in zip(self.heads, cells, strict=True):
                table.add_row(f"  {head}", _below(cell, width))
        return table


def _below(cell: Text, width: int) -> Text:
    """Fill a cell up on its left: justified by the table, a trailing space would be dropped, and numbers shifted."""
    filled = Text(" " * (width - len(cell))) + cell
    filled.justify = "left"
    return filled


def comparison(title: str, runs: Mapping[str, list[History]], unfinished: Collection[str] = ()) -> Comparison:
    """Make the table of methods: accuracies, forgetting, cost; mean±standard deviation where there are several runs."""
    summaries = {name: [h.summary() for h in histories] for name, histories in runs.items()}
    means = {
        key: {n: float(np.mean([s[key] for s in rows])) for n, rows in summaries.items() if n not in unfinished}
        for key in HIGHER_IS_BETTER
    }
    places = {key: ranks(values, HIGHER_IS_BETTER[key]) for key, values in means.items()}

    def cell(name: str, key: str) -> Text:
        values = [s[key] for s in summaries[name]]
        if key not in HIGHER_IS_BETTER:
            return Text(f"{np.mean(values) / (1e6 if key == 'bytes' else 1):.1f}")
        place = places[key].get(name, 0)
        number = spread(values, 1, 100) if HIGHER_IS_BETTER[key] else spread(values, 2)
        padding = " " if any(places.values()) else ""  # so that the numbers stay below each other
        return Text(number, style=STYLES.get(place, "")) + Text(MARKS.get(place, padding))

    rows = {name: [cell(name, key) for key in HEADS] for name in runs}
    marked = f"{MARKS[1]} best, {MARKS[2]} second best; " if any(places.values()) else ""
    return Comparison(title, list(HEADS.values()), rows, marked + CAPTION, costs=len(HIGHER_IS_BETTER))


def rounds_table(
    title: str, fractions: Sequence[float], rows: Mapping[str, Mapping[float, Sequence[int | None]]]
) -> Comparison:
    """Make Flashback's table 1: rounds to fractions of a target, the median over seeds, or how many seeds got there."""
    cells = {name: [Text(reached(found[x])) for x in fractions] for name, found in rows.items()}
    heads = [f"{x:g} A" for x in fractions]
    return Comparison(title, heads, cells, "rounds until the test accuracy first reaches that share of A; - never")


def reached(rounds: Sequence[int | None]) -> str:
    """Write the median, with those that never got there counted as later than all others, and how many did.

    >>> reached([3, 5, 8]), reached([3, 5, None]), reached([3, None, None]), reached([None])
    ('5', '5 (2 of 3)', '- (1 of 3)', '-')
    """
    there = [r for r in rounds if r is not None]
    middle = np.median([np.inf if r is None else r for r in rounds])
    some = f" ({len(there)} of {len(rounds)})" if 0 < len(there) < len(rounds) else ""
    return (f"{middle:g}" if np.isfinite(middle) else "-") + some
