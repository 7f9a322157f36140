"""`fedkeep.run` and `fedkeep.sweep`: the command `fedkeep run` from Python."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fedkeep import methods
from fedkeep._util.own_parts import trust as allow
from fedkeep.engine.setup import require_callbacks
from fedkeep.engine.simulation import Callback, Simulation
from fedkeep.errors import ConfigError, FedkeepError
from fedkeep.experiments.experiment import read
from fedkeep.experiments.jobs import Jobs
from fedkeep.experiments.overrides import override, with_values
from fedkeep.experiments.plan import Change, Plan, plan_runs
from fedkeep.experiments.run import run as run_in_folder
from fedkeep.experiments.sweep import run_all
from fedkeep.runs.history import History, Record

Given = str | Path | Mapping[str, Any]


@dataclass(repr=False)
class SweepResult(Mapping[str, History]):
    """The histories of a sweep's runs by the names of their folders; errors of the runs that failed."""

    histories: dict[str, History]
    failures: dict[str, FedkeepError] = field(default_factory=dict)
    left_out: dict[str, FedkeepError] = field(default_factory=dict)  # methods that these settings do not allow

    @property
    def folders(self) -> list[Path]:
        """The run folders, for `fedkeep.compare` and `fedkeep.report`."""
        return [history.folder for history in self.histories.values() if history.folder is not None]

    def __getitem__(self, name: str) -> History:
        return self.histories[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.histories)

    def __len__(self) -> int:
        return len(self.histories)

    def __repr__(self) -> str:
        lines = [f"<SweepResult: {len(self.histories)} runs, {len(self.failures)} failed>"]
        lines += [f"  {name}: {history!r}" for name, history in self.histories.items()]
        lines += [f"  {name}: failed: {error}" for name, error in self.failures.items()]
        return "\n".join([*lines, *(f"  {name}: left out: {error}" for name, error in self.left_out.items())])


def run(
    experiment: Given,
    overrides: Iterable[str] = (),
    *,
    runs: str | Path = "runs",
    name: str | None = None,
    callbacks: Callback | Iterable[Callback] = (),
    trust: str | Iterable[str] = (),
    **changes: Any,
) -> History:
    """Run an experiment file in a folder below `runs`, as `fedkeep run` does, and return its history.

    `experiment` is a file, the name of an experiment that comes with fedkeep ("digits"), or its tables as a dict.
    Changes are keyword arguments (`lr=0.1`, `method="fedavg"`, `split={"kind": "iid", "n_clients": 9}`) or a list of
    overrides as on the command line (["split.s=3"]). If the folder already holds this run, it is resumed, or loaded if
    it is finished. `name` is the name of the folder; by default it is made of the file's name and the changes.
    `callbacks` are called after every round, besides those that the file names.
    """
    plan = _plan(experiment, overrides, changes, {}, name, trust)
    [(label, made)] = plan.experiments.items()
    history = run_in_folder(made, Path(runs) / label, require_callbacks(callbacks))
    history.folder = Path(runs) / label
    return history


def sweep(
    experiment: Given,
    axes: Mapping[str, Any],
    overrides: Iterable[str] = (),
    *,
    runs: str | Path = "runs",
    name: str | None = None,
    jobs: Jobs = 1,
    trust: str | Iterable[str] = (),
    **changes: Any,
) -> SweepResult:
    """Run an experiment once for each combination of values, as `fedkeep run --sweep` does; return the histories.

    `axes` maps keys to their values: {"method": ["fedavg", "fedntd"], "seed": range(3)}; {"method": "all"} stands for
    all methods that the other settings allow. `jobs` of the runs run at a time, each in its own process. A failed run
    does not stop the others. The other arguments are those of `fedkeep.run`.
    """
    plan = _plan(experiment, overrides, changes, axes, name, trust)
    result = SweepResult({}, {}, dict(plan.left_out))
    with closing(run_all(plan.experiments, Path(runs), jobs, _Silent())) as outcomes:
        for label, outcome in outcomes:
            if isinstance(outcome, FedkeepError):
                result.failures[label] = outcome
            else:
                outcome.folder = Path(runs) / label
                result.histories[label] = outcome
    return result


def _plan(
    experiment: Given,
    overrides: Iterable[str],
    changes: Mapping[str, Any],
    axes: Mapping[str, Any],
    name: str | None,
    trust: str | Iterable[str],
) -> Plan:
    allow(trust)
    tables = dict(experiment) if isinstance(experiment, Mapping) else read(Path(experiment))
    file = None if isinstance(experiment, Mapping) else Path(experiment)
    base = name or tables.get("name") or (file.stem if file else "run")
    for key in axes:
        if key in changes:
            raise ConfigError(f"{key} is both swept and changed", key=key, value=changes[key])
    texts = [overrides] if isinstance(overrides, str) else overrides
    fixed: list[Change] = [(text, partial(override, overrides=[text])) for text in texts]
    fixed += [_change(key, value) for key, value in changes.items()]
    combinations = itertools.product(*(_axis(key, values) for key, values in axes.items()))
    return plan_runs(
        tables, base, fixed, combinations, all_methods=axes.get("method") == "all", names_fixed=name is None
    )


def _axis(key: str, values: Any) -> list[Change]:
    if key in ("method", "method.name") and values == "all":
        values = list(methods.discover())
    if isinstance(values, str | Mapping) or not isinstance(values, Iterable):
        raise ConfigError(f"{key} is swept over a list of values, not {values!r}", key=key, value=values)
    return [_change(key, value) for value in values]


def _change(key: str, value: Any) -> Change:
    value = value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value  # numpy's numbers
    return f"{key}={value}", partial(with_values, changes={key: value})


class _Silent:
    """Progress that shows nothing."""

    def start_run(self, name: str) -> None:
        """Show nothing."""

    def finish_run(self, name: str, history: History, rounds: int) -> None:
        """Show nothing."""

    def fail_run(self, name: str, error: FedkeepError, rounds: int) -> None:
        """Show nothing."""

    def __call__(self, simulation: Simulation, record: Record) -> None:
        """Show nothing."""
