"""TensorBoard event files, written while a run goes on (extra `tensorboard`).

    fk.simulate(..., run_dir="runs/one", callbacks=[fk.tensorboard.TensorBoard()])

and `tensorboard --logdir runs`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedkeep import forgetting as fg
from fedkeep._util.optional import require_extra
from fedkeep.errors import FedkeepError
from fedkeep.runs.history import Record

if TYPE_CHECKING:
    from fedkeep.engine.simulation import Simulation

FOLDER = "tensorboard"
_PLAIN = ("lr", "train_loss", "test_loss", "bytes_down", "bytes_up", "seconds")


class TensorBoard:
    """A callback that writes a round's figures as scalars: accuracies, forgetting, losses, costs, every class.

    Into `log_dir`, or else into `tensorboard` in the run's folder. A resumed run writes its earlier rounds again, and
    TensorBoard shows these in the place of the old ones.
    """

    def __init__(self, log_dir: str | Path | None = None) -> None:
        require_extra("tensorboard", "tensorboard", "TensorBoard logging")
        self.log_dir = None if log_dir is None else Path(log_dir)
        self._writer: Any = None
        self._accuracies: list[Any] = []  # of the classes, round after round from 1 on
        self._last = 0  # the last evaluated round

    def __call__(self, simulation: Simulation, record: Record) -> None:
        """Write a round; at the first call, also those before it."""
        if self._writer is None:
            self._writer = self._open(simulation)
            for earlier in simulation.history.records:
                if earlier["round"] < record["round"]:
                    self._write(earlier)
        self._write(record)
        self._writer.flush()
        if record["round"] >= simulation.settings.rounds:
            self._writer.close()

    def _open(self, simulation: Simulation) -> Any:
        folder = self.log_dir
        if folder is None:
            if simulation.folder is None:
                raise FedkeepError("TensorBoard needs to know where to write: give it log_dir, or the run a run_dir")
            folder = simulation.folder.path / FOLDER
        writer = require_extra("torch.utils.tensorboard", "tensorboard", "TensorBoard logging").SummaryWriter
        return writer(str(folder), purge_step=0)

    def _write(self, record: Record) -> None:
        for name, value in self._scalars(record):
            if value == value:  # not NaN
                self._writer.add_scalar(name, value, record["round"])

    def _scalars(self, record: Record) -> list[tuple[str, float]]:
        found = [(f"round/{name}", float(record[name])) for name in _PLAIN if record.get(name) is not None]
        if "confusion" not in record:
            return found
        classes = fg.class_accuracy(record["confusion"])
        found.append(("test/accuracy", float(fg.accuracy(record["confusion"]))))
        found += [(f"class_accuracy/{c}", float(a)) for c, a in enumerate(classes)]
        if record["round"] == 0:
            return found
        if self._accuracies and self._last == record["round"] - 1:
            pair = [self._accuracies[-1], classes]
            found.append(("forgetting/round", float(fg.round_forgetting(pair)[0])))
            found.append(("forgetting/consistency", float(fg.consistency(pair)[0])))
        self._accuracies.append(classes)
        self._last = record["round"]
        found.append(("forgetting/so_far", fg.forgetting(self._accuracies)))
        return found
