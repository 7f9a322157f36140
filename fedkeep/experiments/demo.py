"""The demonstration: FedAvg beside three other methods, over the same cohorts of clients with about two digits each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedkeep.errors import FedkeepError
from fedkeep.experiments.experiment import Experiment
from fedkeep.experiments.sweep import Progress, run_all
from fedkeep.runs.history import History

METHODS = ("fedavg", "fedprox", "scaffold", "fedntd")
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
    "eval_local_every": 1,  # what becomes of each client's model: the report takes rounds apart
}


def experiment(name: str, seed: int, rounds: int = SETTINGS["rounds"]) -> Experiment:
    """One method on the digits, divided into shards of two classes; data, split and cohorts depend on the seed."""
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
    """Run all methods with seeds 0, 1, ... into folders; return their histories by method."""
    experiments = {f"{name}-seed={seed}": experiment(name, seed, rounds) for seed in range(seeds) for name in METHODS}
    runs: dict[str, list[History]] = {name: [] for name in METHODS}
    for label, outcome in run_all(experiments, folder, 1, progress):
        if isinstance(outcome, FedkeepError):
            raise outcome
        runs[experiments[label].method["name"]].append(outcome)
    return runs


def verdict(runs: dict[str, list[History]]) -> str:
    """Say in a sentence what came out."""
    means = {
        name: {key: float(np.mean([h.summary()[key] for h in hs])) for key in ("final", "forgetting")}
        for name, hs in runs.items()
    }
    base = means["fedavg"]
    better = [n for n in means if n != "fedavg" and means[n]["forgetting"] < base["forgetting"]]
    better.sort(key=lambda n: means[n]["forgetting"])
    told = [f"{n} {means[n]['forgetting']:.2f} (ending at {means[n]['final']:.1%})" for n in better]
    lost, final = f"{base['forgetting']:.2f}", f"{base['final']:.1%}"
    start = f"FedAvg ends {lost} below each class's best accuracy, on average (its forgetting), at {final}"
    return f"{start}. Less is forgotten by {', '.join(told)}." if told else f"{start}; no method forgets less here."
