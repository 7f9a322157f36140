"""Small pieces of HTML for notebooks: self-contained, escaped, and readable on light and on dark pages."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedkeep._util.arrays import evenly_spaced
from fedkeep._util.text import clip, printable

# From low to high: matplotlib's cividis, also readable for the colour-blind.
COLOURS = (
    "#00224e", "#083370", "#35456c", "#4f576c", "#666970", "#7d7c78", "#948e77", "#aea371", "#c8b866", "#e5cf52",
    "#fee838",
)  # fmt: skip
MOST_ROWS, MOST_COLUMNS = 50, 100  # of a heat map; of more, evenly spaced ones are shown
_WIDTH, _HEIGHT = 560, 300  # pixels of a large heat map
_CHARACTER = 6.0  # pixels, of the labels
_TOP = 5  # pixels above the cells: a label is higher than a low row


@dataclass(frozen=True)
class Html:
    """HTML that a notebook shows; `str` returns it as text, to write into a file."""

    text: str

    def _repr_html_(self) -> str:
        return self.text

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<Html of {len(self.text)} characters: a notebook shows it>"


def escape(text: object) -> str:
    """Return text that HTML shows as it is.

    >>> escape("<b>&")
    '&lt;b&gt;&amp;'
    """
    return html.escape(printable(text))


def block(title: object, *parts: str) -> str:
    """Return a title and some pieces of HTML below it."""
    return f'<div style="font-size:13px"><b>{escape(title)}</b>{"".join(parts)}</div>'


def paragraph(text: object) -> str:
    """Return a line of text."""
    return f'<div style="margin:2px 0">{escape(text)}</div>'


def table(columns: Mapping[str, Sequence[object]]) -> str:
    """Return a table with one column per entry: its name above its values."""
    cell = 'style="text-align:right;padding:2px 10px 2px 0;white-space:nowrap"'
    head = "".join(f"<th {cell}>{escape(name)}</th>" for name in columns)
    rows = zip(*columns.values(), strict=True)
    body = "".join(f"<tr>{''.join(f'<td {cell}>{escape(value)}</td>' for value in row)}</tr>" for row in rows)
    return f'<table style="border-collapse:collapse;margin:4px 0;font-size:inherit"><tr>{head}</tr>{body}</table>'


def heat_map(
    values: np.ndarray, rows: Sequence[str], columns: Sequence[str], axes: tuple[str, str], counts: bool = False
) -> str:
    """Return values [R, C] between 0 and 1 as a picture with labels; NaN is empty.

    `axes` are what a row and a column are. With `counts`, values are numbers from 0 to any largest; they are written
    into the cells if these are large enough, and 0 is empty.
    """
    at = evenly_spaced(len(rows), MOST_ROWS), evenly_spaced(len(columns), MOST_COLUMNS)
    shown = np.asarray(values, dtype=float)[np.ix_(*at)]
    names = [clip(printable(rows[r]), 24) for r in at[0]]
    picture = _Picture(
        left=math.ceil(_CHARACTER * max(len(name) for name in names)) + 6,
        width=max(4, min(36 if len(at[1]) > 4 else 72, _WIDTH // len(at[1]))),
        height=max(5, min(16, _HEIGHT // len(at[0]))),
    )
    largest = max(float(np.nanmax(shown, initial=0)), 1.0) if counts else 1.0
    labels = [clip(printable(columns[c]), max(3, int((picture.width - 4) / _CHARACTER))) for c in at[1]]
    hidden = [
        f"{len(some)} of {len(every)} {axis} shown"
        for axis, some, every in zip(("rows", "columns"), at, (rows, columns), strict=True)
        if len(some) < len(every)
    ]
    meaning = "brighter: more examples" if counts else "dark: 0%, bright: 100%"
    return picture.draw(
        [
            *picture.cells(np.where(shown > 0, shown / largest, np.nan) if counts else shown),
            *(picture.numbers(shown, largest) if counts else ()),
            *picture.row_labels(names),
            *picture.column_labels(labels, _TOP + picture.height * len(names)),
        ],
        shown.shape,
        caption="; ".join([f"across: {axes[1]}", meaning, *hidden]),
        label=f"{axes[0]} by {axes[1]}",
    )


@dataclass(frozen=True)
class _Picture:
    """A grid of cells of this width and height, with labels to its left and below."""

    left: int
    width: int
    height: int

    def cells(self, share: np.ndarray) -> list[str]:
        """Return one path per colour with all its cells: a rectangle each would take five times as many bytes."""
        level = np.clip(np.nan_to_num(share) * (len(COLOURS) - 1), 0, len(COLOURS) - 1).round().astype(int)
        level[np.isnan(share)] = -1
        cell, paths = f"h{self.width}v{self.height}h-{self.width}z", []
        for k, colour in enumerate(COLOURS):
            if at := np.argwhere(level == k).tolist():
                every = "".join(f"M{self.left + self.width * c} {_TOP + self.height * r}{cell}" for r, c in at)
                paths.append(f'<path fill="{colour}" shape-rendering="crispEdges" d="{every}"/>')
        size = f'width="{self.width * share.shape[1] + 1}" height="{self.height * len(share)}"'
        frame = f'x="{self.left - 0.5}" y="{_TOP}" {size} fill="none" stroke="currentColor" stroke-opacity="0.35"'
        return [*paths, f"<rect {frame}/>"]

    def numbers(self, values: np.ndarray, largest: float) -> list[str]:
        """Return the numbers in the cells; none if they do not fit."""
        if self.height < 14 or self.width < _CHARACTER * len(f"{largest:g}"):
            return []
        return [
            self._text(self._centre(c), self._middle(r), "middle", f"{values[r, c]:g}", _on(values[r, c] / largest))
            for r, c in np.argwhere(values > 0).tolist()
        ]

    def row_labels(self, names: Sequence[str]) -> list[str]:
        """Return the labels to the left; of low rows, every n-th."""
        every = range(0, len(names), math.ceil(11 / self.height))
        return [self._text(self.left - 4, self._middle(r), "end", names[r]) for r in every]

    def column_labels(self, names: Sequence[str], bottom: int) -> list[str]:
        """Return the labels below: the first, every n-th, and the last instead of one that is too near to it."""
        every = max(1, math.ceil((_CHARACTER * max(len(name) for name in names) + 4) / self.width))
        at = list(range(0, len(names), every))
        if at[-1] != len(names) - 1:
            at = [*(c for c in at if c <= len(names) - 1 - every), len(names) - 1]
        return [self._text(self._centre(c), bottom + 11, "middle", names[c]) for c in at]

    def draw(self, parts: Sequence[str], shape: tuple[int, ...], caption: str, label: str) -> str:
        """Return the picture of a grid of this shape."""
        bottom = _TOP + self.height * shape[0]
        width = max(self.left + self.width * shape[1] + 12, self.left + math.ceil(_CHARACTER * len(caption)))
        return (
            f'<svg role="img" aria-label="{escape(label)}" width="{width}" height="{bottom + 28}" '
            'style="display:block;margin:4px 0;max-width:100%" font-family="sans-serif" font-size="10" '
            f'fill="currentColor">{"".join(parts)}{self._text(self.left, bottom + 24, "start", caption)}</svg>'
        )

    def _centre(self, column: int) -> float:
        return self.left + self.width * column + self.width / 2

    def _middle(self, row: int) -> float:
        return _TOP + self.height * row + self.height / 2 + 3.5

    def _text(self, x: float, y: float, anchor: str, text: str, colour: str = "") -> str:
        fill = f' fill="{colour}"' if colour else ""
        return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{fill}>{escape(text)}</text>'


def _on(share: float) -> str:
    """Return the colour of text on a cell."""
    return "#000" if share > 0.55 else "#fff"
