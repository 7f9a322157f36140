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
    files = [word for word in words or [] if "=" not in word or word.endswith(".toml")]
    if len(files) > 1:
        raise FedkeepError(f"one experiment file at a time, not {' and '.join(files)}; overrides are key=value")
    return Path(files[0]) if files else None, [word for word in words or [] if word not in files]
