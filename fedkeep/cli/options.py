"""Arguments and checks shared by several commands."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedkeep.errors import FedkeepError, RunError

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
ExperimentArgs = Annotated[
    list[str] | None, typer.Argument(metavar="[FILE.toml] [key=value]...", help="An experiment file and overrides.")
]


def file_and_overrides(words: list[str] | None) -> tuple[Path | None, list[str]]:
    """Tell the experiment file from the overrides."""
    file, overrides = name_and_overrides(words, "experiment file")
    return Path(file) if file else None, overrides


def name_and_overrides(words: list[str] | None, what: str) -> tuple[str | None, list[str]]:
    """Tell a name, or a file, from the overrides."""
    names = [word for word in words or [] if "=" not in word or word.endswith(".toml")]
    if len(names) > 1:
        raise FedkeepError(f"one {what} at a time, not {' and '.join(names)}; overrides are key=value")
    return names[0] if names else None, [word for word in words or [] if word not in names]


Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders that hold some.")]


def print_page_path(console: Console, output: Path) -> None:
    """Say where the page is."""
    console.print(f"\nThe page: {output} (open it in a browser)", markup=False, highlight=False, soft_wrap=True)


def check_folders(folders: Sequence[Path]) -> None:
    """Refuse a folder that is not there, with the name that was probably meant."""
    for folder in folders:
        if folder.exists():
            continue
        beside = sorted(p.name for p in folder.parent.iterdir() if p.is_dir()) if folder.parent.is_dir() else []
        close = difflib.get_close_matches(folder.name, beside, n=1)
        hint = f": did you mean {folder.parent / close[0]}?" if close else ""
        raise RunError(f"there is no folder {folder}{hint}")


def check_output(output: Path) -> None:
    """Refuse a place where no file can be written, before any work is done."""
    if not output.parent.is_dir():
        raise FedkeepError(f"there is no folder {output.parent} to write the page in")
    if output.is_dir():
        raise FedkeepError(f"{output} is a folder: name the file to write, such as {output / 'report.html'}")
