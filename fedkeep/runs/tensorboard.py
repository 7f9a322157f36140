"""TensorBoard event files, written during a run (needs the extra `tensorboard`).

    fk.simulate(..., run_dir="runs/one", callbacks=[fk.TensorBoard()])

Then start `tensorboard --logdir runs`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedkeep._util.optional import require_extra
from fedkeep.runs.files import TENSORBOARD
from fedkeep.runs.round_logger import RoundLogger, RoundRow, default_path

if TYPE_CHECKING:
    from fedkeep.engine.simulation import Simulation


class TensorBoard(RoundLogger):
    """A callback that writes every round's accuracies, forgetting, losses and costs as scalars.

    They are written into `log_dir`, by default into `tensorboard` in the run folder. A resumed run writes its earlier
    rounds again, and TensorBoard shows these instead of the old ones.
    """

    def __init__(self, log_dir: str | Path | None = None) -> None:
        super().__init__()
        require_extra("tensorboard", "tensorboard", "TensorBoard logging")
        self.log_dir = None if log_dir is None else Path(log_dir)
        self._writer: Any = None

    def _start(self, simulation: Simulation, rounds: list[RoundRow]) -> None:
        folder = default_path(simulation, self.log_dir, TENSORBOARD, "log_dir", "TensorBoard")
        writer = require_extra("torch.utils.tensorboard", "tensorboard", "TensorBoard logging").SummaryWriter
        self._writer = writer(str(folder), purge_step=0)
        for one in rounds:
            self._write(*one)

    def _write(self, round: int, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, round)
        self._writer.flush()

    def _end(self, finished: bool) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = None
