"""Callback that applies the instruments every n rounds during a run."""

from __future__ import annotations

from pathlib import Path

from fedkeep._util.validate import require_whole
from fedkeep.engine.distributed import current_ranks
from fedkeep.engine.simulation import Simulation
from fedkeep.errors import FedkeepError
from fedkeep.instruments.options import Options, Result
from fedkeep.instruments.recoverable import require_examples
from fedkeep.instruments.study import analyse, needs_examples, parse_study_names, with_earlier
from fedkeep.runs.history import Record
from fedkeep.runs.reading import read_instruments, write_instruments


class Every:
    """A callback that analyses a run after every n-th round and after the last round.

    It trains the next round as a trial, so an analysed round takes about twice as long; `recoverable` and `personal`
    need no trial. The run's results do not change. They are in `values` and, if the run has a folder, in
    `instruments.jsonl`, one line per analysed round.

        instruments = fk.instruments.Every(10, "divergence,alignment")
        fk.simulate(..., callbacks=[instruments])
        instruments.values[0]["divergence"]["relation"]
    """

    def __init__(self, n: int, what: str | list[str] | tuple[str, ...] = (), options: Options | None = None) -> None:
        if current_ranks().size > 1:  # only rank 0 calls callbacks, but a trial round needs all ranks
            raise FedkeepError(
                "instruments need a run in one process: start it without torchrun, or analyse its folder afterwards",
                key="instruments",
                value=current_ranks().size,
                valid=[1],
            )
        self.n, self.what, self.options = require_whole("n", n, low=1), parse_study_names(what), options or Options()
        self.values: list[Result] = []

    def __call__(self, simulation: Simulation, record: Record) -> None:
        """Analyse the simulation if this round is due."""
        number = record["round"]
        if needs_examples(self.what, self.options.fit_on_test):
            require_examples(simulation, self.options)
        if number % self.n and number != simulation.settings.rounds:
            return
        earlier = self.values if simulation.folder is None else read_instruments(simulation.folder.path)
        analysis = with_earlier(analyse(simulation, self.what, self.options), earlier, number)
        result = {"after_round": number, **analysis}
        self.values = [value for value in self.values if value["after_round"] < number] + [result]
        if simulation.folder is not None:
            append_result(simulation.folder.path, result)


def append_result(run_dir: Path, result: Result) -> None:
    """Append a line to `instruments.jsonl`; lines of this round and later ones, from before a resume, are removed."""
    earlier = [line for line in read_instruments(run_dir) if line["after_round"] < result["after_round"]]
    write_instruments(run_dir, [*earlier, result])
