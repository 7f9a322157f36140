"""What several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedkeep.errors import FedkeepError

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Words = Annotated[
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
