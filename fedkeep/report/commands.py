"""`fedkeep report` and `fedkeep watch`."""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedkeep.errors import FedkeepError, RunError
from fedkeep.options import AsJson

Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders that hold some.")]


def report(
    folders: Runs,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("report.html"),
    as_json: AsJson = False,
) -> None:
    """Write one page that shows what runs forgot, when, and where: a single file, to be opened or sent as it is.

    Example: fedkeep report runs/ -o report.html
    """
    from fedkeep.report import write

    check_folders(folders)
    check_output(output)
    data = write(folders, output)
    if as_json:
        about = {"page": str(output), "bytes": output.stat().st_size, "verdict": data["verdict"]}
        print(json.dumps(about, indent=2))
    else:
        console = Console()
        console.print(data["verdict"]["headline"], markup=False, highlight=False)
        say_where(console, output)


def watch(
    folders: Runs,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where to listen; 0 takes any that is free.")] = 8300,
) -> None:
    """Serve the report of runs that go on, refreshed as they do, to a browser on this machine; Ctrl-C ends it.

    Example: fedkeep watch runs/digits
    """
    from fedkeep.report.watch import HOST, serve

    check_folders(folders)
    logging.getLogger("fedkeep").addFilter(_Once())
    with serve(folders, port) as server:
        print(f"http://{HOST}:{server.server_address[1]}/ shows the runs as they go on; Ctrl-C ends this", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


class _Once(logging.Filter):
    """Lets a warning through once: the same runs are read again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.said: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Say whether this is new."""
        new = record.getMessage() not in self.said
        self.said.add(record.getMessage())
        return new


def say_where(console: Console, output: Path) -> None:
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
