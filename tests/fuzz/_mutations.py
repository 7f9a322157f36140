"""Mutations of Flower's messages: of their records, of single values, and of the bytes that are sent."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import safetensors.torch
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.app.message.message import make_message
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

NUMBERS = [0, 1, -1, 2, 3.5, 1e-30, 1e9, 1e30, 1e300, -1e9, float("nan"), float("inf"), 2**31, 2**63 - 1, 0.1, True]
TEXTS = ["", "/", "//", "a/b", "a//b", "n", "params", "leaves", "fedkeep", "client", "round", "x" * 3000, "a/" * 2000,
         "\x1b[2J", "\u202e", "..", "../../x", "{}", "[" * 3000, "numpy.ndarray", "bfloat16", "float64"]  # fmt: skip
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
          torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64, torch.uint16,
          torch.uint64]  # fmt: skip
SHAPES = [(), (0,), (1,), (2,), (3, 0), (1, 1, 1), (1,) * 40, (7,), (2, 4)]
PIECES = ["'descr'", "'<f4'", "'|O'", "'>f8'", "(", ")", "-1", "True", "0", str(2**62), str(2**70), ",", "'''", "{",
          "}", "[]", ":", "1j", "'shape'", "'fortran_order'", "False", "None", "lambda:0", "9" * 50, "#"]  # fmt: skip


def number(rng: random.Random) -> Any:
    """Return a number, often a special one."""
    return rng.choice(NUMBERS) if rng.random() < 0.8 else rng.uniform(-10, 10)


def text(rng: random.Random) -> str:
    """Return a text."""
    if rng.random() < 0.6:
        return rng.choice(TEXTS)
    return "".join(
        chr(rng.choice((rng.randrange(1, 128), rng.randrange(160, 0x2FF)))) for _ in range(rng.randrange(12))
    )


def value(rng: random.Random) -> Any:
    """Return a value that a ConfigRecord can hold."""
    kind = rng.randrange(8)
    if kind < 3:
        return number(rng)
    if kind < 5:
        return text(rng)
    if kind == 5:
        return rng.randbytes(rng.randrange(40))
    one = rng.choice([1, 2.0, "t", b"b", True])
    return [one] * rng.choice([0, 1, 3, 1000])


def tensor(rng: random.Random) -> torch.Tensor:
    """Return a tensor of any dtype and a small shape."""
    shape, fill = rng.choice(SHAPES), number(rng)
    try:
        return torch.full(shape, float(fill), dtype=torch.float64).to(rng.choice(DTYPES))
    except (RuntimeError, NotImplementedError):
        return torch.zeros(shape)


def flip(data: bytes, rng: random.Random) -> bytes:
    """Change, cut, repeat or replace some of the bytes."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        if not changed:
            return rng.randbytes(rng.randrange(20))
        at, how = rng.randrange(len(changed)), rng.randrange(6)
        if how < 3:
            changed[at] = rng.choice([0, 255, rng.randrange(256), changed[at] ^ (1 << rng.randrange(8))])
        elif how == 3:
            del changed[at:]
        elif how == 4:
            del changed[at : at + rng.randrange(1, 20)]
        else:
            changed[at:at] = changed[at : at + rng.randrange(1, 20)] * rng.choice([1, 2, 50])
    return bytes(changed)


def npy(rng: random.Random) -> bytes:
    """Return something like an array in numpy's format."""
    if rng.random() < 0.5:
        shape = rng.choice(
            ["(1,)", "(-1,)", f"(0, {2**62})", "(True,)", "(" + "1, " * 70 + ")", "1", "(1", "()", "(2, 2)"]
        )
        descr = rng.choice(["<f4", "<f8", ">f4", "|O", "<U5", "|b1", "<c16", "|V1", "<f16", "<i3"])
        header = f"{{'descr': '{descr}', 'fortran_order': {rng.choice(['True', 'False'])}, 'shape': {shape}, }}"
    else:
        header = "".join(rng.choice(PIECES) for _ in range(rng.choice([1, 5, 20, 3000])))
    body = header.encode() + rng.choice([b"\n", b"", b" \n"])
    size = len(body).to_bytes(2, "little", signed=False) if len(body) < 65536 else b"\xff\xff"
    return (
        b"\x93NUMPY"
        + rng.choice([b"\x01\x00", b"\x01\x00", b"\x02\x00", b"\x03\x00"])
        + size
        + body
        + rng.randbytes(rng.choice([0, 4, 8, 64]))
    )


def array(old: Array | None, rng: random.Random) -> Array:
    """Return another array in place of this one."""
    how = rng.randrange(5)
    if old is None or how == 0:
        return Array(np.zeros(rng.choice(SHAPES[:6]), dtype=rng.choice(["f4", "f8", "i8", "b1", "f2"])))
    if how == 1:
        return Array(old.dtype, old.shape, old.stype, flip(old.data, rng))
    if how == 2:
        return Array(old.dtype, old.shape, old.stype, npy(rng))
    if how == 3:
        return Array(text(rng), old.shape, rng.choice([old.stype, text(rng)]), old.data)
    try:
        values = old.numpy().copy()
    except Exception:  # mutated before
        return old
    if values.size and values.dtype.kind == "f":
        with np.errstate(all="ignore"):
            values.flat[rng.randrange(values.size)] = float(number(rng))
    return Array(values)


def change_record(content: RecordDict, rng: random.Random) -> None:
    """Change one record in place."""
    name = rng.choice(sorted(content)) if len(content) else ""
    record, how = content.get(name), rng.randrange(8)
    if record is None or how == 0:
        content[text(rng)] = rng.choice(
            [
                ConfigRecord({text(rng): value(rng)}),
                MetricRecord({"m": [1.0] * rng.choice([0, 5, 10**4])}),
                ArrayRecord({text(rng): array(None, rng)}),
            ]
        )
    elif how == 1:
        del content[name]
    elif how == 2 and len(record):
        del record[rng.choice(sorted(record))]
    elif isinstance(record, ArrayRecord):
        key = rng.choice(sorted(record)) if len(record) and rng.random() < 0.8 else text(rng)
        record[key] = array(record.get(key), rng)
    elif isinstance(record, ConfigRecord):
        key = rng.choice(sorted(record)) if len(record) and rng.random() < 0.9 else text(rng)
        if key == "leaves" and rng.random() < 0.9:
            record[key] = leaves(record.get(key), rng)
        else:
            record[key] = value(rng)


def leaves(old: Any, rng: random.Random) -> bytes:
    """Return other safetensors bytes."""
    if rng.random() < 0.4 and isinstance(old, bytes):
        return flip(old, rng)
    try:
        entries = dict(safetensors.torch.load(old))
    except Exception:
        entries = {}
    key = rng.choice([*entries, *(["n/a", "n/", "params", "params/x", "extra", "/", "a//b"])])
    if rng.random() < 0.3:
        entries.pop(key, None)
    elif key in entries and rng.random() < 0.6:
        entries[key] = torch.full(entries[key].shape, float(number(rng)), dtype=torch.float64).to(entries[key].dtype)
    else:
        entries[key] = tensor(rng).contiguous()
    return safetensors.torch.save(entries)


def copy_records(content: RecordDict) -> RecordDict:
    """Return a copy whose records can be changed."""
    return RecordDict({name: type(record)(dict(record)) for name, record in content.items()})


def mutate(message: Message, rng: random.Random) -> Callable[[], Message]:
    """Return a function that builds a mutated copy of a message; it may raise whatever Flower does."""
    if rng.random() < 0.7:
        changed = make_message(copy.copy(message.metadata), copy_records(message.content))
        for _ in range(rng.choice([1, 1, 1, 2, 5])):
            change_record(changed.content, rng)
        return lambda: changed
    contents = {key: one.deflate() for key, one in get_all_nested_objects(message).items()}
    for _ in range(rng.choice([1, 1, 2])):
        key = rng.choice(sorted(contents))
        contents[key] = flip(contents[key], rng)

    def build() -> Message:
        built: Any = inflate_object_from_contents(message.object_id, dict(contents))
        built.metadata.__dict__["_message_id"] = message.metadata.message_id
        return built  # type: ignore[no-any-return]

    return build
