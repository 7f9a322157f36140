"""Processes that run experiments, several at a time. A process that dies is replaced, and all end with their parent."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from fedkeep._util.own_parts import trust, trusted
from fedkeep._util.signals import NUMBERS, EndOnce
from fedkeep._util.text import one_line
from fedkeep.engine.simulation import Callback
from fedkeep.errors import FedkeepError, RunFailed
from fedkeep.experiments.experiment import Experiment
from fedkeep.experiments.failure import as_failure, process_failure, remove_traceback
from fedkeep.experiments.run import run

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext, SpawnContext

# called once per run; with several processes it must be picklable, and not be defined in the main script
MakeCallbacks = Callable[[], list[Callback]]
SECONDS_TO_END = 120.0  # for a process to save its run, after the signal to end; a busy disk may take long
# new processes: a fork of this one would inherit the locks of its threads, and its GPU
PROCESSES: SpawnContext | ForkServerContext = multiprocessing.get_context("spawn")

_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def run_in_processes(
    experiments: Mapping[str, Experiment],
    folder: Path,
    jobs: int,
    make_callbacks: MakeCallbacks,
    until: int | None = None,
) -> Generator[tuple[str, FedkeepError | None]]:
    """Run experiments in `jobs` processes; yield each name when its run has ended, with its error if it failed.

    With `until`, runs stop after that round.

    If this generator is closed or ends with an exception, every process saves its run's last round and ends.
    """
    waiting = list(experiments)[::-1]
    threads = max(1, (os.cpu_count() or 1) // jobs)
    workers = [Worker(threads, make_callbacks) for _ in range(min(jobs, len(waiting)))]

    def start_next(worker: Worker) -> None:
        label = waiting.pop()
        worker.start(label, experiments[label], folder / label, until)

    try:
        for worker in workers:
            start_next(worker)
        while running := {worker.pipe: worker for worker in workers if worker.label is not None}:
            for pipe in wait(list(running)):
                worker = running[pipe]  # type: ignore[index]
                yield worker.finish()
                if waiting:
                    start_next(worker)
    finally:
        _end(workers)


class Worker:
    """A process that runs one experiment after another. A new one takes its place after an unexpected error."""

    def __init__(self, threads: int, make_callbacks: MakeCallbacks) -> None:
        self.threads, self.make_callbacks = threads, make_callbacks
        self.process: multiprocessing.process.BaseProcess | None = None
        self.pipe: Connection
        self.label: str | None = None  # of the run in progress

    def start(self, label: str, experiment: Experiment, path: Path, until: int | None = None) -> None:
        """Start a run."""
        self.label = label
        if self.process is None or not self.process.is_alive():
            self._start_process()
        with suppress(OSError):  # the process has died: `finish` says so
            self.pipe.send((experiment.to_dict(), trusted(), path, until))

    def finish(self) -> tuple[str, FedkeepError | None]:
        """Return the name of the run that has ended, and its error."""
        assert self.label is not None
        assert self.process is not None
        label, self.label = self.label, None
        error: FedkeepError | None
        try:
            error = self.pipe.recv()
        except (EOFError, OSError):
            _join(self.process, SECONDS_TO_END)
            error = process_failure(self.process.exitcode)
        except Exception as problem:  # an error of another package that cannot be sent
            error = RunFailed(f"it failed with an error that cannot be read ({one_line(problem)})")
        if isinstance(error, RunFailed) and self.process.is_alive():  # its memory or device may be in a bad state
            self.close()
            _join(self.process, SECONDS_TO_END)
        return label, error

    def close(self) -> None:
        """Let the process end after its run."""
        if self.process is not None:
            self.pipe.close()

    def _start_process(self) -> None:
        self.pipe, theirs = PROCESSES.Pipe()
        process = PROCESSES.Process(target=_serve, args=(theirs, self.threads, self.make_callbacks))
        with _without_interrupts(), _without_main_script():
            process.start()
        self.process = process
        theirs.close()


def _end(workers: list[Worker]) -> None:
    """End all processes: idle ones now, the others after they have saved their run's last round."""
    processes = [worker.process for worker in workers if worker.process is not None]
    for worker in workers:
        worker.close()
        if worker.label is not None and worker.process is not None:
            worker.process.terminate()
    end = time.monotonic() + SECONDS_TO_END
    for process in processes:
        _join(process, max(0.0, end - time.monotonic()))


def _join(process: multiprocessing.process.BaseProcess, seconds: float) -> None:
    """Wait for a process to end; kill it after so many seconds."""
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Hold back Ctrl-C here, and in a process that is started meanwhile: while it imports, it would raise there."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # otherwise the first process starts it, which lets Ctrl-C through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _without_main_script() -> Iterator[None]:
    """Hide the main script from processes that are started meanwhile.

    A new process imports it otherwise, which would start the whole sweep again in every process, unless the script has
    `if __name__ == "__main__"`. Nothing that is sent to a process is defined there.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")  # without __spec__ and __file__ there is nothing to import
    try:
        yield
    finally:
        sys.modules["__main__"] = main


# In the process


def _serve(pipe: Connection, threads: int, make_callbacks: MakeCallbacks) -> None:
    """Run the experiments that come through the pipe, until it is closed; send back None or the error of each."""
    _end_with_parent()
    torch.set_num_threads(threads)
    with suppress(EOFError, OSError):
        while True:
            experiment, names, path, until = pipe.recv()
            trust(names)
            error = _run(experiment, path, make_callbacks, until)
            try:
                pipe.send(error)
            except Exception:  # the error holds a value that cannot be sent
                pipe.send(RunFailed(str(error)))


def _run(
    experiment: dict[str, Any], path: Path, make_callbacks: MakeCallbacks, until: int | None
) -> FedkeepError | None:
    """Run one experiment; the history stays in its folder."""
    remove_traceback(path)
    try:
        run(Experiment.from_dict(experiment), path, make_callbacks(), until)
    except Exception as error:
        return as_failure(error, path)
    return None


def _end_with_parent() -> None:
    """End this process, saving its run, on SIGTERM, SIGHUP and when its parent dies. Ctrl-C is left to the parent."""
    on_signal = EndOnce()  # a group of processes gets a signal at once, and then the parent's and that of its death
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    for number in NUMBERS:
        if number != signal.SIGINT and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, on_signal)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    threading.Thread(target=_watch_parent, daemon=True).start()


def _watch_parent() -> None:
    """Wait for the parent's death, which every system reports here; then end this process, however busy it is."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SECONDS_TO_END)
    os._exit(128 + signal.SIGTERM)
