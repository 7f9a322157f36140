"""Specification of a paper's table: settings, rows, columns and printed figures, read from a TOML file in `tables/`.

setting         the experiment that all cells share, without its method
columns.NAME    changes for one column, and `paper`: the printed figures, by row and measure
rows.NAME       a method, or why it is not available, and the changes for its row
columns.NAME.rows.ROW, quick, quick.rows.ROW
                changes for one cell, and what `--quick` changes in every cell

A cell's experiment merges these in this order: setting, column, quick, row, the column's row, quick's row. A table may
take its setting, rows and columns from another table of the same paper: see `extends`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from fedkeep._util.toml import parse_toml
from fedkeep._util.validate import first_error, require_choice
from fedkeep.errors import ConfigError, FedkeepError
from fedkeep.experiments.experiment import Experiment
from fedkeep.experiments.overrides import merge, override
from fedkeep.plots.runs import ALL_PLOTS
from fedkeep.reproduce.claims import Claim
from fedkeep.reproduce.extends import extend
from fedkeep.reproduce.lookup import unknown_table
from fedkeep.reproduce.measures import get_measure
from fedkeep.reproduce.recorded import Instruments, is_recorded

TABLES = Path(__file__).parent / "tables"
AGAINST = "against"  # the plot of the measures over the columns
KINDS = (*ALL_PLOTS, AGAINST)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Change(_Strict):
    """Changes to an experiment."""

    model: str | dict[str, Any] | None = None
    data: str | dict[str, Any] | None = None
    split: str | dict[str, Any] | None = None
    train: dict[str, Any] = Field(default_factory=dict)

    def changes(self) -> dict[str, Any]:
        """Return the changes as a nested dict with the keys of an experiment file."""
        changes = self.model_dump(include={"method", "model", "data", "split", "train"})
        return {key: value for key, value in changes.items() if value}


class CellChange(Change):
    """Changes to the experiment of one row, including the method and its hyperparameters."""

    method: str | dict[str, Any] | None = None


class Row(CellChange):
    """One method of a table with its changes to the setting; or, in `absent`, why it cannot be run."""

    label: str
    absent: str | None = None
    extends: str | None = None  # a row of the table that this one extends

    @model_validator(mode="after")
    def _method_or_absent(self) -> Row:
        if (self.method is None) == (self.absent is None):
            raise ConfigError(
                f"row {self.label!r} must have either `method` or `absent` (the reason why it has no method)",
                key="method",
                value=self.label,
                valid=("method", "absent"),
            )
        return self


class Figure(_Strict):
    """A printed figure: the mean and, if the paper gives it, the spread.

    The mean is None for a target that was never reached, and, with `failed`, for a run that failed.
    """

    mean: float | None
    spread: float | None = None
    failed: bool = False


def _parse_figure(value: Any) -> Any:
    """Parse 40.14, [40.14, 1.15] (mean and spread), "never" (a target that was not reached) or "failed" (a run)."""
    if value in ("never", "failed"):
        return {"mean": None, "failed": value == "failed"}
    if isinstance(value, list) and len(value) == 2:
        return {"mean": value[0], "spread": value[1]}
    return {"mean": value} if isinstance(value, int | float) else value


Printed = Annotated[Figure, BeforeValidator(_parse_figure)]


class ColumnChange(Change):
    """Changes to all cells of a column, and to single ones; `target` is the accuracy for measures that count rounds."""

    target: float | None = Field(default=None, gt=0, le=1)
    rows: dict[str, CellChange] = Field(default_factory=dict)


class Column(ColumnChange):
    """One data set and split of a table."""

    label: str
    extends: str | None = None  # a column of the table that this one extends
    paper: dict[str, dict[str, Printed]] = Field(default_factory=dict)
    explained: dict[str, str] = Field(default_factory=dict)  # what explains a row's disagreement with the paper


class Quick(ColumnChange):
    """Changes that `--quick` makes to its one column, so that it takes about a minute on a CPU."""

    column: str
    instruments: Instruments | None = None  # instead of the table's


class Table(_Strict):
    """A paper's table, or one of fedkeep's own."""

    format: Literal[1]
    title: str
    paper: str
    measures: list[str]
    plots: list[str] = Field(default_factory=list)  # what a figure draws
    claims: list[Claim] = Field(default_factory=list)  # what the paper says of a figure, or fedkeep of its method
    notes: list[str] = Field(default_factory=list)
    instruments: Instruments | None = None  # what is recorded during the runs
    seeds: int = Field(default=3, ge=1)  # by default
    first_seed: int = Field(default=0, ge=0)
    setting: Change
    rows: dict[str, Row]
    columns: dict[str, Column]
    quick: Quick
    name: str = ""
    extended: Table | None = Field(default=None, exclude=True, repr=False)  # the table that this one extends

    @model_validator(mode="after")
    def _require_known_names(self) -> Table:
        """Raise an error for changes or figures of an unknown row, column or measure, or for a missing target."""
        for measure in self.measures:
            get_measure(measure)  # raises if there is none of this name
            for quick in (False, True) if is_recorded(measure) else ():
                instruments = self.recorded(quick)
                names = instruments.what if instruments else []
                require_choice("instruments.what", measure.partition(".")[0], names, "study", error=ConfigError)
        for plot in self.plots:
            require_choice("plots", plot, KINDS, what="plot", error=ConfigError)
        require_choice("quick.column", self.quick.column, list(self.columns), what="column", error=ConfigError)
        changes: dict[str, ColumnChange] = {f"columns.{name}": column for name, column in self.columns.items()}
        changes["quick"] = self.quick
        for name, change in changes.items():
            for row in change.rows:
                _require_row(f"{name}.rows", row, self.rows)
            need_target = [measure for measure in self.measures if get_measure(measure).needs_target]
            if change.target is None and need_target:
                raise ConfigError(f"{name}.target is missing; {need_target[0]} needs it", key=f"{name}.target")
        about: dict[str, Row | Column] = {f"rows.{name}": row for name, row in self.rows.items()}
        about |= {f"columns.{name}": column for name, column in self.columns.items()}
        for name, one in about.items():
            if one.extends is not None and self.extended is None:
                message = f"{name}.extends = {one.extends!r}, but the table extends no other"
                raise ConfigError(message, key=f"{name}.extends", value=one.extends)
        for number, claim in enumerate(self.claims):
            claim.check(f"claims[{number}]", self.measures, list(self.rows), list(self.columns))
        for name, column in self.columns.items():
            for row in column.explained:
                _require_row(f"columns.{name}.explained", row, self.rows)
            for row, figures in column.paper.items():
                _require_row(f"columns.{name}.paper", row, self.rows)
                for measure in figures:
                    key = f"columns.{name}.paper.{row}"
                    require_choice(key, measure, self.measures, what=f"measure in {key}:", error=ConfigError)
        return self

    @property
    def own(self) -> bool:
        """Whether it is fedkeep's own comparison, not a paper's."""
        return self.paper_name == "fedkeep"

    @property
    def paper_name(self) -> str:
        """The short name of its paper: the folder of the file, such as fedntd."""
        return self.name.rpartition("/")[0]

    @property
    def baseline(self) -> str:
        """The first row: the method that the others are compared with."""
        return next(iter(self.rows))

    def recorded(self, quick: bool) -> Instruments | None:
        """Return what is recorded during the runs."""
        return self.quick.instruments or self.instruments if quick else self.instruments

    def target(self, column: str, quick: bool) -> float | None:
        """Return the target accuracy of a column."""
        return self.quick.target if quick else self.columns[column].target

    def experiment(
        self, column: str, row: str, seed: int, quick: bool = False, overrides: Iterable[str] = ()
    ) -> Experiment:
        """Return the complete experiment of one cell."""
        try:
            return Experiment.from_dict(override({"seed": seed, **self.changes(column, row, quick)}, overrides))
        except FedkeepError as error:
            raise _with_prefix(f"{self.name}, {column}, {row}", error) from error

    def changes(self, column: str, row: str, quick: bool = False) -> dict[str, Any]:
        """Return what the table says about one cell, as the tables of an experiment file."""
        about = self.columns[column]
        layers: list[Change | None] = [self.setting, about, self.quick if quick else None, self.rows[row]]
        layers += [about.rows.get(row), self.quick.rows.get(row) if quick else None]
        merged: dict[str, Any] = {}
        for layer in layers:
            merged = merge(merged, layer.changes() if layer else {})
        return merged

    def extended_cell(self, column: str, row: str) -> tuple[Table, str, str] | None:
        """Return the table, column and row that a cell extends; None if there is none."""
        of_column, of_row = self.columns[column].extends, self.rows[row].extends
        if self.extended is None or of_column is None or of_row is None:
            return None
        return self.extended, of_column, of_row

    def select(self, columns: Iterable[str] | None, rows: Iterable[str] | None) -> tuple[list[str], list[str]]:
        """Return the named columns and rows in the table's order, or all for None; raise if a name is unknown."""
        return _select("column", "column", columns, self.columns), _select("methods", "method", rows, self.rows)


def names() -> list[str]:
    """Return the names of the tables that come with fedkeep, such as fedntd/table-1, with table-9 before table-10."""
    found = [f"{path.parent.name}/{path.stem}" for path in TABLES.glob("*/*.toml")]
    return sorted(found, key=lambda name: [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", name)])


def load(name: str) -> Table:
    """Read a table by its name, such as fedntd/table-1, or from a TOML file."""
    if name.endswith(".toml") and Path(name).is_file():
        return read(Path(name), f"{Path(name).resolve().parent.name}/{Path(name).stem}")
    if name.lower() not in names():
        raise unknown_table(name, {one: _read_toml(TABLES / f"{one}.toml")["paper"] for one in names()})
    return read(TABLES / f"{name.lower()}.toml", name.lower())


def read(path: Path, name: str) -> Table:
    """Read a table's specification from a file."""
    tables, extended = _read_toml(path), None
    try:
        if "extends" in tables:
            other = tables.pop("extends")
            tables = extend(tables, _read_extended(path, other))
            extended = read(path.parent / f"{other}.toml", f"{name.rpartition('/')[0]}/{other}")
        return Table(**{**tables, "name": name, "extended": extended})
    except ValidationError as error:
        raise _with_prefix(str(path), first_error("", error)) from None
    except ConfigError as error:
        raise _with_prefix(str(path), error) from None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return parse_toml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}", key=path.name) from None


def _read_extended(path: Path, name: Any) -> dict[str, Any]:
    """Read the table of the same folder that a table extends; that one must not extend another."""
    valid = sorted(other.stem for other in path.parent.glob("*.toml") if other.name != path.name)
    require_choice("extends", name, valid, what="table in extends:", error=ConfigError)
    tables = _read_toml(path.parent / f"{name}.toml")
    if "extends" in tables:
        raise ConfigError(f"extends = {name!r}: that table extends another one itself", key="extends", value=name)
    return tables


def all_tables() -> Iterator[Table]:
    """Read all tables that come with fedkeep."""
    return map(load, names())


def papers() -> list[str]:
    """Return the short names of the papers, such as fedntd."""
    return list(dict.fromkeys(name.rpartition("/")[0] for name in names()))


def of_paper(paper: str) -> list[Table]:
    """Read all tables of a paper."""
    return [load(name) for name in names() if name.rpartition("/")[0] == paper.lower()]


def _require_row(key: str, row: str, rows: dict[str, Row]) -> None:
    require_choice(key, row, list(rows), what=f"row in {key}:", error=ConfigError)


def _with_prefix(prefix: str, error: FedkeepError) -> ConfigError:
    return error.converted(ConfigError, f"{prefix}: {error}")


def _select(option: str, what: str, wanted: Iterable[str] | None, valid: dict[str, Any]) -> list[str]:
    selected = list(valid) if wanted is None else list(wanted)
    for name in selected:
        require_choice(option, name, list(valid), what, error=ConfigError)
    return [name for name in valid if name in selected]
