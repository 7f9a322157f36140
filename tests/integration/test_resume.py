"""Resuming: runs killed at any time, on a full disk, and from Python."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cli import fedkeep
from support.errors import raises
from support.problems import Problem, same
from support.runs import (
    SMALL,
    assert_same_run,
    files_of,
    group_runs,
    interrupt_small,
    is_killed_at_write,
    run_small,
    run_small_until_killed,
    run_with_little_space,
    wait_for_lines,
)

import fedkeep as fk
from fedkeep.errors import ConfigError, DataError, FedkeepError, RunError
from fedkeep.experiments.experiment import Experiment
from fedkeep.runs.experiment_file import read_experiment
from fedkeep.runs.extension import write_extension
from fedkeep.runs.files import to_toml
from fedkeep.runs.seals import seal_text


@pytest.mark.parametrize("method", fk.methods.REGISTRY)
def test_a_run_killed_at_any_write_resumes_to_the_same_weights(tmp_path: Path, forks, method: str) -> None:
    """Every method at a few random writes, SCAFFOLD (which stores client states) at every single one."""
    whole = tmp_path / "whole"
    run_small(whole, method)
    events = range(1, 400) if method == "scaffold" else sorted(random.Random(method).sample(range(2, 20), 4))
    reached = 0
    for event in events:
        path = tmp_path / f"killed-{event}"
        if not is_killed_at_write(forks, method, path, event):
            break
        reached += 1
        if (path / "experiment.toml").exists():
            fk.resume(path)
        else:  # killed before the experiment file was written
            run_small(path, method)
        assert_same_run(whole, path)
        leftovers = [p for p in path.rglob("*") if p.name.endswith(".part")]
        assert not [p for p in leftovers if not p.name.startswith(".")]
        shutil.rmtree(path)
    assert reached >= (20 if method == "scaffold" else 3)


def test_a_run_killed_repeatedly_at_random_times_resumes_to_the_same_weights(tmp_path: Path, forks) -> None:
    """Each process dies a random time after it has written a certain round, however fast or busy the machine is."""
    long = {"rounds": 60, "epochs": 2}
    whole, path = tmp_path / "whole", tmp_path / "killed"
    run_small(whole, "scaffold", **long)
    rng = random.Random(0)
    for lines in (1, 6, 14, 22, 30):
        process = forks.Process(target=run_small_until_killed, args=(str(path), "scaffold", 50), kwargs=long)
        process.start()
        wait_for_lines(path / "rounds.jsonl", lines, process)
        time.sleep(rng.uniform(0, 0.02))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    fk.resume(path)
    assert_same_run(whole, path)


@pytest.mark.parametrize("every", [2, None], ids=["every second round", "by their cost"])
def test_the_command_line_resumes_after_kill_9(tmp_path: Path, every: int | None) -> None:
    file = tmp_path / "x.toml"
    long = {**SMALL, "method": "scaffold", "train": {**SMALL["train"], "rounds": 60}, "checkpoint_every": every}
    file.write_text(to_toml(long).decode())
    command = [sys.executable, "-m", "fedkeep", "run", str(file), "--runs", str(tmp_path), "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, "--name", "killed"], env=environment, stdout=subprocess.DEVNULL)
    wait_for_lines(tmp_path / "killed" / "rounds.jsonl", 9, process)
    process.kill()
    process.wait()
    done = fedkeep("resume", str(tmp_path / "killed"), "--json", env=environment)
    assert set(json.loads(done.stdout)) == {"killed"}
    assert fedkeep(*command[3:], "--name", "whole", env=environment).returncode == 0
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


def test_ctrl_c_names_the_command_that_resumes(tmp_path: Path) -> None:
    args = ["run", "digits", "rounds=100000", "--name", "x", "--runs", str(tmp_path)]
    process = subprocess.Popen(
        [sys.executable, "-m", "fedkeep", *args],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # the shell of the test may ignore it
    )
    wait_for_lines(tmp_path / "x" / "rounds.jsonl", 3, process)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "fedkeep resume" in stderr.splitlines()[-1]
    assert "Traceback" not in stderr


def test_a_full_disk_is_reported_and_loses_nothing(tmp_path: Path, forks) -> None:
    """The system does not let files grow beyond a limit, as on a full disk; then there is space again."""
    whole, path, train = tmp_path / "whole", tmp_path / "full", {"rounds": 80, "eval_local_every": 1}
    run_small(whole, "scaffold", **train)
    process = forks.Process(target=run_with_little_space, args=(str(path), "scaffold"), kwargs=train)
    process.start()
    process.join(120)
    assert process.exitcode == 0
    assert fk.load_run(path).rounds[-1] < 80
    run_small(path, "scaffold", **train)
    assert_same_run(whole, path)


# From Python


def test_a_run_of_python_objects_needs_them_again(tmp_path: Path, problem: Problem) -> None:
    def stop(simulation: fk.Simulation, record: dict) -> None:
        if record["round"] == 2:
            raise KeyboardInterrupt

    method, args = fk.methods.Scaffold(), (problem.model, problem.data, problem.clients)
    whole = fk.simulate(method, *args, **problem.settings)
    path = tmp_path / "r"
    with pytest.raises(KeyboardInterrupt):
        fk.simulate(method, *args, **problem.settings, run_dir=path, checkpoint_every=1, callbacks=[stop])
    with raises(ConfigError, key="model.class", mentions=[str(path), "model=..., data=..., clients=..."]):
        fk.resume(path)
    with raises(RunError, key="data"):
        fk.resume(path, model=problem.model)
    with raises(DataError, key="data"):
        fk.resume(path, model=problem.model, data="digits", clients=problem.clients)
    with raises(RunError, key="split", mentions=[str(path)]):
        fk.resume(path, model=problem.model, data=problem.data, clients=problem.clients[::-1])
    history = fk.resume(path, model=problem.model, data=problem.data, clients=problem.clients)
    assert same(whole.params, history.params)


def smoothed(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(z, y, reduction="none", label_smoothing=0.2)


def test_the_criterion_and_the_normalisation_must_be_those_of_the_start(tmp_path: Path, problem: Problem) -> None:
    def stop(simulation: fk.Simulation, record: dict) -> None:
        raise KeyboardInterrupt

    args = {"model": problem.model, "data": problem.data, "clients": problem.clients}
    where = {"run_dir": tmp_path / "r", "checkpoint_every": 1}
    with pytest.raises(KeyboardInterrupt):
        fk.simulate("fedavg", *args.values(), **problem.settings, **where, callbacks=stop, criterion=smoothed)
    with raises(RunError, key="criterion"):
        fk.resume(tmp_path / "r", **args)
    moved = dataclasses.replace(problem.data, mean=torch.tensor(0.5), std=torch.tensor(1.0))
    with raises(RunError, key="data"):
        fk.resume(tmp_path / "r", **{**args, "data": moved}, criterion=smoothed)
    history = fk.resume(tmp_path / "r", **args, criterion=smoothed)
    assert same(history.params, fk.simulate("fedavg", *args.values(), **problem.settings, criterion=smoothed).params)


def test_a_finished_run_has_its_model(tmp_path: Path) -> None:
    trained = run_small(tmp_path / "a", "fedavg")
    again = fk.resume(tmp_path / "a")
    x = torch.zeros(2, 1, 8, 8)
    assert torch.equal(trained.model(x), again.model(x))


def test_a_finished_run_that_lost_records_is_reported(tmp_path: Path) -> None:
    run_small(tmp_path / "a", "fedavg")
    file = tmp_path / "a" / "rounds.jsonl"
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:-1]))
    with raises(RunError, key="rounds.jsonl", mentions=[str(tmp_path / "a")]):
        fk.resume(tmp_path / "a")


def test_a_run_of_a_flower_app_is_resumed_by_its_app(tmp_path: Path) -> None:
    interrupt_small(tmp_path)
    file = tmp_path / "experiment.toml"
    changed = file.read_text().replace('engine = "stacked"', 'engine = "flower"').partition("# run")[0]
    file.write_bytes(seal_text(file.name, changed.encode(), read_experiment(tmp_path)["made_by"]["run"]))
    with raises(ConfigError, key="run_dir", value=str(tmp_path), mentions=["flwr run", "run-dir"]):
        fk.resume(tmp_path)


# Extending a run


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("scaffold", {}),
        ("fedavg", {"eval_every": 2, "eval_local_every": 2, "average_weights": 2}),  # round 3 is not due
        ("feddf", {"reductions": [{"client": 1, "class_id": 0, "round": 2, "keep": 0}]}),
    ],
    ids=["client states", "other evaluations", "reductions"],
)
def test_an_extended_run_is_one_with_more_rounds_from_the_start(
    tmp_path: Path, method: str, settings: dict[str, Any]
) -> None:
    run_small(tmp_path / "whole", method, rounds=6, **settings)
    run_small(tmp_path / "extended", method, rounds=3, **settings)
    history = fk.resume(tmp_path / "extended", rounds=6)
    assert history.finished
    assert [r["round"] for r in history.records] == list(range(7))
    assert_same_run(tmp_path / "whole", tmp_path / "extended")
    assert fk.load_run(tmp_path / "extended").settings["rounds"] == 6
    assert len(group_runs([tmp_path])[0].runs) == 1, "they are one experiment, twice"


def interrupt(simulation: fk.Simulation, record: dict[str, Any]) -> None:
    """Be a callback that ends the process after a round."""
    raise KeyboardInterrupt


def test_an_extension_survives_an_interruption_and_is_repeated_without_effect(tmp_path: Path) -> None:
    run_small(tmp_path / "run", "fedavg")
    with pytest.raises(KeyboardInterrupt):
        fk.resume(tmp_path / "run", rounds=5, callbacks=[interrupt])
    assert not fk.load_run(tmp_path / "run").finished
    with pytest.raises(KeyboardInterrupt):
        fk.resume(tmp_path / "run", rounds=5, callbacks=[interrupt])
    assert fk.resume(tmp_path / "run").finished
    assert fk.load_run(tmp_path / "run").records[-1]["round"] == 5
    assert Experiment.load(tmp_path / "run" / "experiment.toml").train.rounds == 5
    (tmp_path / "run" / "extended.json").unlink()
    with raises(RunError, "extended.json"):
        fk.load_run(tmp_path / "run")


def test_a_run_is_not_extended_where_earlier_rounds_would_differ(tmp_path: Path) -> None:
    run_small(tmp_path / "run", "fedavg", rounds=3, eval_every=2)
    for kept in (0, 2):
        (tmp_path / "run" / f"checkpoint-{kept}.safetensors").unlink()
    before = (tmp_path / "run" / "rounds.jsonl").read_bytes()
    with raises(RunError, "eval_every", 3):
        fk.resume(tmp_path / "run", rounds=6)
    with raises(RunError, "rounds", 2):
        fk.resume(tmp_path / "run", rounds=2)
    assert before == (tmp_path / "run" / "rounds.jsonl").read_bytes()
    assert not (tmp_path / "run" / "extended.json").exists()
    run_small(tmp_path / "given", "fedavg", cohorts=[[0], [1], [2]])
    with raises(RunError, "cohorts"):
        fk.resume(tmp_path / "given", rounds=6)


def test_a_failed_extension_changes_no_file(three: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run"
    simulated(three, path)
    before = files_of(path)
    args = {"model": fk.models.build("mlp", three.data.input_shape, three.data.n_classes, 0), "data": three.data}
    with raises(ConfigError):
        fk.resume(path, rounds=4)
    with raises(RunError, "split"):
        fk.resume(path, rounds=4, **args, clients=three.clients[::-1])
    with raises(RunError, "from_round"):
        fk.resume(path, rounds=4, **args, clients=three.clients, from_round=9)
    with raises(FedkeepError, "metrics.m"):
        fk.resume(path, rounds=4, **args, clients=three.clients, metrics={"m": 3})
    done = fedkeep("resume", str(path), "rounds=4")
    assert done.returncode != 0
    assert files_of(path) == before
    assert fk.load_run(path).finished
    assert fk.resume(path, rounds=4, **args, clients=three.clients).finished


def test_simulate_continues_an_extended_run_as_resume_does(three: Problem, tmp_path: Path) -> None:
    """Round 4 was evaluated because it was the last; in a run of 8 rounds it is not."""
    whole = simulated(three, tmp_path / "whole", rounds=8, eval_every=3, checkpoint_every=1)
    simulated(three, path := tmp_path / "run", rounds=4, eval_every=3, checkpoint_every=1)
    args = {"model": fk.models.build("mlp", three.data.input_shape, three.data.n_classes, 0), "data": three.data}
    for name in ("again", "chosen"):
        shutil.copytree(path, tmp_path / name)
    write_extension(path, read_experiment(path)["made_by"]["run"], 8)  # and killed
    history = simulated(three, path, rounds=8, eval_every=3, resume=True)
    assert ["confusion" in r for r in history.records] == ["confusion" in r for r in whole.records]
    assert_same_run(tmp_path / "whole", path)
    fk.resume(tmp_path / "chosen", rounds=8, **args, clients=three.clients, from_round=4)
    assert_same_run(tmp_path / "whole", tmp_path / "chosen")
    before = files_of(tmp_path / "again")
    fk.resume(tmp_path / "again", **args, clients=three.clients)
    assert files_of(tmp_path / "again") == before, "a finished run has nothing to repeat"


def test_simulate_builds_one_simulation(three: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    real = fk.Simulation.__init__
    monkeypatch.setattr(fk.Simulation, "__init__", lambda self, *args: built.append(1) or real(self, *args))
    for _ in range(2):
        simulated(three, tmp_path / "run", resume=True)
        assert built == [1]
        built.clear()


def test_the_command_extends_a_run_and_changes_nothing_else(tmp_path: Path) -> None:
    run_small(tmp_path / "run", "fedavg")
    done = fedkeep("resume", str(tmp_path / "run"), "rounds=4", "--json")
    assert done.returncode == 0, done.stderr
    assert fk.load_run(tmp_path / "run").records[-1]["round"] == 4
    for change in ("lr=0.1", "rounds=x", "rounds=1"):
        done = fedkeep("resume", str(tmp_path / "run"), change)
        assert done.returncode == 2, change
        assert done.stderr.count("\n") == 1


# A run from Python, again in the same folder


def simulated(problem: Problem, path: Path, **options: Any) -> fk.History:
    settings = {"rounds": 2, "participation": 2, "epochs": 1, "batch_size": 10, **options}
    return fk.simulate(settings.pop("method", "scaffold"), settings.pop("model", "mlp"), problem.data, problem.clients,
                       run_dir=path, **settings)  # fmt: skip


def write_logs(path: Path) -> list[Path]:
    """Write what loggers would, into a run folder, and a log of another run; return the files and folders."""
    run = read_experiment(path)["made_by"]["run"]
    names = ["log.csv", "trace.json.gz", "tensorboard/events.out.tfevents.1", f"wandb/offline-run-1-{run}/x.wandb"]
    for name in [*names, "wandb/run-1-other/x.wandb"]:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(b"")
    (path / "wandb" / "latest-run").symlink_to(f"offline-run-1-{run}")
    return [path / name for name in (*names, "tensorboard", "wandb", "wandb/latest-run", "wandb/run-1-other")]


def test_simulate_resumes_or_replaces_the_run_in_its_folder(three: Problem, tmp_path: Path) -> None:
    path = tmp_path / "run"
    whole = simulated(three, tmp_path / "whole", resume=True)
    with pytest.raises(KeyboardInterrupt):
        simulated(three, path, callbacks=interrupt)
    with raises(RunError, "run_dir", mentions=["resume=True", "overwrite=True"]):
        simulated(three, path)
    assert same(simulated(three, path, resume=True).params, whole.params)
    assert_same_run(tmp_path / "whole", path)
    before = files_of(path)
    again = simulated(three, path, resume=True)
    assert files_of(path) == before, "a finished run is loaded"
    assert same(dict(again.model.named_parameters()), whole.params)
    (path / "notes.txt").write_text("mine")
    logs = write_logs(path)
    simulated(three, path, overwrite=True, method="fedavg", rounds=1)
    assert fk.load_run(path).method == "fedavg"
    assert (path / "notes.txt").exists()
    assert [log for log in logs if log.exists() or log.is_symlink()] == [path / "wandb", path / "wandb" / "run-1-other"]
    assert not list(path.rglob("*-2.safetensors"))
    simulated(three, tmp_path / "new", overwrite=True)


def test_simulate_does_not_resume_another_run(three: Problem, tmp_path: Path) -> None:
    simulated(three, tmp_path / "run")
    for key, value in {"lr": 0.5, "rounds": 1, "seed": 1, "method": "fedavg"}.items():
        with raises(RunError, key, mentions=["overwrite=True"]):
            simulated(three, tmp_path / "run", resume=True, **{key: value})
    with raises(RunError, "lr", mentions=["overwrite=True"]):
        simulated(three, tmp_path / "run", resume=True, rounds=3, lr=0.5)
    with raises(RunError, "rounds", 3, mentions=["fedkeep.resume(run_dir, rounds=3", "fedkeep resume"]) as refused:
        simulated(three, tmp_path / "run", resume=True, rounds=3)
    assert "overwrite" not in str(refused.value)
    wider = fk.models.build("mlp", three.data.input_shape, three.data.n_classes, projection=4)
    with raises(RunError, "model"):
        simulated(three, tmp_path / "run", resume=True, model=wider)
    with raises(RunError, "resume"):
        simulated(three, tmp_path / "run", resume=True, overwrite=True)
    with raises(RunError, "run_dir"):
        fk.simulate("fedavg", "mlp", three.data, three.clients, rounds=1, resume=True)


def test_a_run_is_loaded_with_its_model_where_its_folder_says_what_it_is(three: Problem, tmp_path: Path) -> None:
    by_name = simulated(three, tmp_path / "name")
    from_file = run_small(tmp_path / "file", "fedavg")
    for history, path in ((by_name, tmp_path / "name"), (from_file, tmp_path / "file")):
        loaded = fk.load_run(path)
        assert same(dict(loaded.model.named_parameters()), history.params)
    simulated(three, tmp_path / "object", model=fk.models.build("mlp", three.data.input_shape, three.data.n_classes))
    with raises(RunError, "model", mentions=["load_state_dict"]):
        _ = fk.load_run(tmp_path / "object").model
    with raises(FedkeepError, "model", mentions=["fedkeep.load_run"]):
        _ = fk.load_run(tmp_path / "name", weights=False).model
