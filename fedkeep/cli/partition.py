"""The command `fedkeep partition`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedkeep._util.json import to_json
from fedkeep.cli.options import AsJson, ExperimentArgs, file_and_overrides
from fedkeep.errors import FedkeepError


def partition(
    words: ExperimentArgs = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also draw it into this SVG file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Look at a split before training: who holds which classes.

    Example: fedkeep partition data=digits split=dirichlet split.n_clients=20 split.alpha=0.1 -o split.svg
    """
    from fedkeep.cli import heatmap
    from fedkeep.data.partition import summarize_label_counts
    from fedkeep.experiments.experiment import Experiment, read
    from fedkeep.experiments.overrides import override

    file, overrides = file_and_overrides(words)
    given = {"method": "fedavg", "model": "mlp", **(read(file) if file else {})}
    experiment = Experiment.from_dict(override(given, overrides))
    data, clients = experiment.data_and_clients()
    counts = clients.label_counts(data.y_train, data.n_classes)
    if output is not None:
        if not output.parent.is_dir():
            raise FedkeepError(f"there is no folder {output.parent} to draw the picture in")
        output.write_text(heatmap.as_svg(counts, f"{data.name}: {experiment.split['kind']}"))
    if as_json:
        print(to_json({"sizes": clients.sizes.tolist(), "label_counts": counts.tolist()}, indent=2))
        return
    console = Console()
    console.print(heatmap.label_count_map(counts, console.width))
    console.print(summarize_label_counts(counts), highlight=False)
