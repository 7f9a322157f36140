"""Runs that survive: killed anywhere, on a full disk, with damaged files, with two processes at one folder."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support.errors import raises
from support.methods import METHODS
from support.problems import Problem, same

import fedkeep as fk
from fedkeep import tree
from fedkeep.analysis import groups
from fedkeep.errors import RunError
from fedkeep.experiments.experiment import Experiment
from fedkeep.experiments.run import run as run_experiment
from fedkeep.runs import client_store, files
from fedkeep.runs.folder import RunFolder
from fedkeep.runs.reading import read_experiment, read_records

SMALL = {
    "model": "mlp",
    "data": {"source": "digits", "public": 2},
    "split": {"kind": "shards", "n_clients": 6, "s": 2},
    "train": {"rounds": 3, "participation": 2, "epochs": 1, "batch_size": 60, "lr": 0.05},
    "checkpoint_every": 2,
    "seed": 1,
}
METHOD_NAMES = list(fk.methods.REGISTRY)


def experiment(method: str, **train) -> Experiment:
    return Experiment.from_dict({**SMALL, "method": method, "train": {**SMALL["train"], **train}})


def weights(path: Path) -> tree.Tree:
    return files.read_tree(path / "checkpoint.safetensors")[0]["server"]


def states(path: Path) -> dict[int, tree.Tree]:
    index = files.read_tree(path / "checkpoint.safetensors")[0]["clients"]
    kept = client_store.ClientStore(path / "clients")
    kept.restore(index)
    return {k: kept[k] for k in kept}


def assert_same_run(a: Path, b: Path) -> None:
    assert same(weights(a), weights(b))
    ours, theirs = states(a), states(b)
    assert ours.keys() == theirs.keys()
    assert all(same(ours[k], theirs[k]) for k in ours)
    lines = [[{k: v for k, v in r.items() if k != "seconds"} for r in read_records(p / "rounds.jsonl")] for p in (a, b)]
    assert lines[0] == lines[1]


# A process that kills itself at its n-th write to disk


def _run_until_event(method: str, path: str, event: int) -> None:
    """Run in a process of its own, and die without warning when the n-th sync, rename, removal or line is due."""
    torch.set_num_threads(1)
    counted = 0

    def die_at(original, tear: bool = False):
        def wrapped(*args, **kwargs):
            nonlocal counted
            counted += 1
            if counted == event:
                if tear and isinstance(args[0], int):  # a sync that never came: only half of the data reached the disk
                    size = os.fstat(args[0]).st_size
                    if os.readlink(f"/proc/self/fd/{args[0]}").endswith(".part"):
                        os.truncate(f"/proc/self/fd/{args[0]}", size // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return wrapped

    os.fsync = die_at(os.fsync, tear=True)
    os.replace = die_at(os.replace)
    Path.unlink = die_at(Path.unlink)
    RunFolder.append = die_at(RunFolder.append)
    run_experiment(experiment(method), path)
    os._exit(7)  # it got through: there are no more events


@pytest.fixture(scope="module")
def forks():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fedkeep.experiments.experiment"])
    return context


def _killed_at(forks, method: str, path: Path, event: int) -> bool:
    process = forks.Process(target=_run_until_event, args=(method, str(path), event))
    process.start()
    process.join(120)
    assert process.exitcode in (-signal.SIGKILL, 7), process.exitcode
    return process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_killed_at_any_write_it_goes_on_to_the_same_weights(tmp_path: Path, forks, method: str) -> None:
    """Every method at a few random writes, SCAFFOLD (which keeps client state) at every single one."""
    torch.set_num_threads(1)
    whole = tmp_path / "whole"
    run_experiment(experiment(method), whole)
    events = range(1, 400) if method == "scaffold" else sorted(random.Random(method).sample(range(2, 20), 4))
    reached = 0
    for event in events:
        path = tmp_path / f"killed-{event}"
        if not _killed_at(forks, method, path, event):
            break
        reached += 1
        if (path / "experiment.toml").exists():
            fk.resume(path)
        else:  # killed before the run had a name
            run_experiment(experiment(method), path)
        assert_same_run(whole, path)
        leftovers = [p for p in path.rglob("*") if p.name.endswith(".part")]
        assert not [p for p in leftovers if not p.name.startswith(".")]
        shutil.rmtree(path)
    assert reached >= (20 if method == "scaffold" else 3)


def test_killed_again_and_again_at_random_moments(tmp_path: Path, forks) -> None:
    """One run, killed by the clock until it gets through."""
    torch.set_num_threads(1)
    long = {"rounds": 30, "epochs": 2}
    whole, path = tmp_path / "whole", tmp_path / "killed"
    run_experiment(experiment("scaffold", **long), whole)
    rng, kills = random.Random(0), 0
    for attempt in range(60):
        process = forks.Process(target=_run_to_the_end, args=(str(path), long))
        process.start()
        process.join(rng.uniform(0.1, 0.3 + 0.1 * attempt))
        if process.is_alive():
            process.kill()
            kills += 1
        process.join()
        if process.exitcode == 0:
            break
    assert process.exitcode == 0
    assert kills >= 3
    assert_same_run(whole, path)


def _run_to_the_end(path: str, train: dict) -> None:
    torch.set_num_threads(1)
    run_experiment(experiment("scaffold", **train), path)


@pytest.mark.parametrize("every", [2, None], ids=["every second round", "by their cost"])
def test_the_command_line_goes_on_after_kill_9(tmp_path: Path, every: int | None) -> None:
    file = tmp_path / "x.toml"
    from fedkeep.runs.files import to_toml

    long = {**SMALL, "method": "scaffold", "train": {**SMALL["train"], "rounds": 60}, "checkpoint_every": every}
    file.write_text(to_toml(long).decode())
    command = [sys.executable, "-m", "fedkeep", "run", str(file), "--runs", str(tmp_path), "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, "--name", "killed"], env=environment, stdout=subprocess.DEVNULL)
    rounds = tmp_path / "killed" / "rounds.jsonl"
    while not rounds.exists() or rounds.read_bytes().count(b"\n") < 9:
        assert process.poll() is None
        time.sleep(0.005)
    process.kill()
    process.wait()
    done = subprocess.run(
        [sys.executable, "-m", "fedkeep", "resume", str(tmp_path / "killed"), "--json"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(json.loads(done.stdout)) == {"killed"}
    subprocess.run([*command, "--name", "whole"], env=environment, check=True, stdout=subprocess.DEVNULL)
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


def test_ctrl_c_says_how_to_go_on(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "fedkeep",
        "run",
        "digits",
        "rounds=100000",
        "--name",
        "x",
        "--runs",
        str(tmp_path),
    ]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell may have us ignore it
    )
    rounds = tmp_path / "x" / "rounds.jsonl"
    while not rounds.exists() or rounds.read_bytes().count(b"\n") < 3:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "goes on from here" in said
    assert "Traceback" not in said


def test_python_objects_are_resumed_when_they_are_given_again(tmp_path: Path, problem: Problem) -> None:
    def stop(simulation: fk.Simulation, record: dict) -> None:
        if record["round"] == 2:
            raise KeyboardInterrupt

    args = (problem.model, problem.data, problem.clients)
    whole = fk.simulate(fk.methods.Scaffold(), *args, **problem.settings)
    with pytest.raises(KeyboardInterrupt):
        fk.simulate(
            fk.methods.Scaffold(),
            *args,
            **problem.settings,
            run_dir=tmp_path / "r",
            checkpoint_every=1,
            callbacks=[stop],
        )
    with pytest.raises(fk.errors.FedkeepError, match=r"model=..., data=..., clients=..."):
        fk.resume(tmp_path / "r")
    with pytest.raises(RunError, match="all three"):
        fk.resume(tmp_path / "r", model=problem.model)
    with raises(RunError, key="split"):
        fk.resume(tmp_path / "r", model=problem.model, data=problem.data, clients=problem.clients[::-1])
    history = fk.resume(tmp_path / "r", model=problem.model, data=problem.data, clients=problem.clients)
    assert same(whole.params, history.params)


def smoothed(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(z, y, reduction="none", label_smoothing=0.2)


def test_what_was_given_at_the_start_must_be_given_again(tmp_path: Path, problem: Problem) -> None:
    """A criterion of one's own, and the normalisation of the data, are part of the run."""
    import dataclasses

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
    trained = run_experiment(experiment("fedavg"), tmp_path / "a")
    again = fk.resume(tmp_path / "a")
    x = torch.zeros(2, 1, 8, 8)
    assert torch.equal(trained.model(x), again.model(x))


@pytest.mark.parametrize("name", METHODS)
def test_checkpoint_holds_all_state(tmp_path: Path, problem: Problem, name: str) -> None:
    """Two rounds, through files into new objects, one more round: bit for bit the uninterrupted run."""
    whole = problem.run(METHODS[name]())
    with RunFolder.create(tmp_path, {"checkpoint_every": 1}) as folder:
        first = problem.simulation(METHODS[name](), rounds=2).attach(folder)
        first.run()
    with RunFolder.open(tmp_path) as folder:
        second = problem.simulation(METHODS[name]()).attach(folder)
        assert second.round == 2
        second.run()
    assert same(whole.server, second.server)
    assert set(whole.state.clients) == set(second.state.clients)
    assert all(same(whole.state.clients[k], second.state.clients[k]) for k in whole.state.clients)


# The folder


def test_a_run_folder_holds_what_it_should_and_runs_again_to_the_same(tmp_path: Path) -> None:
    history = run_experiment(experiment("scaffold"), tmp_path / "a")
    assert sorted(p.name for p in (tmp_path / "a").iterdir() if not p.name.startswith(".")) == [
        "checkpoint.safetensors", "clients", "experiment.toml", "rounds.jsonl", "split.json",
    ]  # fmt: skip
    again = Experiment.load(tmp_path / "a" / "experiment.toml")
    run_experiment(again, tmp_path / "b")
    assert_same_run(tmp_path / "a", tmp_path / "b")
    loaded = fk.load_run(tmp_path / "a")
    assert same(loaded.params, history.params)
    assert loaded.accuracy.tolist() == history.accuracy.tolist()
    assert loaded.summary()["bytes"] == history.summary()["bytes"]
    about = read_experiment(tmp_path / "a")
    assert about["format"] == 1
    assert about["made_by"]["torch"] == str(torch.__version__)
    assert about["made_by"]["engine"] == "stacked"
    assert loaded.settings["engine"] == "stacked"


def test_a_finished_run_is_read_not_run_again(tmp_path: Path) -> None:
    first = run_experiment(experiment("fedavg"), tmp_path / "a")
    before = (tmp_path / "a" / "checkpoint.safetensors").stat().st_mtime_ns
    called = []
    again = run_experiment(experiment("fedavg"), tmp_path / "a", [lambda s, r: called.append(r)])
    assert not called
    assert (tmp_path / "a" / "checkpoint.safetensors").stat().st_mtime_ns == before
    assert same(first.params, again.params)


def test_another_experiment_is_not_written_over(tmp_path: Path, problem: Problem) -> None:
    run_experiment(experiment("fedavg"), tmp_path / "a")
    with pytest.raises(fk.errors.ConfigError, match=r"differs in method.name"):
        run_experiment(experiment("fedntd"), tmp_path / "a")
    with pytest.raises(RunError, match="holds a run already"):
        fk.simulate("fedavg", problem.model, problem.data, problem.clients, **problem.settings, run_dir=tmp_path / "a")


def test_bad_input_leaves_no_folder_behind(tmp_path: Path, problem: Problem) -> None:
    with pytest.raises(fk.errors.FedkeepError, match="there are 6"):
        fk.simulate("fedavg", problem.model, problem.data, problem.clients, participation=9, run_dir=tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_checkpoints_take_a_twentieth_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock of our own, where rounds take a second, and checkpoints three and later a thousand."""
    now, costs = 100.0, 3.0
    monkeypatch.setattr("fedkeep.runs.folder.time.monotonic", lambda: now)

    def slow(self: client_store.ClientStore) -> tree.Tree:
        nonlocal now
        now += costs
        return {}

    monkeypatch.setattr(client_store.ClientStore, "save", slow)
    with RunFolder.create(tmp_path, {}) as folder:
        written = []
        for number in range(3000):
            if folder.checkpoint_due(number):
                folder.checkpoint(number, {}, client_store.ClientStore())
                written.append(number)
            now += 1
        assert written[:3] == [0, 117, 174]
        assert 3 * len(written) == pytest.approx((now - 100) / 20, abs=3)
        costs = 1000.0
        folder.checkpoint(3000, {}, client_store.ClientStore())
        now += 599
        assert not folder.checkpoint_due(3001)
        now += 1
        assert folder.checkpoint_due(3002)


def test_how_often_there_is_a_checkpoint_makes_no_other_experiment(tmp_path: Path) -> None:
    first = run_experiment(experiment("fedavg"), tmp_path / "a")
    seldom = {key: value for key, value in SMALL.items() if key != "checkpoint_every"}
    again = Experiment.from_dict({**seldom, "method": "fedavg"})
    assert again.checkpoint_every is None
    assert run_experiment(again, tmp_path / "a").records == first.records
    run_experiment(again, tmp_path / "b")
    assert_same_run(tmp_path / "a", tmp_path / "b")


def test_a_run_that_diverged_says_so_until_it_is_gone_on_with(tmp_path: Path) -> None:
    def run() -> None:
        with pytest.raises(fk.errors.Diverged):
            run_experiment(experiment("fedavg", lr_decay=1e30, rounds=4), tmp_path / "a")  # from the second round on

    run()
    said = fk.load_run(tmp_path / "a").diverged
    assert "diverged in round 2" in said
    [group] = groups.group_runs([tmp_path / "a"])
    assert (group.status, group.last_round) == ("diverged", 1)
    assert not group.finished
    (tmp_path / "a" / "diverged.txt").write_text("another word")
    run()
    assert fk.load_run(tmp_path / "a").diverged == said


def test_two_processes_at_one_folder(tmp_path: Path, forks) -> None:
    with RunFolder.create(tmp_path / "a", {"checkpoint_every": 1}):
        process = forks.Process(target=_expect_refused, args=(str(tmp_path / "a"),))
        process.start()
        process.join(60)
        assert process.exitcode == 0
    RunFolder.open(tmp_path / "a").close()  # and afterwards it is free


def _expect_refused(path: str) -> None:
    try:
        RunFolder.open(Path(path))
    except RunError as error:
        sys.exit(0 if "another process is at work" in str(error) else 3)
    sys.exit(4)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    run_experiment(experiment("fedavg"), tmp_path)
    file = tmp_path / "experiment.toml"
    file.write_text(file.read_text().replace("format = 1", "format = 2"))
    with pytest.raises(RunError, match="format 2"):
        fk.resume(tmp_path)


@pytest.mark.parametrize("damage", ["truncate", "flip", "garbage"])
def test_a_damaged_checkpoint_is_reported_and_left_as_it_is(tmp_path: Path, damage: str) -> None:
    _interrupted(tmp_path)
    file = tmp_path / "checkpoint.safetensors"
    data = bytearray(file.read_bytes())
    if damage == "truncate":
        data = data[:-10]
    elif damage == "flip":
        data[-5] ^= 0x40
    else:
        data = bytearray(b"not a checkpoint")
    file.write_bytes(data)
    lines = (tmp_path / "rounds.jsonl").read_bytes()
    with pytest.raises(RunError, match=r"checkpoint.safetensors is damaged"):
        fk.resume(tmp_path)
    assert file.read_bytes() == bytes(data)
    assert (tmp_path / "rounds.jsonl").read_bytes() == lines
    assert fk.load_run(tmp_path).rounds.tolist() == [1, 2, 3]  # what was measured can still be read


def test_a_damaged_line_and_a_missing_client_are_reported(tmp_path: Path) -> None:
    _interrupted(tmp_path)
    file = tmp_path / "rounds.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole.replace(b'{"round": 1', b'{"round": ~', 1))
    with pytest.raises(RunError, match="line 2 is damaged"):
        fk.resume(tmp_path)
    file.write_bytes(whole[:100])
    with pytest.raises(RunError, match="truncated"):
        fk.resume(tmp_path)
    file.write_bytes(whole)
    shutil.rmtree(tmp_path / "clients")
    with pytest.raises(RunError, match=r"there is no file .*clients"):
        fk.resume(tmp_path)


def _interrupted(path: Path) -> None:
    """A run of SCAFFOLD that stopped after round 3, with a checkpoint at round 2."""

    def stop(simulation: fk.Simulation, record: dict) -> None:
        if record["round"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_experiment(experiment("scaffold", rounds=4), path, [stop])


def test_a_full_disk_is_reported_and_loses_nothing(tmp_path: Path, forks) -> None:
    """The system refuses to let files grow beyond a limit, as a full disk would; then there is room again."""
    whole, path = tmp_path / "whole", tmp_path / "full"
    run_experiment(experiment("scaffold", rounds=80, eval_local_every=1), whole)
    process = forks.Process(target=_run_with_little_room, args=(str(path),))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    assert fk.load_run(path).rounds[-1] < 80
    torch.set_num_threads(1)
    run_experiment(experiment("scaffold", rounds=80, eval_local_every=1), path)
    assert_same_run(whole, path)


def _run_with_little_room(path: str) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))  # a checkpoint fits, 80 rounds' lines do not
    try:
        run_experiment(experiment("scaffold", rounds=80, eval_local_every=1), path)
    except RunError as error:
        sys.exit(0 if "could not be written" in str(error) and "saved so far: round" in str(error) else 3)
    sys.exit(4)


# Client states


def test_client_states_are_bounded_in_memory_and_written_once(tmp_path: Path) -> None:
    one = {"c": torch.zeros(1000)}
    kept = client_store.ClientStore(tmp_path, cache_bytes=10 * tree.nbytes(one))
    for client in range(200):
        kept.put(client, {"c": torch.full((1000,), float(client))}, round=1)
        assert kept._cached_bytes <= kept.cache_bytes
    kept.save()
    files = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.safetensors")}
    assert len(files) == 200
    kept.put(7, {"c": torch.full((1000,), -7.0)}, round=2)
    kept.save()
    kept.prune()
    now = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.safetensors")}
    assert len(set(now.items()) - set(files.items())) == 1  # one more file, the others untouched
    assert {p.name for p in files.keys() - now.keys()} == {"7-1.safetensors"}
    assert float(kept[7]["c"][0]) == -7
    assert float(kept[123]["c"][0]) == 123


def test_states_of_the_last_checkpoint_stay_until_the_next_one_lands(tmp_path: Path) -> None:
    kept = client_store.ClientStore(tmp_path)
    kept.put(1, {"c": torch.tensor(1.0)}, round=1)
    index = kept.save()
    kept.prune()
    kept.put(1, {"c": torch.tensor(2.0)}, round=2)
    kept.save()  # killed here, before the checkpoint that names round 2
    again = client_store.ClientStore(tmp_path)
    again.restore(index)
    assert float(again[1]["c"]) == 1
    assert [p.name for p in tmp_path.rglob("*.safetensors")] == ["1-1.safetensors"]


def test_memory_holds_only_the_cohort_and_the_cache(tmp_path: Path, problem: Problem) -> None:
    with RunFolder.create(tmp_path, {"checkpoint_every": 1}) as folder:
        sim = problem.simulation(fk.methods.Scaffold(), participation=1.0).attach(folder)
        sim.state.clients.cache_bytes = 1
        sim.run()
        assert len(sim.state.clients._cache) == 1
        assert len(sim.state.clients) == len(problem.clients)
        whole = problem.run(fk.methods.Scaffold(), participation=1.0)
        assert same(whole.server, sim.server)
