"""The command `fedkeep new`."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Annotated

import typer

from fedkeep._util.text import printable
from fedkeep.errors import FedkeepError

TEMPLATE = Path(__file__).parents[1] / "experiments" / "template.toml"


def new(
    file: Annotated[Path, typer.Argument(metavar="FILE.toml", help="The experiment file to write.")],
) -> None:
    """Write a commented experiment file, which runs as it is.

    Example: fedkeep new my.toml
    """
    if file.suffix != ".toml":
        raise FedkeepError(f"{file} does not end in .toml: write {file}.toml", key="file", value=str(file))
    text = TEMPLATE.read_text(encoding="utf-8").replace("NAME.toml", file.name)
    try:
        with file.open("x", encoding="utf-8") as opened:
            opened.write(text)
    except OSError as error:
        exists = error.errno == errno.EEXIST
        reason = "it exists already; choose another name" if exists else error.strerror
        raise FedkeepError(f"{file} is not written: {reason}", key="file", value=str(file)) from None
    name = printable(file)
    print(f"{name} is written. Look at it, then: fedkeep partition {name}; fedkeep run {name}")
