"""What the documentation says is run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fedkeep as fk
from fedkeep.cli.app import app

ROOT = Path(__file__).parents[2]


def test_the_readmes_python_runs_as_written() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert len(blocks) >= 3
    names: dict = {}
    for block in blocks:
        exec(block, names)
    assert names["history"].method == "near"


def test_no_page_holds_a_placeholder() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        found = re.findall(r"\b(?:BASE|LOOP|STACKED)\d+\b|^OUTPUT$|\bTODO\b|\bTBD\b", page.read_text(), re.MULTILINE)
        assert not found, f"{page.name}: {found}"


def test_the_readme_names_every_method() -> None:
    text = (ROOT / "README.md").read_text()
    assert [name for name in fk.methods.REGISTRY if f"| `{name}` |" not in text] == []


def test_the_contract_page_names_every_hook() -> None:
    text = (ROOT / "docs" / "contract.md").read_text()
    hooks = fk.method.HOOKS
    assert [hook for hook in hooks if f"{hook}(" not in text] == []


def test_links_between_pages_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_adding_a_method_works_as_written_and_takes_25_lines() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "add-a-method.md").read_text(), flags=re.DOTALL)
    assert len([line for line in blocks[0].split("@dataclass")[1].splitlines() if line.strip()]) <= 25
    names: dict = {}
    for block in blocks:
        exec(block, names)
    assert names["history"].method == "fedadam"


def test_every_method_has_its_page() -> None:
    for name in fk.methods.REGISTRY:
        text = (ROOT / "docs" / "methods" / f"{name}.md").read_text()
        missing = [h for h in fk.methods.REGISTRY[name].hyperparameters() if f"`{h}`" not in text]
        assert not missing, f"{name}.md does not speak of {missing}"


def run_page(name: str, folder: Path) -> None:
    """Run a page: shell blocks as commands, TOML as the file it names, Python in one namespace, all in one folder."""
    text = (ROOT / "docs" / name).read_text()
    names: dict = {}
    for kind, block in re.findall(r"```(sh|toml|python)\n(.*?)```", text, flags=re.DOTALL):
        if kind == "toml":
            (folder / "first.toml").write_text(block)
        elif kind == "python":
            exec(block, names)
        else:
            for line in block.strip().splitlines():
                command = [sys.executable, "-m", *line.split()]
                done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
                assert done.returncode == 0, f"{line}\n{done.stderr}"


def test_the_tutorial_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page("tutorial.md", tmp_path)
    assert (tmp_path / "split.svg").exists()
    assert (tmp_path / "report.html").exists()
    assert {"first", "mine", "own-model"} <= {p.name for p in (tmp_path / "runs").iterdir()}


def test_the_page_of_instruments_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="plotting needs the extra plots")
    pytest.importorskip("pyarrow", reason="Parquet needs the extra data")
    monkeypatch.chdir(tmp_path)
    run_page("instruments.md", tmp_path)
    assert {"tsne.pdf", "surface.png", "accuracy.pdf", "where.png"} <= {
        p.name for p in (tmp_path / "figures").iterdir()
    }


def test_the_page_of_instruments_names_them_all() -> None:
    text = (ROOT / "docs" / "instruments.md").read_text()
    known = [n for n, f in vars(fk.forgetting).items() if callable(f) and not n.startswith("_")]
    helpers = {"Any", "Sequence", "accuracy", "class_accuracy", "smoothed", "underlying_distribution"}
    assert [name for name in [*known, *fk.instruments.STUDIES] if name not in helpers and f"`{name}" not in text] == []


def test_the_page_of_results_says_what_the_runs_in_the_repository_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("FEDKEEP_DATA", "nowhere")
    page = (ROOT / "docs" / "results.md").read_text()
    shown = re.findall(r"```sh\n(fedkeep reproduce .* --show .*)\n```\n\n((?:\|.*\n)+)", page)
    assert len(shown) == 6
    for command, table in shown:
        result = CliRunner().invoke(app, shlex.split(command)[1:])
        assert result.exit_code == 0, result.output
        assert [line for line in result.stdout.splitlines() if line.startswith("|")] == table.splitlines()
