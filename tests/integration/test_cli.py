"""The command line, in processes of its own."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
from support.cli import fedkeep
from support.processes import run_script
from typer.testing import CliRunner

import fedkeep as fk
from fedkeep.cli import options
from fedkeep.cli.app import app
from fedkeep.cli.methods import methods as cli_methods
from fedkeep.cli.new import TEMPLATE
from fedkeep.engine.footprint import default_footprint, footprint
from fedkeep.errors import FedkeepError
from fedkeep.experiments.experiment import Experiment
from fedkeep.experiments.overrides import override


def test_version() -> None:
    assert fedkeep("--version", fresh=True).stdout.strip() == f"fedkeep {fk.__version__}"


def test_demo_piped_prints_lines_and_a_table(tmp_path: Path) -> None:
    done = fedkeep("demo", "--seeds", "1", "--rounds", "3", cwd=tmp_path, fresh=True)
    assert done.returncode == 0, done.stderr
    for name in ("fedavg", "scaffold", "fedntd", "fedkeep"):
        assert f"{name}-seed=0: accuracy 0." in done.stderr
        assert name in done.stdout
    assert "class 9" in done.stdout
    assert "fedkeep-demo.html" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr


def test_demo_as_json_and_as_svg(tmp_path: Path) -> None:
    done = fedkeep("demo", "--seeds", "1", "--rounds", "2", "--json", cwd=tmp_path)
    report = json.loads(done.stdout)
    assert list(report) == ["fedavg", "scaffold", "fedntd", "fedkeep"]
    assert 0 < report["fedavg"][0]["final"] <= 1
    picture = tmp_path / "demo.svg"
    fedkeep("demo", "--seeds", "1", "--rounds", "2", "--svg", str(picture), cwd=tmp_path)
    assert picture.read_text().startswith("<svg")


def test_methods_lists_what_each_sends_and_stores() -> None:
    found = json.loads(fedkeep("methods", "--json").stdout)
    assert set(fk.methods.REGISTRY) <= set(found)
    assert found["fedavg"]["uploads"] == ["n", "params"]
    assert found["fedavg"]["up"] == pytest.approx(1, abs=0.01)
    assert found["scaffold"]["down"] == pytest.approx(2, abs=0.01)
    assert found["scaffold"]["keeps"] == ["c_k"]
    assert found["fedntd"]["teacher"]
    assert found["fedavg"]["public"] == "no"
    assert found["fedavg"]["summary"].startswith("FedAvg: average")
    assert [name for name, about in found.items() if about["min_classes"] > 2] == ["fedntd", "fedlmd"]


def test_the_list_says_what_a_method_does_and_needs() -> None:
    shown = " ".join(fedkeep("methods", env={**os.environ, "COLUMNS": "200"}).stdout.split())
    assert "fedntd distil the global model into local training" in shown
    assert shown.count("needs at least 3 classes") == 2
    assert "needs an unlabelled public set" in shown
    assert "FedCAD (unverified): distil" in shown


def test_stored_footprints_are_those_that_are_measured() -> None:
    """If this fails: python -m fedkeep.engine.footprint."""
    for cls in fk.methods.REGISTRY.values():
        if fk.methods.is_built_in(cls):
            stored, measured = dataclasses.asdict(default_footprint(cls)), dataclasses.asdict(footprint(cls()))
            for size in ("down", "up", "state"):
                assert stored.pop(size) == pytest.approx(measured.pop(size), rel=1e-6), (cls.name, size)
            assert stored == measured, cls.name


def test_the_list_measures_no_method_of_this_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedkeep.engine.footprint.footprint", lambda method: pytest.fail(f"measures {method.name}"))
    monkeypatch.setattr(fk.methods, "discover", lambda: fk.methods.REGISTRY)
    cli_methods(as_json=True)


def test_one_method_in_full() -> None:
    shown = fedkeep("methods", "fedntd").stdout
    for part in ("beta = 1", "tau = 1", "NeurIPS 2022"):
        assert part in shown
    [beta] = [line for line in shown.splitlines() if line.strip().startswith("beta = 1")]
    assert "at 0" in beta, "the value at which it is FedAvg"


def test_the_choices_of_a_hyperparameter_are_those_declared() -> None:
    shown = " ".join(fedkeep("methods", "fedka").stdout.split())
    for choices in ("random, hard, proficient", "both, non_dominant, missing"):
        assert f"(valid: {choices})" in shown


def test_a_single_run_in_which_nothing_was_learned_says_so(tmp_path: Path) -> None:
    args = ["run", "digits", "rounds=1", "epochs=1", "lr=1e-9", "--runs", str(tmp_path)]
    assert "No model learned" in fedkeep(*args, "--name", "none").stdout
    assert "No model learned" not in fedkeep("run", "digits", "rounds=4", "--runs", str(tmp_path)).stdout


def test_warnings_about_hyperparameters_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    declared = fk.methods.FedNTD.hyperparameters()
    declared["beta"] = dataclasses.replace(declared["beta"], warning="diverges at 7")
    monkeypatch.setattr(fk.methods.FedNTD, "hyperparameters", lambda: declared)
    cli_methods("fedntd", as_json=True)
    assert json.loads(capsys.readouterr().out)["fedntd"]["warnings"] == {"beta": "diverges at 7"}
    cli_methods("fedntd")
    lines = capsys.readouterr().out.splitlines()
    [at] = [number for number, line in enumerate(lines) if line.strip().startswith("beta = 1")]
    assert lines[at + 1].strip() == "warning: diverges at 7"


@pytest.mark.parametrize(
    ("args", "mention"),
    [
        (["methods", "fedntf"], "fedntd"),
        (["demo", "--seeds", "0"], "--seeds"),
        (["demo", "--rounds", "many"], "--rounds"),
        (["dmo"], "did you mean demo?"),
        (["flower", "nwe"], "did you mean new?"),
        (["run", "digits", "method=all"], "--sweep method=all"),
        (["run", "digits", "seed=0,1"], "for one run per value, use --sweep seed=0,1"),
        (["run", "digits", "method.nme=fedavg"], "did you mean method.name?"),
        (["run", "digits", "lr=0.1", "train.lr=0.2"], "lr=0.1 and train.lr=0.2"),
        (["partition", "digits", "-o", "split.txt"], "split.svg"),
        (["tune", "digits", "--search", "foo=1:2"], "unknown key 'foo'"),
        (["tune", "digits", "participation=50"], "fedkeep: participation = 50"),
    ],
)
def test_invalid_input_ends_with_code_2_and_no_traceback(args: list[str], mention: str) -> None:
    done = fedkeep(*args)
    assert done.returncode == 2
    assert mention in done.stderr
    assert done.stderr.lower().count("did you mean") <= 1
    assert "Traceback" not in done.stderr


def test_a_message_names_the_file_and_the_key_that_the_user_wrote(tmp_path: Path) -> None:
    start = 'method = "fedavg"\nmodel = "mlp"\nsplit = { kind = "iid", n_clients = 4 }\ntrain = { rounds = 1 }\n'
    for name, data in {"alpha": "public_alpha = 0.1", "held": "held_out = 1e-4"}.items():
        (tmp_path / f"{name}.toml").write_text(f'{start}data = {{ source = "digits", {data} }}\n')
    for args, code, message in (
        (["run", "alpha.toml"], 2, "alpha.toml: data.public_alpha needs data.public"),
        (["partition", "alpha.toml"], 2, "alpha.toml: data.public_alpha needs"),
        (["tune", "alpha.toml"], 2, "alpha.toml: data.public_alpha needs"),
        (["run", "alpha.toml", "data.public_alpha=0.3"], 2, "data.public_alpha needs data.public"),
        (["run", "held.toml", "lr=0.1"], 2, "held.toml: data.held_out = 0.0001"),
    ):
        done = fedkeep(*args, cwd=tmp_path)
        assert (done.returncode, done.stderr.count("\n")) == (code, 1), done.stderr
        assert done.stderr.startswith(f"fedkeep: {message}"), done.stderr


def test_the_core_needs_only_torch_and_numpy() -> None:
    """Everything else is imported when it is used."""
    script = """
        import sys
        others = "pydantic typer rich safetensors sklearn scipy pandas matplotlib tensorboard"
        for name in others.split():
            sys.modules[name] = None
        import numpy as np
        import fedkeep as fk
        x, y = np.random.default_rng(0).normal(size=(40, 5)), np.arange(40) % 4
        data = fk.data.from_arrays(x, y, x, y)
        history = fk.simulate("fedntd", "mlp", data, fk.data.partition.iid(y, 4), rounds=2, participation=2)
        print(history.rounds.tolist())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[1, 2]", done.stderr


def test_another_package_adds_a_method_through_the_entry_point(tmp_path: Path) -> None:
    (tmp_path / "elsewhere.py").write_text(
        textwrap.dedent("""
            from dataclasses import dataclass
            from fedkeep.method import FedAvg, hyper

            @dataclass(frozen=True)
            class Halfway(FedAvg):
                "Halfway: a method of another package."
                name = "halfway"
                paper = "nobody, nowhere"
                share: float = hyper(0.5, "how far", low=0)

            @dataclass(frozen=True)
            class Unread(FedAvg):
                pass

            class Failing(FedAvg):
                def broadcast(self, server):
                    raise ValueError("never works")
        """)
    )
    info = tmp_path / "elsewhere-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[fedkeep.methods]\nhalfway = elsewhere:Halfway\nunread = elsewhere:Unread\n"
        "failing = elsewhere:Failing\nbroken = elsewhere:Missing\nwrong = elsewhere:hyper\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = fedkeep("methods", "--json", env=environment, fresh=True)
    found = json.loads(done.stdout)
    assert found["halfway"]["hyperparameters"] == {"share": 0.5}
    assert (found["halfway"]["paper"], found["halfway"]["uploads"]) == ("nobody, nowhere", ["n", "params"])
    assert (found["unread"]["paper"], found["unread"]["summary"]) == ("", ""), "not those of the class it extends"
    for name in ("broken", "wrong", "failing"):
        assert name not in found
        assert any(name in line for line in done.stderr.splitlines())


@pytest.mark.parametrize(
    ("args", "file"),
    [
        (["report", "."], "page.html"),
        (["partition", "digits"], "split.svg"),
        (["demo", "--seeds", "1"], "page.html"),
        (["analyse", "."], "figures"),
    ],
)
def test_a_read_only_folder_is_refused_before_any_work(
    args: list[str], file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Permissions do not stop root, so the question itself is answered with no."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(options.os, "access", lambda path, mode: not mode & os.W_OK)
    result = CliRunner().invoke(app, [*args, "-o", file])
    assert isinstance(result.exception, FedkeepError)
    assert result.exception.key == "output"
    assert "read-only" in str(result.exception)
    assert list(tmp_path.iterdir()) == []


def test_pictures_do_not_replace_what_a_link_leads_to(tmp_path: Path) -> None:
    (tmp_path / "kept.txt").write_text("kept")
    (tmp_path / "split.svg").symlink_to(tmp_path / "kept.txt")
    done = fedkeep("partition", "data=digits", "split.n_clients=4", "-o", str(tmp_path / "split.svg"))
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert (tmp_path / "kept.txt").read_text() == "kept"


def test_a_run_does_not_import_what_it_does_not_need(tmp_path: Path) -> None:
    code = f"""
    import sys
    import fedkeep as fk
    data = fk.data.load("digits")
    clients = fk.data.partition.iid(data.y_train, 4)
    fk.simulate("fedntd", "mlp", data, clients, rounds=1, participation=2, run_dir={str(tmp_path / "run")!r})
    print([name for name in ("torch._dynamo", "sklearn", "pandas", "matplotlib") if name in sys.modules])
    """
    assert run_script(code).stdout.strip() == "[]"


def test_a_new_experiment_file_runs_as_it_is_and_is_not_overwritten(tmp_path: Path) -> None:
    done = fedkeep("new", "my.toml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "my.toml").read_text()
    assert "fedkeep run my.toml" in text
    done = fedkeep("run", "my.toml", "rounds=1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("my.toml", "my", "no/such.toml"):
        done = fedkeep("new", name, cwd=tmp_path)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert (tmp_path / "my.toml").read_text() == text


def test_the_settings_that_a_new_experiment_file_comments_on_exist() -> None:
    text = TEMPLATE.read_text()
    given = re.findall(r"^# (\w+) = ([^#\n]+?) *(?:#.*)?$", text, re.MULTILINE)
    assert len(given) == 10
    for key, value in given:
        full = f"data.{key}" if key in ("public", "held_out") else key
        Experiment.from_dict(override(tomllib.loads(text), [f"{full}={value}"]))
    splits = dict(re.findall(r'^#     kind = "(\w+)" *# with (\w+)', text, re.MULTILINE))
    assert splits.keys() == {"dirichlet", "shards", "label_quantity", "file"}
    for kind, key in splits.items():
        assert kind == "file" or key in inspect.signature(getattr(fk.data.partition, kind)).parameters
