"""Instruments every n rounds, while a run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedkeep._util.json import to_json
from fedkeep.engine.simulation import Simulation
from fedkeep.errors import FedkeepError
from fedkeep.instruments.study import Options, Result, analyse, parse_study_names
from fedkeep.runs.files import INSTRUMENTS, write_atomic
from fedkeep.runs.history import Record
from fedkeep.runs.reading import read_instruments


class Every:
    """A callback that studies a run after every n-th round, and after the last.

    It trains the cohort of the next round aside, so a studied round costs about twice its time; the run itself comes
    out as it would without. A round's record is written before callbacks are called: results are kept in `values`, and
    in a run folder also in `instruments.jsonl`, one line per studied round.

        watch = fk.instruments.Every(10, "divergence,alignment")
        fk.simulate(..., callbacks=[watch])
        watch.values[0]["divergence"]["relation"]
    """

    def __init__(self, n: int, what: str | list[str] | tuple[str, ...] = (), options: Options | None = None) -> None:
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise FedkeepError(f"instruments run every n rounds, n a whole number of at least 1, not {n!r}")
        self.n, self.what, self.options = n, parse_study_names(what), options
        self.values: list[Result] = []

    def __call__(self, simulation: Simulation, record: Record) -> None:
        """Study the simulation, if this round is due."""
        number = record["round"]
        if number % self.n and number != simulation.settings.rounds:
            return
        found = {"after_round": number, **analyse(simulation, self.what, self.options)}
        self.values = [v for v in self.values if v["after_round"] < number] + [found]
        if simulation.folder is not None:
            _keep(simulation.folder.path / INSTRUMENTS, found)


def _keep(path: Path, found: dict[str, Any]) -> None:
    """Add a line; those of rounds that a resumed run goes through again make way."""
    kept = [line for line in read_instruments(path.parent) if line["after_round"] < found["after_round"]]
    write_atomic(path, b"".join(to_json(line).encode() + b"\n" for line in [*kept, found]))
