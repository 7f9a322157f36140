"""Template of a Flower app that runs a fedkeep method."""

from __future__ import annotations

import keyword
import re
from pathlib import Path

from fedkeep.errors import ConfigError
from fedkeep.runs.files import write_atomic

TEMPLATE = Path(__file__).parent / "template"


def files(name: str) -> dict[str, str]:
    """Return the files of an app with this name: path and content.

    >>> sorted(files("ward"))
    ['README.md', 'pyproject.toml', 'ward/__init__.py', 'ward/client_app.py', 'ward/server_app.py', 'ward/task.py']
    """
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name) or keyword.iskeyword(name):
        raise ConfigError(
            f"{name!r} is not a valid name for an app: use lower-case letters, digits and -, starting with a letter, "
            "such as ward-7",
            key="name",
            value=name,
        )
    package = name.replace("-", "_")
    contents = {}
    for file in sorted(TEMPLATE.glob("*.txt")):
        target = file.name.removesuffix(".txt")
        text = file.read_text().replace("{name}", name).replace("{package}", package)
        contents[f"{package}/{target}" if target.endswith(".py") else target] = text
    return contents


def write(name: str, into: Path) -> Path:
    """Write an app into a new folder of its name, and return that folder."""
    folder = into / name
    contents = files(name)
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} already exists and is not empty: choose another name", key="name", value=name)
    for path, text in contents.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / path, text.encode())
    return folder
