"""State of a federation's server, shared by the simulation and by the server on Flower."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from fedkeep import tree
from fedkeep.runs.client_store import ClientStore
from fedkeep.runs.folder import RunFolder
from fedkeep.runs.history import History, Record
from fedkeep.tree import Tree

AVERAGE = "average_weights"  # the entry of a server's tree with the mean of the weights over rounds, if a run keeps one


def global_params(server: Tree) -> Tree:
    """Return the global model's weights, as tested and saved: their average over rounds, if a run keeps one.

    Clients start from `server["params"]`, the weights of the last round.
    """
    if AVERAGE not in server:
        return server["params"]  # type: ignore[no-any-return]
    return tree.map(lambda a, w: a.to(w.dtype), server[AVERAGE]["weights"], server["params"])


@dataclass
class ServerState:
    """The server's tree, the last finished round, the history, the clients' states, and the folder that saves them."""

    server: Tree
    history: History
    clients: ClientStore = field(default_factory=ClientStore)
    folder: RunFolder | None = None
    round: int = 0

    @property
    def params(self) -> Tree:
        """The global model's weights, as tested and saved."""
        return global_params(self.server)

    def attach(
        self, folder: RunFolder, clients: ClientStore, device: torch.device, from_round: int | None = None
    ) -> bool:
        """Write into this folder from now on. If it has a checkpoint, continue from it; return whether it has one.

        With `from_round`, continue from the checkpoint of that round instead of the last one.
        """
        saved = folder.restore(clients, from_round)
        self.folder, self.clients = folder, clients
        if saved is None:
            return False
        self.server = tree.to(saved.server, device)
        self.round, self.history.records, self.history.params = saved.round, saved.records, self.params
        return True

    def record(self, record: Record) -> None:
        """Add a round's record to the history and to the folder."""
        self.history.records.append(record)
        self.history.params = self.params
        if self.folder is not None:
            self.folder.append(record)

    def checkpoint(self, ended: str | None = None) -> None:
        """Save the state in the folder, unless this round is saved already."""
        if self.folder is not None and self.folder.last != self.round:
            self.folder.checkpoint(self.round, self.server, self.clients, ended)

    def finish(self, reason: str) -> None:
        """Save the state, and record in the history and in the folder that the run ended, and why."""
        self.checkpoint(ended=reason)
        self.history.ended = reason
        if self.folder is not None:
            self.folder.finish(self.round, reason)

    def close(self) -> None:
        """Close the folder, so that other processes can use it."""
        if self.folder is not None:
            self.folder.close()
            self.folder = None
