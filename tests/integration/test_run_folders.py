"""Run folders that cannot lie: damaged and foreign files, going back, links, modes, ends of runs, large tables."""

from __future__ import annotations

import json
import logging
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import synthetic
from support.errors import raises
from support.problems import same
from support.runs import (
    assert_same_run,
    files_of,
    group_runs,
    interrupt_small,
    read_newest,
    run_small,
    small_experiment,
)

import fedkeep as fk
from fedkeep.engine import provenance
from fedkeep.errors import ForeignFile, RunError
from fedkeep.experiments.experiment import Experiment
from fedkeep.experiments.run import run
from fedkeep.runs import packed
from fedkeep.runs.checkpoints import find_checkpoints, read_header
from fedkeep.runs.client_store import ClientStore
from fedkeep.runs.files import make_folder, read_bytes, to_toml, write_atomic
from fedkeep.runs.folder import RunFolder
from fedkeep.runs.label_counts import label_counts_of
from fedkeep.runs.reading import load_run, read_instruments
from fedkeep.runs.trees import read_tree, write_tree

# Damage


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "finished"
    run_small(path, "scaffold", rounds=4)
    return path


@pytest.fixture(scope="module")
def other_seed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "other"
    experiment = small_experiment("scaffold", rounds=4)
    run(experiment.model_copy(update={"seed": 2, "train": small_experiment("scaffold", rounds=4).train}), path)
    return path


def change(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("experiment.toml", "lr = 0.05", "lr = 0.06"),
        ("experiment.toml", "seed = 1", "seed = 2"),
        ("experiment.toml", 'torch = "', 'torch = "1'),
        ("rounds.jsonl", '"bytes_up": ', '"bytes_up": 1'),
        ("rounds.jsonl", '"test_loss": 2', '"test_loss": 1'),
        ("split.json", '"counts": [[', '"counts": [[1'),
        ("ended.json", '"round": 4', '"round": 3'),
        ("ended.json", "finished", "stopped"),
    ],
)
def test_a_changed_digit_is_found_by_all_readers(finished: Path, tmp_path: Path, name: str, old: str, new: str) -> None:
    path = tmp_path / "run"
    shutil.copytree(finished, path)
    change(path / name, old, new)
    with raises(RunError, key=name, mentions=[str(path / name)]):
        load_run(path, weights=False)
    with raises(RunError, key=name):
        fk.resume(path)


def test_lines_and_settings_are_verified_without_a_checkpoint(finished: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    for name in ("experiment.toml", "rounds.jsonl"):
        shutil.copy(finished / name, path / name)
    history = load_run(path, weights=False)
    assert (history.verified, history.finished) == (True, True)
    lines = (path / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    for damage in ([lines[0], lines[2], lines[1], *lines[3:]], lines[1:], [*lines[:2], *lines[3:]]):
        (path / "rounds.jsonl").write_bytes(b"".join(damage))
        with raises(RunError, key="rounds.jsonl"):
            load_run(path, weights=False)


@pytest.mark.parametrize("name", ["checkpoint-4.safetensors", "rounds.jsonl", "split.json", "ended.json"])
def test_a_file_of_another_run_is_named_and_not_used(
    finished: Path, other_seed: Path, tmp_path: Path, name: str
) -> None:
    path = tmp_path / "run"
    shutil.copytree(finished, path)
    shutil.copy(other_seed / name, path / name)
    with raises(ForeignFile, key=name, mentions=[name, "experiment.toml"]):
        load_run(path)


def test_states_of_other_clients_or_runs_are_refused(other_seed: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    interrupt_small(path)
    before = files_of(path)
    named = read_newest(path).clients
    first, second = (
        path / "clients" / f"{k:03d}" / f"{k}-{r}.safetensors"
        for k, r in list(zip(named["id"].tolist(), named["round"].tolist(), strict=True))[:2]
    )
    kept = first.read_bytes()
    for wrong in (second.read_bytes(), next((other_seed / "clients").rglob("*.safetensors")).read_bytes(), kept[:-4]):
        first.write_bytes(wrong)
        with raises(RunError, key=first.name):
            fk.resume(path)
        first.write_bytes(kept)
        assert files_of(path) == before, "a failed resume changes nothing"


def test_the_header_of_a_tree_is_covered(tmp_path: Path) -> None:
    file = tmp_path / "t.safetensors"
    write_tree(file, {"a": torch.zeros(4), "b": torch.ones(2, 3)}, {"round": 3}, "00ff00ff")
    whole = file.read_bytes()
    tree, about = read_tree(file, "00ff00ff")
    length = 8 + int.from_bytes(whole[:8], "little")
    silent = []
    for place in range(length):
        for bit in (1, 4):
            data = bytearray(whole)
            data[place] ^= bit
            file.write_bytes(data)
            try:
                again, theirs = read_tree(file, "00ff00ff")
            except RunError:
                continue
            if not same(again, tree) or theirs != about:
                silent.append(place)
    assert not silent
    file.write_bytes(whole)
    with raises(ForeignFile, key=file.name):
        read_tree(file, "ff00ff00")


def test_a_finished_run_that_lost_lines_is_damaged_not_unfinished(finished: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(finished, path)
    lines = (path / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    (path / "rounds.jsonl").write_bytes(b"".join(lines[:-1]))
    with raises(RunError, key="rounds.jsonl", value=3, valid=[4]):
        load_run(path, weights=False)
    (path / "ended.json").unlink()  # the checkpoint knows it too
    with raises(RunError, key="rounds.jsonl", value=3, valid=[4]):
        load_run(path, weights=False)
    (path / "rounds.jsonl").unlink()
    with raises(RunError, key="rounds.jsonl"):
        load_run(path, weights=False)


def test_a_deleted_file_that_the_checkpoint_names_is_missed(finished: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(finished, path)
    (path / "split.json").unlink()
    with raises(RunError, key="split.json"):
        load_run(path, weights=False)


# Format 1


def as_format_1(path: Path, old: Path) -> None:
    """Write an interrupted or finished run of format 2 as format 1 would have written it."""
    about = load_run(old, weights=False).about
    del about["made_by"]["run"]
    path.mkdir()
    (path / "experiment.toml").write_bytes(to_toml({**about, "format": 1}))
    saved = read_newest(old)
    lines, offset = b"", 0
    for record in load_run(old, weights=False).records:
        lines += json.dumps(record).encode() + b"\n"
        offset = len(lines) if record["round"] == saved.round else offset
    (path / "rounds.jsonl").write_bytes(lines)
    for state in (old / "clients").rglob("*.safetensors"):
        copy = path / "clients" / state.relative_to(old / "clients")
        copy.parent.mkdir(parents=True, exist_ok=True)
        client, number = map(int, state.stem.split("-"))
        run_id = load_run(old, weights=False).about["made_by"]["run"]
        write_tree(copy, read_tree(state, run_id)[0], {"client": client, "round": number})
    trees = {"server": saved.server, "clients": saved.clients}
    write_tree(path / "checkpoint.safetensors", trees, {"round": saved.round, "offset": offset})


def test_format_1_is_read_as_unverified_and_continued_in_format_1(finished: Path, tmp_path: Path) -> None:
    as_format_1(tmp_path / "whole", finished)
    history = fk.load_run(tmp_path / "whole")
    assert (history.verified, history.finished, history.ended) == (False, True, None)
    assert same(history.params, fk.load_run(finished).params)
    interrupt_small(tmp_path / "new")
    as_format_1(tmp_path / "old", tmp_path / "new")
    assert same(fk.resume(tmp_path / "old").params, history.params)
    again = fk.load_run(tmp_path / "old")
    assert (again.verified, again.finished, again.about["format"]) == (False, True, 1)
    assert not list((tmp_path / "old").glob("checkpoint-*"))
    with raises(RunError, key="from_round", value=2):
        fk.resume(tmp_path / "old", from_round=2)


def test_a_run_of_format_1_without_made_by_is_named(tmp_path: Path) -> None:
    interrupt_small(tmp_path / "new")
    as_format_1(tmp_path / "old", tmp_path / "new")
    about = fk.load_run(tmp_path / "old").about
    write_atomic(tmp_path / "old" / "experiment.toml", to_toml({**about, "made_by": None}))
    with raises(RunError, key="experiment.toml", mentions=["made_by.engine is missing"]):
        fk.resume(tmp_path / "old")


@pytest.mark.parametrize("text", ["format = 1\nseed = 0xffffffffffffffff\n", "a = " + "[" * 40 + "]" * 40])
def test_an_experiment_file_is_read_like_those_of_users(tmp_path: Path, text: str) -> None:
    (tmp_path / "experiment.toml").write_text(text)
    with raises(RunError, key="experiment.toml", mentions=["cannot be read"]):
        fk.load_run(tmp_path)


def test_a_run_of_format_1_is_readable(tmp_path: Path) -> None:
    path = synthetic.write_run(tmp_path / "run", synthetic.records(synthetic.wave(0)))
    history = load_run(path, weights=False)
    assert (history.verified, history.finished) == (False, True)


@pytest.mark.parametrize(
    "line", ['{"round": 2}', "5", '{"round": "x"}', "[" * 100_000, '{"round": 1, "confusion": [[1]]}']
)
def test_an_unusable_record_of_format_1_is_named(tmp_path: Path, line: str) -> None:
    path = synthetic.write_run(tmp_path / "run", synthetic.records(synthetic.wave(0)))
    lines = (path / "rounds.jsonl").read_text().splitlines()
    lines[1] = line
    (path / "rounds.jsonl").write_text("\n".join(lines) + "\n")
    with raises(RunError, key="rounds.jsonl"):
        load_run(path, weights=False)


# Resuming elsewhere


def test_other_software_is_named_in_one_warning(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    interrupt_small(tmp_path / "run")
    changed = {"fedkeep": "9.9.9", "torch": "99.0", "threads": 7}
    made_by = provenance.made_by
    monkeypatch.setattr(provenance, "made_by", lambda *args: {**made_by(*args), **changed})
    with caplog.at_level(logging.WARNING, logger="fedkeep"):
        fk.resume(tmp_path / "run")
    [message] = [r.getMessage() for r in caplog.records if "resumed" in r.getMessage()]
    for part in (f"fedkeep {fk.__version__} -> 9.9.9", f"torch {torch.__version__} -> 99.0", "threads 1 -> 7"):
        assert part in message, message
    assert "device" not in message


# Going back


def test_the_last_checkpoints_are_kept_with_their_states(tmp_path: Path) -> None:
    run(small_experiment("scaffold", rounds=9).model_copy(update={"checkpoint_every": 1, "keep": 2}), tmp_path / "a")
    assert list(find_checkpoints(tmp_path / "a")) == [8, 9]
    run(small_experiment("scaffold", rounds=9).model_copy(update={"checkpoint_every": 1, "keep": 1}), tmp_path / "b")
    assert list(find_checkpoints(tmp_path / "b")) == [9]
    for path in (tmp_path / "a", tmp_path / "b"):
        named = set()
        run_id = load_run(path, weights=False).about["made_by"]["run"]
        for file in find_checkpoints(path).values():
            index = read_tree(file, run_id)[0]["clients"]
            named |= {f"{k}-{r}" for k, r in zip(index["id"].tolist(), index["round"].tolist(), strict=True)}
        assert {p.stem for p in (path / "clients").rglob("*.safetensors")} == named
    assert_same_run(tmp_path / "a", tmp_path / "b")


def test_a_new_keep_applies_when_a_run_is_resumed(tmp_path: Path) -> None:
    interrupt_small(tmp_path)
    experiment = small_experiment("scaffold", rounds=4)
    about = fk.load_run(tmp_path, weights=False).about
    run(Experiment.from_dict({**about, "keep": 1}), tmp_path)
    assert list(find_checkpoints(tmp_path)) == [experiment.train.rounds]


def test_going_back_repeats_the_later_rounds(tmp_path: Path) -> None:
    path = tmp_path / "run"
    whole = run_small(path, "scaffold", rounds=4)
    before = files_of(path)
    with raises(RunError, key="from_round", value=1, valid=[0, 2, 4]):
        fk.resume(path, from_round=1)
    assert files_of(path) == before

    def stop(simulation: fk.Simulation, record: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fk.resume(path, from_round=2, callbacks=[stop])
    aside = {p.name: p.read_bytes() for p in (path / "abandoned").iterdir()}
    assert set(aside) == {"rounds-after-2.jsonl", "checkpoint-4.safetensors", "ended.json"}
    assert aside["checkpoint-4.safetensors"] == before["checkpoint-4.safetensors"]
    assert before["rounds.jsonl"].endswith(aside["rounds-after-2.jsonl"])
    assert not load_run(path, weights=False).finished
    states = [name for name in before if name.startswith("clients")]
    assert all((path / name).exists() for name in states), "the abandoned checkpoint's states are still there"
    assert same(fk.resume(path).params, whole.params)
    assert not (path / "abandoned").exists()
    after = files_of(path)
    assert after.keys() == before.keys()


def test_an_error_names_an_older_checkpoint_only(tmp_path: Path) -> None:
    path = tmp_path / "my runs"
    run_small(path, "fedavg", rounds=3)
    *_, middle, newest = find_checkpoints(path).values()
    for file, others in ((newest, True), (middle, False)):
        for older in [] if others else [f for f in find_checkpoints(path).values() if f not in (middle, newest)]:
            older.unlink()
        file.write_bytes(b"torn")
        with pytest.raises(RunError) as caught:
            read_header(file, fk.load_run(path, weights=False).about["made_by"]["run"])
        assert (f"fedkeep resume '{path}' --from-round" in str(caught.value)) == others


def test_an_older_checkpoint_put_back_destroys_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run"

    def stop(simulation: fk.Simulation, record: dict[str, Any]) -> None:
        if record["round"] == 7:
            raise KeyboardInterrupt

    experiment = small_experiment("scaffold", rounds=8).model_copy(update={"checkpoint_every": 1, "keep": 1})
    early = {}

    def save(simulation: fk.Simulation, record: dict[str, Any]) -> None:
        early.update({p.name: p.read_bytes() for p in path.glob("checkpoint-2.*")})

    with pytest.raises(KeyboardInterrupt):
        run(experiment, path, [save, stop])
    before = files_of(path)
    [newest] = path.glob("checkpoint-*")
    whole = newest.read_bytes()
    newest.unlink()
    (path / "checkpoint-2.safetensors").write_bytes(early["checkpoint-2.safetensors"])
    with raises(RunError):
        fk.resume(path)
    (path / "checkpoint-2.safetensors").unlink()
    newest.write_bytes(whole)
    assert files_of(path) == before
    fk.resume(path)
    run(experiment, tmp_path / "whole")
    assert_same_run(tmp_path / "whole", path)


def test_stale_states_are_removed_when_a_finished_run_is_resumed(tmp_path: Path, monkeypatch: Any) -> None:
    """The process was killed between its last checkpoint and the deletion of old states."""
    path = tmp_path / "run"
    experiment = small_experiment("scaffold", rounds=6).model_copy(update={"keep": 1})

    def killed(*args: Any) -> None:
        raise KeyboardInterrupt

    def before_the_last(simulation: fk.Simulation, record: dict[str, Any]) -> None:
        if record["round"] == 6:
            monkeypatch.setattr(ClientStore, "prune", killed)

    with pytest.raises(KeyboardInterrupt):
        run(experiment, path, [before_the_last])
    monkeypatch.undo()
    (path / "clients" / "000" / ".fedkeep-00112233445566ff.part").write_bytes(b"torn")
    fk.resume(path)
    run(experiment, tmp_path / "whole")
    assert files_of(path).keys() == files_of(tmp_path / "whole").keys()


# Links, special files and modes


def test_nothing_outside_the_folder_is_deleted_or_written(tmp_path: Path) -> None:
    path, outside = tmp_path / "run", tmp_path / "models"
    interrupt_small(path)
    (outside / "000").mkdir(parents=True)
    for k in range(3):
        (outside / "000" / f"{k}-1.safetensors").write_bytes(b"mine")
    shutil.move(path / "clients", tmp_path / "states")
    (path / "clients").symlink_to(outside)
    with raises(RunError, key="clients"):
        fk.resume(path)
    assert len(list(outside.rglob("*.safetensors"))) == 3
    (path / "clients").unlink()
    shutil.move(tmp_path / "states", path / "clients")
    (path / "clients" / "999").symlink_to(outside / "000")
    fk.resume(path)
    assert len(list(outside.rglob("*.safetensors"))) == 3


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
@pytest.mark.parametrize("name", ["rounds.jsonl", ".lock", "diverged.txt"])
def test_special_files_in_a_run_folder_are_named(tmp_path: Path, kind: str, name: str) -> None:
    path = tmp_path / "run"
    interrupt_small(path)
    target = tmp_path / "target"
    target.write_text("precious")
    (path / name).unlink(missing_ok=True)
    make = {"link": lambda p: p.symlink_to(target), "folder": Path.mkdir, "pipe": os.mkfifo}[kind]
    make(path / name)
    with raises(RunError, key=name, mentions=[str(path / name)]):
        fk.resume(path)
    assert target.read_text() == "precious"


def test_only_temporary_files_of_a_run_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    mine = [path / name for name in (".film.part", ".fedkeep-notes.part", ".data.csv.part")]
    left = [path / name for name in (".fedkeep-0123456789abcdef.part", ".rounds.jsonl.part")]
    for file in mine + left:
        file.write_bytes(b"torn")
    with raises(RunError, key="keep"):
        RunFolder.create(path, {"keep": 0})
    assert all(file.exists() for file in mine + left)
    run_small(path, "fedavg", rounds=1)
    assert all(file.exists() for file in mine)
    assert not any(file.exists() for file in left)


def test_a_private_folder_is_not_a_link(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "shared")
    make_folder(tmp_path / "link")
    with raises(RunError, key="link", mentions=["a symbolic link"]):
        make_folder(tmp_path / "link", private=True)


def test_outputs_replace_regular_files_only(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("precious")
    (tmp_path / "link").symlink_to(target)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "folder", "pipe", "/dev/null"):
        with raises(RunError, key=Path(name).name, mentions=[name]):
            write_atomic(tmp_path / name, b"new")
        with raises(RunError, key=Path(name).name) if name != "link" else pytest.MonkeyPatch.context():
            read_bytes(tmp_path / name)
    assert target.read_text() == "precious"
    write_atomic(target, b"new")
    assert target.read_text() == "new"
    with raises(RunError, key="x" * 300):
        write_atomic(tmp_path / ("x" * 300), b"new")
    (tmp_path / ".target.part").symlink_to(tmp_path / "elsewhere")  # the name that earlier versions used
    write_atomic(target, b"newer")
    assert not (tmp_path / "elsewhere").exists()
    assert [p.name for p in tmp_path.glob(".fedkeep-*")] == []


def test_a_read_only_disk_is_one_error(finished: Path, tmp_path: Path, monkeypatch: Any) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(30, "Read-only file system")

    for name in ("mkdir", "replace", "unlink"):
        monkeypatch.setattr(os, name, refuse)
    with raises(RunError, key="out.html"):
        write_atomic(tmp_path / "out.html", b"page")
    with raises(RunError, key="run_dir"):
        RunFolder.create(tmp_path / "a" / "b", {})
    assert fk.resume(finished).finished, "a finished run can be loaded"


def test_client_states_are_private(finished: Path) -> None:
    def mode(path: Path) -> int:
        return stat.S_IMODE(path.stat().st_mode)

    assert mode(finished) == mode(finished / "clients") == 0o700
    for path in (finished / "clients").rglob("*"):
        assert mode(path) == (0o700 if path.is_dir() else 0o600)


# The end of a run


def test_a_run_stopped_by_a_callback_is_finished(tmp_path: Path) -> None:
    def stop(simulation: fk.Simulation, record: dict[str, Any]) -> None:
        if record["round"] == 2:
            simulation.stop()

    path, experiment = tmp_path / "run", small_experiment("fedavg", rounds=4)
    first = run(experiment, path, [stop])
    assert (first.finished, first.ended) == (True, "stopped")
    loaded = fk.load_run(path)
    assert (loaded.finished, loaded.ended) == (True, "stopped")
    assert group_runs([path])[0].finished
    again = run(experiment, path)
    assert [r["round"] for r in again.records] == [0, 1, 2], "run loads it"
    (path / "ended.json").unlink()
    assert load_run(path, weights=False).ended == "stopped", "the checkpoint knows it too"
    assert fk.resume(path).ended == "finished", "resume continues it"
    assert same(fk.load_run(path).params, run_small(tmp_path / "whole", "fedavg", rounds=4).params)


def test_an_interrupted_run_is_not_finished(tmp_path: Path) -> None:
    interrupt_small(tmp_path / "run")
    history = load_run(tmp_path / "run", weights=False)
    assert (history.finished, history.ended, history.verified) == (False, None, True)


def test_a_lost_divergence_message_is_missed(tmp_path: Path) -> None:
    with pytest.raises(fk.errors.Diverged):
        run_small(tmp_path, "fedavg", lr_decay=1e30, rounds=4)
    history = load_run(tmp_path, weights=False)
    assert history.diverged
    assert not history.finished
    (tmp_path / "diverged.txt").unlink()
    with raises(RunError, key="diverged.txt"):
        load_run(tmp_path, weights=False)


def test_records_without_a_checkpoint_are_not_cut_off(finished: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    for name in ("experiment.toml", "rounds.jsonl"):
        shutil.copy(finished / name, path / name)
    before = files_of(path)
    with raises(RunError, key="rounds.jsonl"):
        fk.resume(path)
    assert files_of(path) == before


# Instruments


def test_no_line_of_the_instruments_can_be_lost(tmp_path: Path) -> None:
    path = tmp_path / "run"
    run(small_experiment("fedavg"), path, [fk.instruments.Every(1, "losses")])
    file = path / "instruments.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    assert [line["after_round"] for line in read_instruments(path)] == [1, 2, 3]
    for damage in (lines[1:], lines[:-1], [lines[1], lines[0], lines[2]], []):
        file.write_bytes(b"".join(damage))
        with raises(RunError, key="instruments.jsonl"):
            read_instruments(path)
        with raises(RunError, key="instruments.jsonl"):
            load_run(path, weights=False)
    file.unlink()
    with raises(RunError, key="instruments.jsonl"):
        load_run(path, weights=False)


# Many classes


def test_a_thousand_classes_and_sixty_rounds_stay_small(tmp_path: Path) -> None:
    rng, classes = np.random.default_rng(0), 1000
    y = np.arange(20_000) % classes
    with RunFolder.create(tmp_path, {"method": {"name": "fedavg"}, "train": {"rounds": 60}, "seed": 0,
                                     "data": {}, "split": {}, "model": {}}) as folder:  # fmt: skip
        for number in range(61):
            right = rng.random(len(y)) < number / 80
            guess = np.where(right, y, rng.integers(0, classes, len(y)))
            confusion = np.bincount(y * classes + guess, minlength=classes**2).reshape(classes, classes)
            record: dict[str, Any] = {"round": number, "confusion": packed.as_table(confusion), "test_loss": 1.0}
            folder.append({**record, **({"bytes_up": 0, "bytes_down": 0, "seconds": 0.1} if number else {})})
    assert (tmp_path / "rounds.jsonl").stat().st_size < 20e6
    history = load_run(tmp_path, weights=False)
    assert (history.records[-1]["confusion"] == confusion).all()
    assert history.accuracy[-1] == pytest.approx(np.trace(confusion) / len(y))
    assert history.class_accuracy.shape == (60, classes)


def test_tables_survive_the_file_and_small_ones_stay_lists(tmp_path: Path) -> None:
    large = np.arange(40 * 40).reshape(40, 40)
    assert (packed.unpack(packed.pack(large)) == large).all()
    assert packed.pack(np.eye(2, dtype=int)) == [[1, 0], [0, 1]]
    bomb = {**packed.pack(large), "shape": [1 << 20, 1 << 20]}
    for wrong in (bomb, {**packed.pack(large), "zlib": "x"}, {**packed.pack(large), "shape": [40, 41]}):
        with pytest.raises(ValueError, match="a table"):
            packed.unpack(wrong)


def test_local_models_of_many_classes_are_recorded(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(600, 4)).astype("f"), np.arange(600) % 200
    data = fk.data.from_arrays(x, y, x, y)
    clients = fk.data.partition.iid(y, 8, seed=0)
    model = torch.nn.Linear(4, 200)
    settings = {"rounds": 1, "participation": 1.0, "eval_local_every": 1}
    histories = [
        fk.simulate("fedavg", model, data, clients, engine=engine, run_dir=tmp_path / engine, **settings)
        for engine in ("loop", "stacked")
    ]
    assert isinstance(histories[0].records[1]["local"]["hits"], np.ndarray)
    for history in histories:
        loaded = load_run(history.folder or tmp_path / history.settings["engine"], weights=False)
        for key, values in history.local(1).items():
            np.testing.assert_array_equal(loaded.local(1)[key], values)
        json.dumps(label_counts_of(loaded))
    np.testing.assert_array_equal(histories[0].local(1)["class_accuracy"], histories[1].local(1)["class_accuracy"])
