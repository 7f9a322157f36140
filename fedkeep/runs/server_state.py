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
READ_OUT = "read_out"  # the entry with what is added to a weight before the model is tested, if a run has a read-out


def global_params(server: Tree) -> Tree:
    """Return the global model's weights, as tested and saved: their average over rounds, if a run keeps one.

    If a run has a read-out, its bias per class is added. Clients start from `server["params"]`, the weights of the last
    round.

    >>> server = {"params": {"bias": torch.zeros(2)}, "read_out": {"bias": torch.tensor([0.5, -0.5])}}
    >>> global_params(server)["bias"].tolist()
    [0.5, -0.5]
    """
    weights: Tree = server["params"]
    if AVERAGE in server:
        weights = tree.map(lambda a, w: a.to(w.dtype), server[AVERAGE]["weights"], weights)
    if READ_OUT in server:
        added = {name: (weights[name].to(b.dtype) + b).to(weights[name].dtype) for name, b in server[READ_OUT].items()}
        weights = {**weights, **added}
    return weights


def without_own_entries(server: Tree) -> Tree:
    """Return the server's tree as the method knows it."""
    return {key: value for key, value in server.items() if key not in (AVERAGE, READ_OUT)}


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
        self.remember(record)
        self.write(record)

    def remember(self, record: Record) -> None:
        """Add a round's record to the history."""
        self.history.records.append(record)
        self.history.params = self.params

    def write(self, record: Record) -> None:
        """Add a round's record to the folder, if there is one."""
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
