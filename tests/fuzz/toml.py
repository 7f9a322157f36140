"""Experiment files: mutated, cut, with other values, keys and characters."""

from __future__ import annotations

import random
from pathlib import Path

from fedkeep.errors import FedkeepError
from fedkeep.experiments.experiment import PRESETS, read
from fuzz._experiments import is_accepted, random_key, random_value

TEXT = (PRESETS / "digits.toml").read_text()
CHARACTERS = "[]{}\"'=.,#\\\n\t \0\x1b\u2028é🦊0123456789abcxyz-+_eE"


def try_one(seed: int, folder: Path) -> bool:
    rng = random.Random(seed)
    file = folder / rng.choice(["x.toml", "x", "[b].toml", "x" * 200 + ".toml"])
    content = mutated(TEXT, rng).encode("utf-8", "surrogatepass")
    for _ in range(rng.choice([0, 0, 0, 1, 3])):  # also what is not UTF-8
        at = rng.randrange(len(content) + 1)
        content = content[:at] + bytes([rng.randrange(256)]) + content[at:]
    file.write_bytes(content)
    try:
        tables = read(file)
    except FedkeepError as error:
        if str(file) not in str(error):
            raise AssertionError("the error does not name the file") from error
        return False
    return is_accepted(tables)


def mutated(text: str, rng: random.Random) -> str:
    """Change an experiment file in one to four places."""
    for _ in range(rng.randint(1, 4)):
        lines = text.split("\n")
        at = rng.randrange(len(lines))
        match rng.randrange(8):
            case 0 | 1 | 2 if "=" in lines[at]:
                lines[at] = f"{lines[at].partition('=')[0]}= {random_value(rng)}"
            case 3:
                lines.insert(at, f"{random_key(rng).rpartition('.')[2] or 'x'} = {random_value(rng)}")
            case 4:
                section, _, name = random_key(rng).partition(".")
                lines += [f"[{section}]", f"{name or 'x'} = {random_value(rng)}"]
            case 5:
                del lines[at]
            case 6:
                lines.insert(at, rng.choice([lines[rng.randrange(len(lines))], "[" * 1100, "[[train]]", "[a.b.c]"]))
            case _:
                where = rng.randrange(len(text) + 1)
                text = text[:where] + rng.choice(CHARACTERS) + text[where + rng.randrange(2) :]
                continue
        text = "\n".join(lines)
    return text
