"""`fedkeep run --profile` and `fk.Profile`: real runs, their traces and tables."""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cli import fedkeep
from support.problems import same
from support.runs import assert_same_run

import fedkeep as fk
from fedkeep.engine.round_parts import PREFIX


@pytest.fixture(scope="module")
def digits() -> tuple[Any, Any]:
    data = fk.data.load("digits")
    return data, fk.data.partition.shards(data.y_train, n_clients=20, s=2, seed=0)


def trace_events(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        return json.load(file)["traceEvents"]  # type: ignore[no-any-return]


def spans(events: list[dict[str, Any]], name: str) -> int:
    return sum(e.get("cat") == "user_annotation" and e["name"] == PREFIX + name for e in events)


def test_the_command_line_prints_the_largest_parts_and_writes_a_trace(tmp_path: Path) -> None:
    args = ("run", "digits", "rounds=5", "method=fedntd", "--name", "one", "--runs")
    done = fedkeep(*args, str(tmp_path / "a"), "--profile")
    assert done.returncode == 0, done.stderr
    shown = done.stdout[done.stdout.index("Profile of 3 rounds") :]
    for part in ("notes", "local steps", "aggregation", "test of the global model", "writing", "plan"):
        assert f"  {part} " in shown, shown
    table = shown[shown.index("operation (CPU)") : shown.index("Trace:")].strip().splitlines()
    assert len(table) == 1 + 10 + 1  # the head, ten operations, the sum of the others
    shares = [float(line.split()[-1].rstrip("%")) for line in table[1:]]
    assert shares[:10] == sorted(shares[:10], reverse=True)
    assert sum(shares) == pytest.approx(100, abs=1)
    events = trace_events(tmp_path / "a" / "one" / "trace.json.gz")
    assert spans(events, "local steps") == spans(events, "aggregation") == 3
    assert any(e["name"] == "aten::bmm" for e in events)

    assert fedkeep(*args, str(tmp_path / "b")).returncode == 0
    assert_same_run(tmp_path / "a" / "one", tmp_path / "b" / "one")

    assert "profiler" not in done.stderr  # torch's own messages
    assert "selection of examples" not in shown  # a hook that FedNTD does not use

    again = fedkeep(*args, str(tmp_path / "a"), "--profile", "--json")
    assert "one was already finished. Use another --name" in again.stderr
    assert list(json.loads(again.stdout)) == ["one"]


def test_several_runs_cannot_be_profiled(tmp_path: Path) -> None:
    done = fedkeep("run", "digits", "--sweep", "seed=0,1", "--profile", "--runs", str(tmp_path))
    assert done.returncode == 2
    assert "--profile is for a single run" in done.stderr


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_the_callback_profiles_rounds_after_the_warm_up(tmp_path: Path, digits: Any, engine: str) -> None:
    profile = fk.Profile(tmp_path / "t.json.gz", rounds=2, warm_up=1)
    settings = {"rounds": 5, "participation": 3, "epochs": 1, "engine": engine}
    history = fk.simulate("scaffold", "mlp", *digits, callbacks=[profile], **settings)
    events = trace_events(tmp_path / "t.json.gz")
    assert spans(events, "aggregation") == spans(events, "client states") == 2
    assert spans(events, "local steps") == (2 if engine == "stacked" else 6)
    assert profile.summary is not None
    shares = {row.name: row.share for row in profile.summary.parts}
    assert sum(shares.values()) == pytest.approx(1)
    assert min(shares["local steps"], shares["aggregation"], shares["client states"]) > 0
    longest_first = [row.ms for row in profile.summary.parts if row.name != "rest"]
    assert longest_first == sorted(longest_first, reverse=True)
    assert str(profile).startswith("Profile of 2 rounds")
    without = fk.simulate("scaffold", "mlp", *digits, **settings)
    assert same(history.params, without.params)


@pytest.mark.parametrize(("rounds", "profiled"), [(1, 0), (2, 1), (3, 2), (4, 3), (5, 3), (9, 3)])
def test_a_short_run_is_profiled_as_far_as_it_goes(tmp_path: Path, digits: Any, rounds: int, profiled: int) -> None:
    profile = fk.Profile()
    fk.simulate(
        "fedavg", "mlp", *digits, rounds=rounds, participation=1, epochs=1, callbacks=[profile], run_dir=tmp_path / "r"
    )
    if profiled == 0:
        assert "only one round was run" in str(profile)
        assert not (tmp_path / "r" / "trace.json.gz").exists()
    else:
        assert spans(trace_events(tmp_path / "r" / "trace.json.gz"), "aggregation") == profiled


def test_a_profile_without_a_place_for_its_trace_says_so(tmp_path: Path, digits: Any) -> None:
    with pytest.raises(fk.errors.FedkeepError, match="set its file, or run_dir"):
        fk.simulate("fedavg", "mlp", *digits, rounds=2, participation=1, epochs=1, callbacks=[fk.Profile()])
    nowhere = fk.Profile(tmp_path / "missing" / "trace.json")
    with pytest.raises(fk.errors.FedkeepError, match="there is no folder"):
        fk.simulate("fedavg", "mlp", *digits, rounds=2, participation=1, epochs=1, callbacks=[nowhere])


def run_until(end: Any, profile: fk.Profile, digits: Any, **settings: Any) -> None:
    changes: dict[str, Any] = {"rounds": 20, "participation": 2, "epochs": 1, **settings}
    fk.simulate("fedavg", "mlp", *digits, callbacks=[end, profile], **changes)


def require_complete(profile: fk.Profile, rounds: int) -> None:
    assert not torch.autograd._profiler_enabled()
    assert profile.summary is not None
    assert profile.n_profiled == rounds
    assert str(profile).startswith(f"Profile of {rounds} round")
    [calls] = [row.calls for row in profile.summary.parts if row.name == "local steps"]
    assert calls == 1  # per round: nothing of the round that was not complete
    assert sum(row.share for row in profile.summary.parts) == pytest.approx(1)
    assert profile.file is not None
    assert spans(trace_events(profile.file), "aggregation") >= rounds


def test_a_run_that_a_callback_stops_is_profiled_until_then(tmp_path: Path, digits: Any) -> None:
    profile = fk.Profile(tmp_path / "t.json.gz", rounds=9)

    def stop(simulation: fk.Simulation, record: Any) -> None:
        if record["round"] == 4:
            simulation.stop()

    run_until(stop, profile, digits, engine="stacked")
    require_complete(profile, 2)


@pytest.mark.parametrize("error", [KeyboardInterrupt, fk.errors.Diverged])
def test_a_run_that_ends_within_a_round_is_profiled_until_then(tmp_path: Path, digits: Any, error: Any) -> None:
    class Ended(fk.methods.FedAvg):
        def aggregate(self, task: Any, server: Any, uploads: Any, cohort: Any) -> Any:
            result = super().aggregate(task, server, uploads, cohort)
            if cohort.round == 6 and error is KeyboardInterrupt:
                raise KeyboardInterrupt
            return fk.tree.map(lambda w: w * float("nan"), result) if cohort.round == 6 else result

    profile = fk.Profile(tmp_path / "t.json.gz", rounds=9)
    with pytest.raises(error):
        fk.simulate(
            Ended(), "mlp", *digits, rounds=20, participation=2, epochs=1, engine="stacked", callbacks=[profile]
        )
    require_complete(profile, 3)


def test_a_run_that_ends_in_the_first_profiled_round_says_so(tmp_path: Path, digits: Any) -> None:
    profile = fk.Profile(tmp_path / "t.json.gz")

    def stop(simulation: fk.Simulation, record: Any) -> None:
        if record["round"] == 2:
            simulation.stop()

    run_until(stop, profile, digits)
    assert "ended before a profiled round was complete" in str(profile)
    assert not torch.autograd._profiler_enabled()
    assert not profile.file.exists()  # type: ignore[union-attr]


def test_a_profile_can_be_used_again(tmp_path: Path, digits: Any) -> None:
    profile = fk.Profile()
    settings: dict[str, Any] = {"participation": 1, "epochs": 1, "callbacks": [profile]}
    fk.simulate("fedavg", "mlp", *digits, rounds=4, run_dir=tmp_path / "a", **settings)
    assert profile.n_profiled == 3
    fk.simulate("fedavg", "mlp", *digits, rounds=3, run_dir=tmp_path / "b", **settings)
    assert profile.n_profiled == 2
    assert profile.file == tmp_path / "b" / "trace.json.gz"
    assert spans(trace_events(profile.file), "aggregation") == 2


def test_both_times_are_those_between_two_calls(tmp_path: Path, digits: Any) -> None:
    profile = fk.Profile(tmp_path / "t.json.gz", rounds=2)
    run_until(lambda simulation, record: time.sleep(0.2), profile, digits, rounds=4)
    assert profile.summary is not None
    assert profile.seconds_before is not None
    assert min(profile.seconds_before, profile.summary.ms / 1e3) >= 0.2


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_command_prints_what_was_profiled(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedkeep", "run", "digits", "rounds=100000", "--profile", "--name", "one"]
    with subprocess.Popen([*command, "--runs", tmp_path], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 120
        while not (tmp_path / "one" / "trace.json.gz").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        shown, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert b"Profile of 3 rounds" in shown
