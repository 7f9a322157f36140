"""Claims: what a paper's text says of a figure, as an order of rows or columns by a measure.

A figure has no printed numbers, so of its gaps only the sign is known: the one that the paper states. A claim names
what is better and than what: rows, in every column or in some, or columns of one row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pydantic import BaseModel, ConfigDict, Field

from fedkeep._util.validate import require_choice
from fedkeep.errors import ConfigError

Cell = tuple[str, str]  # column and row


class Claim(BaseModel):
    """One row is better than others by a measure, in every column or in some; with `row`, columns of that row are."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    claim: str  # in our words, with the number of the figure
    of: str  # a measure of the table
    better: str
    than: list[str] = Field(min_length=1)
    columns: list[str] | None = None
    row: str | None = None
    explained: str | None = None  # what explains a disagreement

    def check(self, key: str, measures: Sequence[str], rows: Sequence[str], columns: Sequence[str]) -> None:
        """Raise if a measure, row or column is not the table's."""
        require_choice(f"{key}.of", self.of, measures, what=f"measure in {key}:", error=ConfigError)
        compared, what = (rows, "row") if self.row is None else (columns, "column")
        for name in (self.better, *self.than):
            require_choice(key, name, compared, what=f"{what} in {key}:", error=ConfigError)
        if self.row is not None:
            require_choice(f"{key}.row", self.row, rows, what=f"row in {key}:", error=ConfigError)
            if self.columns is not None:
                message = f"{key} compares the columns {self.better} and others: it cannot have `columns` too"
                raise ConfigError(message, key=f"{key}.columns", value=self.columns)
        for name in self.columns or ():
            require_choice(f"{key}.columns", name, columns, what=f"column in {key}:", error=ConfigError)

    def pairs(self, columns: Sequence[str]) -> Iterator[tuple[Cell, Cell]]:
        """Yield the cells that are compared, the one that is said to be better first."""
        if self.row is not None:
            yield from (((self.better, self.row), (other, self.row)) for other in self.than)
            return
        for column in self.columns or columns:
            yield from (((column, self.better), (column, other)) for other in self.than)
