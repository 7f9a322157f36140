"""Choice of a table's columns: by the user's options, by their usual names, or all that can be inputs."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fedkeep._util.text import did_you_mean, list_some, short_name
from fedkeep.data.sources.arrow_types import is_number, is_whole, is_words
from fedkeep.data.sources.categories import MAX_CATEGORIES
from fedkeep.data.sources.common import Options
from fedkeep.errors import DataError

if TYPE_CHECKING:
    from fedkeep.data.sources.tables import Table

log = logging.getLogger("fedkeep")

# the usual names of columns, in order of preference
USUAL_Y = ("label", "labels", "fine_label", "target", "class", "character", "y")
USUAL_X = (
    "image", "img", "images", "pixels", "pixel_values", "features", "input_ids", "text", "sentence", "content", "x",
)  # fmt: skip
PIXEL = re.compile(r"(pixel|px)[_ ]?\d+|\d+x\d+", re.IGNORECASE)
_ROW_NUMBERS = ("", "id", "index", "Unnamed: 0", "__index_level_0__")  # added by programs that write tables
_ID = re.compile(r"(?i:(.*[\W_])?(uu|gu)?id)|.*[a-z](Id|ID)", re.DOTALL)
_SHOWN = 6  # columns in a message
_ENOUGH_ROWS = 20  # in fewer rows, all values of a feature may be different by chance


@dataclass(frozen=True)
class Chosen:
    """The chosen columns: of the examples, the classes and, optionally, the owners."""

    x: tuple[str, ...]
    y: str
    ids: str | None
    every: bool = False  # whether x are all columns that can be inputs, because none is named
    left_out: dict[str, str] = field(default_factory=dict)  # why columns are not among x, if every is True

    @property
    def names(self) -> list[str]:
        """The names of all chosen columns."""
        return [*self.x, self.y, *([] if self.ids is None else [self.ids])]


def choose(schema: Any, options: Options, where: str) -> Chosen:
    """Return the columns named by the options; for the others, columns with a usual name."""
    given = options.x if options.text is None else options.text
    x = () if given is None else (given,) if isinstance(given, str) else tuple(given)
    free = [name for name in schema.names if name not in (*x, options.ids)]
    y = options.y or next((name for usual in USUAL_Y for name in free if name.lower() == usual), None)
    if y is None:
        raise DataError(
            f"{where}: name the column of the classes with y= (columns: {list_some(free)})", key="y", valid=free
        )
    if x:
        chosen = Chosen(x, y, options.ids)
    else:
        require_columns(schema, Chosen((), y, options.ids), where)
        chosen = _usual_x(schema, Chosen((), y, options.ids), where)
    require_columns(schema, chosen, where)
    return chosen


def require_columns(schema: Any, chosen: Chosen, where: str) -> None:
    """Raise unless each chosen column exists exactly once, and the classes are not among the examples' columns."""
    names = list(schema.names)
    counts = Counter(names)
    columns = [("y", chosen.y), *(("x", name) for name in chosen.x), *([("ids", chosen.ids)] if chosen.ids else [])]
    roles = {"y": "the classes", "x": "the examples", "ids": "the owners"}
    for option, name in columns:
        if counts[name] > 1:
            raise DataError(f"{where} has {counts[name]} columns named {name!r}", key=option, value=name)
        if name not in counts:
            raise DataError(
                f"{where} has no column {name!r} for {roles[option]}: {did_you_mean(name, names)}",
                key=option,
                value=name,
                valid=names,
            )
    if chosen.y in chosen.x:
        raise DataError(
            f"{where}: the column {chosen.y!r} cannot be both the classes and a part of the examples",
            key="x",
            value=chosen.y,
        )


def _usual_x(schema: Any, chosen: Chosen, where: str) -> Chosen:
    """Return the columns of the examples: one with a usual name, else all pixels, else all of numbers and words."""
    names = [name for name in schema.names if name not in chosen.names and name not in _ROW_NUMBERS]
    known = next((name for usual in USUAL_X for name in names if name.lower() == usual), None)
    if known is not None:
        return replace(chosen, x=(known,))
    if pixels := [name for name in names if PIXEL.fullmatch(name)]:
        return replace(chosen, x=tuple(pixels))
    if len(names) == 1:
        return replace(chosen, x=tuple(names))
    kinds = dict(zip(schema.names, schema.types, strict=True))
    left_out = {}
    for name in names:
        if _ID.fullmatch(name):
            left_out[name] = "named like an id"
        elif not (is_number(kinds[name]) or is_words(kinds[name])):
            left_out[name] = f"neither numbers nor words, but {kinds[name]}"
    x = tuple(name for name in names if name not in left_out)
    return _require_some(replace(chosen, x=x, every=True, left_out=left_out), schema, where)


def leave_out_by_content(table: Table, chosen: Chosen) -> Chosen:
    """Return the choice without columns that are chosen only because none is named, and cannot be features.

    These are numbers of rows, and words that are different in every row, or too many to be categories.
    """
    if not chosen.every or len(chosen.x) == 1:
        return chosen
    left_out = dict(chosen.left_out)
    for name in chosen.x:
        reason = _unlike_a_feature(table.arrow.column(name))
        if reason is not None:
            left_out[name] = reason
    x = tuple(name for name in chosen.x if name not in left_out)
    return _require_some(replace(chosen, x=x, left_out=left_out), table.arrow.schema, table.name)


def _unlike_a_feature(column: Any) -> str | None:
    """Return why a column of numbers or words is not a feature, or None."""
    if not (is_words(column.type) or is_whole(column.type)):
        return None
    n = len(column.unique())
    differs = n == len(column) >= _ENOUGH_ROWS
    if is_words(column.type):
        if differs:
            return "words that differ in every row"
        return f"{n} different words, more than {MAX_CATEGORIES}" if n > MAX_CATEGORIES else None
    if not differs or column.null_count:
        return None
    values = column.to_numpy()
    dense = int(values.max()) - int(values.min()) < 2 * n
    return "a number of its own in every row" if dense or bool((values[1:] > values[:-1]).all()) else None


def _require_some(chosen: Chosen, schema: Any, where: str) -> Chosen:
    if chosen.x:
        return chosen
    names = list(schema.names)
    reasons = f"; left out: {format_left_out(chosen)}" if chosen.left_out else ""
    raise DataError(
        f"{where}: name the columns of the examples with x= (columns: {list_some(names)}{reasons})",
        key="x",
        valid=names,
    )


def format_left_out(chosen: Chosen) -> str:
    """Return the columns that are not used, with the reasons.

    >>> format_left_out(Chosen(("age",), "label", None, True, {"patient_id": "named like an id"}))
    'patient_id (named like an id)'
    """
    return list_some([f"{short_name(name, 40)} ({reason})" for name, reason in chosen.left_out.items()])


def _format_names(names: Sequence[str]) -> str:
    return list_some([short_name(name, 40) for name in names], _SHOWN)


def log_choice(chosen: Chosen, where: str) -> None:
    """Log which columns are used; as a warning if some are left out that a user may have expected."""
    if chosen.every and chosen.left_out:
        log.warning(
            "%s: the examples are %s; left out: %s; x= chooses columns",
            where, _format_names(chosen.x), format_left_out(chosen),
        )  # fmt: skip
    else:
        ids = f", their owners {short_name(chosen.ids)}" if chosen.ids else ""
        log.info("%s: the examples are %s, the classes %s%s", where, _format_names(chosen.x), short_name(chosen.y), ids)
