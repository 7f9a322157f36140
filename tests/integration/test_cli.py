"""The command line as a user meets it: real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.cli import fedkeep

import fedkeep as fk


def test_version() -> None:
    assert fedkeep("--version").stdout.strip() == f"fedkeep {fk.__version__}"


def test_demo_piped_is_plain_lines_and_a_table(tmp_path: Path) -> None:
    done = fedkeep("demo", "--seeds", "1", "--rounds", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("fedavg", "fedprox", "scaffold", "fedntd"):
        assert f"{name}, seed 0: accuracy 0." in done.stderr
        assert name in done.stdout
    assert "class 9" in done.stdout
    assert "FedAvg ends" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr


def test_demo_as_json_and_as_a_picture(tmp_path: Path) -> None:
    done = fedkeep("demo", "--seeds", "1", "--rounds", "2", "--json", cwd=tmp_path)
    report = json.loads(done.stdout)
    assert list(report) == ["fedavg", "fedprox", "scaffold", "fedntd"]
    assert 0 < report["fedavg"][0]["final"] <= 1
    picture = tmp_path / "demo.svg"
    fedkeep("demo", "--seeds", "1", "--rounds", "2", "--svg", str(picture), cwd=tmp_path)
    assert picture.read_text().startswith("<svg")


def test_methods_lists_what_each_moves_measured_from_its_trees() -> None:
    found = json.loads(fedkeep("methods", "--json").stdout)
    assert set(fk.methods.REGISTRY) <= set(found)
    assert found["fedavg"]["uploads"] == ["n", "params"]
    assert found["fedavg"]["up"] == pytest.approx(1, abs=0.01)
    assert found["scaffold"]["down"] == pytest.approx(2, abs=0.01)
    assert found["scaffold"]["keeps"] == ["c_k"]
    assert found["fedntd"]["teacher"]
    assert found["fedavg"]["public"] == "no"


def test_one_method_in_full() -> None:
    shown = fedkeep("methods", "fedntd").stdout
    for part in ("beta = 1", "tau = 1", "NeurIPS 2022", "it is FedAvg)"):
        assert part in shown


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["methods", "fedntf"], "did you mean fedntd?"),
        (["demo", "--seeds", "0"], "--seeds"),
        (["demo", "--rounds", "many"], "--rounds"),
        (["dmo"], "demo"),
    ],
)
def test_bad_input_ends_with_code_2_and_no_traceback(args: list[str], said: str) -> None:
    done = fedkeep(*args)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_importing_needs_torch_and_numpy_alone() -> None:
    """The rest is imported when it is used, so that the core runs where only these two are installed."""
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
                "Halfway: go only half of the way."
                name = "halfway"
                paper = "nobody, nowhere"
                share: float = hyper(0.5, "how far", low=0)
        """)
    )
    info = tmp_path / "elsewhere-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[fedkeep.methods]\nhalfway = elsewhere:Halfway\nbroken = elsewhere:Missing\nwrong = elsewhere:hyper\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = fedkeep("methods", "--json", env=environment)
    found = json.loads(done.stdout)
    assert found["halfway"]["hyperparameters"] == {"share": 0.5}
    assert "broken" not in found
    assert "wrong" not in found
    assert "broken" in done.stderr
    assert "not a subclass" in done.stderr


def test_a_run_does_not_wait_for_imports_it_has_no_use_for(tmp_path: Path) -> None:
    code = f"""
    import sys
    import fedkeep as fk
    data = fk.data.load("digits")
    clients = fk.data.partition.iid(data.y_train, 4)
    fk.simulate("fedntd", "mlp", data, clients, rounds=1, participation=2, run_dir={str(tmp_path / "run")!r})
    print([name for name in ("torch._dynamo", "sklearn", "pandas", "matplotlib") if name in sys.modules])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
