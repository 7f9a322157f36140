"""Instruments every n rounds, while a run goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedkeep import plain
from fedkeep.engine.rounds import Simulation
from fedkeep.errors import FedkeepError
from fedkeep.history import Record
from fedkeep.instruments.study import Options, Result, analyse, check
from fedkeep.store import write_atomic

FILE = "instruments.jsonl"


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
        self.n, self.what, self.options = n, check(what), options
        self.values: list[Result] = []

    def __call__(self, simulation: Simulation, record: Record) -> None:
        """Study the simulation, if this round is due."""
        number = record["round"]
        if number % self.n and number != simulation.settings.rounds:
            return
        found = {"after_round": number, **analyse(simulation, self.what, self.options)}
        self.values = [v for v in self.values if v["after_round"] < number] + [found]
        if simulation.folder is not None:
            _keep(simulation.folder.path / FILE, found)


def read(run_dir: str | Path) -> list[Result]:
    """Read what `Every` kept in a run folder; nothing where there was none."""
    path = Path(run_dir) / FILE
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _keep(path: Path, found: dict[str, Any]) -> None:
    """Add a line; those of rounds that a resumed run goes through again make way."""
    kept = [line for line in read(path.parent) if line["after_round"] < found["after_round"]]
    write_atomic(path, b"".join(plain.dumps(line).encode() + b"\n" for line in [*kept, found]))
