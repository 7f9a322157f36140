"""TensorBoard event files, written during a run (needs the extra `tensorboard`).

    fk.simulate(..., run_dir="runs/one", callbacks=[fk.tensorboard.TensorBoard()])

Then start `tensorboard --logdir runs`.
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
_COPIED = ("lr", "train_loss", "test_loss", "epsilon", "bytes_down", "bytes_up", "seconds")


class TensorBoard:
    """A callback that writes every round's accuracies, forgetting, losses and costs as scalars.

    They are written into `log_dir`, by default into `tensorboard` in the run folder. A resumed run writes its earlier
    rounds again, and TensorBoard shows these instead of the old ones.
    """

    def __init__(self, log_dir: str | Path | None = None) -> None:
        require_extra("tensorboard", "tensorboard", "TensorBoard logging")
        self.log_dir = None if log_dir is None else Path(log_dir)
        self._writer: Any = None
        self._accuracies: list[Any] = []  # class accuracies [C], one entry per evaluated round
        self._last = 0  # the last evaluated round

    def __call__(self, simulation: Simulation, record: Record) -> None:
        """Write a round; at the first call, also the rounds before it."""
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
                raise FedkeepError("TensorBoard has no folder to write to: set its log_dir, or run_dir", key="log_dir")
            folder = simulation.folder.path / FOLDER
        writer = require_extra("torch.utils.tensorboard", "tensorboard", "TensorBoard logging").SummaryWriter
        return writer(str(folder), purge_step=0)

    def _write(self, record: Record) -> None:
        for name, value in self._scalars(record):
            if value == value:  # not NaN
                self._writer.add_scalar(name, value, record["round"])

    def _scalars(self, record: Record) -> list[tuple[str, float]]:
        scalars = [(f"round/{name}", float(record[name])) for name in _COPIED if record.get(name) is not None]
        if "confusion" not in record:
            return scalars
        classes = fg.class_accuracy(record["confusion"])
        scalars.append(("test/accuracy", float(fg.accuracy(record["confusion"]))))
        scalars += [(f"class_accuracy/{c}", float(a)) for c, a in enumerate(classes)]
        if record["round"] == 0:
            return scalars
        if self._accuracies and self._last == record["round"] - 1:
            pair = [self._accuracies[-1], classes]
            scalars.append(("forgetting/round", float(fg.round_forgetting(pair)[0])))
            scalars.append(("forgetting/consistency", float(fg.consistency(pair)[0])))
        self._accuracies.append(classes)
        self._last = record["round"]
        scalars.append(("forgetting/so_far", fg.forgetting(self._accuracies)))
        return scalars
