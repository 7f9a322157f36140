"""Random experiments: mutated TOML and overrides, and using what was accepted for one short round."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import torch

from fedkeep import data, methods, models
from fedkeep.data import partition
from fedkeep.engine.simulate import make_simulation
from fedkeep.errors import FedkeepError
from fedkeep.experiments import build as parts
from fedkeep.experiments.experiment import Experiment
from fedkeep.experiments.overrides import KEYS, TRAIN

VALUES = [
    *(
        "0",
        "1",
        "2",
        "-1",
        "10",
        "0.0",
        "-0.0",
        "0.5",
        "1.0",
        "-0.5",
        "1e-300",
        "1e-45",
        "1e38",
        "1e39",
        "1e308",
        "1e400",
    ),
    *("inf", "-inf", "nan", "true", "false", '""', '"x"', '"all"', "none", "null", "None", "[]", "{}", "[[]]", "[1]"),
    *("[1, 2.5]", '["a"]', "{a = 1}", "[0]", "[-1]", "[1000000000]", "[[1]]", '"digits"', '"~nouser/x"', '"~"', '"/"'),
    *(str(n) for n in (255, 1024, 1025, 2**20, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, -(2**63) - 1, 10**30)),
    *("9" * 5000, "0x" + "f" * 5000, "[" * 40 + "]" * 40, "[" * 1000 + "]" * 1000, "{a=" * 200 + "1" + "}" * 200),
    *(
        "1979-05-27",
        "07:32:00",
        '"""',
        "'",
        '"\\u0000"',
        '"a\\nb"',
        '"' + "n" * 300 + '"',
        "n" * 300,
        "[/b]",
        "é",
        "🦊",
    ),
    *("../x", "/etc/passwd", ".", "..", "hf:x", "nope.npz", '"x.csv"', "cuda", '"cuda:99"', '"cpu"', "mps", "meta"),
    *("loop", "stacked", "auto", "adam", "adamw", "sgd", "cosine", "float64", "bfloat16", "float16", "int8"),
]
NAMES = [
    *methods.REGISTRY, *models.REGISTRY, *partition.KINDS, "digits", "cifar10", "by_id", "nothing", "name", "kind",
]  # fmt: skip
TABLE = {
    "data": ["source", "root", "public", "public_ids", "public_alpha", "public_only", "min_per_id", "validation"]
    + ["seed", "n_classes", "mean", "std"]
    + [f.name for f in dataclasses.fields(data.sources.common.Options)],
    "split": [
        *("kind", "n_clients", "s", "alpha", "min_size", "tries", "group", "k", "validation", "seed", "balanced"),
        *("file", "overlap", "even", "cap"),
    ],
    "model": ["name", "class", *{option for name in models.REGISTRY for option in models.options(name)}],
    "method": ["name", *{field for cls in methods.REGISTRY.values() for field in cls.hyperparameters()}],
    "train": [*TRAIN, "augment.crop", "augment.flip", "augment.cutout", "augment.padding", "augment"],
}
MOST = {"rounds": 1, "epochs": 2, "threads": 1}  # what an accepted experiment is run with


def random_value(rng: random.Random) -> str:
    """Return a value as written in TOML, often not valid."""
    kind = rng.random()
    if kind < 0.2:
        return f'"{rng.choice(NAMES)}"'
    if kind < 0.5:
        return rng.choice([str(rng.randint(0, 20)), f"{rng.random():.3f}", str(rng.choice([True, False])).lower()])
    return rng.choice(VALUES)


def random_key(rng: random.Random) -> str:
    """Return a key of an experiment, with its section; sometimes one that does not exist."""
    section = rng.choice([*TABLE, *KEYS])
    if section not in TABLE or rng.random() < 0.1:
        return (
            section
            if rng.random() < 0.9
            else rng.choice(["", ".", "a.b", "train", "nope", "format", "made_by", "label"])
        )
    return f"{section}.{rng.choice(TABLE[section])}"


def use(tables: dict[str, Any]) -> None:
    """Build what these tables define, and train for one short round; raise what is raised.

    Numbers that only cost time are lowered, and methods with such numbers are not trained.
    """
    experiment = Experiment.from_dict(tables)
    if experiment.data["source"] != "digits":
        parts.load_data_and_clients(experiment)
    changes = {key: min(most, getattr(experiment.train, key) or most) for key, most in MOST.items()}
    train = dataclasses.replace(
        experiment.train, **changes, participation=1 if experiment.train.participation != 0 else 0
    )
    federation = parts.build(experiment.model_copy(update={"train": train}))
    costs = [v for v in experiment.method.values() if isinstance(v, int | float) and v > 1000]
    costs += [1] * (sum(p.numel() for p in federation.model.parameters()) > 10**6)
    simulation = make_simulation(federation)
    if not costs and not simulation.history.records:
        simulation.run()


def is_accepted(tables: dict[str, Any]) -> bool:
    """Return whether these tables define an experiment that works."""
    torch.set_num_threads(1)
    try:
        use(tables)
    except FedkeepError as error:
        if not str(error):
            raise AssertionError("the error does not say what is wrong") from error
        return False
    return True
