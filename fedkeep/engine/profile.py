"""Callback that profiles a few rounds of a run with torch's profiler."""

from __future__ import annotations

import gzip
import logging
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity, record_function

from fedkeep._util.text import format_os_error, printable
from fedkeep._util.validate import require_whole
from fedkeep.engine import trace
from fedkeep.engine.round_parts import unused_parts
from fedkeep.errors import FedkeepError
from fedkeep.runs.files import TRACE, write_atomic
from fedkeep.runs.history import Record

if TYPE_CHECKING:
    from fedkeep.engine.simulation import Simulation

log = logging.getLogger("fedkeep")


class Profile:
    """A callback that profiles a few rounds, writes their trace, and can print where their time went.

    The first `warm_up` rounds are not profiled, because they include work that is done once; of a short run, fewer are
    left out, but at least one. Then `rounds` rounds are, or as many as are complete when the run ends. Their trace, in
    Chrome's format, is written to `file`, by default to `trace.json.gz` in the run folder. The run's results do not
    change. If a profile is used for another run, it starts anew.

        profile = fk.Profile()
        fk.simulate(..., run_dir="runs/one", callbacks=[profile])
        print(profile)
    """

    def __init__(self, file: str | Path | None = None, rounds: int = 3, warm_up: int = 2) -> None:
        self._given_file = None if file is None else Path(file)
        self.rounds, self.warm_up = require_whole("rounds", rounds, low=1), require_whole("warm_up", warm_up, low=1)
        self._profiler: torch.profiler.profile | None = None
        self._simulation: Callable[[], Simulation | None] = lambda: None
        self._reset()

    def _reset(self) -> None:
        self.file = self._given_file
        self.summary: trace.Summary | None = None
        self.seconds_before: float | None = None  # of the last round that was not profiled, if that is known
        self.n_seen = self.n_profiled = 0  # rounds
        self._to_skip: int | None = None
        self._began: float | None = None  # when the profiler was started
        self._last_call: float | None = None  # when the last round ended

    def __call__(self, simulation: Simulation, record: Record) -> None:
        """Start the profiler after the warm-up rounds; stop it after the profiled ones, or after the last round."""
        if self._simulation() is not simulation:
            self.close()
            self._reset()
            self._simulation = weakref.ref(simulation)
        self.n_seen += 1
        if self.summary is not None:
            return
        last = record["round"] >= simulation.settings.rounds
        if self._profiler is not None:
            self._end_round(simulation, record, last)
            return
        if self._to_skip is None:
            self._require_file(simulation)
            to_come = simulation.settings.rounds - record["round"] + 1  # this one included
            self._to_skip = max(1, min(self.warm_up, to_come - self.rounds))
        self._to_skip -= 1
        now = time.perf_counter()
        self.seconds_before = None if self._last_call is None else now - self._last_call
        self._last_call = now
        if self._to_skip == 0 and not last:
            self._start(simulation.task.device)

    def close(self) -> None:
        """End the profiler if it still runs, because the run has ended early; write the rounds that are complete."""
        profiler, simulation = self._profiler, self._simulation()
        if profiler is not None:
            self._profiler = None
            profiler.stop()
            if self.n_profiled and simulation is not None:
                try:
                    self._write(simulation, profiler)
                except OSError as error:  # the reason for the end of the run is more important
                    log.warning("the trace is not written: %s", format_os_error(error))
        self._to_skip = self._last_call = None

    def __str__(self) -> str:
        if self.summary is None:
            return f"Nothing was profiled: {self._reason()}."
        gpu = "" if self.summary.gpu_ms is None else _format_busy(self.summary.gpu_ms, self.summary.ms)
        before = self.seconds_before
        without = "" if before is None else f" (the round before, without the profiler: {before * 1e3:.1f} ms)"
        return (
            f"Profile of {self.n_profiled} round{'s' * (self.n_profiled > 1)}: "
            f"{self.summary.ms:.1f} ms per round{gpu}{without}\n\n"
            f"{trace.format_summary(self.summary)}\n\n"
            f"Trace: {printable(self.file)} (open it in https://ui.perfetto.dev or chrome://tracing)"
        )

    def _reason(self) -> str:
        """Return why there is no summary."""
        if self.n_seen == 0:
            return "no round has been run"
        if self.n_seen == 1 and self._began is None:
            return "only one round was run, and a round is profiled after at least one other"
        return "the run has ended before a profiled round was complete" if self._profiler is None else "it still runs"

    def _require_file(self, simulation: Simulation) -> None:
        """Choose the file of the trace; raise if there is no place for it."""
        if self.file is None:
            if simulation.folder is None:
                raise FedkeepError("the profile has no file to write to: set its file, or run_dir", key="file")
            self.file = simulation.folder.path / TRACE
        elif not self.file.parent.is_dir():
            raise FedkeepError(
                f"there is no folder {self.file.parent} to write {self.file} in", key="file", value=str(self.file)
            )

    def _start(self, device: torch.device) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()
        self._began = time.perf_counter()

    def _end_round(self, simulation: Simulation, record: Record, last: bool) -> None:
        """Note the end of a profiled round; after the last one, write the trace."""
        assert self._profiler is not None
        done = last or self.n_profiled + 1 == self.rounds
        if done and simulation.task.device.type == "cuda":
            torch.cuda.synchronize(simulation.task.device)
        with record_function(f"{trace.ROUND_END}{record['round']}"):
            self._last_call = time.perf_counter()
        self.n_profiled += 1
        if done:
            profiler, self._profiler = self._profiler, None
            profiler.stop()
            self._write(simulation, profiler)

    def _write(self, simulation: Simulation, profiler: torch.profiler.profile) -> None:
        """Write the trace and summarise its complete rounds."""
        assert self.file is not None
        assert self._began is not None
        assert self._last_call is not None
        with tempfile.TemporaryDirectory(prefix="fedkeep-profile-") as folder:
            profiler.export_chrome_trace(f"{folder}/trace.json")
            written = Path(folder, "trace.json").read_bytes()
        events = trace.complete_rounds(trace.read_events(written))
        seconds = self._last_call - self._began
        self.summary = trace.summarise(events, self.n_profiled, seconds, unused_parts(simulation.method))
        write_atomic(self.file, gzip.compress(written, 5) if self.file.suffix == ".gz" else written)


def _format_busy(gpu_ms: float, ms: float) -> str:
    return f"; the GPU was busy for {gpu_ms:.1f} ms of it ({gpu_ms / ms:.0%})"
