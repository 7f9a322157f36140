"""Hostile nodes for tests: replies that no honest node sends."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import safetensors.torch
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedkeep import tree
from fedkeep.flower import records

Attack = Callable[[dict[str, Any]], dict[str, Any]]


def with_upload(change: Attack, rounds: tuple[int, ...] = ()) -> Any:
    """Return a fault that changes a node's upload, in these rounds or in all."""

    def fault(message: Message, work: Callable[[], Message]) -> Message:
        reply = work()
        if rounds and message.content["fedkeep"]["round"] not in rounds:
            return reply
        upload = records.from_records(reply.content)
        config = {k: v for k, v in reply.content["fedkeep"].items() if k != "leaves"}
        return Message(records.to_records(change(upload), config), reply_to=message)

    return fault


def with_content(change: Callable[[RecordDict], None]) -> Any:
    """Return a fault that changes the records of a node's reply in place."""

    def fault(message: Message, work: Callable[[], Message]) -> Message:
        reply = work()
        change(reply.content)
        return reply

    return fault


def with_leaves(leaves: bytes | dict[str, torch.Tensor]) -> Any:
    """Return a fault that replaces the numbers at the top of the upload, such as n."""
    data = leaves if isinstance(leaves, bytes) else safetensors.torch.save(leaves)

    def change(content: RecordDict) -> None:
        content["fedkeep"]["leaves"] = data

    return with_content(change)


def with_array(data: bytes, dtype: str = "float64", key: str = "body.1.bias") -> Any:
    """Return a fault that replaces the bytes of one array."""

    def change(content: RecordDict) -> None:
        content["params"][key] = Array(dtype, (1,), "numpy.ndarray", data)

    return with_content(change)


def npy(header: str, body: bytes = b"", version: int = 1) -> bytes:
    """Return an array in numpy's format with this header."""
    text = header.encode() + b"\n"
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", len(text)) + text + body


def header(shape: str, descr: str = "<f8") -> str:
    """Return numpy's header with any text as its shape."""
    return f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}"


def _add_record(name: str, record: Any) -> Any:
    return with_content(lambda content: content.__setitem__(name, record))


def _arrays(**entries: np.ndarray) -> ArrayRecord:
    return ArrayRecord({key: Array(value) for key, value in entries.items()})


ONE = np.zeros(1)
MALFORMED: dict[str, Any] = {  # a fault of a node, whose reply must be its own failure and no more
    "n empty": with_leaves({"n": torch.zeros(0, dtype=torch.float64)}),
    "n a branch": with_leaves({"n/a": torch.zeros((), dtype=torch.float64)}),
    "n an empty branch": with_leaves({"n/": torch.zeros(0, dtype=torch.uint8)}),
    "n float8": with_leaves({"n": torch.ones(()).to(torch.float8_e4m3fn)}),
    "n bool": with_leaves({"n": torch.ones((), dtype=torch.bool)}),
    "n complex": with_leaves({"n": torch.ones((), dtype=torch.complex64)}),
    "n NaN": with_leaves({"n": torch.tensor(float("nan"), dtype=torch.float64)}),
    "n half": with_leaves({"n": torch.tensor(2.5, dtype=torch.float64)}),
    "leaves not safetensors": with_leaves(b"\xff" * 40),
    "leaves empty": with_leaves(b""),
    "leaves a list": with_content(lambda content: content["fedkeep"].__setitem__("leaves", [1.0, 2.0])),
    "shape negative": with_array(npy(header("(-1, -1)"))),
    "shape empty and huge": with_array(npy(header(f"(0, {2**62})"))),
    "shape beyond integers": with_array(npy(header(f"(0, {2**70})"))),
    "shape with two huge axes": with_array(npy(header(f"(0, {2**40}, {2**40})"))),
    "shape of 70 axes": with_array(npy(header("(" + "1, " * 70 + ")"), bytes(8))),
    "shape of a bool": with_array(npy(header("(True,)"), bytes(8))),
    "shape of terabytes": with_array(npy(header(f"({2**40},)"), bytes(8))),
    "header a set": with_array(npy("{[]: 1}")),
    "header unclosed": with_array(npy("{'descr': '<f8', 'shape': (")),
    "header quotes": with_array(npy("'''")),
    "header 9000 brackets": with_array(npy("(" * 9000)),
    "header 9000 signs": with_array(npy("-" * 9000 + "1")),
    "header cut off": with_array(b"\x93NUMPY\x01\x00\xff"),
    "header version 3": with_array(npy(header("(1,)"), bytes(8), version=3)),
    "header an object": with_array(npy(header("(1,)", "|O"), bytes(8))),
    "array empty": with_array(b""),
    "array bfloat16 of floats": with_array(npy(header("(64,)"), bytes(512)), dtype="bfloat16"),
    "key a//b": _add_record("params", _arrays(**{"a//b": ONE})),
    "key //": _add_record("params", _arrays(**{"//": ONE})),
    "key empty": _add_record("params", _arrays(**{"": ONE})),
    "record without a name": _add_record("", _arrays(w=ONE)),
    "record /": _add_record("/", _arrays(w=ONE)),
    "key of 5,000 levels": _add_record("params", _arrays(**{"a/" * 5000 + "a": ONE})),
    "300,000 numbers": _add_record("list", ConfigRecord({"list": [0.5] * 300_000})),
    "300,000 metrics": _add_record("list", MetricRecord({"list": [0.5] * 300_000})),
    "20,000 entries": _add_record("list", ConfigRecord({f"{k}": k for k in range(20_000)})),
    "a long key": _add_record("list", ConfigRecord({"k" * 3_000_000: 1})),
    "a long text": _add_record("list", ConfigRecord({"k": ["t" * 1000] * 3000})),
    "config a record of arrays": _add_record("fedkeep", _arrays(w=ONE)),
    "round a list": with_content(lambda content: content["fedkeep"].__setitem__("round", [1])),
    "round a float": with_content(lambda content: content["fedkeep"].__setitem__("round", 1.0)),
    "round another": with_content(lambda content: content["fedkeep"].__setitem__("round", 7)),
    "client a bool": with_content(lambda content: content["fedkeep"].__setitem__("client", True)),
    "no content": lambda message, work: Message(RecordDict(), reply_to=message),
}


def far_away(factor: float) -> Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]:
    """Return an attack that moves the weights by a multiple of the server's norm, in a random direction."""

    def attack(upload: dict[str, Any], server: dict[str, Any]) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(0)
        way = tree.map(lambda w: torch.randn(w.shape, generator=generator, dtype=w.dtype), upload["params"])
        length = factor * float(tree.dot(server["params"], server["params"]) / tree.dot(way, way)) ** 0.5
        return {**upload, "params": tree.map(lambda w, d: w + length * d, server["params"], way)}

    return attack


def filled(key: str, value: float) -> Attack:
    """Return an attack that sets every number of an entry."""
    return lambda upload: {**upload, key: tree.map(lambda t: torch.full_like(t, value), upload[key])}


def scaled(key: str, factor: float) -> Attack:
    """Return an attack that multiplies an entry."""
    return lambda upload: {**upload, key: tree.map(lambda t: t * factor, upload[key])}
