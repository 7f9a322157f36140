"""The commands `fedkeep report` and `fedkeep watch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedkeep._util.json import to_json
from fedkeep._util.validate import require_number
from fedkeep.cli.options import AsJson, Runs, log_once, print_page_path, require_writable


def report(
    folders: Runs,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("report.html"),
    target: Annotated[
        float | None,
        typer.Option(help="The accuracy of the column 'MB to', such as 0.8. By default the final one of fedavg."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a report page as one HTML file: which classes runs forgot, when, and in which phase of a round.

    Example: fedkeep report runs/ -o report.html
    """
    from fedkeep.analysis.run_set import read_runs
    from fedkeep.reports.page import write
    from fedkeep.runs.reading import require_folder

    for folder in folders:
        require_folder(folder)
    if target is not None:
        require_number("--target", target, above=0, high=1)
    require_writable(output)
    runs = read_runs(folders)
    data = write(runs, output, target)
    if as_json:
        problems = [{"title": problem["title"], **problem["verdict"]} for problem in data["problems"]]
        summary = {"page": str(output), "bytes": output.stat().st_size, "verdict": data["verdict"]}
        print(to_json({**summary, "problems": problems, "left_out": data["left_out"]}, indent=2))
    else:
        console = Console()
        console.print(data["verdict"]["headline"], markup=False, highlight=False)
        if len(data["problems"]) > 1:
            for problem in data["problems"]:
                line = f"- {problem['title']}: {problem['verdict']['headline']}"
                console.print(line, markup=False, highlight=False)
        print_page_path(console, output)
    if runs.incomplete:
        raise typer.Exit(1)


def watch(
    folders: Runs,
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port to listen on; 0 selects a free one.")] = 8300,
) -> None:
    """Serve the report page of running experiments to a browser on this machine, refreshed after every round.

    Ctrl-C stops the server.

    Example: fedkeep watch runs/digits
    """
    from fedkeep.reports.watch import HOST, serve
    from fedkeep.runs.reading import require_folder

    for folder in folders:
        require_folder(folder)
    with log_once(), serve(folders, port) as server:
        print(f"http://{HOST}:{server.server_address[1]}/ serves the report (Ctrl-C stops it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
