"""The notebooks in examples/: valid files without outputs, whose code runs and whose results a notebook can show."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

import fedkeep as fk

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def execute(path: Path) -> tuple[dict[str, Any], list[Any]]:
    """Run the code cells in one namespace; return it, and the value of each cell that ends in an expression."""
    names: dict[str, Any] = {"__name__": "__main__"}
    values = []
    for cell in read(path)["cells"]:
        if cell["cell_type"] != "code":
            continue
        code = ast.parse("".join(cell["source"]))
        last = code.body.pop() if isinstance(code.body[-1], ast.Expr) else None
        exec(compile(code, path.name, "exec"), names)
        if last is not None:
            values.append(eval(compile(ast.Expression(last.value), path.name, "eval"), names))
    return names, values


def test_there_are_two() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["first_steps", "own_model_and_data"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_a_valid_file_without_outputs(path: Path) -> None:
    notebook = read(path)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in notebook["cells"]:
        required = {"cell_type", "id", "metadata", "source"}
        if cell["cell_type"] == "code":
            required |= {"execution_count", "outputs"}
            assert (cell["execution_count"], cell["outputs"]) == (None, [])
        assert set(cell) == required
        assert re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", cell["id"])
        lines = cell["source"]
        assert all(line.endswith("\n") and line.count("\n") == 1 for line in lines[:-1])
        assert "\n" not in lines[-1]
        for target in re.findall(r"\]\(([^)]+)\)", "".join(lines) if cell["cell_type"] == "markdown" else ""):
            assert (FOLDER / target).exists(), target


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_its_results(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra plots")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    names, values = execute(path)
    histories = [value for value in names.values() if isinstance(value, fk.History)]
    assert all(history.finished and history.accuracy[-1] > 0.5 for history in histories)
    pictures = [value._repr_html_() for value in values if hasattr(value, "_repr_html_") and not is_figure(value)]
    assert len(pictures) >= 3
    assert any(is_figure(value) and value._repr_png_().startswith(b"\x89PNG") for value in values)
    assert capsys.readouterr().err == ""


def is_figure(value: Any) -> bool:
    return hasattr(value, "savefig")
