"""What a run abandons when it goes back to an earlier round: set aside in `abandoned/`, not deleted.

The lines of the later rounds, the later checkpoints, and the record of the run's end are moved there before anything is
cut. They are deleted when a new checkpoint has reached the rounds that were abandoned.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from fedkeep.errors import RunError
from fedkeep.runs.checkpoints import find_checkpoints
from fedkeep.runs.files import (
    ABANDONED,
    ENDED,
    INSTRUMENTS,
    PARTIAL,
    entries,
    is_there,
    make_folder,
    read_bytes,
    remove,
    require_real_folder,
    sync_folder,
    write_atomic,
)
from fedkeep.runs.seals import seal_lines, unseal_lines

_LINES = "rounds-after-{}.jsonl"
_ROUND = re.compile(r"rounds-after-(\d+)\.jsonl|checkpoint-(\d+)\.safetensors")
_OWN = re.compile(r"rounds-after-\d+\.jsonl|checkpoint-\d+\.safetensors|ended\.json|instruments\.jsonl|" + PARTIAL)


def set_aside(folder: Path, number: int, cut: bytes, run: str) -> None:
    """Move everything that a run wrote after a round into `abandoned/`; `cut` are the lines of the later rounds."""
    newer = [path for later, path in find_checkpoints(folder).items() if later > number]
    if b"\n" not in cut and not newer:
        return
    aside = folder / ABANDONED
    require_real_folder(aside)
    make_folder(aside, private=True)
    lines = aside / _LINES.format(number)
    if cut.count(b"\n") > _count_lines(lines):
        write_atomic(lines, cut)
    if newer:
        _cut_instruments(folder, aside, number, run)
    for path in ([folder / ENDED] if is_there(folder / ENDED) else []) + newer[::-1]:
        try:
            os.replace(path, aside / path.name)
        except OSError as error:
            raise RunError(f"{path} could not be moved to {aside} ({error.strerror})", key=path.name) from error
        sync_folder(aside)
        sync_folder(folder)


def last_abandoned_round(folder: Path) -> int | None:
    """Return the last of the rounds that were set aside, or None if there are none."""
    rounds = []
    for entry in entries(folder / ABANDONED):
        if match := _ROUND.fullmatch(entry.name):
            rounds.append(int(match[2]) if match[2] else int(match[1]) + _count_lines(Path(entry.path)))
    return max(rounds, default=None)


def delete_abandoned(folder: Path) -> None:
    """Delete what was set aside; only files that `set_aside` writes."""
    aside = folder / ABANDONED
    if not is_there(aside):
        return
    require_real_folder(aside)
    for entry in entries(aside):
        if _OWN.fullmatch(entry.name):
            remove(Path(entry.path))
    with contextlib.suppress(OSError):
        os.rmdir(aside)
        sync_folder(folder)


def _count_lines(file: Path) -> int:
    return read_bytes(file).count(b"\n") if is_there(file) else 0


def _cut_instruments(folder: Path, aside: Path, number: int, run: str) -> None:
    """Remove the results of later rounds from instruments.jsonl; the whole file is set aside."""
    file = folder / INSTRUMENTS
    if not is_there(file):
        return
    data = read_bytes(file)
    earlier = [line for line in unseal_lines(file, data, run) if line["after_round"] <= number]
    write_atomic(aside / INSTRUMENTS, data)
    if earlier:
        write_atomic(file, seal_lines(INSTRUMENTS, earlier, run))
    else:
        remove(file)
