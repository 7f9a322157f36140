"""Options, arrays and partitions with odd values: they are used, or refused with an error that names the key."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedkeep.data import Partition, from_arrays, load, partition
from fedkeep.errors import FedkeepError
from fuzz._data_sources import SOURCES
from fuzz.data_files import require_named, require_sound

VALUES: list[Callable[[], Any]] = [
    *(lambda value=value: value for value in (
        None, True, False, 0, 1, 2, -1, 3, 10, 10**9, 10**30, 10**400, 10**5000, -(10**30), 0.0, 0.1, 0.5, 0.999,
        1.0, 1.5, -0.5, 1e-320, 1e-300, 1e308, float("nan"), float("inf"), float("-inf"), 1j, "", "a", "b",
        "label", "who", "x", "train", "0.5", "~nouser-of-this-name/x", "a" * 300, "a\0b", "\ud800", "../x", b"a",
        (), (2,), (2, 2), (0, 1), (-1, 4), (2.0, 2), (10**9, 10**9), ("a",), ("a", "b"), ("a", "a"), ("a", 1),
        ("train", "test"), (1, 2, 3), Path("a"), int, frozenset(), range(3),
    )),
    list, dict, set, object,
    lambda: [1.0, 2.0],
    lambda: [[1], [1, 2]],
    lambda: {"a": 1},
    lambda: {"train": "a", "test": "b"},
    lambda: lambda *args: args,
    lambda: lambda texts: torch.zeros(len(texts), 3),
    lambda: lambda texts: {"words": np.zeros((len(texts), 3))},
    lambda: lambda texts: {},
    lambda: np.array(0.5),
    lambda: np.array([0.5, 0.5]),
    lambda: np.array([], int),
    lambda: np.array([np.nan]),
    lambda: np.array(["a", "b"]),
    lambda: np.array([None, 1], object),
    lambda: np.zeros((2, 0)),
    lambda: torch.tensor(0.5),
    lambda: torch.tensor([True, False]),
    lambda: torch.tensor([1j]),
    lambda: np.int64(2),
    lambda: np.float32(0.5),
]  # fmt: skip
OPTIONS = (
    "size", "x", "y", "ids", "text", "label", "classes", "max_length", "tokenizer", "splits", "test", "first_label",
    "merge_validation", "test_writers", "max_gb", "root", "public", "public_ids", "public_alpha", "public_only",
    "min_per_id", "validation", "seed",
    "n_classes", "mean", "std", "unknown",
)  # fmt: skip
ARRAYS = ("x_train", "y_train", "x_test", "y_test", "n_classes", "mean", "std", "ids", "test_ids")


def try_one(seed: int, folder: Path) -> bool:
    """Call one function of `fedkeep.data` with odd values; return whether they were accepted."""
    rng = random.Random(seed)
    call = rng.choice([_load, _load, _load, _source, _arrays, _partition, _clients])
    try:
        call(rng, folder)
    except FedkeepError as error:
        require_named(error)
        return False
    return True


def _odd(rng: random.Random) -> Any:
    return rng.choice(VALUES)()


def _load(rng: random.Random, folder: Path) -> None:
    """Load sound files with odd options."""
    name = rng.choice([*SOURCES, "digits"])
    source: Any = name
    options: dict[str, Any] = {}
    if name != "digits":
        files, options = SOURCES[name]()
        for path, content in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        source = folder / name if "." in name else folder
    chosen = rng.sample(OPTIONS, rng.choice([1, 1, 2, 3]))
    data = load(source, **{"max_gb": 0.2, **options, **{option: _odd(rng) for option in chosen}})
    require_sound(data)


def _source(rng: random.Random, folder: Path) -> None:
    one, other = _odd(rng), _odd(rng)
    source = rng.choice([one, (one, other), {"train": one, "test": other}, [one], str(_short(one))])
    options = {"root": folder / "none"} if rng.random() < 0.8 else {"root": _odd(rng)}
    require_sound(load(source, **options))


def _arrays(rng: random.Random, folder: Path) -> None:
    x, y = np.arange(12.0).reshape(6, 2), np.arange(6) % 2
    given: dict[str, Any] = {"x_train": x, "y_train": y, "x_test": x, "y_test": y}
    for name in rng.sample(ARRAYS, rng.choice([1, 1, 2])):
        given[name] = _odd(rng) if name not in given or rng.random() < 0.6 else _odd_array(rng, given[name])
    require_sound(from_arrays(**given))


def _odd_array(rng: random.Random, array: np.ndarray) -> Any:
    changes: list[Callable[[], Any]] = [
        array.tolist,
        lambda: array[:3],
        lambda: array.astype(rng.choice(["f2", "f4", "i1", "u8", "c8", "U3", "S2", "O", "M8[s]", "?", ">i4", "g"])),
        lambda: torch.from_numpy(array).to(
            rng.choice([torch.bfloat16, torch.half, torch.bool, torch.uint8, torch.cfloat])
        ),
        lambda: torch.from_numpy(array).to_sparse(),
        lambda: torch.from_numpy(array).to("meta"),
        lambda: {"a": array, "b": {"c": array}},
        lambda: {"a": array, "b": array[:2]},
        lambda: {1: array},
        lambda: array - 2,
        lambda: array * 1e300,
        lambda: np.ma.masked_array(array, array > 1),
        lambda: np.broadcast_to(array, (2, *array.shape)),
        lambda: array[::-1],
    ]
    return rng.choice(changes)()


def _partition(rng: random.Random, folder: Path) -> None:
    sound = {
        "iid": {"n_clients": 4},
        "shards": {"n_clients": 4, "s": 2},
        "dirichlet": {
            "n_clients": 4,
            "alpha": 0.5,
            "min_size": 1,
            "tries": 50,
            "group": None,
            "cap": True,
            "even": False,
        },
        "label_quantity": {"n_clients": 4, "k": 2},
        "by_id": {},
    }
    kind = rng.choice(sorted(sound))
    y: Any = np.arange(40) % 4
    arguments: dict[str, Any] = dict(sound[kind])
    for name in rng.sample([*arguments, "seed"], min(len(arguments), rng.choice([0, 1, 1, 2]))):
        arguments[name] = _odd(rng)
    if kind == "by_id" or rng.random() < 0.1:
        y = rng.choice([_odd(rng), _odd_array(rng, np.arange(40) % 4)])
    clients = partition.KINDS[kind](y, **arguments)
    assert sorted(clients.indices.tolist()) == list(range(len(clients.indices)))
    if rng.random() < 0.3:
        clients.hold_out(_odd(rng), _odd(rng))


def _clients(rng: random.Random, folder: Path) -> None:
    one, other = _odd(rng), _odd(rng)
    given = rng.choice([one, [one, other], {0: one}, [np.arange(3), one], (each for each in (one, other))])
    clients = Partition.of(given, 10)
    assert 0 <= clients.indices.min() <= clients.indices.max() < 10


def _short(value: Any) -> Any:
    return 0 if isinstance(value, int) and abs(value) > 10**100 else value
