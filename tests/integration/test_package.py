"""The distribution: built, installed in another environment and run there."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import fedkeep as fk

ROOT = Path(__file__).parents[2]


@pytest.mark.package
def test_wheel_and_sdist_work_outside_the_checkout(tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHONPATH", "VIRTUAL_ENV"))}

    def run(*command: str | Path) -> str:
        done = subprocess.run(
            [str(c) for c in command], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    run(sys.executable, "-m", "build", "--outdir", tmp_path / "dist", ROOT)
    [wheel], [sdist] = (tmp_path / "dist").glob("*.whl"), (tmp_path / "dist").glob("*.tar.gz")
    assert f"-{fk.__version__}-" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert {
        "fedkeep/py.typed",
        "fedkeep/methods/fedntd.py",
        "fedkeep/reports/static/page.html",
        "fedkeep/runs/reading.py",
    } <= set(names)
    assert not [n for n in names if not n.startswith(("fedkeep/", "fedkeep-"))]
    with tarfile.open(sdist) as archive:
        assert any(member.endswith("tests/integration/test_package.py") for member in archive.getnames())

    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    # compiling all of torch would take longer than the rest: Python compiles what it imports
    run(python, "-m", "pip", "install", "--quiet", "--no-compile", "-c", ROOT / "constraints.txt", wheel)
    where = run(python, "-c", "import fedkeep; print(fedkeep.__file__, fedkeep.__version__)")
    assert str(tmp_path / "venv") in where
    assert fk.__version__ in where
    shown = run(tmp_path / "venv" / "bin" / "fedkeep", "demo", "--seeds", "1")
    assert "fedntd" in shown
    page = (tmp_path / "fedkeep-demo.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "fedntd" in page
