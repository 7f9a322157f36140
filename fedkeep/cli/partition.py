"""The command `fedkeep partition`."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fedkeep._util.json import to_json
from fedkeep._util.text import list_some, short_name
from fedkeep.cli.options import (
    AsJson,
    ExperimentArgs,
    Trust,
    file_and_overrides,
    log_information,
    naming,
    require_writable,
)
from fedkeep.errors import FedkeepError

if TYPE_CHECKING:
    import numpy as np


def partition(
    args: ExperimentArgs = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Also save the picture as this SVG file.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option("--save", help="Write split and cohorts to this JSON file, for split.file, cohorts.")
    ] = None,
    trust: Trust = None,
    as_json: AsJson = False,
) -> None:
    """Show which client holds how many examples of which class, without training.

    Example: fedkeep partition data=digits split=dirichlet split.n_clients=20 split.alpha=0.1 -o split.svg
    With --save, the split and the cohorts are written to a file, which split.file=FILE and cohorts=FILE read.
    """
    from fedkeep._util import own_parts
    from fedkeep.data.partition import heterogeneity
    from fedkeep.engine.cohorts import CohortSequence, summarize_cohorts
    from fedkeep.experiments.build import load_data_and_clients
    from fedkeep.experiments.experiment import Experiment, read
    from fedkeep.experiments.overrides import override
    from fedkeep.experiments.own_parts import trust_given
    from fedkeep.runs.federation_copy import save_federation

    if output is not None and output.suffix.lower() != ".svg":
        raise FedkeepError(
            f"-o {output}: the picture is an SVG file, such as {output.with_suffix('.svg')}",
            key="output",
            value=str(output),
            valid=[".svg"],
        )
    for path, name in ((output, "split.svg"), (save, "federation.json")):
        if path is not None:
            require_writable(path, name)
    file, overrides = file_and_overrides(args)
    own_parts.trust(trust or [])
    tables = {"method": "fedavg", "model": "mlp", **(read(file) if file else {})}
    trust_given(override({}, overrides))
    changed = override(tables, overrides)
    with naming(file, overrides), log_information():
        experiment = Experiment.from_dict(changed, given=True)
        data, clients = load_data_and_clients(experiment)
    counts = clients.label_counts(data.y_train, data.n_classes)
    shows_cohorts = save is not None or experiment.train.cohorts is not None
    cohorts = CohortSequence.of(experiment.train, len(clients)).all() if shows_cohorts else None
    if save is not None:
        save_federation(save, clients, cohorts, data.y_train)
    named = clients.owners is not None and isinstance(clients.owners[0], str)
    names = [f"{k} {short_name(clients.name(k))}" for k in range(len(clients))] if named else []
    if output is not None:
        _save_svg(output, counts, f"{data.name}: {experiment.split['kind']}", data.class_names, names)
    if as_json:
        table: dict[str, Any] = {"sizes": clients.sizes.tolist(), "label_counts": counts.tolist()}
        table["heterogeneity"] = heterogeneity(counts)
        if data.class_names is not None:
            table["class_names"] = list(data.class_names)
        if clients.owners is not None:
            table["client_names"] = [clients.name(k) for k in range(len(clients))]
        print(to_json(table if cohorts is None else {**table, "cohorts": cohorts}, indent=2))
        return
    console = Console()
    _print_split(console, counts, data.class_names, names)
    if cohorts is not None:
        console.print(summarize_cohorts(cohorts, len(clients)), highlight=False)


def _print_split(
    console: Console, counts: np.ndarray, classes: Sequence[str] | None, clients: Sequence[str] = ()
) -> None:
    """Print the picture and what it shows in figures; `clients` are their names, if they have any."""
    from fedkeep.cli import heatmap
    from fedkeep.data.heterogeneity import format_heterogeneity
    from fedkeep.data.partition import heterogeneity, summarize_label_counts

    console.print(heatmap.label_count_map(counts, console.width, classes))
    console.print(summarize_label_counts(counts), highlight=False)
    console.print(format_heterogeneity(heterogeneity(counts)), highlight=False)
    if clients:
        console.print(f"clients: {list_some(clients)}", highlight=False, markup=False)


def _save_svg(
    path: Path, counts: np.ndarray, title: str, classes: Sequence[str] | None, clients: Sequence[str]
) -> None:
    """Save the picture as an SVG file, wide enough for at most 200 clients."""
    from fedkeep.cli import heatmap
    from fedkeep.runs.files import write_atomic

    width = min(len(counts), 200) + heatmap.label_count_margin(counts.shape[1], classes)
    console = Console(record=True, file=io.StringIO(), width=max(80, width))
    _print_split(console, counts, classes, clients)
    write_atomic(path, console.export_svg(title=title).encode())
