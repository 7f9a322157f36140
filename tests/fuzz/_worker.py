"""The processes in which tries run: with a limit on the memory of a process and on the time of a try."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import resource
import shutil
import signal
import tempfile
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from pathlib import Path
from types import TracebackType

START_SECONDS = 120.0  # for imports, and for what the first try prepares
MEBIBYTE = 2**20


@dataclass(frozen=True)
class Limits:
    """What one try may take. Memory is counted on top of what the process has mapped after its imports.

    Time is the process's own where it can be read (Linux), and then at most six times as long on the clock, so that a
    busy machine makes no failures.
    """

    seconds: float = 20.0
    mebibytes: int = 2048


DEFAULT = Limits()


@dataclass(frozen=True)
class Result:
    """The result of one try: "accepted", "refused" or "failed", and why it failed."""

    outcome: str
    reason: str = ""


class Worker:
    """A process that runs one try after another; after a crash or a hang it is replaced by a new one."""

    def __init__(self, module: str, limits: Limits = DEFAULT, context: BaseContext | None = None) -> None:
        self.module, self.limits = module, limits
        self.context = context or multiprocessing.get_context("spawn")
        self.folder = Path(tempfile.mkdtemp(prefix="fedkeep-fuzz-"))
        self.output = self.folder / "output.txt"  # what the process writes to stdout and stderr
        self.process: multiprocessing.process.BaseProcess | None = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, seed: int) -> Result:
        """Run the try of this seed."""
        if self.process is None:
            self._start()
            limit = START_SECONDS
        else:
            limit = self.limits.seconds
        try:
            self.pipe.send(seed)
            if self._has_result(limit):
                return Result(*self.pipe.recv())
            reason = f"no result after {limit:.0f} s\n{self._where_it_hangs()}"
        except (EOFError, OSError):
            assert self.process is not None
            self.process.join(5)
            reason = f"the process ended with exit code {self.process.exitcode}\n{self._last_output()}"
        self._end()
        return Result("failed", reason)

    def _has_result(self, limit: float) -> bool:
        """Wait for the result; return whether there is one within the limit."""
        assert self.process is not None
        before = _cpu_seconds(self.process.pid)
        for _ in range(6):
            if self.pipe.poll(limit):
                return True
            now = _cpu_seconds(self.process.pid)
            if before is None or now is None or now - before > limit:
                return False
        return False

    def _start(self) -> None:
        shutil.rmtree(self.folder / "shared", ignore_errors=True)
        (self.folder / "shared").mkdir()
        self.pipe, theirs = self.context.Pipe()
        args = (self.module, self.folder, self.limits.mebibytes, theirs)
        self.process = self.context.Process(target=_serve, args=args, daemon=True)
        self.process.start()
        theirs.close()

    def _end(self) -> None:
        if self.process is not None:
            self.pipe.close()
            self.process.kill()
            self.process.join()
            self.process = None

    def _where_it_hangs(self) -> str:
        assert self.process is not None
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGUSR1)
        self.process.join(0.5)
        return self._last_output()

    def _last_output(self) -> str:
        with contextlib.suppress(OSError):
            return "\n".join(self.output.read_text(errors="replace").splitlines()[-30:])
        return ""


def _cpu_seconds(pid: int | None) -> float | None:
    """Return the processor time of a process; None where it cannot be read."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return None


def _serve(module: str, folder: Path, mebibytes: int, pipe: Connection) -> None:
    """Run the tries whose seeds come through the pipe, until it is closed."""
    with open(folder / "output.txt", "wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ["HF_HUB_OFFLINE"] = "1"  # no try waits for a server
    try_one = importlib.import_module(module).try_one
    _limit_memory(mebibytes)
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        while True:
            seed = pipe.recv()
            os.truncate(folder / "output.txt", 0)
            pipe.send(_run(try_one, seed, folder / "shared" / "try"))


def _run(try_one, seed: int, folder: Path) -> tuple[str, str]:
    folder.mkdir()
    try:
        return ("accepted" if try_one(seed, folder) else "refused"), ""
    except BaseException:
        return "failed", traceback.format_exc()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _limit_memory(mebibytes: int) -> None:
    """Let this process map this much more than it has mapped now, where the system counts it (Linux)."""
    with contextlib.suppress(OSError):
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        limit = mapped + mebibytes * MEBIBYTE
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
