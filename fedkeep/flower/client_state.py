"""What a node remembers between its visits: the state of a stateful method, in the node's own folder.

A state is kept under the run, the client and the round that made it. The server says from which round's state to go
on; the one before the newest is kept as well, because the server may have lost the round that made the newest. So a
round that is repeated starts from the same state again, whatever happened in between.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Protocol

from flwr.app import ConfigRecord, Context

from fedkeep import tree
from fedkeep.errors import RunError
from fedkeep.runs.files import read_tree, write_tree
from fedkeep.tree import Tree

log = logging.getLogger("fedkeep")


class ClientStates(Protocol):
    """Somewhere to keep one client's states of one run."""

    def load(self, round: int) -> Tree | None:
        """Return the state that a round made, or None."""
        ...

    def save(self, round: int, state: Tree, keep: int) -> None:
        """Keep the state that a round made, and of the older ones only that of the round `keep`."""
        ...


class FolderStates:
    """States as files, whole or not there at all: they outlive the node's processes."""

    def __init__(self, path: Path, run: str, client: int) -> None:
        if not re.fullmatch(r"[0-9a-f]{8,64}", run):
            raise RunError(f"{run!r} is no name for a run's folder")
        self.path = path / run / f"client-{client}"

    def load(self, round: int) -> Tree | None:
        """Return the state that a round made; one that is damaged is as good as lost, and said."""
        file = self._file(round)
        if not file.exists():
            return None
        try:
            return read_tree(file)[0]
        except RunError as error:
            log.warning("%s; this client starts anew", error)
            return None

    def save(self, round: int, state: Tree, keep: int) -> None:
        """Keep the state that a round made, and of the older ones only that of the round `keep`."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_tree(self._file(round), state, {"round": round})
        for file in self.path.glob("*.safetensors"):
            if file not in (self._file(round), self._file(keep)):
                file.unlink(missing_ok=True)

    def _file(self, round: int) -> Path:
        return self.path / f"{round}.safetensors"


class ContextStates:
    """States in Flower's context: they outlive a round, but not a restart of the node."""

    def __init__(self, context: Context, run: str, client: int) -> None:
        self.records, self.name = context.state, f"fedkeep-{run}-{client}"

    def load(self, round: int) -> Tree | None:
        """Return the state that a round made, or None."""
        held = self.records.config_records.get(self.name)
        data = held.get(str(round)) if held is not None else None
        return tree.from_bytes(data) if isinstance(data, bytes) else None

    def save(self, round: int, state: Tree, keep: int) -> None:
        """Keep the state that a round made, and of the older ones only that of the round `keep`."""
        held = self.records.config_records.get(self.name, ConfigRecord())
        older = {key: value for key, value in held.items() if key == str(keep)}
        self.records[self.name] = ConfigRecord({**older, str(round): tree.to_bytes(state)})


def client_states(context: Context, run: str, client: int) -> ClientStates:
    """Choose where this node keeps its state: in the folder its config names, or else in Flower's context."""
    folder = context.node_config.get("state-dir")
    if folder:
        return FolderStates(Path(str(folder)).expanduser(), run, client)
    return ContextStates(context, run, client)
