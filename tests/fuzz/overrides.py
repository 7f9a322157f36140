"""Overrides and sweeps of an experiment."""

from __future__ import annotations

import random
from pathlib import Path

from fedkeep.errors import FedkeepError
from fedkeep.experiments.experiment import PRESETS, read
from fedkeep.experiments.overrides import expand_sweep, override
from fedkeep.experiments.sweep import folder_name
from fuzz._experiments import is_accepted, random_key, random_value


def try_one(seed: int, folder: Path) -> bool:
    rng = random.Random(seed)
    overrides = [random_override(rng) for _ in range(rng.choice([1, 1, 1, 2, 4]))]
    axes = [",".join([random_override(rng), *(random_value(rng) for _ in range(2))])] if rng.random() < 0.1 else []
    try:
        combination = rng.choice(expand_sweep(axes, overrides) or [[]])
        name = folder_name("x", [*overrides, *combination])
        tables = override(read(PRESETS / "digits.toml"), [*overrides, *combination])
    except FedkeepError:
        return False
    assert "/" not in name
    assert len(name.encode()) <= 255
    return is_accepted(tables)


def random_override(rng: random.Random) -> str:
    """Return `key=value`, rarely something else."""
    key, value = random_key(rng), random_value(rng)
    if rng.random() < 0.05:
        return rng.choice(
            [key, f"{key} = {value}", f"={value}", f"{key}=={value}", f"{key}.a.b={value}", f" {key}={value}"]
        )
    return f"{key.removeprefix('train.') if rng.random() < 0.3 else key}={value}"
