"""The failure of one run of several: its message, and a file with the traceback."""

from __future__ import annotations

import signal
import traceback
from contextlib import suppress
from pathlib import Path

from fedkeep._util.text import format_os_error, one_line
from fedkeep.errors import FedkeepError, RunFailed
from fedkeep.runs.files import write_atomic

TRACEBACK = "traceback.txt"  # in the run folder, after an error that is not fedkeep's own


def as_failure(error: Exception, path: Path) -> FedkeepError:
    """Return any error of a run in this folder as one of fedkeep's; write the traceback of others into the folder."""
    if isinstance(error, FedkeepError):
        return error
    if isinstance(error, OSError):  # the system refused something
        return RunFailed(format_os_error(error))
    what = "out of memory" if isinstance(error, MemoryError) else f"{type(error).__name__}: {one_line(error)}"
    file = path / TRACEBACK
    try:
        path.mkdir(parents=True, exist_ok=True)
        write_atomic(file, "".join(traceback.format_exception(error)).encode(errors="replace"))
    except (FedkeepError, OSError):
        return RunFailed(f"{what} (the traceback could not be written to {file})")
    return RunFailed(f"{what} (traceback: {file})")


def process_failure(exit_code: int | None) -> RunFailed:
    """Return the failure of a run whose process has ended before it; a signal's code is -N, or 128 + N."""
    code = exit_code or 0
    number = -code if code < 0 else code - 128
    if number not in [each.value for each in signal.Signals]:
        return RunFailed(f"its process ended with exit code {exit_code}")
    name = signal.Signals(number).name
    advice = " (out of memory? try fewer --jobs)" if name == "SIGKILL" else ""
    return RunFailed(f"its process was ended by {name}{advice}")


def remove_traceback(path: Path) -> None:
    """Remove the traceback of an earlier failure of this run."""
    with suppress(OSError):
        (path / TRACEBACK).unlink(missing_ok=True)
