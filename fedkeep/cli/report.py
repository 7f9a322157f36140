"""`fedkeep report` and `fedkeep watch`."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedkeep.cli.options import AsJson, Runs, check_folders, check_output, print_page_path


def report(
    folders: Runs,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("report.html"),
    as_json: AsJson = False,
) -> None:
    """Write one page that shows what runs forgot, when, and where: a single file, to be opened or sent as it is.

    Example: fedkeep report runs/ -o report.html
    """
    from fedkeep.reports import write

    check_folders(folders)
    check_output(output)
    data = write(folders, output)
    if as_json:
        about = {"page": str(output), "bytes": output.stat().st_size, "verdict": data["verdict"]}
        print(json.dumps(about, indent=2))
    else:
        console = Console()
        console.print(data["verdict"]["headline"], markup=False, highlight=False)
        print_page_path(console, output)


def watch(
    folders: Runs,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where to listen; 0 takes any that is free.")] = 8300,
) -> None:
    """Serve the report of runs that go on, refreshed as they do, to a browser on this machine; Ctrl-C ends it.

    Example: fedkeep watch runs/digits
    """
    from fedkeep.reports.watch import HOST, serve

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
