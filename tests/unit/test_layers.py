"""The layers of the package: a module imports its own room and strictly lower ones, at any depth of the code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "fedkeep"
LEVELS = [
    {"errors"},
    {"_util"},
    {"tree", "losses", "forgetting", "metrics"},
    {"optim", "bounds"},
    {"task"},
    {"visit"},
    {"method"},
    {"server_training"},
    {"methods", "models", "data"},
    {"runs"},
    {"engine"},
    {"experiments", "analysis"},
    {"instruments", "plots", "reports", "flower"},
    {"reproduce"},
    {"cli", "testing"},
]
LEVEL = {room: number for number, rooms in enumerate(LEVELS) for room in rooms}
# third-party packages that one room alone may import
ONLY_IN = {"rich": "cli", "typer": "cli", "flwr": "flower", "matplotlib": "plots", "triton": "engine.gpu"}
# display methods that may reach up: (module, imported module)
MAY_REACH_UP: set[tuple[str, str]] = {("runs.history", "plots.history")}

MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.name != "__main__.py" and path != PACKAGE / "__init__.py"
}


def imports(node: ast.AST) -> Iterator[str]:
    """Yield every imported module, lazy imports included; those for type checkers alone do not count."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    if isinstance(node, ast.ImportFrom) and node.module:
        assert node.level == 0, "imports are absolute"
        yield from (f"{node.module}.{alias.name}" if node.module == "fedkeep" else node.module for alias in node.names)
    for child in ast.iter_child_nodes(node):
        yield from imports(child)


@pytest.mark.parametrize("module", MODULES)
def test_modules_import_lower_rooms_only(module: str) -> None:
    room = module.partition(".")[0]
    assert room in LEVEL, f"{module} is in no room: give it a level"
    for found in imports(ast.parse(MODULES[module].read_text())):
        top, _, rest = found.partition(".")
        if top in ONLY_IN:
            assert f"{module}.".startswith(f"{ONLY_IN[top]}."), f"{module} imports {top}"
        if top != "fedkeep" or not rest or (module, rest) in MAY_REACH_UP:
            continue
        other = rest.partition(".")[0]
        assert other == room or LEVEL[other] < LEVEL[room], f"{module} imports {found}"


def test_the_root_holds_only_what_a_methods_author_imports() -> None:
    modules = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"}
    assert modules == {
        "bounds", "errors", "forgetting", "losses", "method", "metrics", "optim", "server_training", "tree", "visit",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["report", "compare", "run"])
def test_names_reserved_for_functions_are_no_rooms(name: str) -> None:
    assert name not in LEVEL
    assert not (PACKAGE / name).exists()
