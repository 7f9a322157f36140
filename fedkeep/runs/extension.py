"""More rounds for a run than its experiment file has: `extended.json`, which takes precedence over `train.rounds`.

The experiment file itself never changes, because every record and every checkpoint refers to its checksum.
"""

from __future__ import annotations

from pathlib import Path

from fedkeep._util.validate import require_whole
from fedkeep.runs.files import EXTENDED, is_there, read_bytes, write_atomic
from fedkeep.runs.seals import damaged, seal_json, unseal_json


def read_extension(folder: Path, run: str | None) -> int | None:
    """Return the number of rounds that a run was extended to, or None."""
    file = folder / EXTENDED
    if run is None or not is_there(file):
        return None
    values, _ = unseal_json(str(file), EXTENDED, read_bytes(file).removesuffix(b"\n"), run, EXTENDED)
    try:
        return require_whole("rounds", values.get("rounds"), low=1)
    except ValueError as error:
        raise damaged(str(file), EXTENDED, str(error)) from None


def write_extension(folder: Path, run: str, rounds: int) -> None:
    """Write the number of rounds that a run is extended to."""
    write_atomic(folder / EXTENDED, seal_json({"rounds": rounds}, run, EXTENDED)[0] + b"\n")
