"""A paper's table as a specification: its settings, rows, columns and own figures, from a file in `experiments/`.

setting         what all cells share: an experiment without its method
columns.NAME    what a column changes in it, and `paper`: the figures printed there, by row and measure
rows.NAME       a method, or why there is none yet, and what it changes
columns.NAME.rows.ROW, quick, quick.rows.ROW
                what one cell changes, and what `--quick` does to every cell

A cell is all of these merged, in this order: setting, column, quick, row, the column's row, quick's row.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from fedkeep._util.text import did_you_mean
from fedkeep._util.validate import first_error
from fedkeep.errors import ConfigError, FedkeepError
from fedkeep.experiments.experiment import Experiment
from fedkeep.experiments.overrides import merge, override
from fedkeep.reproduce.measures import MEASURES

TABLES = Path(__file__).parent / "tables"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Change(_Strict):
    """What is changed in an experiment."""

    model: str | dict[str, Any] | None = None
    data: str | dict[str, Any] | None = None
    split: str | dict[str, Any] | None = None
    train: dict[str, Any] = Field(default_factory=dict)

    def changes(self) -> dict[str, Any]:
        """Return what is said, as tables of an experiment."""
        said = self.model_dump(include={"method", "model", "data", "split", "train"})
        return {key: value for key, value in said.items() if value}


class CellChange(Change):
    """What is changed in one row's experiment; its method's hyperparameters too."""

    method: str | dict[str, Any] | None = None


class Row(CellChange):
    """One method of a table, in the setting it is run in; or, in `absent`, why it cannot be run."""

    label: str
    absent: str | None = None

    @model_validator(mode="after")
    def _there_or_not(self) -> Row:
        if (self.method is None) == (self.absent is None):
            raise ConfigError(f"row {self.label!r} has a method, or says in `absent` why it has none")
        return self


class Figure(_Strict):
    """A figure as printed: mean and, where the paper gives one, spread; None: a target never reached."""

    mean: float | None
    spread: float | None = None


def _figure(given: Any) -> Any:
    """Read 40.14, [40.14, 1.15] (mean and spread), or "never", a paper's dash for a target that was not reached."""
    if given == "never":
        return {"mean": None}
    if isinstance(given, list) and len(given) == 2:
        return {"mean": given[0], "spread": given[1]}
    return {"mean": given} if isinstance(given, int | float) else given


Printed = Annotated[Figure, BeforeValidator(_figure)]


class ColumnChange(Change):
    """What is changed in all cells of a column, and in some; `target` is the accuracy that rounds are counted to."""

    target: float | None = Field(default=None, gt=0, le=1)
    rows: dict[str, CellChange] = Field(default_factory=dict)


class Column(ColumnChange):
    """One data set and split of a table."""

    label: str
    paper: dict[str, dict[str, Printed]] = Field(default_factory=dict)


class Quick(ColumnChange):
    """What `--quick` changes in its one column: small enough for a minute on a CPU."""

    column: str


class Table(_Strict):
    """A paper's table."""

    format: Literal[1]
    title: str
    paper: str
    measures: list[str]
    notes: list[str] = Field(default_factory=list)
    setting: Change
    rows: dict[str, Row]
    columns: dict[str, Column]
    quick: Quick
    name: str = ""

    @model_validator(mode="after")
    def _names_meet(self) -> Table:
        """Refuse figures and changes for rows, columns and measures that there are not."""
        for measure in self.measures:
            _one_of("measure", measure, MEASURES)
        _one_of("column", self.quick.column, self.columns)
        changes: dict[str, ColumnChange] = {**self.columns, "quick": self.quick}
        for name, change in changes.items():
            for row in change.rows:
                _one_of(f"row of {name}", row, self.rows)
            if change.target is None and any(MEASURES[measure].of_target for measure in self.measures):
                raise ConfigError(f"{name} has no target, which {self.measures[0]} needs")
        for name, column in self.columns.items():
            for row, figures in column.paper.items():
                _one_of(f"row of {name}", row, self.rows)
                for measure in figures:
                    _one_of(f"measure of {name}, {row}", measure, self.measures)
        return self

    @property
    def baseline(self) -> str:
        """The row that gaps are taken to."""
        return next(iter(self.rows))

    def target(self, column: str, quick: bool) -> float | None:
        """Return the accuracy that rounds are counted to."""
        return self.quick.target if quick else self.columns[column].target

    def experiment(
        self, column: str, row: str, seed: int, quick: bool = False, overrides: Iterable[str] = ()
    ) -> Experiment:
        """Return one cell's experiment, said in full."""
        at = self.columns[column]
        steps: list[Change | None] = [self.setting, at, self.quick if quick else None, self.rows[row]]
        steps += [at.rows.get(row), self.quick.rows.get(row) if quick else None]
        given: dict[str, Any] = {"seed": seed}
        for step in steps:
            given = merge(given, step.changes() if step else {})
        try:
            return Experiment.from_dict(override(given, overrides))
        except FedkeepError as error:
            raise ConfigError(f"{self.name}, {column}, {row}: {error}") from error

    def chosen(self, columns: Iterable[str] | None, rows: Iterable[str] | None) -> tuple[list[str], list[str]]:
        """Check names of columns and rows against what there is; None: all of them."""
        return _chosen("column", columns, self.columns), _chosen("method", rows, self.rows)


def names() -> list[str]:
    """List the tables that come with fedkeep: paper/table-n."""
    return sorted(f"{path.parent.name}/{path.stem}" for path in TABLES.glob("*/*.toml"))


def load(name: str) -> Table:
    """Read a table's specification by its name, such as fedntd/table-1, or from a file of one's own."""
    if name.endswith(".toml") and Path(name).is_file():
        return read(Path(name), f"{Path(name).resolve().parent.name}/{Path(name).stem}")
    if name.lower() not in names():
        raise ConfigError(f"there is no table {name!r}: {did_you_mean(name, names())}")
    return read(TABLES / f"{name.lower()}.toml", name.lower())


def read(path: Path, name: str) -> Table:
    """Read a table's specification from a file."""
    try:
        return Table(**tomllib.loads(path.read_text()), name=name)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}") from None
    except ValidationError as error:
        raise ConfigError(f"{path}: {first_error('', error)}") from None


def all_tables() -> Iterator[Table]:
    """Read all of them."""
    return map(load, names())


def _one_of(what: str, name: str, valid: Iterable[str]) -> None:
    if name not in valid:
        raise ConfigError(f"unknown {what} {name!r}: {did_you_mean(name, valid)}")


def _chosen(what: str, wanted: Iterable[str] | None, valid: dict[str, Any]) -> list[str]:
    asked = list(valid) if wanted is None else list(wanted)
    for name in asked:
        _one_of(what, name, valid)
    return [name for name in valid if name in asked]
