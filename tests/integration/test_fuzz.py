"""A small, seeded part of the fuzzing of every area, and the runner's own limits."""

from __future__ import annotations

import time
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
from fuzz.__main__ import area_names
from fuzz._worker import Limits, Worker
from support.fuzz_failures import WAYS

TRIES, SECONDS = 100, 10.0  # per area: whichever comes first


@pytest.mark.parametrize("area", area_names())
def test_no_input_ends_in_anything_but_our_errors(area: str, forks: ForkServerContext) -> None:
    end, results = None, []
    with Worker(f"fuzz.{area}", context=forks) as worker:
        for seed in range(TRIES):
            result = worker.run(seed)
            assert result.outcome != "failed", f"seed {seed}: {result.reason}"
            results.append(result.outcome)
            end = end or time.monotonic() + SECONDS  # the first try prepares what the others share
            if time.monotonic() > end:
                break
    assert "refused" in results, "the area never makes bad input"


def test_the_runner_counts_every_kind_of_failure_and_goes_on(forks: ForkServerContext) -> None:
    with Worker("support.fuzz_failures", Limits(seconds=1.0, mebibytes=1024), forks) as worker:
        first = worker.run(WAYS.index("accept"))  # the first try has more time: it includes the imports
        results = {way: worker.run(seed) for seed, way in enumerate(WAYS)}
        after = worker.run(WAYS.index("accept"))
    outcomes = {way: result.outcome for way, result in results.items()}
    assert first.outcome == after.outcome == outcomes.pop("accept") == "accepted"
    assert outcomes.pop("refuse") == outcomes.pop("leave a file") == "refused"
    assert set(outcomes.values()) == {"failed"}
    assert "KeyError" in results["raise"].reason
    assert Path(__file__).parent.parent.joinpath("support", "fuzz_failures.py").name in results["hang"].reason
    assert "MemoryError" in results["exhaust memory"].reason
    assert "-9" in results["die"].reason
