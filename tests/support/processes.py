"""Processes of the command line: starting them, sending signals, and finding what is left of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def running_fedkeep(*args: str, **kwargs: object) -> Iterator[subprocess.Popen[str]]:
    """Start `fedkeep ARGS` in a session of its own, with the signals of a terminal; kill what is left in the end."""

    def use_default_signals() -> None:  # the shell of the tests may ignore some
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)

    process = subprocess.Popen(
        [sys.executable, "-m", "fedkeep", *args],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=use_default_signals,
        **kwargs,  # type: ignore[call-overload]
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def run_script(script: str, limit: float = 300) -> subprocess.CompletedProcess[str]:
    """Run an indented script in a new interpreter and return its output; it must not fail."""
    command = [sys.executable, "-c", textwrap.dedent(script)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=limit)


def wait_until(
    condition: Callable[[], object], process: subprocess.Popen[str] | None = None, limit: float = 120
) -> None:
    """Wait until this is true, while the process runs."""
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, "it never happened"
        assert process is None or process.poll() is None, process.communicate()[1]
        time.sleep(0.02)


def count_lines(path: Path) -> int:
    """Count the lines of a file; 0 if there is none."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def handles(pid: int, number: int) -> bool:
    """Return whether a process has a handler for this signal."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def processes_of(session: int) -> dict[int, str]:
    """Return the running processes of a session and their command lines."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, its_session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(its_session) == session and state != "Z":
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    return found


def workers_of(session: int) -> list[int]:
    """Return the processes that run a sweep's experiments."""
    return sorted(pid for pid, command in processes_of(session).items() if "spawn_main" in command)
