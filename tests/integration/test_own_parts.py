"""A user's own model, data and callbacks, named `package.module:name`; no run folder runs code by naming it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.cli import fedkeep
from support.errors import raises
from support.runs import files_of

import fedkeep as fk
from fedkeep._util import own_parts
from fedkeep.analysis.groups import Group
from fedkeep.cli.options import confirm_code
from fedkeep.errors import ConfigError, FedkeepError, UntrustedCode
from fedkeep.experiments.experiment import Experiment, read
from fedkeep.experiments.overrides import override
from fedkeep.experiments.run import run
from fedkeep.instruments.next_round import open_run
from fedkeep.runs.reading import load_run

MODULE = """
from pathlib import Path
import numpy as np
from torch import nn
import fedkeep as fk

HERE = Path(__file__).parent
with open(HERE / "imports.txt", "a") as log:
    log.write("imported\\n")

def net(input_shape, n_classes, width=4):
    return nn.Sequential(nn.Flatten(), nn.Linear(input_shape[0], width), nn.ReLU(), nn.Linear(width, n_classes))

def load(n=60, seed=0):
    y = np.arange(n) % 3
    x = (2 * np.eye(3)[y] + np.random.default_rng(seed).normal(size=(n, 3))).astype("float32")
    return fk.data.from_arrays(x[:-15], y[:-15], x[-15:], y[-15:], ids=np.array(["a", "b", "c"])[np.arange(n - 15) % 3])

class Log:
    def __init__(self, name="rounds.txt"):
        self.name = name
    def __call__(self, simulation, record):
        with open(HERE / self.name, "a") as log:
            log.write(f"{record['round']} ")

def broken():
    return 1 / 0

def not_a_model():
    return 3
"""
TOML = """
method = "fedavg"
model = { name = "parts_of_mine:net", width = 5 }
data = { source = "parts_of_mine:load", n = 48 }
split = "by_id"
callbacks = ["parts_of_mine:Log"]

[train]
rounds = 2
participation = 2
epochs = 1
batch_size = 5
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder `mine` with an experiment file and a module; nothing is trusted or imported yet."""
    path = tmp_path / "mine"
    path.mkdir()
    (path / "parts_of_mine.py").write_text(MODULE)
    (path / "my.toml").write_text(TOML)
    monkeypatch.setattr(own_parts, "_trusted", set())
    monkeypatch.setattr(own_parts, "_folders", set())
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield path
    sys.modules.pop("parts_of_mine", None)


@pytest.fixture
def run_folder(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a finished run, in a process that has neither trusted nor imported anything."""
    run(Experiment.load(folder / "my.toml"), tmp_path / "run")
    (folder / "imports.txt").unlink()
    sys.modules.pop("parts_of_mine")
    sys.path.remove(str(folder))
    monkeypatch.setattr(own_parts, "_trusted", set())
    return tmp_path / "run"


def test_a_file_names_model_data_and_callbacks_which_are_next_to_it(folder: Path, tmp_path: Path) -> None:
    done = fedkeep("run", "mine/my.toml", "--callback", "parts_of_mine:Log", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (folder / "rounds.txt").read_text() == "1 1 2 2 "
    history = load_run(tmp_path / "runs" / "my")
    assert history.about["model"] == {"name": "parts_of_mine:net", "width": 5}
    assert set(history.about["made_by"]["code"]) == {"model", "data", "callbacks"}
    assert history.params["1.weight"].shape == (5, 3)
    assert history.client_names == {0: "a", 1: "b", 2: "c"}
    again = fedkeep("run", "mine/my.toml", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert (folder / "rounds.txt").read_text() == "1 1 2 2 ", "a finished run is loaded"


def test_the_seed_decides_the_weights_of_an_own_model_and_data_takes_a_public_set(folder: Path, tmp_path: Path) -> None:
    def init(name: str, seed: int) -> str:
        experiment = Experiment.load(folder / "my.toml", [f"seed={seed}", "data.public=2", "method=feddf", "rounds=1"])
        before = torch.get_rng_state()
        run(experiment, tmp_path / name)
        assert torch.equal(before, torch.get_rng_state())
        return load_run(tmp_path / name, weights=False).about["made_by"]["init"]

    assert init("a", 0) == init("b", 0) != init("c", 1)


def test_own_data_can_be_normalised(folder: Path) -> None:
    from fedkeep.experiments.build import build

    data = build(Experiment.load(folder / "my.toml", ["data.normalise=standard"])).data
    assert data.normalise == "standard"
    assert torch.allclose(torch.as_tensor(data.mean).flatten().float(), data.x_train.mean(0))


def test_own_parts_are_swept_in_processes(folder: Path, tmp_path: Path, forked_workers: None) -> None:
    from fedkeep.experiments.sweep import run_all

    file = folder / "my.toml"
    experiments = {f"s{seed}": Experiment.load(file, [f"seed={seed}", "callbacks=[]"]) for seed in (0, 1)}
    outcomes = dict(run_all(experiments, tmp_path, 2, _Silent()))
    assert [type(outcome) for outcome in outcomes.values()] == [fk.History] * 2


class _Silent:
    def start_run(self, name: str) -> None: ...
    def finish_run(self, *args: object) -> None: ...
    def fail_run(self, *args: object) -> None: ...


@pytest.mark.parametrize(
    ("overrides", "key", "mentions"),
    [
        (["model=no_such_module:net"], "model.name", ["no_such_module"]),
        (["model=parts_of_mine:nett"], "model.name", ["did you mean net"]),
        (["model=parts_of_mine:HERE"], "model.name", ["PosixPath"]),
        (["model.widht=3"], "model.widht", ["model.width"]),
        (["data.m=3"], "data.m", ["n, seed"]),
        (["callbacks=nonsense"], "callbacks", ["package.module:name"]),
        (["callbacks=[3]"], "callbacks", []),
        (["callbacks=5"], "callbacks", ["package.module:name"]),
        (["metrics=5"], "metrics", ["5"]),
        (['metrics=["parts_of_mine:f", "others:f"]'], "metrics", ["two metrics", "f"]),
        (["model=os.path:join"], "model.a", []),
    ],
)
def test_mistakes_are_named_before_anything_runs(
    folder: Path, overrides: list[str], key: str, mentions: list[str]
) -> None:
    with raises(ConfigError, key, mentions=mentions):
        Experiment.load(folder / "my.toml", overrides)


def test_errors_in_own_code_say_where_they_were_raised(folder: Path, tmp_path: Path) -> None:
    (folder / "cannot.py").write_text("import parts_of_mine\n\nraise RuntimeError('on purpose')\n")
    with raises(ConfigError, "model.name", mentions=["on purpose", "cannot.py, line 3"]):
        Experiment.load(folder / "my.toml", ["model=cannot:net"])
    for name, mentions in (("broken", ["ZeroDivisionError", "parts_of_mine.py, line"]), ("not_a_model", ["int"])):
        with raises(ConfigError, "model.name", mentions=mentions):
            run(Experiment.load(folder / "my.toml", [f"model=parts_of_mine:{name}"]), tmp_path / "run")
    with raises(ConfigError, "data.source", mentions=["ZeroDivisionError"]):
        run(Experiment.load(folder / "my.toml", ["data=parts_of_mine:broken"]), tmp_path / "run")


def test_installed_packages_offer_parts_under_short_names(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(
        folder, {"models": "tiny = parts_of_mine:net\nodd = parts_of_mine:HERE", "data": "toy = parts_of_mine:load"}
    )
    monkeypatch.syspath_prepend(folder)
    tables = override(read(folder / "my.toml"), ["model=tiny", "model.width=3", "data=toy", "callbacks=[]"])
    from fedkeep.experiments.build import build

    federation = build(Experiment.from_dict(tables))
    assert sum(p.numel() for p in federation.model.parameters()) == 24
    assert len(federation.clients) == 3
    with raises(ConfigError, "model.widht"):
        Experiment.from_dict(override(tables, ["model.widht=3"]), given=True)
    with raises(ConfigError, "model.name", mentions=["odd", "PosixPath"]):
        Experiment.from_dict(override(tables, ["model=odd"]), given=True)


def install(folder: Path, offered: dict[str, str]) -> None:
    """Let the packages in a folder offer parts, as if they had been installed there."""
    about = folder / "parts_of_mine-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: parts_of_mine\nVersion: 1.0\n")
    lines = [f"[fedkeep.{group}]\n{lines}\n" for group, lines in offered.items()]
    (about / "entry_points.txt").write_text("".join(lines))


# Safety


def test_a_module_in_the_working_directory_does_not_take_the_place_of_an_installed_one(
    folder: Path, tmp_path: Path
) -> None:
    """The folder `mine` is where packages are installed; the victim's folder has a module of the same name."""
    install(folder, {"models": "tiny = parts_of_mine:net", "data": "toy = parts_of_mine:load"})
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "parts_of_mine.py").write_text("raise SystemExit('foreign code')\n")
    (victim / "of_victim.py").write_text("class Log:\n    def __call__(self, simulation, record): ...\n")
    (victim / "plug.toml").write_text(TOML.replace("parts_of_mine:net", "tiny").replace("parts_of_mine:load", "toy"))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}
    commands = [
        ["run", "plug.toml", "callbacks=[]", "--name", "run", "--runs", "."],
        ["resume", "run", "--from-round", "0"],
        ["run", "run/experiment.toml", "--callback", "of_victim:Log", "--trust", "of_victim", "--name", "again"],
    ]
    script = f"""
import sys
from fedkeep.cli import main
for command in {commands}:
    sys.argv = ["fedkeep", *command]
    sys.modules.pop("parts_of_mine", None)
    try:
        main()
    except SystemExit as end:
        assert not end.code, (command, end)
"""
    command = [sys.executable, "-P", "-c", script]
    done = subprocess.run(command, cwd=victim, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "foreign code" not in done.stdout + done.stderr
    assert (folder / "imports.txt").read_text() == "imported\n" * 3


def test_a_module_that_an_installed_one_hides_is_named(folder: Path) -> None:
    (folder / "fractions.py").write_text("def net(): ...\n")
    with raises(ConfigError, "model.name", mentions=[str(folder / "fractions.py"), "rename yours"]):
        Experiment.load(folder / "my.toml", ["model=fractions:net"])


@pytest.mark.parametrize("source", ["parts_of_mine:load", "toy"])
def test_no_plot_runs_code(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    install(folder, {"data": "toy = parts_of_mine:load"})
    monkeypatch.syspath_prepend(folder)
    run(Experiment.load(folder / "my.toml", [f"data={source}"]), tmp_path / "run")
    (folder / "imports.txt").unlink()
    sys.modules.pop("parts_of_mine")
    history = load_run(tmp_path / "run", weights=False)
    monkeypatch.setattr("fedkeep.plots.runs.label_counts_of", lambda history: None)  # as in runs of earlier versions
    from fedkeep.plots.runs import split

    group = Group.of_histories("run", [history])
    assert f"data.source = '{source}'" in split([group])
    assert not (folder / "imports.txt").exists()


def test_a_module_in_a_run_folder_is_not_imported_even_from_within(folder: Path, run_folder: Path) -> None:
    shutil.copy(folder / "parts_of_mine.py", run_folder)
    done = fedkeep("analyse", ".", "--trust", "parts_of_mine", cwd=run_folder)
    assert done.returncode == 2
    assert "there is no module parts_of_mine" in done.stderr
    assert not (run_folder / "imports.txt").exists()


def test_reading_a_run_imports_nothing(folder: Path, run_folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "parts_of_mine.py", run_folder)  # it must not be found there either
    for command in (["compare"], ["report"], ["export"], ["plot"], ["resume"]):  # a finished run is shown
        done = fedkeep(*command, str(run_folder), cwd=folder)
        assert done.returncode == 0, (command, done.stderr)
    load_run(run_folder)
    assert not (folder / "imports.txt").exists()
    assert not (run_folder / "imports.txt").exists()


@pytest.mark.parametrize("command", [["resume", "--from-round", "0"], ["analyse"], ["run"], ["partition"]])
def test_no_command_runs_code_because_a_run_folder_names_it(folder: Path, run_folder: Path, command: list[str]) -> None:
    shutil.copy(folder / "parts_of_mine.py", run_folder)
    name, *options = command
    target = run_folder / "experiment.toml" if name in ("run", "partition") else run_folder
    done = fedkeep(name, str(target), *options, cwd=folder)
    assert done.returncode != 0
    assert "--trust parts_of_mine" in done.stderr
    assert done.stderr.count("\n") <= 2, done.stderr
    assert not (folder / "imports.txt").exists()
    assert not (run_folder / "imports.txt").exists()
    done = fedkeep(name, str(target), *options, "--trust", "parts_of_mine", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert (folder / "imports.txt").exists(), "the user's own module"
    assert not (run_folder / "imports.txt").exists()


def test_a_run_whose_code_is_not_trusted_is_not_extended(folder: Path, run_folder: Path) -> None:
    before = files_of(run_folder)
    with raises(UntrustedCode):
        fk.resume(run_folder, rounds=3)
    assert "--trust parts_of_mine" in fedkeep("resume", str(run_folder), "rounds=3", cwd=folder).stderr
    assert files_of(run_folder) == before
    assert load_run(run_folder).finished


def test_code_that_is_typed_is_run_also_where_it_changes_the_file_of_a_run(folder: Path, run_folder: Path) -> None:
    (folder / "typed.py").write_text(
        "def share(z, y): return float((z.argmax(1) == 0).float().mean())\n"
        "def log(): return lambda simulation, record: open('called.txt', 'a').write('x')\n"
    )
    file = str(run_folder / "experiment.toml")
    typed = ["--callback", "typed:log", "metrics.share=typed:share"]
    done = fedkeep("run", file, *typed, cwd=folder)
    assert "--trust parts_of_mine" in done.stderr, "the folder's own code is still refused"
    assert not (folder / "imports.txt").exists()
    done = fedkeep("run", file, *typed, "--trust", "parts_of_mine", "--name", "x", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert (folder / "called.txt").read_text() == "xx"
    assert "share" in load_run(folder / "runs" / "x").records[-1]["metrics"]


def test_a_file_without_made_by_in_a_run_folder_is_no_experiment_of_the_users(folder: Path, run_folder: Path) -> None:
    (run_folder / "experiment.toml").write_text(TOML)
    Experiment.load(run_folder / "experiment.toml")
    assert not own_parts.trusted()
    assert not (folder / "imports.txt").exists()


def test_from_python_code_of_a_run_needs_trust(folder: Path, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    before = fk.load_run(run_folder).params
    for call in (lambda: fk.resume(run_folder, from_round=0), lambda: open_run(run_folder)):
        with raises(UntrustedCode, mentions=["trust='parts_of_mine'"]):
            call()
    assert not (folder / "imports.txt").exists()
    with raises(UntrustedCode):
        _ = fk.load_run(run_folder).model
    history = fk.resume(run_folder, from_round=0, trust="parts_of_mine")
    assert fk.load_run(run_folder, trust="parts_of_mine:net").model[1].weight.shape == (5, 3)
    assert all(torch.equal(before[name], history.params[name]) for name in before)
    with raises(FedkeepError, "trust"):
        fk.resume(run_folder, trust="not a module")


def test_a_trusted_module_is_not_a_door_to_what_it_imports(folder: Path) -> None:
    own_parts.trust(["parts_of_mine"])
    own_parts.import_from(folder)
    assert own_parts.load_object("parts_of_mine:net", key="model").__name__ == "net"
    with raises(ConfigError, "model", mentions=["--trust parts_of_mine:nn.Linear"]):
        own_parts.load_object("parts_of_mine:nn.Linear", key="model")


def test_a_run_is_not_resumed_with_another_model_of_the_same_name(folder: Path, run_folder: Path) -> None:
    file = folder / "parts_of_mine.py"
    file.write_text(file.read_text().replace("nn.ReLU()", "nn.Tanh()"))
    own_parts.import_from(folder)
    with raises(ConfigError, "model.name", mentions=["parts_of_mine:net"]):
        fk.resume(run_folder, from_round=0, trust="parts_of_mine")


@pytest.mark.parametrize("answer", [True, False])
def test_a_terminal_asks_about_code_that_a_run_folder_names(
    folder: Path, monkeypatch: pytest.MonkeyPatch, answer: bool
) -> None:
    asked: list[str] = []
    for stream in ("stdin", "stderr"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.confirm", lambda text, err: asked.append(text) or answer)
    about = {"model": {"name": "parts_of_mine:net"}, "callbacks": [{"name": "others:Log\x1b"}, {"name": "others:Log"}]}
    confirm_code(about, ["others:Log"])
    confirm_code(about, [])
    assert len(asked) == (1 if answer else 2)
    assert "parts_of_mine:net" in asked[0]
    assert "others" not in asked[0]
    assert own_parts.is_trusted("parts_of_mine:net") == answer


def test_options_of_an_own_model_label_its_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    result = fk.sweep("my.toml", {"model.width": [3, 4]}, rounds=1)
    assert {row["label"] for row in fk.compare(result.folders).rows} == {"fedavg (width=3)", "fedavg (width=4)"}


def test_a_function_of_two_arguments_is_a_callback_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(folder / "parts_of_mine.py", "a") as file:
        file.write("def note(simulation, record):\n    record['metrics']['twice'] = 2 * record['round']\n")
    experiment = folder / "my.toml"
    experiment.write_text(experiment.read_text().replace("parts_of_mine:Log", "parts_of_mine:note"))
    monkeypatch.chdir(folder)
    assert [record["metrics"]["twice"] for record in fk.run("my.toml").records[1:]] == [2, 4]
