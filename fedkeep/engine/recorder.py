"""Recording the rounds of a simulation: calling the callbacks, writing records, saving checkpoints."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING

from fedkeep.engine.distributed import Ranks
from fedkeep.engine.round_parts import round_part
from fedkeep.engine.round_record import keep_added
from fedkeep.errors import FedkeepError
from fedkeep.runs.history import Record
from fedkeep.runs.server_state import ServerState

if TYPE_CHECKING:
    from fedkeep.engine.simulation import Callback, Simulation

log = logging.getLogger("fedkeep")


class Recorder:
    """Writes every round of a simulation into its run folder, if it has one. Callbacks may add to a round's record.

    Only rank 0 calls callbacks and writes.
    """

    def __init__(self, state: ServerState, ranks: Ranks, callbacks: tuple[Callback, ...]) -> None:
        self.state, self.ranks, self.callbacks = state, ranks, callbacks
        self.stopped = False  # by a callback

    def closing(self) -> ExitStack:
        """Return a context that closes the callbacks at its end, whatever ends it."""
        stack = ExitStack()
        for close in (getattr(callback, "close", None) for callback in self.callbacks):
            if callable(close) and self.ranks.first:
                stack.callback(close)
        return stack

    def record(self, simulation: Simulation, record: Record) -> None:
        """Add a finished round to the history, call the callbacks with it, and write it."""
        self.state.round = record["round"]
        self.state.remember(record)
        measured = {**record, **{key: dict(record[key]) for key in ("metrics",) if key in record}}
        try:
            self._call_callbacks(simulation, record, measured)
        except BaseException:  # the round is complete, whatever becomes of a callback
            record.clear()
            record.update(measured)
            self._write(record)
            raise
        self._write(record)

    def record_untrained(self, record: Record) -> None:
        """Write the record of the untrained model, and save it; no callback is called."""
        self.state.remember(record)
        self._write(record)
        self.checkpoint()

    def checkpoint(self) -> None:
        """Save the state, unless this round is saved already."""
        with round_part("writing"):
            self.ranks.on_rank0(self.state.checkpoint)

    def checkpoint_if_due(self, rounds: int) -> None:
        """Save the state if it is time to; the last of these rounds is saved when the run ends."""
        if self.ranks.on_rank0(lambda: self._is_due(rounds)):
            self.checkpoint()

    def save_last_round(self) -> None:
        """Save the last finished round, because the process is about to end."""
        try:
            self.state.checkpoint()
        except (FedkeepError, OSError, RuntimeError) as error:
            log.warning("round %d is not saved: %s", self.state.round, error)

    def finish(self, reason: str) -> None:
        """Save the state, and record why the run ended."""
        self.ranks.on_rank0(lambda: self.state.finish(reason))
        self.state.history.ended = reason

    def write_diverged(self, message: str) -> None:
        """Mark the run as diverged in its folder."""
        folder = self.state.folder
        self.ranks.on_rank0(lambda: folder.write_diverged(message) if folder else None)

    def _write(self, record: Record) -> None:
        with round_part("writing"):
            self.ranks.on_rank0(lambda: self.state.write(record))

    def _is_due(self, rounds: int) -> bool:
        state = self.state
        continues = state.round < rounds and not self.stopped
        return continues and state.folder is not None and state.folder.checkpoint_due(state.round)

    def _call_callbacks(self, simulation: Simulation, record: Record, measured: Record) -> None:
        """Call the callbacks, on rank 0; they may stop the run, and add to what was measured before it is written."""
        if not self.callbacks:
            return

        def call() -> tuple[bool, Record]:
            record.setdefault("metrics", {})
            for callback in self.callbacks:
                callback(simulation, record)
                keep_added(record, measured, simulation.task.n_classes, saved=self.state.folder is not None)
            if not record["metrics"]:
                del record["metrics"]
            return self.stopped, {key: record[key] for key in ("metrics",) if key in record}

        self.stopped, added = self.ranks.on_rank0(call)
        record.update(added)
