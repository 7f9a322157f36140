"""The demonstration: FedAvg and three other methods, with the same clients, each with about two digits, and cohorts."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep.errors import FedkeepError, RunFailed
from fedkeep.experiments.experiment import Experiment
from fedkeep.experiments.sweep import Progress, run_all
from fedkeep.runs.history import History

METHODS = ("fedavg", "scaffold", "fedntd", "fedkeep")
CLIENTS, SHARDS = 20, 2
SETTINGS: dict[str, Any] = {
    "rounds": 60,
    "participation": 4,
    "epochs": 2,
    "batch_size": 10,
    "lr": 0.05,
    "momentum": 0.0,
    "weight_decay": 0.0,
    "lr_decay": 1.0,
    "eval_local_every": 1,  # the report shows what each client's model forgets
}


def experiment(name: str, seed: int, rounds: int = SETTINGS["rounds"]) -> Experiment:
    """Return the experiment of one method on the digits, divided into shards; split and cohorts depend on the seed."""
    return Experiment.from_dict(
        {
            "seed": seed,
            "method": name,
            "model": "mlp",
            "data": "digits",
            "split": {"kind": "shards", "n_clients": CLIENTS, "s": SHARDS},
            "train": {**SETTINGS, "rounds": rounds},
        }
    )


def run(folder: Path, seeds: int, rounds: int, progress: Progress) -> dict[str, list[History]]:
    """Run all methods with seeds 0, 1, ... in folders and return their histories by method."""
    experiments = {f"{name}-seed={seed}": experiment(name, seed, rounds) for seed in range(seeds) for name in METHODS}
    runs: dict[str, list[History]] = {name: [] for name in METHODS}
    with closing(run_all(experiments, folder, 1, progress)) as outcomes:
        for label, outcome in outcomes:
            if isinstance(outcome, FedkeepError):
                raise outcome.converted(RunFailed, f"{label}: {outcome}")
            runs[experiments[label].method["name"]].append(outcome)
    return runs


def verdict(runs: dict[str, list[History]]) -> str:
    """Format the result in two sentences: how much FedAvg forgets, and which methods forget less."""
    means = {
        name: {key: float(np.mean([h.summary()[key] for h in histories])) for key in ("final", "forgetting")}
        for name, histories in runs.items()
    }
    base = means["fedavg"]
    better = [name for name in means if means[name]["forgetting"] < base["forgetting"]]
    better.sort(key=lambda name: means[name]["forgetting"])
    rows = [f"{name} {means[name]['forgetting']:.2f} (final accuracy {means[name]['final']:.1%})" for name in better]
    return (
        f"FedAvg reaches a final accuracy of {base['final']:.1%} and forgets {base['forgetting']:.2f}: on average, a "
        f"class ends that far below its best accuracy. "
        + (f"Methods that forget less: {', '.join(rows)}." if rows else "No other method forgets less here.")
    )
