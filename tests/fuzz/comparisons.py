"""Comparisons over run folders of which one is damaged: the others are always shown."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from support.synthetic import experiment, records, wave

from fedkeep.analysis.compare import comparison_as_data, comparison_as_markdown
from fedkeep.analysis.export import long_table
from fedkeep.analysis.run_set import read_runs
from fedkeep.analysis.sentences import sentences
from fedkeep.reports.data import page_data
from fedkeep.reports.page import render
from fedkeep.runs.files import to_toml

ODD: tuple[Any, ...] = (
    *(-1, 0, 2**70, 1.5, float("nan"), float("inf"), True, "", "x", "\x1b[31m", "[/b]", "a|b", "$\\frac{$", "\u202e"),
    *([], {}, [[]], [1, [2]], {"a": {"b": []}}, "y" * 5000, "</script>"),
)


def try_one(seed: int, folder: Path) -> bool:
    """Damage one of three runs and compare all; return whether the damaged run was still shown."""
    rng = np.random.default_rng(seed)
    shutil.rmtree(folder, ignore_errors=True)
    for k, method in enumerate(("fedavg", "fedntd")):
        _write(folder / f"good-{k}", experiment(method, rounds=4), records(wave(k)))
    about, lines = experiment("fedprox", rounds=4), records(wave(2), np.full((4, 2, 3), 0.5))
    for _ in range(rng.integers(1, 4)):
        if rng.random() < 0.5:
            about = _changed(about, rng)
        else:
            lines = _changed(lines, rng)
    _write(folder / "bad", about, lines)
    if rng.random() < 0.3:
        _flip_bytes(folder / "bad" / str(rng.choice(["experiment.toml", "rounds.jsonl"])), rng)
    runs = read_runs([folder])
    shown = {run.name for group in runs.groups for run in group.runs}
    assert {"good-0", "good-1"} <= shown, shown
    assert shown | {path.name for path in runs.left_out} == {"good-0", "good-1", "bad"}
    page = render(page_data(runs))
    assert "\x1b" not in page
    for problem in runs.problems:
        sentences(problem.groups)
        comparison_as_data(problem.groups, target=0.5)
        assert "\x1b" not in comparison_as_markdown(problem.groups)
    list(long_table([folder / name for name in ("good-0", "bad")], {}))
    return "bad" in shown


def _write(path: Path, about: Any, lines: Any) -> None:
    path.mkdir(parents=True)
    try:
        text = to_toml(about)
    except (TypeError, AttributeError):
        text = b"format = 1\n"
    (path / "experiment.toml").write_bytes(text)
    (path / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _changed(value: Any, rng: np.random.Generator) -> Any:
    """Return a copy with one value, at any depth, replaced, removed or doubled."""
    whole = copy.deepcopy(value)
    table = whole
    while True:
        keys = list(table) if isinstance(table, dict) else list(range(len(table)))
        if not keys:
            return whole
        key = keys[int(rng.integers(len(keys)))]
        if not isinstance(table[key], dict | list) or not table[key] or rng.random() < 0.2:
            break
        table = table[key]
    action = rng.integers(4)
    if action == 0:
        del table[key]
    elif action == 1 and isinstance(table, list):
        table.insert(key, copy.deepcopy(table[key]))
    else:
        table[key] = copy.deepcopy(ODD[int(rng.integers(len(ODD)))])
    return whole


def _flip_bytes(file: Path, rng: np.random.Generator) -> None:
    data = bytearray(file.read_bytes())
    for _ in range(int(rng.integers(1, 5))):
        if data:
            data[int(rng.integers(len(data)))] = int(rng.integers(256))
    file.write_bytes(bytes(data[: int(rng.integers(len(data) + 1))] if rng.random() < 0.2 else data))
