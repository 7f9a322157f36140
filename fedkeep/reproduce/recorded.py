"""Instruments that a table records during its runs, and measures that read what they recorded.

A table's `[instruments]` names studies of `fedkeep.instruments` and says how often they are made. The results of the
last analysed round are what its measures read, such as `alignment.layers.first.clients`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedkeep.analysis import personal
from fedkeep.analysis.recoverable import HALF_KEY, STUDY, TEST_HALF
from fedkeep.engine.simulation import Callback
from fedkeep.errors import ConfigError, FedkeepError
from fedkeep.instruments.every import Every, append_result
from fedkeep.instruments.options import Options
from fedkeep.instruments.study import CHEAP, STUDIES, analyse, parse_study_names
from fedkeep.runs.history import History
from fedkeep.runs.reading import read_instruments

_ONLY_LAST = 1 << 30  # more rounds than any run has: the callback is due after the last round alone


class Instruments(BaseModel):
    """The studies of a table's runs: which, every how many rounds (without it: after the last), and their options."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    what: list[str] = Field(min_length=1)
    every: int | None = Field(default=None, ge=1)
    options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _require_valid(self) -> Instruments:
        try:
            parse_study_names(self.what)
            self.parsed_options()
        except (FedkeepError, TypeError) as error:
            raise ConfigError(f"instruments: {error}", key="instruments", value=self.what) from None
        return self

    def parsed_options(self) -> Options:
        """Return the options of the studies."""
        return Options(**self.options)

    def callbacks(self) -> list[Callback]:
        """Return a new callback for one run."""
        return [Every(self.every or _ONLY_LAST, self.what, self.parsed_options())]

    def recorded_in(self, history: History) -> bool:
        """Return whether a finished run has the results of its last round."""
        last = history.instruments[-1] if history.instruments else {}
        found = set(parse_study_names(self.what)) <= last.keys()
        return found and last["after_round"] == history.records[-1]["round"]

    def add_missing(self, folder: Path) -> list[dict[str, Any]]:
        """Return what was recorded in the folder of a finished run; if nothing was, analyse its last checkpoint."""
        if not read_instruments(folder):
            result = analyse(folder, self.what, self.parsed_options())
            append_result(folder, {"after_round": result["round"] - 1, **result})
        return read_instruments(folder)


def kept_studies(what: Any) -> set[str]:
    """Return which of these studies kept runs carry: all but the large ones.

    >>> sorted(kept_studies(["tsne", "alignment", "divergence"]))
    ['alignment', 'divergence']
    """
    return set(what) & {*CHEAP, STUDY, personal.STUDY}


def is_recorded(measure: str) -> bool:
    """Return whether the name of a measure is that of a study's value.

    >>> is_recorded("gradients.diversity"), is_recorded("gradients"), is_recorded("final")
    (True, False, False)
    """
    study, _, path = measure.partition(".")
    return study in STUDIES and path != ""


def value_of(history: History, measure: str) -> float | None:
    """Return a recorded value of the last analysed round; None if there is none.

    What was measured on half of the test set has a name that says so: `recoverable.test_half.share`.
    """
    if not history.instruments:
        return None
    last, half = history.instruments[-1], f"{STUDY}.{HALF_KEY}."
    if measure.startswith(f"{STUDY}.") and (last.get(STUDY, {}).get("fitted_on") == TEST_HALF) != (half in measure):
        return None
    return find_value(last, measure.replace(half, f"{STUDY}."))


def find_value(found: Any, path: str) -> float | None:
    """Return the number at a path of keys, the mean of a list; `first` and `last` are entries of a table.

    >>> layers = {"body.2": {"clients": [0.5, 1.0], "after": 0.9}, "classifier": {"clients": [0.25, None], "after": 1}}
    >>> find_value({"layers": layers}, "layers.first.clients"), find_value({"layers": layers}, "layers.body.2.after")
    (0.75, 0.9)
    >>> find_value({"layers": layers}, "layers.last.clients"), find_value({"layers": layers}, "layers.other.after")
    (0.25, None)
    """
    if not path:
        return _number(found)
    if not isinstance(found, Mapping) or not found:
        return None
    for key, value in found.items():  # a key may have dots itself
        if path == key or path.startswith(f"{key}."):
            return find_value(value, path[len(key) + 1 :])
    first, _, rest = path.partition(".")
    ends = {"first": 0, "last": -1}
    return find_value(list(found.values())[ends[first]], rest) if first in ends else None


def _number(found: Any) -> float | None:
    if isinstance(found, list):
        values = [value for value in map(_number, found) if value is not None]
        return statistics.fmean(values) if values else None
    return float(found) if isinstance(found, int | float) and not isinstance(found, bool) else None
