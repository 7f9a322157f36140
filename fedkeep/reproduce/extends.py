"""Tables that extend another table of the same paper: `extends = "table-1"`.

setting, quick      the other table's, merged with the changes given here
rows                without `rows`, all of the other table's; with it, the named ones: `fedavg = {}` is its row FedAvg
rows.NAME           with `extends = "ROW"`, that row of the other table, merged with the changes given here
columns.NAME        with `extends = "COLUMN"`, the changes of that column of the other table, merged with those given
                    here; never its figures

What a row or a column extends stays in its `extends`, so that runs of the other table can be used here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fedkeep._util.text import format_value
from fedkeep._util.validate import require_choice
from fedkeep.errors import ConfigError
from fedkeep.experiments.overrides import merge

_NOT_EXTENDED = ("label", "paper", "explained")  # of a column


def extend(table: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return a table's specification with what it takes from the one that it extends.

    >>> one = {"setting": {"model": "mlp"}, "rows": {"fedavg": {"label": "FedAvg"}, "moon": {"label": "MOON"}}}
    >>> extended = extend({"setting": {"train": {"lr": 0.1}}, "rows": {"moon": {"method": "moon"}}}, one)
    >>> extended["setting"], extended["rows"]
    ({'model': {'name': 'mlp'}, 'train': {'lr': 0.1}}, {'moon': {'label': 'MOON', 'extends': 'moon', 'method': ...}})
    """
    others = _tables(other, "rows")
    named = _tables(table, "rows") if "rows" in table else {name: {} for name in others}
    rows = {name: _extend_row(name, row, others) for name, row in named.items()}
    columns = {
        name: _extend_column(f"columns.{name}", column, _tables(other, "columns"), rows)
        for name, column in _tables(table, "columns").items()
    }
    changed = {key: merge(merge({}, _table(other, key)), _table(table, key)) for key in ("setting", "quick")}
    changed["quick"] = _without_rows(changed["quick"], _table(other, "quick"), rows)
    return {**table, **changed, "rows": rows, "columns": columns}


def _extend_row(name: str, row: dict[str, Any], others: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return a row with what it takes from the row that it extends, or from the one of its own name."""
    if "extends" not in row and name not in others:
        return row
    extended = row.get("extends", name)
    require_choice(f"rows.{name}.extends", extended, list(others), what=f"row in rows.{name}:", error=ConfigError)
    return merge({**others[extended], "extends": extended}, row)


def _extend_column(
    key: str, column: dict[str, Any], others: dict[str, dict[str, Any]], rows: Iterable[str]
) -> dict[str, Any]:
    """Return a column with the changes of the column that it extends, if it extends one."""
    if "extends" not in column:
        return column
    require_choice(f"{key}.extends", column["extends"], list(others), what=f"column in {key}:", error=ConfigError)
    other = {name: value for name, value in others[column["extends"]].items() if name not in _NOT_EXTENDED}
    return merge(merge({}, _without_rows(other, other, rows)), column)


def _without_rows(changes: dict[str, Any], other: dict[str, Any], rows: Iterable[str]) -> dict[str, Any]:
    """Return changes without those that come from the other table for rows that this table does not have."""
    if "rows" not in changes:
        return changes
    dropped = _table(other, "rows").keys() - set(rows)
    return {**changes, "rows": {row: change for row, change in _table(changes, "rows").items() if row not in dropped}}


def _table(tables: dict[str, Any], key: str) -> dict[str, Any]:
    """Return a TOML table of a specification; empty if there is none."""
    value = tables.get(key, {})
    if not isinstance(value, dict):
        raise ConfigError(f"{key} must be a table, not {format_value(value)}", key=key, value=value)
    return value


def _tables(tables: dict[str, Any], key: str) -> dict[str, dict[str, Any]]:
    """Return a TOML table of tables of a specification; empty if there is none."""
    found = _table(tables, key)
    return {name: _table(found, name) for name in found}
