"""Synthetic run folders with known contents, written without any training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep.runs.files import to_toml
from fedkeep.runs.history import Record

PER_CLASS = 20  # test examples of each class: accuracies come in steps of 0.05


def confusion(accuracy: Any) -> list[list[int]]:
    """Return a confusion matrix with these class accuracies; wrong predictions are the next class."""
    hits = np.round(np.asarray(accuracy) * PER_CLASS).astype(int)
    matrix = np.diag(hits)
    for c, right in enumerate(hits):
        matrix[c, (c + 1) % len(hits)] += PER_CLASS - right
    return matrix.tolist()


def records(accuracy: Any, local: Any = None) -> list[Record]:
    """Return the records of rounds 0 to T with class accuracies [T + 1, C]; `local` [T, K, C] are those of clients."""
    out: list[Record] = [{"round": 0, "confusion": confusion(accuracy[0]), "test_loss": 1.0}]
    for t, row in enumerate(accuracy[1:], start=1):
        record = {
            "round": t,
            "lr": 0.1,
            "cohort": [],
            "skipped": [],
            "bytes_down": 1000,
            "bytes_up": 1000,
            "train_loss": 0.5,
            "confusion": confusion(row),
            "test_loss": 1.0,
            "seconds": 0.1,
        }
        if local is not None:
            clients = np.asarray(local[t - 1])
            record["cohort"] = list(range(len(clients)))
            record["local"] = {
                "hits": np.round(clients * PER_CLASS).astype(int).tolist(),
                "total": [PER_CLASS] * len(row),
                "label_counts": [
                    [30 if c == k % len(row) else 0 for c in range(len(row))] for k in range(len(clients))
                ],
            }
        out.append(record)
    return out


def experiment(
    method: str = "fedavg", seed: int = 0, rounds: int = 4, hyper: dict[str, Any] | None = None, **changes: Any
) -> dict[str, Any]:
    """Return the contents of an experiment file."""
    return {
        "format": 1,
        "seed": seed,
        "checkpoint_every": 10,
        "method": {"name": method, **(hyper or {})},
        "model": {"name": "mlp"},
        "data": {"source": "digits"},
        "split": {"kind": "shards", "n_clients": 4, "s": 2, "seed": seed},
        "train": {"rounds": rounds, "lr": 0.1},
        "made_by": {"fedkeep": "0.1.0", "torch": "2.13.0", "engine": "loop"},
        **changes,
    }


def write_run(path: Path, lines: list[Record], **about: Any) -> Path:
    """Write a run folder with these records and return it."""
    path.mkdir(parents=True)
    settings = experiment(**{"rounds": len(lines) - 1, **about})
    (path / "experiment.toml").write_text(to_toml(settings).decode())
    (path / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def wave(seed: int, classes: int = 3, rounds: int = 4, depth: float = 0.4) -> np.ndarray:
    """Return class accuracies [rounds + 1, classes] that rise to about 0.9, one class lower by `depth` each round."""
    rising = np.minimum(0.9 - 0.05 * seed, np.linspace(0.1, 1.7, rounds + 1))[:, None].repeat(classes, 1)
    for t in range(1, rounds + 1):
        rising[t, (t + seed) % classes] -= depth
    return np.clip(rising, 0, 1)


def write_pair(folder: Path, seeds: int = 2, rounds: int = 6, clients: int = 3) -> Path:
    """Write runs of FedAvg and of FedNTD, which forgets less, for several seeds, with local accuracies."""
    for method, depth in (("fedavg", 0.6), ("fedntd", 0.2)):
        for seed in range(seeds):
            accuracy = wave(seed, rounds=rounds, depth=depth)
            local = np.clip(accuracy[1:, None, :] - depth, 0, 1).repeat(clients, 1)
            for k in range(clients):
                local[:, k, k % 3] = 1.0
            write_run(folder / f"{method}-{seed}", records(accuracy, local), method=method, seed=seed)
    return folder


HOSTILE = "</script><script>window.evil=1</script><img src=x onerror='window.evil=1'>{{data}}\u2028&amp;"


def hostile_run(folder: Path) -> Path:
    """Write a run folder with markup in every name."""
    about = {
        "method": {"name": HOSTILE},
        "data": {"source": HOSTILE},
        "split": {"kind": HOSTILE, "seed": 0, HOSTILE: HOSTILE},
        "made_by": {"torch": HOSTILE},
    }
    path = write_run(folder / "<b onclick=x>'\"&", records(wave(0), np.zeros((4, 2, 3))))
    (path / "experiment.toml").write_text(to_toml({**experiment(rounds=4), **about}).decode())
    return path
