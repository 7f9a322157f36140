"""Sound data files of every format, small, to be damaged."""

from __future__ import annotations

import functools
import gzip
import io
import json
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

Files = dict[str, bytes]  # by their path in the folder


@functools.cache
def picture(value: int = 0, size: int = 8) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.full((size, size), value, np.uint8)).save(out, "PNG")
    return out.getvalue()


def _table() -> dict[str, Any]:
    n = 12
    return {"a": [i / 4 for i in range(n)], "b": list(range(n)), "label": [i % 2 for i in range(n)],
            "who": [f"w{i % 3}" for i in range(n)]}  # fmt: skip


def _csv_text() -> bytes:
    table = _table()
    rows = zip(*table.values(), strict=True)
    return "\n".join([",".join(table), *(",".join(map(str, row)) for row in rows)]).encode()


def _notes() -> list[dict[str, Any]]:
    return [{"note": f"word {i}, \u00e9t\u00e9 {'again ' * i}", "label": "ab"[i % 2]} for i in range(12)]


def _notes_csv() -> bytes:
    rows = (f'"{row["note"]}",{row["label"]}' for row in _notes())
    return "\n".join(["note,label", *rows]).encode()


def _notes_jsonl() -> bytes:
    return "\n".join(map(json.dumps, _notes())).encode()


def _parquet(table: Any) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table(table), out)
    return out.getvalue()


def _npz() -> bytes:
    out, y = io.BytesIO(), np.arange(8) % 2
    x = np.arange(16, dtype=np.float32).reshape(8, 2)
    owners = np.array(["a", "b"] * 4)
    np.savez(out, x_train=x, y_train=y, x_test=x, y_test=y, mean=np.zeros(2), std=np.ones(2), n_classes=2, ids=owners)
    return out.getvalue()


def _idx(shape: tuple[int, ...], data: bytes) -> bytes:
    return bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + data


def _mnist(pack: Callable[[bytes], bytes], suffix: str) -> Files:
    parts = {"images-idx3": _idx((4, 2, 2), bytes(range(16))), "labels-idx1": _idx((4,), bytes([0, 1, 0, 1]))}
    return {f"{p}-{name}-ubyte{suffix}": pack(data) for p in ("train", "t10k") for name, data in parts.items()}


def _cifar() -> Files:
    record = b"".join(bytes([c]) + bytes(3072) for c in range(10))
    return {f"{name}.bin": record for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")}


def _leaf() -> bytes:
    users = {f"w{i}": {"x": [[0.5] * 784] * 2, "y": [i, 1]} for i in range(3)}
    return json.dumps({"users": list(users), "num_samples": [2, 2, 2], "user_data": users}).encode()


def _images() -> Files:
    return {f"{part}/{c}/{i}.png": picture(i) for part in ("train", "test") for c in "ab" for i in range(2)}


def _tiny() -> Files:
    train = {f"train/{c}/images/{i}.png": picture(i) for c in "ab" for i in range(2)}
    val = {f"val/images/{i}.png": picture(i) for i in range(2)}
    return {**train, **val, "val/val_annotations.txt": b"0.png\ta\t0\t0\t7\t7\n1.png\tb\t0\t0\t7\t7\n"}


def _pictures() -> Files:
    rows = [{"bytes": picture(i), "path": None} for i in range(3)] + [{"bytes": None, "path": "1.png"}]
    table = {"image": pa.array(rows), "label": [0, 1, 0, 1]}
    return {"train.parquet": _parquet(table), "test.parquet": _parquet(table), "1.png": picture()}


TABLE = {"x": ["a", "b"], "y": "label", "ids": "who"}
SOURCES: dict[str, Callable[[], tuple[Files, dict[str, Any]]]] = {
    "t.npz": lambda: ({"t.npz": _npz()}, {}),
    "t.csv": lambda: ({"t.csv": _csv_text()}, TABLE),
    "u.csv": lambda: ({"u.csv": _csv_text()}, {}),
    "t.csv.gz": lambda: ({"t.csv.gz": gzip.compress(_csv_text(), mtime=0)}, TABLE),
    "t.parquet": lambda: ({"t.parquet": _parquet(_table())}, TABLE),
    "u.parquet": lambda: ({"u.parquet": _parquet(_table())}, {}),
    "tables": lambda: ({f"{p}.parquet": _parquet(_table()) for p in ("train-0", "train-1", "test")}, TABLE),
    "notes.csv": lambda: ({"notes.csv": _notes_csv()}, {"text": "note", "max_length": 9}),
    "notes.jsonl": lambda: ({"notes.jsonl": _notes_jsonl()}, {"x": "note", "tokenizer": "words:50"}),
    "pictures": lambda: (_pictures(), {}),
    "resized": lambda: (_pictures(), {"size": (4, 4)}),
    "idx": lambda: (_mnist(bytes, ""), {}),
    "packed": lambda: (_mnist(lambda data: gzip.compress(data, mtime=0), ".gz"), {}),
    "cifar": lambda: (_cifar(), {}),
    "leaf": lambda: ({"train/all.json": _leaf(), "test/all.json": _leaf()}, {}),
    "unsplit": lambda: ({"all_data/all.json": _leaf()}, {}),
    "images": lambda: (_images(), {}),
    "coloured": lambda: (_images(), {"size": (5, 6)}),
    "tiny": lambda: (_tiny(), {}),
}
