"""Run folders: their files, checkpoints, locks, damage, and the states of clients."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from support.errors import raises
from support.problems import Problem, same
from support.runs import SMALL, assert_same_run, expect_locked, group_runs, interrupt_small, run_small, small_experiment

import fedkeep as fk
from fedkeep import tree
from fedkeep.errors import ConfigError, FedkeepError, RunError
from fedkeep.experiments.experiment import Experiment
from fedkeep.experiments.run import require_same
from fedkeep.experiments.run import run as run_experiment
from fedkeep.runs import client_store
from fedkeep.runs.folder import RunFolder
from fedkeep.runs.reading import read_experiment


def test_the_files_of_a_run_folder_and_running_its_experiment_again(tmp_path: Path) -> None:
    history = run_small(tmp_path / "a", "scaffold")
    assert sorted(p.name for p in (tmp_path / "a").iterdir() if not p.name.startswith(".")) == [
        "checkpoint-0.safetensors", "checkpoint-2.safetensors", "checkpoint-3.safetensors", "clients", "ended.json",
        "experiment.toml", "rounds.jsonl", "split.json",
    ]  # fmt: skip
    again = Experiment.load(tmp_path / "a" / "experiment.toml")
    run_experiment(again, tmp_path / "b")
    assert_same_run(tmp_path / "a", tmp_path / "b")
    loaded = fk.load_run(tmp_path / "a")
    assert same(loaded.params, history.params)
    assert loaded.accuracy.tolist() == history.accuracy.tolist()
    assert loaded.summary()["bytes"] == history.summary()["bytes"]
    about = read_experiment(tmp_path / "a")
    assert about["format"] == 2
    assert loaded.verified
    assert loaded.ended == "finished"
    assert about["made_by"]["torch"] == str(torch.__version__)
    assert about["made_by"]["engine"] == "stacked"
    assert loaded.settings["engine"] == "stacked"


def test_a_finished_run_is_loaded_not_run_again(tmp_path: Path) -> None:
    first = run_small(tmp_path / "a", "fedavg")
    before = (tmp_path / "a" / "checkpoint-3.safetensors").stat().st_mtime_ns
    called = []
    again = run_experiment(small_experiment("fedavg"), tmp_path / "a", [lambda s, r: called.append(r)])
    assert not called
    assert (tmp_path / "a" / "checkpoint-3.safetensors").stat().st_mtime_ns == before
    assert same(first.params, again.params)


def test_another_experiment_is_not_overwritten(tmp_path: Path, problem: Problem) -> None:
    run_small(tmp_path / "a", "fedavg")
    with raises(ConfigError, key="method.name", value="fedntd", mentions=[str(tmp_path / "a"), "method.name"]):
        run_small(tmp_path / "a", "fedntd")
    with raises(RunError, key="run_dir", value=str(tmp_path / "a"), mentions=["resume=True"]):
        fk.simulate("fedavg", problem.model, problem.data, problem.clients, **problem.settings, run_dir=tmp_path / "a")


def test_invalid_settings_leave_no_folder_behind(tmp_path: Path, problem: Problem) -> None:
    with raises(FedkeepError, mentions=["participation", "9", "6"]):
        fk.simulate("fedavg", problem.model, problem.data, problem.clients, participation=9, run_dir=tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_checkpoints_take_5_percent_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fake clock: rounds take a second, checkpoints three seconds and later a thousand."""
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


def test_checkpoint_every_is_not_part_of_an_experiments_identity(tmp_path: Path) -> None:
    first = run_small(tmp_path / "a", "fedavg")
    default = {key: value for key, value in SMALL.items() if key != "checkpoint_every"}
    again = Experiment.from_dict({**default, "method": "fedavg"})
    assert again.checkpoint_every is None
    assert run_experiment(again, tmp_path / "a").records == first.records
    run_experiment(again, tmp_path / "b")
    assert_same_run(tmp_path / "a", tmp_path / "b")


def test_a_diverged_run_is_marked_until_it_is_resumed(tmp_path: Path) -> None:
    def run() -> None:
        with pytest.raises(fk.errors.Diverged):
            run_small(tmp_path / "a", "fedavg", lr_decay=1e30, rounds=4)  # from the second round on

    run()
    message = fk.load_run(tmp_path / "a").diverged
    assert "round 2" in message
    [group] = group_runs([tmp_path / "a"])
    assert (group.status, group.last_round) == ("diverged", 1)
    assert not group.finished
    (tmp_path / "a" / "diverged.txt").write_text("an old message")
    with raises(RunError, key="diverged.txt"):
        fk.load_run(tmp_path / "a")
    run()
    assert fk.load_run(tmp_path / "a").diverged == message


def test_a_folder_is_locked_by_one_process(tmp_path: Path, forks) -> None:
    with RunFolder.create(tmp_path / "a", {"checkpoint_every": 1}):
        process = forks.Process(target=expect_locked, args=(str(tmp_path / "a"),))
        process.start()
        process.join(300)
        assert process.exitcode == 0
    RunFolder.open(tmp_path / "a").close()  # afterwards it is free


def test_a_newer_format_raises(tmp_path: Path) -> None:
    run_small(tmp_path, "fedavg")
    file = tmp_path / "experiment.toml"
    file.write_text(file.read_text().replace("format = 2", "format = 3").partition("# run")[0])
    with raises(RunError, key="format", value=3, valid=[1, 2], mentions=[str(file)]):
        fk.resume(tmp_path)


@pytest.mark.parametrize("damage", ["truncate", "flip", "garbage"])
def test_a_damaged_checkpoint_is_reported_and_not_changed(tmp_path: Path, damage: str) -> None:
    interrupt_small(tmp_path)
    file = tmp_path / "checkpoint-2.safetensors"
    data = bytearray(file.read_bytes())
    if damage == "truncate":
        data = data[:-10]
    elif damage == "flip":
        data[-5] ^= 0x40
    else:
        data = bytearray(b"not a checkpoint")
    file.write_bytes(data)
    lines = (tmp_path / "rounds.jsonl").read_bytes()
    with raises(RunError, key=file.name, mentions=[str(file), f"fedkeep resume {tmp_path} --from-round 0"]):
        fk.resume(tmp_path)
    assert file.read_bytes() == bytes(data)
    assert (tmp_path / "rounds.jsonl").read_bytes() == lines
    assert fk.load_run(tmp_path).rounds.tolist() == [1, 2, 3]  # what was measured can still be read


def test_damaged_records_and_missing_client_states_are_reported(tmp_path: Path) -> None:
    interrupt_small(tmp_path)
    file = tmp_path / "rounds.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole.replace(b'{"round": 1', b'{"round": ~', 1))
    with raises(RunError, key="rounds.jsonl", value=2, mentions=[str(file)]):
        fk.resume(tmp_path)
    file.write_bytes(whole[:100])
    with raises(RunError, key="rounds.jsonl", value=100, mentions=[str(file)]):
        fk.resume(tmp_path)
    file.write_bytes(whole)
    shutil.rmtree(tmp_path / "clients")
    with raises(RunError, mentions=[str(tmp_path / "clients")]):
        fk.resume(tmp_path)


# Client states


def test_the_cache_is_bounded_and_every_state_is_written_once(tmp_path: Path) -> None:
    one = {"c": torch.zeros(1000)}
    store = client_store.ClientStore(tmp_path, cache_bytes=10 * tree.nbytes(one))
    for client in range(200):
        store.put(client, {"c": torch.full((1000,), float(client))}, round=1)
        assert store._cached_bytes <= store.cache_bytes
    store.save()
    files = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.safetensors")}
    assert len(files) == 200
    store.put(7, {"c": torch.full((1000,), -7.0)}, round=2)
    store.save()
    store.prune()
    now = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.safetensors")}
    assert len(set(now.items()) - set(files.items())) == 1  # one more file, the others untouched
    assert {p.name for p in files.keys() - now.keys()} == {"7-1.safetensors"}
    assert float(store[7]["c"][0]) == -7
    assert float(store[123]["c"][0]) == 123


def test_states_of_the_last_checkpoint_stay_until_the_next_one(tmp_path: Path) -> None:
    store = client_store.ClientStore(tmp_path)
    store.put(1, {"c": torch.tensor(1.0)}, round=1)
    index = store.save()
    store.prune()
    store.put(1, {"c": torch.tensor(2.0)}, round=2)
    store.save()  # killed here, before the checkpoint of round 2
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


def test_a_run_made_before_a_hyperparameter_existed_keeps_its_value(tmp_path: Path) -> None:
    """FedSSD's M was inside the square before `form` existed; experiments without it now have it outside."""
    experiment = Experiment.load("digits", ["method=fedssd", "method.form=inside", "rounds=1", "data.public=2"])
    run_experiment(experiment, tmp_path / "run")
    recorded = read_experiment(tmp_path / "run")
    del recorded["method"]["form"]
    assert Experiment.from_dict(recorded).method["form"] == "inside"
    require_same(experiment, recorded, "it is another run", "choose another folder")
    assert Experiment.load("digits", ["method=fedssd"]).method["form"] == "outside"


def test_names_of_classes_and_clients_are_kept_with_a_run(tmp_path):
    rng = np.random.default_rng(0)
    y = np.arange(40) % 2
    x = rng.normal(size=(40, 3)).astype("float32")
    data = fk.data.from_arrays(x, y, x, y, class_names=["benign", "malignant"], ids=["Aachen", "Bonn"] * 20)
    clients = fk.data.partition.by_id(data.ids).hold_out(0.2)
    run = fk.simulate("fedavg", "mlp", data, clients, rounds=1, participation=1.0, run_dir=tmp_path / "run")
    for history in (run, fk.load_run(tmp_path / "run")):
        assert [history.class_name(c) for c in (0, 1)] == ["benign", "malignant"]
        assert history.client_names == {0: "Aachen", 1: "Bonn"}
        assert history.client_name(7) == "client 7"


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["a", "a"], "different"),
        (["a", "b", "c"], "3 names, but there are 2"),
        ("ab", "must be texts"),
        (["a", " "], "must be texts"),
    ],
)
def test_class_names_are_checked(names, said):
    x, y = np.zeros((4, 2), "float32"), np.arange(4) % 2
    with pytest.raises(fk.errors.DataError, match=said) as error:
        fk.data.from_arrays(x, y, x, y, n_classes=2, class_names=names)
    assert error.value.key == "class_names"
