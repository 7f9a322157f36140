"""MLflow log of a run (needs the extra `mlflow`).

    fk.simulate(..., run_dir="runs/one", callbacks=[fk.MLflow(experiment="digits")])

Then start `mlflow ui`. The log is where MLflow keeps it: by default in a local file, or at `MLFLOW_TRACKING_URI`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from fedkeep._util.optional import require_extra
from fedkeep._util.text import one_line
from fedkeep.errors import FedkeepError
from fedkeep.runs.round_logger import RoundLogger, RoundRow, describe_run

if TYPE_CHECKING:
    from fedkeep.engine.simulation import Simulation

_FEATURE = "MLflow logging"
_RUN, _ROUND = "fedkeep.run", "fedkeep.round"  # tags: the id of the run folder, and the last round in the log
_AT_ONCE = {"metrics": 1000, "params": 100}  # MLflow's limits for one request
_LONGEST_VALUE = 500  # characters of a parameter, in all versions of MLflow


class MLflow(RoundLogger):
    """A callback that logs every round's accuracies, forgetting, losses and costs to MLflow.

    They go to `tracking_uri`, by default to MLflow's own (`MLFLOW_TRACKING_URI`, or a local file). `name` is the run's
    name, by default that of its folder. A resumed run continues its log after the last round that is there.
    """

    def __init__(self, experiment: str = "fedkeep", name: str | None = None, tracking_uri: str | None = None) -> None:
        super().__init__()
        mlflow = require_extra("mlflow", "mlflow", _FEATURE)
        self.experiment, self.name, self.tracking_uri = experiment, name, tracking_uri
        self._run_id: str | None = None
        try:  # now, not after the first round; and several processes cannot create a store at the same time
            self._client = mlflow.MlflowClient(tracking_uri=tracking_uri)
            found = self._client.get_experiment_by_name(experiment)
            self._experiment_id = found.experiment_id if found else self._client.create_experiment(experiment)
        except Exception as error:  # of MLflow, of its database or of the network
            raise FedkeepError(f"MLflow cannot be used: {one_line(error)}", key="mlflow", value=tracking_uri) from error

    def _start(self, simulation: Simulation, rounds: list[RoundRow]) -> None:
        folder, logged = simulation.folder, -1
        run = None if folder is None else folder.run
        found = self._find(run)
        if found is None:
            created = self._client.create_run(
                self._experiment_id,
                run_name=self.name or (folder.path.name if folder else None),
                tags={_RUN: run} if run else None,
            )
            self._run_id = created.info.run_id
            self._log_params(describe_run(simulation))
        else:
            self._run_id, logged = found.info.run_id, int(found.data.tags.get(_ROUND, -1))
            self._client.update_run(self._run_id, status="RUNNING")
        for round, figures in rounds:
            if round > logged:
                self._write(round, figures)

    def _write(self, round: int, figures: dict[str, float]) -> None:
        entities, now = require_extra("mlflow.entities", "mlflow", _FEATURE), int(1000 * time.time())
        metrics = [entities.Metric(name, value, now, round) for name, value in figures.items()]
        self._log("metrics", metrics)
        self._client.set_tag(self._run_id, _ROUND, str(round))

    def _end(self, finished: bool) -> None:
        if self._run_id is not None:
            self._client.set_terminated(self._run_id, "FINISHED" if finished else "KILLED")
        self._run_id = None

    def _find(self, run: str | None) -> Any:
        """Return the log that this run has already, or None."""
        if run is None:
            return None
        found = self._client.search_runs([self._experiment_id], f"tags.`{_RUN}` = '{run}'", max_results=1)
        return next(iter(found), None)

    def _log_params(self, about: dict[str, Any]) -> None:
        entities = require_extra("mlflow.entities", "mlflow", _FEATURE)
        self._log("params", [entities.Param(key, str(value)[:_LONGEST_VALUE]) for key, value in about.items()])

    def _log(self, kind: str, entries: list[Any]) -> None:
        for start in range(0, len(entries), _AT_ONCE[kind]):
            self._client.log_batch(self._run_id, **{kind: entries[start : start + _AT_ONCE[kind]]})
