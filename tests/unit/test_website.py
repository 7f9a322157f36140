"""The documentation site, without the packages that build it: navigation, API reference, links; and the citation."""

from __future__ import annotations

import importlib
import posixpath
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import fedkeep as fk

ROOT = Path(__file__).parents[2]
FOR_AUTHORS = {path.stem for path in (ROOT / "fedkeep").glob("*.py")} - {"__init__", "__main__"} | {"task", "testing"}


@pytest.fixture(scope="module")
def build() -> ModuleType:
    sys.path.insert(0, str(ROOT / "website"))
    return importlib.import_module("build_site")


@pytest.fixture(scope="module")
def pages(build: ModuleType) -> dict[str, str]:
    return build.pages()


def test_the_navigation_leads_to_every_page(pages: dict[str, str]) -> None:
    lists = [text for page in pages.values() for text in re.findall(r"```\{toctree\}\n(.*?)```", page, flags=re.DOTALL)]
    listed = [f"{line}.md" for text in lists for line in text.splitlines() if line and not line.startswith(":")]
    assert sorted(listed) == sorted(pages.keys() - {"index.md"}), "each page once"
    in_docs = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert in_docs <= pages.keys()


def test_every_public_name_has_an_entry(pages: dict[str, str]) -> None:
    names = {name: getattr(fk, name) for name in fk.__all__ if not name.startswith("__")}
    modules = {value.__name__ for value in names.values() if isinstance(value, ModuleType)}
    modules |= {f"fedkeep.{name}" for name in FOR_AUTHORS} | {"fedkeep.data.partition", "fedkeep.flower"}
    assert {f"api/{module}.md" for module in modules} <= pages.keys()
    others = [name for name, value in names.items() if not isinstance(value, ModuleType)]
    expected = {"fedkeep": others}
    for name in modules:
        module = importlib.import_module(name)
        own = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == name and not n.startswith("_")]
        public = getattr(module, "__all__", own)
        expected[name] = [n for n in public if not isinstance(getattr(module, n), ModuleType)]
    for module, public in expected.items():
        headings = set(re.findall(r"^## (\w+)$", pages[f"api/{module}.md"], flags=re.MULTILINE))
        assert set(public) == headings, module


def test_an_entry_has_the_signature_and_the_docstring(pages: dict[str, str]) -> None:
    entry = pages["api/fedkeep.methods.md"].partition("## FedNTD\n")[2].partition("\n## ")[0]
    assert "beta: float = 1.0" in entry
    assert "distil the global model into local training" in entry
    assert "- `tau`: temperature of both softmaxes" in entry
    assert "- rounds: number of rounds." in pages["api/fedkeep.md"]
    assert "```pycon\n>>> import torch\n>>> two = stack([" in pages["api/fedkeep.tree.md"], "code is not escaped"


def test_links_of_the_site_lead_to_its_pages(pages: dict[str, str]) -> None:
    pictures = {path.name for path in (ROOT / "docs").glob("*.[ps][nv]g")}
    for page, text in pages.items():
        text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        for target in re.findall(r"(?<!\\)\]\(([^)\s#]+)[^)]*\)", text):
            if "://" not in target:
                resolved = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
                assert resolved in pages or resolved in pictures, f"{page} links to {target}"


def test_links_out_of_the_documentation_name_the_file(build: ModuleType) -> None:
    change = build.with_site_links
    assert change("results.md", "[runs](../results) and [start](../README.md#install)") == (
        "runs (`results`) and [start](index.md#install)"
    )
    assert change("methods/fedntd.md", "[all](../index.md#methods)") == "[all](../pages.md#methods)"
    assert change("index.md", "![x](docs/demo.svg) [y](https://example.org/a.md)") == (
        "![x](demo.svg) [y](https://example.org/a.md)"
    )
    assert change("index.md", "```\n[x](docs/a.md)\n```\n") == "```\n[x](docs/a.md)\n```\n", "code stays as it is"


def test_the_citation_has_what_readers_of_cff_require() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["cff-version"] == "1.2.0"
    assert citation["type"] == "software"
    assert citation["authors"] == [{"name": "The fedkeep authors"}]
    assert citation["version"] == fk.__version__
    assert citation["license"] == "Apache-2.0"
    assert not {"url", "repository-code", "doi"} & citation.keys(), "left to the owner"
