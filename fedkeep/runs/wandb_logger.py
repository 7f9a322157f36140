"""Weights & Biases log of a run (needs the extra `wandb`).

    fk.simulate(..., run_dir="runs/one", callbacks=[fk.WandB(project="digits")])

Nothing is sent unless the environment says so (`WANDB_MODE=online`): `wandb sync runs/one/wandb/offline-run-*` does.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedkeep._util.optional import require_extra
from fedkeep._util.text import one_line
from fedkeep.errors import FedkeepError
from fedkeep.runs.files import WANDB
from fedkeep.runs.round_logger import RoundLogger, RoundRow, describe_run

if TYPE_CHECKING:
    from fedkeep.engine.simulation import Simulation

_FEATURE = "Weights & Biases logging"


class WandB(RoundLogger):
    """A callback that logs every round's accuracies, forgetting, losses and costs to Weights & Biases.

    It works offline, unless the environment variable `WANDB_MODE` or `mode=` says otherwise. The files are in the run
    folder, in `wandb`. `options` are passed to `wandb.init`, such as `name`, `entity`, `group` and `tags`. A resumed
    run continues its log online; offline it writes a new one that replaces the old.
    """

    def __init__(self, project: str = "fedkeep", **options: Any) -> None:
        super().__init__()
        require_extra("wandb", "wandb", _FEATURE)
        self.project, self.options = project, options
        self._run: Any = None

    def _start(self, simulation: Simulation, rounds: list[RoundRow]) -> None:
        wandb = require_extra("wandb", "wandb", _FEATURE)
        mode = self.options.get("mode") or os.environ.get("WANDB_MODE") or "offline"
        options: dict[str, Any] = {"mode": mode, "config": describe_run(simulation)}
        if mode == "offline":
            options["settings"] = wandb.Settings(silent=True)
        if simulation.folder is not None:
            path, run = simulation.folder.path, simulation.folder.run
            options |= {"name": path.name, "dir": str(path), "id": run, "resume": "allow"}
            if mode == "offline":
                options.pop("resume")
                _remove_earlier(path / WANDB, run)
        try:
            self._run = wandb.init(project=self.project, **{**options, **self.options, "mode": mode})
        except Exception as error:
            raise FedkeepError(f"Weights & Biases cannot be used: {one_line(error)}", key="wandb") from error
        logged = self._run.step if self._run.resumed else 0  # the first round that the log does not have
        for round, figures in rounds:
            if round >= logged:
                self._write(round, figures)

    def _write(self, round: int, figures: dict[str, float]) -> None:
        self._run.log(figures, step=round)

    def _end(self, finished: bool) -> None:
        if self._run is not None:
            self._run.finish(exit_code=0 if finished else 1)
        self._run = None


def _remove_earlier(folder: Path, run: str | None) -> None:
    """Remove the offline logs of this run: it writes all of its rounds again."""
    for earlier in folder.glob(f"offline-run-*-{run}") if run else ():
        shutil.rmtree(earlier, ignore_errors=True)  # it does not follow links
