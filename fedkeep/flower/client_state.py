"""State of a stateful method on a node, between a client's visits.

A state is saved under the run, the client and the round that made it. The server decides from which round's state a
client continues. The state before the newest one is kept too, because the server may have lost the round that made the
newest. So a repeated round starts from the same state again, whatever happened in between.
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
    """Storage for one client's states of one run."""

    def load(self, round: int) -> Tree | None:
        """Return the state that a round made, or None."""
        ...

    def save(self, round: int, state: Tree, keep: int) -> None:
        """Save the state that a round made, and remove the older ones except that of the round `keep`."""
        ...


class FolderStates:
    """States as files, written atomically. They survive a restart of the node."""

    def __init__(self, path: Path, run: str, client: int) -> None:
        if not re.fullmatch(r"[0-9a-f]{8,64}", run):
            raise RunError(f"{run!r} is not a run id of 8 to 64 hexadecimal digits", key="run", value=run)
        self.path = path / run / f"client-{client}"

    def load(self, round: int) -> Tree | None:
        """Return the state that a round made, or None; a damaged file is logged and counts as lost."""
        file = self._file(round)
        if not file.exists():
            return None
        try:
            return read_tree(file)[0]
        except RunError as error:
            log.warning("%s; this client starts with a new state", error)
            return None

    def save(self, round: int, state: Tree, keep: int) -> None:
        """Save the state that a round made, and remove the older ones except that of the round `keep`."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_tree(self._file(round), state, {"round": round})
        for file in self.path.glob("*.safetensors"):
            if file not in (self._file(round), self._file(keep)):
                file.unlink(missing_ok=True)

    def _file(self, round: int) -> Path:
        return self.path / f"{round}.safetensors"


class ContextStates:
    """States in Flower's context. They survive a round, but not a restart of the node."""

    def __init__(self, context: Context, run: str, client: int) -> None:
        self.records, self.name = context.state, f"fedkeep-{run}-{client}"

    def load(self, round: int) -> Tree | None:
        """Return the state that a round made, or None."""
        states = self.records.config_records.get(self.name)
        data = states.get(str(round)) if states is not None else None
        return tree.from_bytes(data) if isinstance(data, bytes) else None

    def save(self, round: int, state: Tree, keep: int) -> None:
        """Save the state that a round made, and remove the older ones except that of the round `keep`."""
        states = self.records.config_records.get(self.name, ConfigRecord())
        older = {key: value for key, value in states.items() if key == str(keep)}
        self.records[self.name] = ConfigRecord({**older, str(round): tree.to_bytes(state)})


def open_states(context: Context, run: str, client: int) -> ClientStates:
    """Return the storage for a client's states: the folder `state-dir` of the node's config, or Flower's context."""
    folder = context.node_config.get("state-dir")
    if folder:
        return FolderStates(Path(str(folder)).expanduser(), run, client)
    return ContextStates(context, run, client)
