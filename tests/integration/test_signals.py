"""Signals: runs are saved, sweeps leave no process behind, and nobody sees a traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.cli import fedkeep
from support.processes import count_lines, handles, processes_of, run_script, running_fedkeep, wait_until, workers_of
from support.runs import assert_same_run, run_small, small_experiment

import fedkeep as fk
from fedkeep._util.signals import EndOnce, delayed
from fedkeep.cli import signals
from fedkeep.cli.app import main
from fedkeep.engine.simulate import make_simulation, start
from fedkeep.experiments.build import build
from fedkeep.runs.files import ROUNDS
from fedkeep.runs.reading import saved_round

needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
RARE = "checkpoint_every=1000000"  # what is saved is saved because of the signal

pytestmark = pytest.mark.usefixtures("interruptible")


# One run


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_the_last_round_and_says_how_to_resume(tmp_path: Path, number: int) -> None:
    args = ["run", "digits", "method=scaffold", "rounds=60", "epochs=1", RARE, "--runs", str(tmp_path)]
    with running_fedkeep(*args, "--name", "ended") as process:
        wait_until(lambda: count_lines(tmp_path / "ended" / ROUNDS) > 4, process)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=300)
    assert process.returncode == 128 + number
    assert stderr.count("\n") == 1
    assert f"fedkeep resume {tmp_path / 'ended'}" in stderr
    last = count_lines(tmp_path / "ended" / ROUNDS) - 1
    assert saved_round(tmp_path / "ended") == last >= 4
    if number == signal.SIGTERM:
        for command in (["resume", str(tmp_path / "ended")], [*args, "--name", "whole"]):
            assert fedkeep(*command).returncode == 0
        assert_same_run(tmp_path / "ended", tmp_path / "whole")


@needs_proc
@pytest.mark.parametrize("delay", [0.0, 0.3, 1.2])
def test_ctrl_c_during_imports_shows_no_traceback(tmp_path: Path, delay: float) -> None:
    """From the first line of the command line on; what happens before is up to Python."""
    with running_fedkeep("run", "digits", "rounds=100000", "--runs", str(tmp_path)) as process:
        wait_until(lambda: handles(process.pid, signal.SIGTERM), process)
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=300)
    assert process.returncode == 130
    assert stderr.startswith("fedkeep: interrupted")
    assert stderr.count("\n") == 1
    assert ("fedkeep resume" in stderr) == bool(list(tmp_path.iterdir())), "only a run that has a folder can be resumed"


def test_the_hint_of_an_interrupted_demo_is_true(tmp_path: Path) -> None:
    folder = {"cwd": tmp_path, "env": {**os.environ, "TMPDIR": str(tmp_path)}}
    with running_fedkeep("demo", "--rounds", "100000", **folder) as process:
        wait_until(lambda: list(tmp_path.glob("*/*/rounds.jsonl")), process)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=300)
    assert process.returncode == 143
    assert "resume" not in stderr
    assert list(tmp_path.iterdir()) == [], "the temporary folder is gone"


def test_importing_the_command_line_imports_nothing_large() -> None:
    done = run_script(
        "import sys, fedkeep.cli; print([name for name in ('torch', 'numpy', 'typer') if name in sys.modules])"
    )
    assert done.stdout.strip() == "[]"


# Sweeps


@needs_proc
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_workers_end_with_their_parent_and_save_their_runs(tmp_path: Path, number: int) -> None:
    args = ["run", "digits", "rounds=100000", RARE, "--sweep", "seed=0,1,2", "--jobs", "2", "--runs", str(tmp_path)]
    rounds = [tmp_path / f"x-seed={seed}" / ROUNDS for seed in (0, 1)]
    with running_fedkeep(*args, "--name", "x") as process:
        wait_until(lambda: min(map(count_lines, rounds)) > 2, process)
        assert len(workers_of(process.pid)) == 2
        process.send_signal(number)
        _, stderr = process.communicate(timeout=300)
        wait_until(lambda: not processes_of(process.pid))
    assert process.returncode == (-9 if number == signal.SIGKILL else 128 + number)
    assert "Traceback" not in stderr
    assert [saved_round(path.parent) for path in rounds] == [count_lines(path) - 1 for path in rounds]


@needs_proc
def test_a_process_that_imports_gets_no_ctrl_c() -> None:
    """Ctrl-C reaches all processes of a terminal; one that still imports would show a traceback."""
    script = """
        from pathlib import Path
        from fedkeep.experiments.workers import Worker
        if __name__ == "__main__":
            for worker in (Worker(1, list), Worker(1, list)):
                worker._start_process()
                lines = Path(f"/proc/{worker.process.pid}/status").read_text().splitlines()
                [blocked] = [int(line.split()[1], 16) for line in lines if line.startswith("SigBlk")]
                print(blocked >> 1 & 1)
                worker.process.kill()
    """
    done = run_script(script)
    assert done.stdout.split() == ["1", "1"]


@needs_proc
def test_a_worker_that_is_killed_is_replaced(tmp_path: Path) -> None:
    args = ["run", "digits", "rounds=30", "--sweep", "seed=0,1,2,3", "--jobs", "2", "--runs", str(tmp_path)]
    with running_fedkeep(*args, "--name", "x") as process:
        wait_until(lambda: count_lines(tmp_path / "x-seed=0" / ROUNDS) > 2, process)
        for pid in workers_of(process.pid):  # the one that runs seed 0
            if any(link.resolve().parent.name == "x-seed=0" for link in Path(f"/proc/{pid}/fd").iterdir()):
                os.kill(pid, signal.SIGKILL)
        _, stderr = process.communicate(timeout=300)
    assert process.returncode == 1
    [failure] = [line for line in stderr.splitlines() if line.startswith("fedkeep: ")]
    assert "x-seed=0" in failure
    assert "SIGKILL" in failure
    assert "Traceback" not in stderr
    assert [fk.load_run(tmp_path / f"x-seed={seed}").finished for seed in range(4)] == [False, True, True, True]


# The engine


def _interrupt_at(experiment_rounds: int, path: Path, moment: str, times: int) -> None:
    """Run an experiment in a folder and send SIGINT, once or more, in round 3: while training or applying it."""
    simulation = make_simulation(build(small_experiment("scaffold", rounds=experiment_rounds)))
    original = getattr(simulation, moment)

    def interrupted(*args: Any) -> Any:
        result = original(*args)
        if simulation.round == 2:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        return result

    setattr(simulation, moment, interrupted)
    with pytest.raises(KeyboardInterrupt):
        start(simulation, path, {**small_experiment("scaffold", rounds=experiment_rounds).to_dict(),
                                 "checkpoint_every": 1000})  # fmt: skip


@pytest.mark.parametrize(
    ("moment", "times", "saved"),
    [
        ("_train_round", 1, 2),  # the round in progress is given up
        ("_aggregate", 1, 3),  # the round is completed first
        ("_aggregate", 2, 0),  # half a round is never saved
    ],
)
def test_an_interrupted_run_saves_whole_rounds_only(tmp_path: Path, moment: str, times: int, saved: int) -> None:
    _interrupt_at(5, tmp_path / "ended", moment, times)
    assert saved_round(tmp_path / "ended") == saved
    run_small(tmp_path / "ended", "scaffold", rounds=5)
    run_small(tmp_path / "whole", "scaffold", rounds=5)
    assert_same_run(tmp_path / "ended", tmp_path / "whole")


def test_delayed_signals_wait_for_the_end_of_the_block() -> None:
    before, steps = signal.getsignal(signal.SIGINT), []

    def signal_in_block(times: int) -> None:
        with delayed():
            for number in range(times):
                signal.raise_signal(signal.SIGINT)
                steps.append(number)

    with pytest.raises(KeyboardInterrupt):
        signal_in_block(1)
    with pytest.raises(KeyboardInterrupt):
        signal_in_block(2)
    assert steps == [0, 0], "the block goes on after the first signal, not after the second"
    assert signal.getsignal(signal.SIGINT) is before
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_worker_completes_its_round_whatever_the_number_of_signals(tmp_path: Path) -> None:
    """The death of its parent is reported to it twice, and a closed terminal by a signal of its own."""
    handler = EndOnce()
    before = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGHUP)}
    simulation = make_simulation(build(small_experiment("scaffold", rounds=5)))
    aggregate = simulation._aggregate

    def interrupted(*args: Any) -> Any:
        result = aggregate(*args)
        if simulation.round == 2:
            for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP):
                signal.raise_signal(number)
        return result

    simulation._aggregate = interrupted  # type: ignore[method-assign]
    try:
        with pytest.raises(SystemExit) as ended:
            start(simulation, tmp_path, {**small_experiment("scaffold", rounds=5).to_dict(), "checkpoint_every": 1000})
    finally:
        for number, old in before.items():
            signal.signal(number, old)
    assert ended.value.code == 128 + signal.SIGTERM
    assert saved_round(tmp_path) == 3


def test_simulate_installs_no_handlers(tmp_path: Path) -> None:
    before = {number: signal.getsignal(number) for number in signals.NUMBERS}
    run_small(tmp_path / "run", "fedavg")
    assert {number: signal.getsignal(number) for number in signals.NUMBERS} == before


def test_a_signal_that_python_ignores_comes_again() -> None:
    """KeyboardInterrupt raised in `__del__` is only printed by Python."""
    script = """
        import signal, time
        from fedkeep.cli import signals
        class Last:
            def __del__(self):
                signal.raise_signal(signal.SIGINT)
        with signals.raising():
            try:
                Last()
                time.sleep(60)
            except KeyboardInterrupt:
                print("interrupted")
    """
    done = run_script(script)
    assert (done.stdout.strip(), done.stderr) == ("interrupted", "")


def test_ignored_signals_stay_ignored() -> None:
    """As after nohup, and in the background of a shell script."""
    script = """
        import json, signal
        from fedkeep.cli import signals
        for number in (signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        signals.end_at_once()
        with signals.raising():
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGINT)
        print(json.dumps([signal.getsignal(number) is signal.SIG_IGN for number in (signal.SIGHUP, signal.SIGINT)]))
    """
    done = run_script(script)
    assert json.loads(done.stdout) == [True, True]


def test_ctrl_c_outside_of_a_command_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Typer itself runs for a moment before and after a command."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fedkeep.cli.app.app", interrupted)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 130
    assert capsys.readouterr().err == "fedkeep: interrupted\n"


def test_ctrl_c_inside_exec_has_the_exit_code_of_ctrl_c(tmp_path: Path) -> None:
    """Dataclasses use `exec`, so imports are often there; Python remembers the interrupt until it ends."""
    (tmp_path / "interrupted.py").write_text(
        "import signal, sys\n"
        "from fedkeep.cli import signals\n"
        "try:\n"
        "    with signals.raising():\n"
        "        exec('signal.raise_signal(signal.SIGINT)')\n"
        "except KeyboardInterrupt:\n"
        "    sys.exit(130)\n"
    )
    done = subprocess.run([sys.executable, "-m", "interrupted"], cwd=tmp_path, capture_output=True, timeout=300)
    assert (done.returncode, done.stderr) == (130, b"")
