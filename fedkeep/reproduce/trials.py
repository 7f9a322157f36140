"""Trials of a table's cells: two rounds each on generated data, with their time and memory.

They show whether a column whose data set is not available would run, and what it needs. Nothing is written.
"""

from __future__ import annotations

import gc
import logging
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from fedkeep._util.text import one_line
from fedkeep.data.sources import generated, named
from fedkeep.engine.simulate import make_simulation
from fedkeep.engine.simulation import Simulation
from fedkeep.errors import ConfigError, FedkeepError
from fedkeep.experiments.build import build
from fedkeep.experiments.experiment import Experiment
from fedkeep.experiments.sweep import Progress
from fedkeep.reproduce.spec import Table

ROUNDS = 2

log = logging.getLogger("fedkeep")


@dataclass(frozen=True)
class Trial:
    """What one cell needed, or why it failed."""

    column: str
    row: str
    source: str
    device: str = ""  # what the memory is of: cpu or cuda
    engine: str = ""
    n_examples: int = 0  # for training, without the public set
    n_clients: int = 0
    n_weights: int = 0
    seconds: tuple[float, ...] = ()  # of each round
    memory: int = 0  # the peak, in bytes
    failed: str | None = None


def columns_without_data(table: Table) -> list[str]:
    """Return the columns of a table whose data set is not available."""
    sources = {column: table.experiment(column, table.baseline, 0).data for column in table.columns}
    return [column for column, data in sources.items() if named.how_to_get(data["source"], data.get("root"))]


def trial_experiment(
    table: Table, column: str, row: str, overrides: Sequence[str] = (), examples: int | None = None
) -> Experiment:
    """Return a cell's experiment on generated data of the size of its data set, or with fewer examples."""
    experiment = table.experiment(column, row, 0, overrides=[f"rounds={ROUNDS}", "reductions=none", *overrides])
    name = named.canonical_name(str(experiment.data["source"]))
    if name not in generated.FORMS:
        raise ConfigError(
            f"{table.name}, {column}: {experiment.data['source']} cannot be generated (valid: "
            f"{', '.join(generated.FORMS)})",
            key="data.source",
            value=experiment.data["source"],
            valid=list(generated.FORMS),
        )
    source = f"{generated.PREFIX}{name}" + ("" if examples is None else f":{examples}")
    data = {key: value for key, value in experiment.data.items() if key != "root"}
    return experiment.model_copy(update={"data": {**data, "source": source}})


def try_cells(
    table: Table,
    columns: Sequence[str],
    rows: Sequence[str],
    overrides: Sequence[str] = (),
    examples: int | None = None,
    progress: Progress | None = None,
) -> Iterator[Trial]:
    """Run the cells one after another, and yield what each needed. A cell that fails does not stop the others."""
    for column in columns:
        for row in rows:
            experiment = trial_experiment(table, column, row, overrides, examples)
            if progress is not None:
                progress.start_run(f"{column}/{row}")
            try:
                yield _try(column, row, experiment, progress)
            except Exception as error:
                if not isinstance(error, FedkeepError | torch.OutOfMemoryError):
                    log.exception("%s, %s", column, row)
                what = "" if isinstance(error, FedkeepError) else f"{type(error).__name__}: "
                yield Trial(column, row, experiment.data["source"], failed=what + one_line(error))


def _try(column: str, row: str, experiment: Experiment, progress: Progress | None) -> Trial:
    _reset_peak_memory()
    simulation = make_simulation(build(experiment), [progress] if progress is not None else [])
    history = simulation.run()
    return Trial(
        column,
        row,
        experiment.data["source"],
        simulation.task.device.type,
        simulation.engine.name,
        len(simulation.data.y_train),
        len(simulation.clients),
        simulation.task.n_weights,
        tuple(record["seconds"] for record in history.records if record["round"]),
        _peak_memory(simulation),
    )


def _reset_peak_memory() -> None:
    """Free what earlier trials left, and start the measurement of the peak again, as far as the system lets it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):  # Linux; elsewhere the peak is that of the whole process so far
        Path("/proc/self/clear_refs").write_text("5")


def _peak_memory(simulation: Simulation) -> int:
    """Return the most bytes in use at a time: of the GPU where training ran, else of this process."""
    if simulation.task.device.type == "cuda":
        return torch.cuda.max_memory_allocated(simulation.task.device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
