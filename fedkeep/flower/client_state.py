"""State of a stateful method on a node, between a client's visits.

A state is saved under the run, the client and the round that made it. The server decides from which round's state a
client continues. A few states before the newest one are kept too, because the server may have lost the round that made
the newest, or may go back to an earlier checkpoint. So a repeated round starts from the same state again, whatever
happened in between.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Protocol

from flwr.app import ConfigRecord, Context

from fedkeep import tree
from fedkeep._util.validate import require_whole
from fedkeep.errors import RunError
from fedkeep.runs.files import (
    entries,
    is_there,
    make_folder,
    remove,
    remove_partial_files,
    require_real_folder,
)
from fedkeep.runs.seals import RUN_ID, damaged
from fedkeep.runs.trees import is_format_1, read_tree, write_tree
from fedkeep.tree import Tree

log = logging.getLogger("fedkeep")

KEPT = 4  # states of a client: the server can go back to any of its last three checkpoints, whatever its `keep`
_STATE = re.compile(r"(0|[1-9][0-9]*)\.safetensors")


class ClientStates(Protocol):
    """Storage for one client's states of one run."""

    def load(self, round: int) -> Tree | None:
        """Return the state that a round made, or None."""
        ...

    def save(self, round: int, state: Tree, keep: int) -> None:
        """Save the state that a round made, and remove older ones; that of the round `keep` stays."""
        ...


class FolderStates:
    """States as files that only their owner can read, written atomically. They survive a restart of the node."""

    def __init__(self, path: Path, run: str, client: int) -> None:
        if not isinstance(run, str) or not RUN_ID.fullmatch(run):
            raise RunError(f"{run!r} is not a run id of 8 to 64 hexadecimal digits", key="run", value=run)
        self.run, self.client = run, require_whole("client", client, low=0, error=RunError)
        self.path = path / run / f"client-{self.client}"

    def load(self, round: int) -> Tree | None:
        """Return the state that a round made, or None; a damaged file is logged and counts as lost."""
        file = self._file(round)
        if not is_there(file):
            return None
        try:
            if is_format_1(file):  # written by an earlier version of fedkeep in the same federation
                return read_tree(file)[0]
            state, about = read_tree(file, self.run)
            if (about.get("client"), about.get("round")) != (self.client, round):
                raise damaged(
                    str(file), file.name, f"it is of client {about.get('client')}, round {about.get('round')}"
                )
        except RunError as error:
            log.warning("%s; this client starts with a new state", error)
            return None
        return state

    def save(self, round: int, state: Tree, keep: int) -> None:
        """Save the state that a round made, and remove older ones; that of the round `keep` stays."""
        file, needed = self._file(round), self._file(keep)
        self._require_real_folders()
        make_folder(self.path, private=True)
        remove_partial_files(self.path)
        write_tree(file, state, {"client": self.client, "round": round}, self.run, private=True)
        own = (entry.name for entry in entries(self.path))
        rounds = sorted(int(match[1]) for name in own if (match := _STATE.fullmatch(name)))
        for number in rounds[:-KEPT]:
            if self._file(number) not in (file, needed):
                remove(self._file(number))

    def _file(self, round: int) -> Path:
        """Return the file of a round's state. The number comes from the server, so it could be anything."""
        number = require_whole("state", round, low=0, high=2**63 - 1, error=RunError)
        return self.path / f"{number}.safetensors"

    def _require_real_folders(self) -> None:
        for folder in (self.path.parent, self.path):
            require_real_folder(folder)


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
        """Save the state that a round made, and remove older ones; that of the round `keep` stays."""
        states = self.records.config_records.get(self.name, ConfigRecord())
        rounds = sorted({*map(int, states), round})
        older = {key: value for key, value in states.items() if int(key) in (keep, *rounds[-KEPT:])}
        self.records[self.name] = ConfigRecord({**older, str(round): tree.to_bytes(state)})


def open_states(context: Context, run: str, client: int) -> ClientStates:
    """Return the storage for a client's states: the folder `state-dir` of the node's config, or Flower's context."""
    folder = context.node_config.get("state-dir")
    if folder:
        return FolderStates(Path(str(folder)).expanduser(), run, client)
    return ContextStates(context, run, client)
