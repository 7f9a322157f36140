"""The command `fedkeep demo`."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fedkeep._util.json import to_json
from fedkeep.cli import options
from fedkeep.cli.options import AsJson
from fedkeep.cli.signals import hint
from fedkeep.errors import RunFailed

if TYPE_CHECKING:
    from fedkeep.runs.history import History


def demo(
    seeds: Annotated[int, typer.Option(min=1, help="Number of runs per method, with seeds 0, 1, ...")] = 3,
    rounds: Annotated[int, typer.Option(min=2, help="Number of rounds per run.")] = 60,
    as_json: AsJson = False,
    svg: Annotated[Path | None, typer.Option(help="Also save the output as an SVG picture.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="File of the report page.")] = Path(
        "fedkeep-demo.html"
    ),
) -> None:
    """Compare how much FedAvg, SCAFFOLD, FedNTD and FedKeep forget, on a small built-in data set. Under two minutes.

    Also writes a report page that shows every round.

    Example: fedkeep demo --seeds 1
    """
    from fedkeep.analysis.groups import Group
    from fedkeep.cli import heatmap, tables
    from fedkeep.cli.progress import ProgressBar
    from fedkeep.experiments import demo as job
    from fedkeep.reports.page import write as write_report
    from fedkeep.runs.files import write_atomic

    if svg is not None:
        options.require_writable(svg, "demo.svg", key="svg")
    options.require_writable(output)
    with hint("nothing is kept of a demo"), tempfile.TemporaryDirectory(prefix="fedkeep-demo-") as folder:
        with ProgressBar(Console(stderr=True), seeds * len(job.METHODS) * rounds) as progress:
            try:
                runs = job.run(Path(folder), seeds, rounds, progress)
            except RunFailed:  # the progress has shown why
                raise typer.Exit(1) from None
        write_report([folder], output, "fedkeep demo")
    if as_json and svg is None:
        _print_summaries(runs)
        return
    console = Console(record=svg is not None, width=100 if svg else None, file=io.StringIO() if as_json else None)
    console.print(
        f"Handwritten digits, {job.CLIENTS} clients with about {job.SHARDS} digits each, "
        f"{job.SETTINGS['participation']} of them in each round, {rounds} rounds, {seeds} seed{'s' * (seeds > 1)}.\n"
    )
    for name in ("fedavg", "fedntd", "fedkeep"):
        console.print(heatmap.heat_map(name, runs[name][0], min(60, console.width - 14)))
    title = "Accuracy and forgetting" + (", mean±standard deviation over seeds" if seeds > 1 else "")
    console.print(tables.comparison(title, {n: Group.of_histories(n, histories) for n, histories in runs.items()}))
    console.print(job.verdict(runs))
    if svg is not None:
        write_atomic(svg, console.export_svg(title="fedkeep demo").encode())
    if as_json:
        _print_summaries(runs)
    else:
        options.print_page_path(Console(), output)


def _print_summaries(runs: Mapping[str, list[History]]) -> None:
    print(to_json({name: [h.summary() for h in histories] for name, histories in runs.items()}, indent=2))
