"""Splits and cohorts from files: the same run, bit for bit, in every runtime; resumed and compared by contents."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from support.cli import fedkeep, run_ranks
from support.errors import raises
from support.problems import same
from support.runs import assert_same_run

import fedkeep as fk
from fedkeep.analysis.run_set import read_runs
from fedkeep.errors import ConfigError, FedkeepError, RunError
from fedkeep.experiments.build import load_data_and_clients
from fedkeep.experiments.experiment import Experiment
from fedkeep.experiments.run import run
from fedkeep.instruments.next_round import open_run
from fedkeep.runs.files import to_toml
from fedkeep.runs.reading import load_run

TABLES: dict[str, Any] = {
    "method": "scaffold",
    "model": "mlp",
    "data": "digits",
    "split": {"kind": "dirichlet", "n_clients": 6, "alpha": 0.3},
    "train": {"rounds": 4, "participation": 2, "epochs": 1, "batch_size": 60, "lr": 0.05},
    "checkpoint_every": 1,
    "seed": 1,
}


def experiment(file: Path | None = None, **changes: Any) -> Experiment:
    """Return the experiment, with the split and the cohorts of a file."""
    tables = {**TABLES, **changes}
    if file is not None:
        tables |= {"split": {"file": str(file)}, "train": {**tables["train"], "cohorts": str(file)}}
    return Experiment.from_dict(tables)


def save(path: Path, history: fk.History, shift: int = 0) -> Path:
    data, clients = load_data_and_clients(experiment())
    cohorts = [sorted((k + shift) % 6 for k in cohort) for cohort in history.cohorts]
    fk.save_federation(path, clients, cohorts, data.y_train)
    return path


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("drawn") / "run"
    run(experiment(), folder)
    return folder


def weights(folder: Path) -> Any:
    return load_run(folder).params


def stop_after(number: int) -> Any:
    def stop(simulation: fk.Simulation, record: dict[str, Any]) -> None:
        if record["round"] == number:
            raise KeyboardInterrupt

    return stop


def test_a_file_of_a_runs_split_and_cohorts_gives_that_run_bit_for_bit(tmp_path: Path, drawn: Path) -> None:
    file = save(tmp_path / "federation.json", load_run(drawn))
    assert_same_run(drawn, _run(experiment(file), tmp_path / "given"))
    other = _run(experiment(save(tmp_path / "other.json", load_run(drawn), shift=1)), tmp_path / "other")
    assert not same(weights(drawn), weights(other))


def _run(this: Experiment, path: Path) -> Path:
    run(this, path)
    return path


def test_from_python_lists_and_files_give_the_drawn_run_too(tmp_path: Path) -> None:
    data = fk.data.load("digits")
    clients = fk.data.partition.shards(data.y_train, n_clients=6, s=2)
    arguments: dict[str, Any] = {"epochs": 1, "batch_size": 60, "rounds": 3}
    whole = fk.simulate("fedavg", "mlp", data, clients, participation=2, **arguments)
    fk.save_federation(tmp_path / "f.json", clients, whole.cohorts)
    read = fk.data.partition.from_file(data.y_train, tmp_path / "f.json")
    listed = fk.simulate("fedavg", "mlp", data, read, cohorts=whole.cohorts, run_dir=tmp_path / "listed", **arguments)
    from_file = fk.simulate("fedavg", "mlp", data, read, cohorts=tmp_path / "f.json", **arguments)
    assert same(whole.params, listed.params)
    assert same(whole.params, from_file.params)
    assert tomllib.loads((tmp_path / "listed/experiment.toml").read_text())["train"]["cohorts"] == "federation.json"
    model = fk.models.build("mlp", data.input_shape, data.n_classes, 0)
    again = fk.resume(tmp_path / "listed", model=model, data=data, clients=read, from_round=0)
    assert same(whole.params, again.params)


@pytest.mark.parametrize("after", ["changed", "vanished"])
def test_a_run_resumes_with_its_own_copy(tmp_path: Path, drawn: Path, after: str) -> None:
    file, path = save(tmp_path / "federation.json", load_run(drawn)), tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run(experiment(file), path, [stop_after(2)])
    if after == "changed":
        save(file, load_run(drawn), shift=1)
        with raises(ConfigError, key="train.cohorts", value=str(file), mentions=[str(path)]):
            run(experiment(file), path)
        fk.resume(path)
    else:
        file.unlink()
        run(experiment(file), path)
    assert_same_run(drawn, path)
    assert len(open_run(path).train_round().plan.cohort) == 2
    repeated = tmp_path / "repeated"
    done = fedkeep("run", str(path / "experiment.toml"), "--runs", str(tmp_path), "--name", "repeated", "--json")
    assert done.returncode == 0, done.stderr
    assert same(weights(drawn), weights(repeated))


def test_another_split_in_the_file_is_another_experiment(tmp_path: Path, drawn: Path) -> None:
    file = save(tmp_path / "federation.json", load_run(drawn))
    path = _run(experiment(file), tmp_path / "run")
    copy = save(tmp_path / "copy.json", load_run(drawn))
    assert run(experiment(copy), path).finished  # the name of the file does not matter
    content = json.loads(file.read_text())
    content["clients"] = content["clients"][::-1]
    file.write_text(json.dumps(content))
    with raises(ConfigError, key="split.file", value=str(file), mentions=[str(path)]):
        run(experiment(file), path)
    with raises(ConfigError, key="train.cohorts"):
        run(Experiment.from_dict({**TABLES, "split": {"file": str(copy)}}), path)


def test_a_damaged_copy_is_never_used(tmp_path: Path, drawn: Path) -> None:
    file, path = save(tmp_path / "federation.json", load_run(drawn)), tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run(experiment(file), path, [stop_after(2)])
    copy = path / "federation.json"
    content = json.loads(copy.read_text())
    content["cohorts"][3] = [0, 1, 2]
    copy.write_text(json.dumps(content))
    with raises(RunError):
        fk.resume(path)


def test_comparisons_tell_files_apart_by_their_contents(tmp_path: Path, drawn: Path) -> None:
    history = load_run(drawn)
    first, second = save(tmp_path / "a.json", history), save(tmp_path / "b.json", history)
    other = save(tmp_path / "c.json", history, shift=2)
    _run(experiment(first), tmp_path / "runs/first")
    _run(experiment(second, method="fedavg"), tmp_path / "runs/second")
    _run(experiment(other, method="fedprox"), tmp_path / "runs/other")
    problems = read_runs([tmp_path / "runs"]).problems
    members = sorted(sorted(run.name for group in problem.groups for run in group.runs) for problem in problems)
    assert members == [["first", "second"], ["other"]]


def test_overrides_and_sweeps_take_files(tmp_path: Path, drawn: Path) -> None:
    file = save(tmp_path / "federation.json", load_run(drawn))
    (tmp_path / "x.toml").write_text(to_toml({**TABLES, "method": "fedavg"}).decode())
    args = ["x.toml", f"split.file={file.name}", f"cohorts={file.name}", "--sweep", "method=fedavg,scaffold"]
    done = fedkeep("run", *args, "--jobs", "2", "--runs", "runs", "--name", "x", "--json", cwd=tmp_path, fresh=True)
    assert done.returncode == 0, done.stderr
    assert same(weights(drawn), weights(tmp_path / "runs/x-method=scaffold"))


def test_the_command_partition_writes_and_reads_files(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(to_toml(TABLES).decode())
    written = fedkeep("partition", "x.toml", "--save", "f.json", "--json", cwd=tmp_path)
    assert written.returncode == 0, written.stderr
    read = fedkeep("partition", "x.toml", "split.file=f.json", "cohorts=f.json", "--json", cwd=tmp_path)
    assert json.loads(read.stdout) == json.loads(written.stdout)
    content = json.loads((tmp_path / "f.json").read_text())
    assert list(map(len, content["clients"])) == json.loads(read.stdout)["sizes"]
    assert content["examples"] == sum(json.loads(read.stdout)["sizes"])
    shown = fedkeep("partition", "x.toml", "split.file=f.json", "cohorts=f.json", "rounds=5", cwd=tmp_path)
    assert shown.returncode == 2
    assert "f.json" in shown.stderr
    assert len(shown.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("split", "key"),
    [
        ({"file": "missing.json"}, "split.file"),
        ({"kind": "file"}, "split.file"),
        ({"file": 3}, "split.file"),
        ({"file": "x.json", "validation": 0.1}, "split.validation"),
        ({"file": "x.json", "n_clients": 3}, "split.n_clients"),
        ({"file": "x.json", "kind": "iid", "n_clients": 3}, "split.file"),
    ],
)
def test_an_invalid_split_table_names_its_key(split: dict[str, Any], key: str) -> None:
    with raises(FedkeepError, key=key, mentions=[key]):
        load_data_and_clients(experiment(split=split))


def test_several_processes_share_given_cohorts(tmp_path: Path, drawn: Path) -> None:
    file = save(tmp_path / "federation.json", load_run(drawn))
    (tmp_path / "x.toml").write_text(to_toml({**TABLES, "split": {"file": file.name}}).decode())
    run_ranks(2, None, "run", "x.toml", f"cohorts={file.name}", "--runs", ".", "--name", "shared", cwd=tmp_path)
    shared = load_run(tmp_path / "shared")
    assert shared.cohorts == load_run(drawn).cohorts
    assert all((shared.params[name] - w).abs().max() < 1e-5 for name, w in weights(drawn).items())


def test_a_federation_takes_a_split_but_no_cohorts(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    from fedkeep.flower.messages import resolve_settings

    with raises(ConfigError, key="cohorts"):
        resolve_settings({}, {"train.cohorts": "f.json"})
