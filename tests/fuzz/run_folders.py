"""Damaged run folders: any file changed in any way, then loaded or resumed.

The outcome must be the same as without the damage, or an error that names the file. A damaged checkpoint may also be
reported by a warning that names it, and a run that was interrupted may have lost rounds after its last checkpoint, as
if it had been interrupted earlier.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fedkeep as fk
from fedkeep import tree
from fedkeep.errors import Diverged, FedkeepError
from fedkeep.experiments.experiment import Experiment
from fedkeep.experiments.run import run
from fedkeep.runs.checkpoints import find_checkpoints
from fedkeep.runs.label_counts import label_counts_of
from fedkeep.runs.reading import read_instruments
from fedkeep.runs.trees import read_tree

KINDS = ("finished", "unfinished", "stopped", "diverged")
ACTIONS = ("load", "load without weights", "resume")
_EXPERIMENT: dict[str, Any] = {
    "model": "mlp",
    "data": {"source": "digits", "public": 2},
    "split": {"kind": "shards", "n_clients": 6, "s": 2},
    "train": {"rounds": 4, "participation": 2, "epochs": 1, "batch_size": 60, "lr": 0.05, "eval_local_every": 1},
    "checkpoint_every": 1,
}


def try_one(seed: int, folder: Path) -> bool:
    """Damage one file of a small run, then load or resume the run."""
    rng = random.Random(seed)
    kind, action = rng.choice(KINDS), rng.choice(ACTIONS)
    templates = _templates(folder.parent / "run_folders")
    path, other = folder / "run", templates / "other" / "run"
    shutil.copytree(templates / kind, path, ignore=shutil.ignore_patterns(".lock"), dirs_exist_ok=True)
    file = rng.choice(sorted(p for p in path.rglob("*") if p.is_file()))
    damage = rng.choice(list(_DAMAGES))
    _DAMAGES[damage](file, path, other, rng)
    what = f"{kind}, {action}, {file.relative_to(path)}: {damage}"
    with _Warnings() as warnings:
        try:
            outcome = _outcome(path, action)
        except Diverged:
            assert kind == "diverged", what
            return True
        except FedkeepError as error:
            if not _names(str(error), file):
                raise AssertionError(f"{what}: the error does not name the file: {error}") from error
            return False
    expected = _expected(templates, kind, action)
    loud = any(_names(text, file) for text in warnings.texts)
    _compare(outcome, expected, kind, loud or "checkpoint" in file.name, what)
    return True


def _names(text: str, file: Path) -> bool:
    """Return whether a message names the damaged file; of the only checkpoint, if it is missing, the kind."""
    return file.name in text or (file.name.startswith("checkpoint-") and "checkpoint-ROUND" in text)


def _outcome(path: Path, action: str) -> dict[str, Any]:
    """Load or resume a run and return everything that it shows."""
    if action == "resume":
        fk.resume(path)
    history = fk.load_run(path, weights=action != "load without weights")
    records = [{k: v for k, v in r.items() if k != "seconds"} for r in history.records]
    return {
        "records": [json.dumps(record) for record in records],
        "about": json.dumps(history.about, sort_keys=True),
        "settings": json.dumps(history.settings, sort_keys=True),
        "ended": (history.finished, history.ended, history.diverged, history.verified),
        "label_counts": json.dumps(label_counts_of(history)),
        "instruments": json.dumps(read_instruments(path)),
        "params": _digest(history.params),
        "saved": history.saved,
    }


def _compare(outcome: dict[str, Any], expected: dict[str, Any], kind: str, about_weights: bool, what: str) -> None:
    """Raise if an outcome is another than expected."""
    ours, theirs = outcome["records"], expected["records"]
    if kind == "unfinished" and len(ours) < len(theirs):
        theirs = theirs[: max(len(ours), expected["checkpoint"] + 1)]
    assert ours == theirs, f"{what}: other records"
    for key in ("about", "settings", "label_counts", "instruments"):
        assert outcome[key] == expected[key], f"{what}: other {key}"
    assert outcome["ended"][:3] == expected["ended"][:3], f"{what}: {outcome['ended']} instead of {expected['ended']}"
    assert outcome["ended"][3] or about_weights, f"{what}: unverified without a warning"
    if outcome["saved"] is None or outcome["saved"] != expected["saved"]:
        assert about_weights or expected["saved"] is None, f"{what}: other weights"
    if outcome["saved"] is not None:
        assert outcome["params"] == expected["weights"][outcome["saved"]], f"{what}: other weights"


def _digest(params: Any) -> str:
    total = hashlib.sha256()
    for name, leaf in sorted(tree.items(params)):
        total.update(f"{name}{leaf.dtype}{tuple(leaf.shape)}".encode())
        total.update(leaf.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


# The runs that are damaged


@functools.cache
def _templates(folder: Path) -> Path:
    """Make the undamaged runs; once for all tries of a process."""
    shutil.rmtree(folder, ignore_errors=True)
    torch.set_num_threads(1)
    _run(folder / "finished", seed=1)
    _run(folder / "other" / "run", seed=2)
    _run(folder / "stopped", seed=1, stop_at=3)
    _run(folder / "unfinished", seed=1, fail_at=3)
    _run(folder / "diverged", seed=1, lr_decay=1e30)
    return folder


def _run(path: Path, seed: int, stop_at: int = 0, fail_at: int = 0, **train: Any) -> None:
    def stop(simulation: fk.Simulation, record: dict[str, Any]) -> None:
        if record["round"] == stop_at:
            simulation.stop()
        if record["round"] == fail_at:
            raise KeyboardInterrupt

    tables = {**_EXPERIMENT, "method": "scaffold", "seed": seed, "train": {**_EXPERIMENT["train"], **train}}
    with contextlib.suppress(KeyboardInterrupt, Diverged):
        run(Experiment.from_dict(tables), path, [fk.instruments.Every(1, "losses"), stop])


@functools.cache
def _expected(templates: Path, kind: str, action: str) -> dict[str, Any]:
    """Return the outcome without damage, the weights of every round, and the round of the last checkpoint."""
    path = templates / f"{kind}-{action}"
    shutil.copytree(templates / kind, path, ignore=shutil.ignore_patterns(".lock"), dirs_exist_ok=True)
    before = find_checkpoints(path)
    run_id = _run_id(path)
    weights = {number: _digest(read_tree(file, run_id)[0]["server"]["params"]) for number, file in before.items()}
    outcome = _outcome(path, action)
    if action == "resume":
        after = find_checkpoints(path).items()
        weights.update({n: _digest(read_tree(file, run_id)[0]["server"]["params"]) for n, file in after})
    return {**outcome, "weights": weights, "checkpoint": max(before)}


def _run_id(path: Path) -> str:
    return str(fk.load_run(path, weights=False).about["made_by"]["run"])


# Damages: (file, run folder, run folder of another seed, random numbers)


def _flip(file: Path, path: Path, other: Path, rng: random.Random) -> None:
    data = bytearray(file.read_bytes())
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def _header_byte(file: Path, path: Path, other: Path, rng: random.Random) -> None:
    data = bytearray(file.read_bytes())
    if data:
        data[rng.randrange(min(len(data), 2500))] = rng.randrange(256)
    file.write_bytes(data)


def _digit(file: Path, path: Path, other: Path, rng: random.Random) -> None:
    _replace_one_of(b"0123456789", file, rng)


def _letter(file: Path, path: Path, other: Path, rng: random.Random) -> None:
    _replace_one_of(b"abcdefghijklmnopqrstuvwxyz", file, rng)


def _replace_one_of(alphabet: bytes, file: Path, rng: random.Random) -> None:
    data = bytearray(file.read_bytes())
    places = [k for k, byte in enumerate(data) if byte in alphabet]
    if places:
        data[rng.choice(places)] = rng.choice(alphabet)
    file.write_bytes(data)


def _truncate(file: Path, path: Path, other: Path, rng: random.Random) -> None:
    os.truncate(file, rng.randrange(file.stat().st_size + 1))


def _zeros(file: Path, path: Path, other: Path, rng: random.Random) -> None:
    data = bytearray(file.read_bytes())
    start = rng.randrange(len(data) + 1)
    end = min(len(data), start + rng.choice([1, 16, 4096]))
    data[start:end] = bytes(end - start)
    file.write_bytes(data)


def _append(file: Path, path: Path, other: Path, rng: random.Random) -> None:
    with file.open("ab") as end:
        end.write(rng.choice([b"\n", b"0", b"{}\n", b"# x\n", bytes(16), b'{"round": 5}\n']))


def _swap_lines(file: Path, path: Path, other: Path, rng: random.Random) -> None:
    lines = file.read_bytes().splitlines(keepends=True)
    a, b = rng.randrange(len(lines) or 1), rng.randrange(len(lines) or 1)
    if lines:
        lines[a], lines[b] = lines[b], lines[a]
    file.write_bytes(b"".join(lines))


def _drop_line(file: Path, path: Path, other: Path, rng: random.Random) -> None:
    lines = file.read_bytes().splitlines(keepends=True)
    if lines:
        del lines[rng.randrange(len(lines))]
    file.write_bytes(b"".join(lines))


def _repeat_line(file: Path, path: Path, other: Path, rng: random.Random) -> None:
    lines = file.read_bytes().splitlines(keepends=True)
    if lines:
        lines.insert(rng.randrange(len(lines)), rng.choice(lines))
    file.write_bytes(b"".join(lines))


def _foreign_line(file: Path, path: Path, other: Path, rng: random.Random) -> None:
    theirs = other / file.relative_to(path)
    lines = file.read_bytes().splitlines(keepends=True)
    foreign = theirs.read_bytes().splitlines(keepends=True) if theirs.exists() else []
    if lines and foreign:
        k = rng.randrange(min(len(lines), len(foreign)))
        lines[k] = foreign[k]
    file.write_bytes(b"".join(lines))


def _foreign_file(file: Path, path: Path, other: Path, rng: random.Random) -> None:
    same_kind = sorted(p for p in other.rglob(f"*{file.suffix}") if p.is_file())
    exact = other / file.relative_to(path)
    shutil.copyfile(exact if exact.exists() else rng.choice(same_kind or [file]), file) if same_kind else None


def _own_file(file: Path, path: Path, other: Path, rng: random.Random) -> None:
    candidates = sorted(p for p in path.rglob(f"*{file.suffix}") if p.is_file() and p != file)
    if candidates:
        shutil.copyfile(rng.choice(candidates), file)


def _delete(file: Path, path: Path, other: Path, rng: random.Random) -> None:
    file.unlink()


def _make_folder(file: Path, path: Path, other: Path, rng: random.Random) -> None:
    file.unlink()
    file.mkdir()


def _make_pipe(file: Path, path: Path, other: Path, rng: random.Random) -> None:
    file.unlink()
    os.mkfifo(file)


_DAMAGES: dict[str, Callable[[Path, Path, Path, random.Random], None]] = {
    function.__name__.strip("_"): function
    for function in (
        _flip, _flip, _header_byte, _digit, _letter, _truncate, _zeros, _append, _swap_lines, _drop_line, _repeat_line,
        _foreign_line, _foreign_file, _own_file, _delete, _make_folder, _make_pipe,
    )
}  # fmt: skip


class _Warnings(logging.Handler):
    """Collects what fedkeep logs while it is entered."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message."""
        self.texts.append(record.getMessage())

    def __enter__(self) -> _Warnings:
        logging.getLogger("fedkeep").addHandler(self)
        return self

    def __exit__(self, *exc: object) -> None:
        logging.getLogger("fedkeep").removeHandler(self)
