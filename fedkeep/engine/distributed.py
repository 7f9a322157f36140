"""Several processes that share one run, started by `torchrun`. Without it there is one, and nothing is sent.

Every rank holds the same server tree and knows the same cohort. Each trains its share of it; rank 0 gathers,
aggregates, writes files and informs the others. Trees are sent as a short JSON header and their bytes: no pickle.
"""

from __future__ import annotations

import atexit
import functools
import heapq
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fedkeep import errors, tree
from fedkeep.errors import EngineError, FedkeepError, LostPeer
from fedkeep.runs.packed import pack, unpack
from fedkeep.tree import Tree

log = logging.getLogger("fedkeep")

_DTYPES = {str(t): t for t in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
                               torch.int16, torch.int8, torch.uint8, torch.bool)}  # fmt: skip


_ERROR_BYTES = 16_384  # enough for an error as JSON, even with every character escaped


@dataclass(frozen=True)
class Ranks:
    """This process among those of the run: number `rank` of `size`."""

    rank: int = 0
    size: int = 1
    transfer_device: torch.device = field(
        default_factory=lambda: torch.device("cpu")
    )  # where tensors must be to be sent

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes the run folder and the output."""
        return self.rank == 0

    def on_rank0(self, function: Callable[[], Any]) -> Any:
        """Call a function on rank 0; return its value, JSON data, on every rank. An error is raised on all of them."""
        if self.size == 1:
            return function()
        message: Any = None
        failed: Exception | None = None
        if self.first:
            try:
                message = {"value": function()}
            except Exception as error:
                message, failed = _error_to_dict(error), error
        message = json.loads(self._broadcast_bytes(json.dumps(message, default=pack).encode()), object_hook=unpack)
        if failed is not None:
            raise failed
        if "error" in message:
            raise _error_from_dict(message)
        return message["value"]

    def broadcast(self, sent: Tree, device: torch.device) -> Tree:
        """Return rank 0's tree on every rank."""
        if self.size == 1:
            return sent
        with _raise_lost_peer():
            about = json.loads(self._broadcast_bytes(_header(sent)))
            payload = _payload(sent, self.transfer_device) if self.first else self._empty(about["bytes"])
            dist.broadcast(payload, 0)
        return sent if self.first else tree.to(_tree_from(about, payload), device)

    def gather(self, make: Callable[[], Tree], device: torch.device) -> list[Tree]:
        """Make a tree on every rank; return all of them on rank 0, nothing on the others. An error is raised on all."""
        if self.size == 1:
            return [make()]
        outcome: Tree | Exception
        try:
            outcome = make()
        except Exception as error:
            outcome = error
        self._agree(outcome)
        assert not isinstance(outcome, Exception)
        with _raise_lost_peer():
            if not self.first:
                self._send(outcome, 0)
                return []
            return [outcome, *(tree.to(self._receive(rank), device) for rank in range(1, self.size))]

    def scatter(self, parts: Sequence[Tree], device: torch.device) -> Tree:
        """Return the part that rank 0 has for this rank; the parts of other ranks are ignored."""
        if self.size == 1:
            return parts[0]
        with _raise_lost_peer():
            if not self.first:
                return tree.to(self._receive(0), device)
            for rank in range(1, self.size):
                self._send(parts[rank], rank)
            return parts[0]

    def divide(self, work: Sequence[int]) -> list[list[int]]:
        """Divide jobs of these sizes evenly among the ranks; return the indices of the jobs for each rank.

        >>> Ranks(0, 2).divide([5, 9, 4, 1])
        [[1, 3], [0, 2]]
        """
        shares: list[list[int]] = [[] for _ in range(self.size)]
        load = [(0, rank) for rank in range(self.size)]
        for job in sorted(range(len(work)), key=lambda job: -work[job]):
            done, rank = heapq.heappop(load)
            shares[rank].append(job)
            heapq.heappush(load, (done + work[job], rank))
        return [sorted(share) for share in shares]

    def slice(self, n: int) -> slice:
        """Return this rank's part of n items in order."""
        return slice(n * self.rank // self.size, n * (self.rank + 1) // self.size)

    def _agree(self, outcome: Tree | Exception) -> None:
        """Raise on every rank if any rank has failed: its own error there, on the others a copy that names the rank."""
        mine = torch.zeros(_ERROR_BYTES, dtype=torch.uint8)
        if isinstance(outcome, Exception):
            data = json.dumps(_error_to_dict(outcome)).encode()
            mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        every = [self._empty(_ERROR_BYTES) for _ in range(self.size)]
        with _raise_lost_peer():
            dist.all_gather(every, mine.to(self.transfer_device))
        if isinstance(outcome, Exception):
            raise outcome
        for rank, one in enumerate(every):
            received = bytes(one.cpu().numpy()).rstrip(b"\0")
            if received:
                raise _error_from_dict(json.loads(received), rank)

    def _broadcast_bytes(self, data: bytes) -> bytes:
        with _raise_lost_peer():
            length = torch.tensor([len(data)], device=self.transfer_device)
            dist.broadcast(length, 0)
            body = _bytes(data, self.transfer_device) if self.first else self._empty(int(length))
            dist.broadcast(body, 0)
        return bytes(body.cpu().numpy())

    def _send(self, sent: Tree, to: int) -> None:
        about = _header(sent)
        dist.send(torch.tensor([len(about)], device=self.transfer_device), to)
        dist.send(_bytes(about, self.transfer_device), to)
        dist.send(_payload(sent, self.transfer_device), to)

    def _receive(self, sender: int) -> Tree:
        length = torch.zeros(1, dtype=torch.int64, device=self.transfer_device)
        dist.recv(length, sender)
        header = self._empty(int(length))
        dist.recv(header, sender)
        about = json.loads(bytes(header.cpu().numpy()))
        payload = self._empty(about["bytes"])
        dist.recv(payload, sender)
        return _tree_from(about, payload)

    def _empty(self, length: int) -> Tensor:
        return torch.zeros(max(length, 1), dtype=torch.uint8, device=self.transfer_device)


@functools.cache
def current_ranks() -> Ranks:
    """Return this process's rank; if `torchrun` started several processes, join them first."""
    if not dist.is_available() or int(os.environ.get("WORLD_SIZE", "1")) < 2 or "RANK" not in os.environ:
        return Ranks()
    here_size = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    own_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= here_size and dist.is_nccl_available()
    if not dist.is_initialized():
        if own_gpu:
            torch.cuda.set_device(local_device())
        dist.init_process_group("nccl" if own_gpu else "gloo")
        if not own_gpu:
            atexit.register(_leave)
    transfer_device = local_device() if dist.get_backend() == "nccl" else torch.device("cpu")
    return Ranks(dist.get_rank(), dist.get_world_size(), transfer_device)


def _leave() -> None:
    """Destroy the process group at exit; otherwise gloo's threads may abort a finished process."""
    if dist.is_initialized():
        dist.destroy_process_group()


def local_device() -> torch.device:
    """Return the GPU of this process; processes share GPUs if there are fewer GPUs than processes."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


@contextmanager
def _raise_lost_peer() -> Iterator[None]:
    """Raise `LostPeer` if the connection to another process is lost."""
    try:
        yield
    except RuntimeError as error:
        raise LostPeer(
            "another process of this run has ended, so this one cannot continue; the saved rounds are safe, and "
            "`fedkeep resume` continues from them, with any number of processes "
            f"({str(error).splitlines()[0][:120]})"
        ) from error


def _error_to_dict(error: Exception) -> dict[str, Any]:
    """Return an error as JSON data, shortened to what ranks can exchange."""
    fields = {k: v for k, v in vars(error).items() if isinstance(v, int | str)}
    fields = {k: v[:400] if isinstance(v, str) else v for k, v in fields.items()}
    return {"error": str(error)[:800], "kind": type(error).__name__, "fields": fields}


def _error_from_dict(message: dict[str, Any], rank: int = 0) -> FedkeepError:
    """Return another rank's error; one that is not fedkeep's becomes an `EngineError` with its rank and type."""
    kind = getattr(errors, message["kind"], None)
    if not isinstance(kind, type) or not issubclass(kind, FedkeepError):
        return EngineError(f"rank {rank} failed with {message['kind']}: {message['error']}")
    error: FedkeepError = kind.__new__(kind)
    error.args = (message["error"],)
    where = {"client": None, "history": None} if kind is errors.Diverged else {}
    vars(error).update({"key": None, "value": None, "valid": None, **where, **message["fields"]})
    return error


def _header(sent: Tree) -> bytes:
    leaves = [[path, str(t.dtype), list(t.shape)] for path, t in tree.flatten(sent).items()]
    return json.dumps({"leaves": leaves, "bytes": tree.nbytes(sent)}).encode()


def _payload(sent: Tree, transfer_device: torch.device) -> Tensor:
    flat = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in tree.flatten(sent).values() if t.numel()]
    return (
        torch.cat([t.to(transfer_device) for t in flat])
        if flat
        else torch.zeros(1, dtype=torch.uint8, device=transfer_device)
    )


def _tree_from(about: Any, payload: Tensor) -> Tree:
    flat, at = {}, 0
    for path, dtype, shape in about["leaves"]:
        like = torch.empty(shape, dtype=_DTYPES[dtype], device="meta")
        size = like.numel() * like.element_size()
        part = payload[at : at + size].clone()  # a tensor of another dtype must start at a multiple of its size
        flat[path], at = part.view(_DTYPES[dtype]).reshape(shape), at + size
    return tree.unflatten(flat)


def _bytes(data: bytes, transfer_device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8).to(transfer_device)
