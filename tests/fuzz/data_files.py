"""Data files of every format, damaged: they are read, or refused with an error that names the file or key."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

from fedkeep import tree
from fedkeep.data import Dataset, load, partition
from fedkeep.data.texts import Texts
from fedkeep.errors import FedkeepError
from fuzz._data_sources import SOURCES, picture

CELLS = [
    "", "0", "1", "-1", "2.5", "nan", "inf", "1e400", "1e308", "9" * 400, "true", "null", "a", "a" * 5000, '"', "\0",
    "\r", "\n", ",", "\ufeff", "é", "\ud7ff", "0x10", "2024-01-01", "1_000", " 1", "9223372036854775808", "-0", "[1,2]",
    "{}",
]  # fmt: skip
NUMBERS = [0, 1, 2, 3, 7, 8, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1]


def try_one(seed: int, folder: Path) -> bool:
    """Damage the files of one source, and load it; return whether that was possible."""
    rng = random.Random(seed)
    name = rng.choice(sorted(SOURCES))
    files, options = SOURCES[name]()
    files = dict(files)
    for target in rng.sample(sorted(files), min(len(files), rng.choice([0, 1, 1, 1, 1, 2, 3]))):
        files[target] = damaged(rng, target, files[target])
    if rng.random() < 0.05:
        files.pop(rng.choice(sorted(files)))
    place = folder / "data"
    shutil.rmtree(place, ignore_errors=True)
    for path, content in files.items():
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_bytes(content)
    source = place / name if "." in name else place
    source.parent.mkdir(parents=True, exist_ok=True)
    try:
        data = load(source, **options, max_gb=0.2)
    except FedkeepError as error:
        require_named(error)
        return False
    require_sound(data)
    return True


def require_named(error: FedkeepError) -> None:
    """Fail unless an error says where: one line, with a key or a file."""
    text = str(error)
    assert "\n" not in text
    assert 0 < len(text) < 5000, text
    assert error.key, text


def require_sound(data: Dataset) -> None:
    """Fail unless what was accepted can be trained on."""
    for x, y in ((data.x_train, data.y_train), (data.x_test, data.y_test)):
        assert len(y)
        assert 0 <= int(y.min()) <= int(y.max()) < data.n_classes
        for leaf in tree.leaves(x):
            assert len(leaf) == len(y)
            if isinstance(leaf, Texts):
                assert 0 <= int(leaf.tokens.min()) <= int(leaf.tokens.max()) < leaf.form.vocabulary
                assert 0 < int(leaf.length.min()) <= int(leaf.length.max()) <= leaf.form.max_length
                continue
            assert not leaf.is_floating_point() or bool(torch.isfinite(leaf).all())
    if data.ids is not None:
        assert sum(len(own) for own in partition.by_id(data.ids)) == len(data.y_train)


# Damage


def damaged(rng: random.Random, path: str, content: bytes) -> bytes:
    """Return a file's content damaged: its bytes, or what is packed in it."""
    inside = next((change for suffix, change in INSIDE.items() if path.endswith(suffix)), None)
    if inside is None or rng.random() < 0.3:
        return with_other_bytes(rng, content)
    changed = inside(rng, content)
    return with_other_bytes(rng, changed) if rng.random() < 0.1 else changed


def with_other_bytes(rng: random.Random, content: bytes) -> bytes:
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 5, 20])):
        at, kind = rng.randrange(len(data) + 1), rng.randrange(8)
        if kind <= 1 and at < len(data):
            data[at] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256), data[at] ^ (1 << rng.randrange(8))])
        elif kind == 2:
            del data[at : at + rng.choice([1, 2, 4, 16, 1000])]
        elif kind == 3:
            data[at:at] = rng.randbytes(rng.choice([1, 4, 100]))
        elif kind == 4:
            number = struct.pack(rng.choice("<>") + "I", rng.choice(NUMBERS))
            data[at : at + 4] = number
        elif kind == 5:
            data[at:at] = data[: rng.choice([4, 64, 1000])]
        elif kind == 6:
            data[at : at + 64] = bytes(len(data[at : at + 64]))
        elif rng.random() < 0.2:
            del data[at:]
    return bytes(data)


def in_gzip(rng: random.Random, content: bytes) -> bytes:
    return gzip.compress(with_other_bytes(rng, gzip.decompress(content)), mtime=0)


def in_npz(rng: random.Random, content: bytes) -> bytes:
    """Change arrays, or the bytes of their files, in a sound archive."""
    with np.load(io.BytesIO(content)) as file:
        arrays = {name: file[name] for name in file.files}
    name, out = rng.choice(sorted(arrays)), io.BytesIO()
    if rng.random() < 0.6:
        arrays[name] = other_array(rng, arrays[name])
        np.savez(out, **arrays)
        return out.getvalue()
    with zipfile.ZipFile(out, "w", rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])) as archive:
        for other, array in arrays.items():
            raw = io.BytesIO()
            np.save(raw, array)
            data = with_other_bytes(rng, raw.getvalue()) if other == name else raw.getvalue()
            archive.writestr(rng.choice([f"{other}.npy"] * 9 + [other, f"../{other}.npy"]), data)
    return out.getvalue()


def other_array(rng: random.Random, array: np.ndarray) -> np.ndarray:
    changes: list[Callable[[], Any]] = [
        lambda: array.reshape(-1)[:0],
        lambda: array.reshape(-1)[:1],
        lambda: array.sum() if array.dtype.kind in "iuf" else np.array("a"),
        lambda: array.reshape(-1),
        lambda: array[None],
        lambda: array.astype(str),
        lambda: array.astype("S3"),
        lambda: np.where(np.arange(array.size).reshape(array.shape) == 1, np.nan, 1.0),
        lambda: np.full(array.shape, np.inf),
        lambda: np.zeros(array.shape, complex),
        lambda: np.zeros(array.shape, bool),
        lambda: np.full(array.shape, rng.choice([-1, 0, 10_000, 2**40, 2**63 - 1, -(2**63)])),
        lambda: np.full(array.shape, 2**64 - 1, np.uint64),
        lambda: np.zeros(array.shape, "M8[s]"),
        lambda: np.zeros(array.shape, [("a", "i4"), ("b", "f4")]),
        lambda: np.zeros(array.shape, np.longdouble),
        lambda: np.zeros(array.shape, ">f8"),
        lambda: np.zeros((0, 5)),
        lambda: np.zeros((*array.shape, 0)),
    ]
    return np.asarray(rng.choice(changes)())


def in_csv(rng: random.Random, content: bytes) -> bytes:
    rows = list(csv.reader(io.StringIO(content.decode())))
    for _ in range(rng.choice([1, 2, 5])):
        row = rng.choice(rows)
        kind = rng.randrange(5)
        if kind <= 2 and row:
            row[rng.randrange(len(row))] = rng.choice(CELLS)
        elif kind == 3:
            row.insert(rng.randrange(len(row) + 1), rng.choice(CELLS))
        elif row:
            row.pop()
    separator, quoting = rng.choice(",,,;\t"), rng.random() < 0.5
    lines = [separator.join(f'"{cell}"' if quoting and cell.isprintable() else cell for cell in row) for row in rows]
    return rng.choice(["\n", "\n", "\r\n", "\r"]).join(lines).encode("utf-8", "surrogatepass")


def in_csv_gz(rng: random.Random, content: bytes) -> bytes:
    return gzip.compress(in_csv(rng, gzip.decompress(content)), mtime=0)


def in_json(rng: random.Random, content: bytes) -> bytes:
    """Replace a value somewhere in the document, or a piece of its text."""
    if rng.random() < 0.3:
        text = content.decode()
        at = rng.randrange(len(text))
        return (text[:at] + rng.choice([*CELLS, "[" * 5000, "{" * 5000, '"x":']) + text[at + 1 :]).encode()
    value = json.loads(content)
    inside, key = value, rng.choice(list(value))
    while isinstance(inside[key], dict | list) and inside[key] and rng.random() < 0.8:
        inside = inside[key]
        key = rng.choice(list(inside)) if isinstance(inside, dict) else rng.randrange(len(inside))
    inside[key] = rng.choice([None, True, -1, 2.5, 10**30, float("nan"), float("inf"), "a", "", [], {}, [[]], [1, "a"]])
    return json.dumps(value).encode()


def in_parquet(rng: random.Random, content: bytes) -> bytes:
    """Write the table again with another column, type, note or encoding."""
    table, out = pq.read_table(io.BytesIO(content)), io.BytesIO()
    name, n = rng.choice(table.column_names), table.num_rows
    columns = [
        lambda: pa.nulls(n),
        lambda: pa.array([rng.choice(CELLS).encode("utf-8", "replace").decode() for _ in range(n)]),
        lambda: pa.array([rng.choice([0, 1, None]) for _ in range(n)], pa.int32()),
        lambda: pa.array([float(rng.choice([0, 1, 2.5, float("nan"), float("inf"), 1e308])) for _ in range(n)]),
        lambda: pa.array([rng.randbytes(5) for _ in range(n)]),
        lambda: pa.array([rng.randbytes(5) for _ in range(n)], pa.binary(5)),
        lambda: pa.array([[1] * rng.choice([0, 1, 2]) for _ in range(n)]),
        lambda: pa.array([[[1, 2]]] * n),
        lambda: pa.array([[[[0.5] * 2] * 2] * 3] * n),
        lambda: pa.array([{"bytes": rng.choice([None, b"", picture()]), "path": rng.choice(PATHS)} for _ in range(n)]),
        lambda: pa.array([{"bytes": rng.randrange(3)} for _ in range(n)]),
        lambda: pa.array([True] * n),
        lambda: pa.array([rng.choice(["a", "b"]) for _ in range(n)]).dictionary_encode(),
        lambda: pa.array([rng.choice([-1, 2**62, 2**31]) for _ in range(n)]),
        lambda: pa.array([2**64 - 1] * n, pa.uint64()),
        lambda: pa.array([0] * n, pa.timestamp("s")),
        lambda: pa.array([0] * n, pa.decimal128(10, 2)),
        lambda: pa.array([0.5] * n, pa.float16()),
        lambda: pa.array(["a" * 50_000] * n, pa.large_string()),
        lambda: pa.array([{}] * n, pa.map_(pa.string(), pa.int8())),
    ]
    kind = rng.randrange(6)
    if kind <= 3:
        table = table.set_column(table.column_names.index(name), name, rng.choice(columns)())
    elif kind == 4:
        table = rng.choice(
            [table.slice(0, 0), table.drop_columns([name]), table.append_column(name, table.column(name))]
        )
    note = {"info": {"features": {"label": {"names": rng.choice([["a", "b"], ["a"], 5, [None], "ab", {}])}}}}
    text = rng.choice([json.dumps(note), "[" * 50_000, "{", json.dumps([1]), '{"info": 5}', "\0"])
    if rng.random() < 0.3:
        table = table.replace_schema_metadata({"huggingface": text})
    pq.write_table(
        table, out, compression=rng.choice(["NONE", "SNAPPY", "GZIP", "ZSTD"]), use_dictionary=rng.random() < 0.5
    )
    return out.getvalue()


def in_png(rng: random.Random, content: bytes) -> bytes:
    """Change a chunk of a PNG, with a right checksum, or write an image of another kind."""
    if rng.random() < 0.3:
        out = io.BytesIO()
        mode = rng.choice(["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
        Image.new(mode, rng.choice([(8, 8), (1, 1), (8, 9), (300, 2)])).save(out, "PNG")
        return out.getvalue()
    if rng.random() < 0.3:
        out, kind = io.BytesIO(), rng.choice(["JPEG", "BMP", "WEBP", "PPM", "GIF", "TIFF", "ICO", "PCX", "TGA", "EPS"])
        Image.new("RGB", (8, 8)).save(out, kind)
        return with_other_bytes(rng, out.getvalue()) if rng.random() < 0.7 else out.getvalue()
    chunks, at = [], 8
    while at + 12 <= len(content):
        length = int.from_bytes(content[at : at + 4], "big")
        chunks.append((content[at + 4 : at + 8], content[at + 8 : at + 8 + length]))
        at += 12 + length
    which = rng.randrange(len(chunks))
    name, data = chunks[which]
    if name == b"IDAT" and rng.random() < 0.7:
        data = zlib.compress(with_other_bytes(rng, zlib.decompress(data)))
    elif name == b"IHDR" and rng.random() < 0.7:
        data = struct.pack(">II", rng.choice([0, 1, 8, *NUMBERS]), rng.choice([0, 1, 8, *NUMBERS])) + data[8:]
    else:
        data = with_other_bytes(rng, data)
    chunks[which] = (rng.choice([name] * 5 + [b"tEXt", b"zTXt", b"acTL", b"PLTE", b"tRNS"]), data)
    pieces = [struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in chunks]
    return content[:8] + b"".join(pieces)


def in_text(rng: random.Random, content: bytes) -> bytes:
    lines = content.decode().splitlines()
    lines[rng.randrange(len(lines))] = rng.choice(
        ["", "\t", "1.png", f"{rng.choice(PATHS)}\tb", "1.png\tc", "1.png\ta\0"]
    )
    return "\n".join(lines).encode()


INSIDE: dict[str, Callable[[random.Random, bytes], bytes]] = {
    ".npz": in_npz,
    ".csv": in_csv,
    ".csv.gz": in_csv_gz,
    ".parquet": in_parquet,
    ".json": in_json,
    ".png": in_png,
    "ubyte.gz": in_gzip,
    ".txt": in_text,
}
PATHS = [None, "", "1.png", "../1.png", "/etc/passwd", "a" * 300, ".", "a\0b", "~", "val"]
