"""Runs the areas for a number of tries and seconds, prints a table, and exits with 1 if a try failed."""

from __future__ import annotations

import argparse
import os
import pkgutil
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from fuzz._worker import Limits, Worker

SLICE_SECONDS = 5.0  # how long one area runs before the area that has had least time gets its turn
MAX_FAILURES = 20  # of one area; then it ends


@dataclass
class Area:
    """One area and the results of its tries."""

    name: str
    worker: Worker
    next_seed: int
    tries: int
    spent: float = 0.0
    busy: bool = False
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: dict[int, str] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        return self.outcomes.total() >= self.tries or len(self.failures) >= MAX_FAILURES

    def run_until(self, end: float) -> None:
        """Run tries until this time, at least one."""
        began = time.monotonic()
        while True:
            result = self.worker.run(self.next_seed)
            self.outcomes[result.outcome] += 1
            if result.outcome == "failed":
                self.failures[self.next_seed] = result.reason
                print(f"\n{self.name}, seed {self.next_seed}: {result.reason}", flush=True)
            self.next_seed += 1
            if self.done or time.monotonic() >= end:
                break
        self.spent += time.monotonic() - began


def area_names() -> list[str]:
    """List the areas: the modules of this package."""
    names = [module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)])]
    return sorted(name for name in names if not name.startswith("_"))


def run(areas: list[Area], seconds: float, jobs: int) -> None:
    """Run the areas side by side, each with a fair share of the time, until all are done or the time is over."""
    end, lock = time.monotonic() + seconds, threading.Lock()

    def take() -> Area | None:
        with lock:
            waiting = [area for area in areas if not area.busy and not area.done]
            area = min(waiting, key=lambda a: a.spent, default=None)
            if area is not None:
                area.busy = True
            return area

    def work() -> None:
        while (now := time.monotonic()) < end and (area := take()) is not None:
            area.run_until(min(end, now + SLICE_SECONDS))
            area.busy = False

    threads = [threading.Thread(target=work) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def print_table(areas: list[Area]) -> None:
    """Print what happened, area by area, with the seeds that failed."""
    print(f"\n{'area':<14}{'tries':>9}{'refused':>9}{'accepted':>9}{'failures':>9}{'seconds':>9}  seeds that failed")
    total: Counter[str] = Counter()
    for area in areas:
        total += area.outcomes
        print(_row(area.name, area.outcomes, area.spent), "", " ".join(map(str, area.failures)))
    print(_row("all", total, sum(area.spent for area in areas)))
    for area in areas:
        for seed in list(area.failures)[:1]:
            print(f"to repeat: PYTHONPATH=tests python -m fuzz {area.name} --seed {seed} --tries 1")


def _row(name: str, outcomes: Counter[str], seconds: float) -> str:
    columns = (outcomes.total(), outcomes["refused"], outcomes["accepted"], outcomes["failed"])
    return f"{name:<14}" + "".join(f"{n:>9}" for n in columns) + f"{seconds:>9.0f}"


def main() -> int:
    """Read the options, run, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("areas", nargs="*", metavar="AREA", help=f"default: all ({', '.join(area_names())})")
    parser.add_argument("--tries", type=int, default=25_000, help="tries of each area, at most (default 25000)")
    parser.add_argument("--seconds", type=float, default=600, help="for all areas together (default 600)")
    parser.add_argument("--seed", type=int, default=0, help="of the first try; the next ones count up (default 0)")
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1), help="areas at a time")
    parser.add_argument("--try-seconds", type=float, default=Limits.seconds, help="limit of one try (default 20)")
    parser.add_argument("--mebibytes", type=int, default=Limits.mebibytes, help="memory of one try (default 2048)")
    given = parser.parse_args()
    if unknown := set(given.areas) - set(area_names()):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; the areas are {', '.join(area_names())}")
    limits = Limits(given.try_seconds, given.mebibytes)
    areas = [
        Area(name, Worker(f"fuzz.{name}", limits), given.seed, given.tries)
        for name in dict.fromkeys(given.areas or area_names())
    ]
    try:
        run(areas, given.seconds, given.jobs)
    finally:
        for area in areas:
            area.worker.__exit__(None, None, None)
    print_table(areas)
    return 1 if any(area.failures for area in areas) else 0


if __name__ == "__main__":
    sys.exit(main())
