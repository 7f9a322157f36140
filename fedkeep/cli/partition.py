"""The command `fedkeep partition`."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fedkeep._util.json import to_json
from fedkeep.cli.options import AsJson, ExperimentArgs, file_and_overrides, require_writable

if TYPE_CHECKING:
    import numpy as np


def partition(
    args: ExperimentArgs = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Also save the picture as this SVG file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show which client holds how many examples of which class, without training.

    Example: fedkeep partition data=digits split=dirichlet split.n_clients=20 split.alpha=0.1 -o split.svg
    """
    from fedkeep.experiments.build import load_data_and_clients
    from fedkeep.experiments.experiment import Experiment, read
    from fedkeep.experiments.overrides import override

    if output is not None:
        require_writable(output, "split.svg")
    file, overrides = file_and_overrides(args)
    tables = {"method": "fedavg", "model": "mlp", **(read(file) if file else {})}
    experiment = Experiment.from_dict(override(tables, overrides))
    data, clients = load_data_and_clients(experiment)
    counts = clients.label_counts(data.y_train, data.n_classes)
    if output is not None:
        _save_svg(output, counts, f"{data.name}: {experiment.split['kind']}")
    if as_json:
        print(to_json({"sizes": clients.sizes.tolist(), "label_counts": counts.tolist()}, indent=2))
        return
    _print_split(Console(), counts)


def _print_split(console: Console, counts: np.ndarray) -> None:
    from fedkeep.cli import heatmap
    from fedkeep.data.partition import summarize_label_counts

    console.print(heatmap.label_count_map(counts, console.width))
    console.print(summarize_label_counts(counts), highlight=False)


def _save_svg(path: Path, counts: np.ndarray, title: str) -> None:
    """Save the picture as an SVG file, wide enough for at most 200 clients."""
    from fedkeep.cli import heatmap

    console = Console(record=True, file=io.StringIO(), width=max(80, min(len(counts), 200) + heatmap.MARGIN))
    _print_split(console, counts)
    console.save_svg(str(path), title=title)
