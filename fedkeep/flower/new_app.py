"""A new Flower app around fedkeep: the files of one, ready to run."""

from __future__ import annotations

import keyword
import re
from pathlib import Path

from fedkeep.errors import ConfigError

TEMPLATE = Path(__file__).parent / "template"


def files(name: str) -> dict[str, str]:
    """Return the files of an app of this name, by their paths.

    >>> sorted(files("ward"))
    ['README.md', 'pyproject.toml', 'ward/__init__.py', 'ward/client_app.py', 'ward/server_app.py', 'ward/task.py']
    """
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name) or keyword.iskeyword(name):
        raise ConfigError(
            f"{name!r} is no name for an app: small letters, digits and -, a letter first, such as ward-7"
        )
    package = name.replace("-", "_")
    found = {}
    for file in sorted(TEMPLATE.glob("*.txt")):
        target = file.name.removesuffix(".txt")
        text = file.read_text().replace("{name}", name).replace("{package}", package)
        found[f"{package}/{target}" if target.endswith(".py") else target] = text
    return found


def write(name: str, into: Path) -> Path:
    """Write an app into a new folder of its name, and return that folder."""
    folder = into / name
    made = files(name)
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is there already: choose another name")
    for path, text in made.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder
