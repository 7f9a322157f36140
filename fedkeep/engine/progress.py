"""Progress of a simulation as one line of text, on a terminal or in a notebook."""

from __future__ import annotations

import contextlib
import math
import shutil
import sys
import time
from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any, TextIO

from fedkeep._util.text import clip, printable
from fedkeep.engine.setup import require_callbacks
from fedkeep.errors import FedkeepError
from fedkeep.runs.history import Record
from fedkeep.runs.round_logger import RoundFigures

if TYPE_CHECKING:
    from fedkeep.engine.simulation import Simulation

_SECONDS_BETWEEN_UPDATES = 0.2
_SECONDS_BETWEEN_LINES = 10.0  # where a line cannot be overwritten


def with_progress(callbacks: Any, progress: bool | None) -> tuple[Any, ...]:
    """Return the callbacks, and one that shows the progress: with True, or with None where somebody is looking."""
    if progress is not None and not isinstance(progress, bool):
        raise FedkeepError(f"progress must be True, False or None, not {progress!r}", key="progress", value=progress)
    given: Iterable[Any] = require_callbacks(callbacks)
    show = (sys.stderr is not None and _can_overwrite(sys.stderr)) if progress is None else progress
    return (*given, ProgressLine()) if show else tuple(given)


class ProgressLine:
    """A callback that shows round, accuracy, forgetting and the time left, in one line on stderr.

    Where a line cannot be overwritten, as in a log file, it prints a line every 10 seconds, and the last one.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream  # None: stderr at the time of writing, which notebooks replace
        self._reset()

    def _reset(self) -> None:
        self._simulation: Simulation | None = None
        self._figures, self._accuracy = RoundFigures(), dict[str, float]()
        self._first: tuple[int, float] | None = None  # the first round of this process, and when it ended
        self._shown_at, self._shown, self._line = -math.inf, "", ""
        self._cell: Any = None  # what a notebook's cell shows

    def __call__(self, simulation: Simulation, record: Record) -> None:
        """Show a round, unless the last one was shown a moment ago."""
        now = time.monotonic()
        if self._simulation is not simulation:
            self._reset()
            self._simulation, self._first = simulation, (record["round"], now)
            for earlier in simulation.history.records:
                if earlier["round"] < record["round"]:
                    self._add(earlier)
        self._add(record)
        self._line = self._format(simulation, record, now)
        pause = _SECONDS_BETWEEN_UPDATES if _can_overwrite(self._file) else _SECONDS_BETWEEN_LINES
        if now - self._shown_at >= pause:
            self._show()

    def close(self) -> None:
        """Show the last round and end the line."""
        if self._simulation is not None:
            if self._line != self._shown:
                self._show()
            if _can_overwrite(self._file) and not _is_notebook(self._file):
                self._write("\n")
        self._reset()

    @property
    def _file(self) -> TextIO:
        return self._stream or sys.stderr

    def _add(self, record: Record) -> None:
        figures = self._figures.add(record)
        names = {"accuracy": "test/accuracy", "forgetting": "forgetting/so_far", "epsilon": "round/epsilon"}
        self._accuracy |= {key: figures[name] for key, name in names.items() if name in figures}

    def _format(self, simulation: Simulation, record: Record, now: float) -> str:
        number, rounds = record["round"], simulation.settings.rounds
        assert self._first is not None
        done = number - self._first[0]
        seconds = (now - self._first[1]) / done if done else record["seconds"]
        parts = [f"{printable(simulation.method.name)}: round {number}/{rounds}"]
        parts += [f"{key} {value:.3f}" for key, value in self._accuracy.items()]
        if number < rounds:
            parts.append(f"time left {format_time(seconds * (rounds - number))}")
        return ", ".join(parts)

    def _show(self) -> None:
        self._shown_at = time.monotonic()
        if _is_notebook(self._file):
            self._show_in_cell()
        elif not _can_overwrite(self._file):
            self._write(f"{self._line}\n")
        else:
            line = clip(self._line, shutil.get_terminal_size().columns - 1)
            self._write(f"\r{line.ljust(len(self._shown))}")
        self._shown = self._line

    def _show_in_cell(self) -> None:
        """Show the line as the cell's own output: on stderr, a notebook would show it as an error."""
        shown = {"text/plain": self._line}
        if self._cell is None:
            self._cell = import_module("IPython.display").display(shown, raw=True, display_id=True)
        else:
            self._cell.update(shown, raw=True)

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # a terminal that was closed must not end the run
            self._file.write(text)
            self._file.flush()


def format_time(seconds: float) -> str:
    """Format a duration.

    >>> format_time(7.4), format_time(95), format_time(7384)
    ('7 s', '1:35', '2:03:04')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _can_overwrite(stream: Any) -> bool:
    """Return whether a line can be overwritten here: a terminal, or the output of a notebook's cell."""
    try:
        return _is_notebook(stream) or bool(stream.isatty())
    except (AttributeError, ValueError):  # no stream, or a closed one
        return False


def _is_notebook(stream: Any) -> bool:
    return type(stream).__module__.partition(".")[0] == "ipykernel"
