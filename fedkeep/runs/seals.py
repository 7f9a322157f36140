"""Seals of a run's text files: the run's id and a checksum, in the file itself, so that no change goes unnoticed.

A JSON object, or a line of JSON, ends with the keys `run` and `check`. Lines that are appended are chained: each
checksum covers the one before. Other text ends with a comment line. A checksum covers every byte before it, and the
name of a file or the checksum of the line before, so that a sealed file is not taken for another one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedkeep.errors import ForeignFile, RunError

RUN_ID = re.compile(r"[0-9a-f]{8,64}")
_CHECK = b', "check": "'
_TRAILER = re.compile(rb"# run ([0-9a-f]{8,64}), checksum ([0-9a-f]{32})\n\Z")


def checksum(*parts: bytes) -> str:
    """Return a checksum of these bytes, 32 hexadecimal digits."""
    total = hashlib.sha256()
    for part in parts:
        total.update(part)
    return total.hexdigest()[:32]


def seal_json(
    value: Mapping[str, Any], run: str, previous: str = "", default: Callable[[Any], Any] | None = None
) -> tuple[bytes, str]:
    """Return a JSON object as a sealed line, without a newline, and its checksum, which also covers `previous`."""
    body = json.dumps({**value, "run": run}, default=default).encode()
    check = checksum(previous.encode(), body)
    return body[:-1] + _CHECK + check.encode() + b'"}', check


def unseal_json(
    where: str, name: str, data: bytes, run: str, previous: str = "", number: int | None = None
) -> tuple[dict[str, Any], str]:
    """Return the JSON object of a sealed line and its checksum; raise if it is damaged or of another run.

    `where` says in messages which file and line it is; `name` is the file's name and `number` the line's number.
    """
    body, found, rest = data.rpartition(_CHECK)
    value = parse_json(where, name, body + b"}" if found else data, number)
    owner = value.pop("run", None)
    if owner != run and isinstance(owner, str) and RUN_ID.fullmatch(owner):
        raise foreign(where, name, owner, run)
    check = checksum(previous.encode(), body + b"}")
    if not found or owner != run or rest != check.encode() + b'"}':
        raise damaged(where, name, "it was changed, or what precedes it is missing", number)
    return value, check


def seal_lines(name: str, values: Sequence[Mapping[str, Any]], run: str) -> bytes:
    """Return sealed lines of which none can be lost: a checksum covers the line after it, the last one their number."""
    lines, following = [], f"{name} {len(values)}"
    for value in reversed(values):
        line, following = seal_json(value, run, following)
        lines.append(line + b"\n")
    return b"".join(reversed(lines))


def unseal_lines(path: Path, data: bytes, run: str) -> list[dict[str, Any]]:
    """Undo `seal_lines`."""
    *lines, rest = data.split(b"\n")
    if not lines or rest:
        raise damaged(str(path), path.name, "it is truncated")
    values, following = [], f"{path.name} {len(lines)}"
    for number, line in reversed(list(enumerate(lines, start=1))):
        value, following = unseal_json(f"{path}, line {number}", path.name, line, run, following, number)
        values.append(value)
    return values[::-1]


def seal_text(name: str, body: bytes, run: str) -> bytes:
    """Return the text of a file, which ends with a newline, and a comment with the run's id and the checksum."""
    return body + f"# run {run}, checksum {checksum(name.encode(), run.encode(), body)}\n".encode()


def unseal_text(path: Path, data: bytes) -> tuple[bytes, str | None]:
    """Return a text without its seal, and the run's id; None if it has no seal. Raise if it does not match its seal."""
    found = _TRAILER.search(data)
    if found is None:
        return data, None
    body, run, check = data[: found.start()], found[1], found[2]
    if checksum(path.name.encode(), run, body).encode() != check:
        raise damaged(str(path), path.name, "its contents do not match its checksum; it was edited or damaged")
    return body, run.decode()


def parse_json(where: str, name: str, data: bytes, number: int | None = None) -> dict[str, Any]:
    """Return a JSON object; raise `RunError` if the bytes are anything else."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise damaged(where, name, str(error) or type(error).__name__, number) from error
    if not isinstance(value, dict):
        raise damaged(where, name, "it is not a JSON object", number)
    return value


def damaged(where: str, name: str, why: str, value: Any = None) -> RunError:
    """Return the error for a damaged file."""
    return RunError(f"{where} is damaged: {why}; it was not changed by this command", key=name, value=value)


def foreign(where: str, name: str, owner: Any, run: str) -> ForeignFile:
    """Return the error for a file of another run."""
    return ForeignFile(
        f"{where} belongs to run {str(owner)[:64]}, experiment.toml to run {run}: one of them is of another run",
        key=name,
        value=owner,
        valid=[run],
    )
