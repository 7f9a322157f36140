"""Keys of nodes: which node may be which client.

Flower's nodes sign every request to the SuperLink with their key, and the SuperLink tells a ServerApp each node's
public key. A client's id is bound to the key that claimed it first, and the run folder keeps the binding.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedkeep._util.validate import require_whole
from fedkeep.errors import ConfigError, RunError
from fedkeep.runs.files import write_atomic

FILE = "client_keys.json"  # in the run folder
CONNECTED, FIRST = "connected", "first"
_FINGERPRINT = re.compile(r"SHA256:[A-Za-z0-9+/]{43}")


class ClientKeys:
    """Who may be which client.

    `rule` is "connected": a client's first key keeps the id while its node is connected, and gets it back when it
    returns; meanwhile a node with another key may stand in. Or "first": only the first key, for the whole run. Or a
    file (or a mapping) that lists the key of every client.
    """

    def __init__(self, rule: str | Path | Mapping[int, str] | None, n_clients: int, folder: Path | None) -> None:
        self.folder = folder
        self.strict = rule not in (None, CONNECTED)
        self.listed: dict[int, str] | None = None
        if rule not in (None, CONNECTED, FIRST):
            self.listed = dict(rule) if isinstance(rule, Mapping) else read_key_file(Path(str(rule)), n_clients)
        self.bound = _read_bindings(folder) if folder is not None else {}

    def problem(self, client: int, key: str) -> str | None:
        """Return why a node with this key may not be this client, or None."""
        if self.listed is not None:
            if client not in self.listed:
                return f"client {client} is not in the list of client keys"
            owner = self.listed[client]
        else:
            owner = self.bound.get(client, key)
        if self.strict and key != owner:
            return f"client {client} belongs to the key {owner}, but this node has {key}"
        return None

    def owns(self, client: int, key: str) -> bool:
        """Return whether this is the key that a client is bound to."""
        owner = self.bound.get(client) if self.listed is None else self.listed.get(client)
        return owner == key

    def bind(self, client: int, key: str) -> None:
        """Bind a client to the first key that claims it."""
        if client not in self.bound:
            self.bound[client] = key
            if self.folder is not None:
                entries = {str(k): key for k, key in sorted(self.bound.items())}
                write_atomic(self.folder / FILE, (json.dumps(entries, indent=2) + "\n").encode())


def key_fingerprint(public_key: bytes, node: int) -> str:
    """Return a public key's fingerprint, as `ssh-keygen -l` shows it; without a usable key, the node's id."""
    from cryptography.hazmat.primitives import serialization

    try:
        key = serialization.load_pem_public_key(public_key)
        text = key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        return _fingerprint_of(text.split()[1])
    except Exception:  # a grid of another kind has no keys
        return f"node:{node}"


def read_key_file(path: Path, n_clients: int) -> dict[int, str]:
    """Return {client: fingerprint} from a file with a line per client: its id, then its public key or fingerprint.

    A public key is the content of the node's `.pub` file.
    """
    try:
        lines = path.expanduser().read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", key="client-keys", value=str(path)) from error
    keys: dict[int, str] = {}
    for number, line in enumerate(lines, 1):
        words = [] if line.lstrip().startswith("#") else line.split()
        if not words:
            continue
        client = int(words[0]) if words[0].isdecimal() and len(words[0]) < 10 else None
        key = _parse_key(words[1:])
        if client is None or client >= n_clients or client in keys or key is None:
            raise ConfigError(
                f"line {number} of {path} must be the id of a client, 0 to {n_clients - 1}, each once, and its public "
                "key (ecdsa-sha2-... AAAA...) or fingerprint (SHA256:...)",
                key="client-keys",
                value=line,
            )
        keys[client] = key
    return keys


def _parse_key(words: list[str]) -> str | None:
    if words and _FINGERPRINT.fullmatch(words[0]):
        return words[0]
    try:
        return _fingerprint_of(words[1].encode()) if words[0].startswith(("ecdsa-", "ssh-")) else None
    except (IndexError, ValueError):
        return None


def _fingerprint_of(blob: bytes) -> str:
    digest = hashlib.sha256(base64.b64decode(blob, validate=True)).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def _read_bindings(folder: Path) -> dict[int, str]:
    path = folder / FILE
    if not path.exists():
        return {}
    try:
        entries: Any = json.loads(path.read_text())
        return {require_whole("client", int(client), low=0): str(key) for client, key in entries.items()}
    except (OSError, ValueError, AttributeError) as error:
        raise RunError(
            f"{path} cannot be read ({error}): restore it, or delete it to bind every client to a new key",
            key=FILE,
            value=str(path),
        ) from error
