"""Files made to do harm: they unpack to too much, are something else than they say, or name files elsewhere."""

from __future__ import annotations

import gzip
import io
import json
import os
import struct
import tracemalloc
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.errors import raises

from fedkeep.data import from_arrays, load, partition
from fedkeep.data.augment import Augment
from fedkeep.data.sources.common import MAX_PIXELS, Missing
from fedkeep.errors import DataError, FedkeepError, PartitionError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
image = pytest.importorskip("PIL.Image")

SMALL = {"max_gb": 0.01}  # 10 MB


@contextmanager
def memory_below(megabytes: float) -> Iterator[None]:
    """Expect Python and numpy to take at most this much memory; Arrow's is added at the end."""
    arrow = pa.total_allocated_bytes()
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1] + pa.total_allocated_bytes() - arrow
    finally:
        tracemalloc.stop()
    assert peak < megabytes * 1e6


def png(path: Path, width: int, height: int) -> Path:
    """Write a black 1-bit image, which compresses to a thousandth."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    pack = zlib.compressobj(9)
    row = b"\0" * (1 + (width + 7) // 8)
    data = b"".join(pack.compress(row) for _ in range(height)) + pack.flush()
    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b""))
    return path


def image_folder(path: Path) -> Path:
    for part in ("train", "test"):
        for name in ("a", "b"):
            png(path / part / name / "1.png", 8, 8)
    return path


# Memory


def test_a_packed_array(tmp_path: Path) -> None:
    arrays = {"y_train": np.arange(2), "x_test": np.zeros((2, 1)), "y_test": np.arange(2)}
    np.savez_compressed(tmp_path / "bomb.npz", x_train=np.zeros((2, 20_000_000), np.uint8), **arrays)
    assert (tmp_path / "bomb.npz").stat().st_size < 100_000
    with memory_below(20), raises(DataError, "max_gb", mentions=["bomb.npz"]):
        load(tmp_path / "bomb.npz", **SMALL)


def test_arrays_that_are_not_used_are_not_read(tmp_path: Path) -> None:
    arrays = {"x_train": np.zeros((2, 1)), "y_train": np.arange(2), "x_test": np.zeros((2, 1)), "y_test": np.arange(2)}
    np.savez_compressed(tmp_path / "more.npz", **arrays, notes=np.zeros(20_000_000, np.uint8))
    with memory_below(5):
        assert len(load(tmp_path / "more.npz", **SMALL).y_train) == 2


def test_a_header_that_promises_too_much(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "lie.npz", "w") as archive:
        for name in ("x_train", "y_train", "x_test", "y_test"):
            head = io.BytesIO()
            np.lib.format.write_array_header_1_0(head, {"descr": "<f8", "fortran_order": False, "shape": (2**50,)})
            archive.writestr(f"{name}.npy", head.getvalue())
    with raises(DataError, str(tmp_path / "lie.npz")):
        load(tmp_path / "lie.npz")


def idx(path: Path, shape: tuple[int, ...], data: bytes, kind: int = 8) -> None:
    path.write_bytes(gzip.compress(bytes([0, 0, kind, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + data))


@pytest.mark.parametrize(
    ("shape", "extra", "key"),
    [
        ((4, 5000, 1000), 0, "max_gb"),
        ((4, 2, 2), 20_000_000, None),
        ((2**32 - 1,) * 3, 0, "max_gb"),
        ((1,) * 70, 0, None),
    ],
)
def test_a_packed_idx_file(tmp_path: Path, shape: tuple[int, ...], extra: int, key: str | None) -> None:
    for part in ("train", "t10k"):
        idx(tmp_path / f"{part}-labels-idx1-ubyte.gz", (4,), bytes([0, 1, 0, 1]))
        size = min(int(np.prod(np.array(shape, float))), 20_000_000)
        idx(tmp_path / f"{part}-images-idx3-ubyte.gz", shape, bytes(size + extra))
    path = tmp_path / "train-images-idx3-ubyte.gz"
    with memory_below(60), raises(DataError, key or str(path), mentions=[path.name]):
        load(tmp_path, **SMALL)


def test_a_packed_csv_file(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "bomb.csv.gz", "wt") as file:
        file.write("x,y\n")
        for _ in range(40):
            file.write("0,1\n" * 100_000)
    with raises(DataError, "max_gb", mentions=["bomb.csv.gz"]):
        load(tmp_path / "bomb.csv.gz", **SMALL)


def test_a_text_that_parquet_repeats(tmp_path: Path) -> None:
    """Stored once, 5 kB; 100,000 rows of it need 500 MB."""
    table = pa.table({"x": np.zeros(100_000), "y": np.arange(100_000) % 2, "who": ["w" * 5000] * 100_000})
    pq.write_table(table, tmp_path / "bomb.parquet")
    del table
    assert (tmp_path / "bomb.parquet").stat().st_size < 1_000_000
    with memory_below(150), raises(DataError, "max_gb", mentions=["bomb.parquet"]):
        load(tmp_path / "bomb.parquet", x="x", y="y", ids="who", max_gb=0.1)


def test_a_column_that_parquet_repeats(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": np.zeros(3_000_000), "y": np.zeros(3_000_000, int)}), tmp_path / "bomb.parquet")
    assert (tmp_path / "bomb.parquet").stat().st_size < 100_000
    with memory_below(20), raises(DataError, "max_gb", mentions=["bomb.parquet"]):
        load(tmp_path / "bomb.parquet", **SMALL)


def test_one_long_id_does_not_make_the_others_longer(tmp_path: Path) -> None:
    """100,000 rows and one id of 5,000 letters: an array of strings would take 2 GB."""
    names = ["w" * 5000, *(f"w{i % 100}" for i in range(99_999))]
    (tmp_path / "ids.csv").write_text("x,y,who\n" + "".join(f"{i},{i % 2},{w}\n" for i, w in enumerate(names)))
    with memory_below(200):
        data = load(tmp_path / "ids.csv", x="x", y="y", ids="who")
        clients = partition.by_id(data.ids)
        left = data.drop_small_owners(2).with_public(3, by_id=True)
    assert len(clients) in (100, 101)
    assert len(set(left.ids.tolist())) == 97
    with memory_below(200):
        small = from_arrays(np.zeros((100_000, 1)), np.arange(100_000) % 2, np.zeros((2, 1)), [0, 1], ids=names)
        assert len(partition.by_id(names)) == len(partition.by_id(small.ids)) == 101


@pytest.mark.parametrize(("width", "height"), [(13_300, 13_300), (8193, 8192), (200_000, 200_000)])
def test_an_image_of_too_many_pixels(tmp_path: Path, width: int, height: int) -> None:
    if width * height > 2e8:  # its header alone is enough
        path = png(image_folder(tmp_path) / "train" / "a" / "1.png", 8, 8)
        damaged = bytearray(path.read_bytes())
        damaged[16:24] = struct.pack(">II", width, height)
        damaged[29:33] = struct.pack(">I", zlib.crc32(bytes(damaged[12:29])))
        path.write_bytes(damaged)
    else:
        path = png(image_folder(tmp_path) / "train" / "a" / "1.png", width, height)
    assert path.stat().st_size < 100_000
    with memory_below(50), raises(DataError, str(path), valid=[MAX_PIXELS]):
        load(tmp_path)


def test_many_large_images(tmp_path: Path) -> None:
    for part in ("train", "test"):
        for name in ("a", "b"):
            png(tmp_path / part / name / "1.png", 3000, 3000)
    with raises(DataError, "max_gb"):
        load(tmp_path, **SMALL)
    assert load(tmp_path, size=(4, 4), **SMALL).x_train.shape == (2, 1, 4, 4)


def test_a_size_of_too_many_pixels() -> None:
    with raises(DataError, "size", (10**9, 10**9)):
        load("digits", size=(10**9, 10**9))


@pytest.mark.parametrize("label", [10_000, 2**40, 2**62])
def test_too_many_classes(tmp_path: Path, label: int) -> None:
    (tmp_path / "t.csv").write_text("x,y\n" + "1,0\n" * 8 + f"2,{label}\n" * 8)
    with raises(DataError, "y_train", label, mentions=["t"]):
        load(tmp_path / "t.csv")
    with raises(DataError, "n_classes"):
        from_arrays(np.zeros((4, 1)), [0, 1, 0, 1], np.zeros((2, 1)), [0, 1], n_classes=10**12)


def test_many_columns(tmp_path: Path) -> None:
    """Time is linear in their number; it was quadratic, with 40 seconds for this table."""
    names = ",".join(f"gene{i}" for i in range(6000))
    (tmp_path / "wide.csv").write_text(f"{names},y\n" + "".join("0," * 6000 + f"{c}\n" for c in (0, 1, 0, 1, 0, 1)))
    assert load(tmp_path / "wide.csv").x_train.shape == (4, 6000)


@pytest.mark.parametrize("key", ["crop", "cutout"])
def test_an_augmentation_of_too_many_pixels(key: str) -> None:
    with raises(DataError, f"augment.{key}", 2**31):
        Augment(**{key: 2**31})


# What a file is


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"


def disguised() -> dict[str, bytes]:
    """Return images of formats that are not read, by name."""
    files = {"eps": EPS}
    for kind in ("TIFF", "ICO", "PCX", "TGA", "GIF"):
        stream = io.BytesIO()
        image.new("L", (16, 16)).save(stream, kind)
        files[kind.lower()] = stream.getvalue()
    return files


@pytest.mark.parametrize("kind", ["eps", "tiff", "ico", "pcx", "tga", "gif"])
def test_another_format_under_the_name_png(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*args: Any, **kwargs: Any) -> None:
        pytest.fail("a program was started")

    monkeypatch.setattr("subprocess.Popen", start)
    monkeypatch.setattr("subprocess.check_call", start)
    path = image_folder(tmp_path) / "train" / "a" / "1.png"
    path.write_bytes(disguised()[kind])
    with raises(DataError, str(path), valid=["PNG", "JPEG", "BMP", "WEBP", "PPM"]):
        load(tmp_path)


def test_a_pipe_is_not_read(tmp_path: Path) -> None:
    path = image_folder(tmp_path) / "train" / "a" / "2.png"
    os.mkfifo(path)
    with raises(DataError, str(path)):
        load(tmp_path)
    os.mkfifo(tmp_path / "x.csv")
    with raises(Missing, str(tmp_path / "x.csv")):
        load(tmp_path / "x.csv")


# Paths that leave the folder


@pytest.mark.parametrize("name", ["../secret.png", "/SECRET", "a/../../secret.png", "..", "", ".", "a\0.png"])
def test_paths_in_tables_stay_in_the_folder(tmp_path: Path, name: str) -> None:
    secret = png(tmp_path / "secret.png", 8, 8)
    name = name.replace("/SECRET", str(secret))
    folder = tmp_path / "data"
    png(folder / "good.png", 8, 8)
    rows = [{"bytes": None, "path": "good.png"}, {"bytes": None, "path": name}]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table({"image": pa.array(rows, kind), "label": [0, 1]})
    for part in ("train", "test"):
        pq.write_table(table, folder / f"{part}.parquet")
    with raises(DataError) as caught:
        load(folder)
    assert "train.parquet, row 1" in str(caught.value)


def test_paths_within_the_folder_are_read(tmp_path: Path) -> None:
    inside = [png(tmp_path / "images" / f"{i}.png", 8, 8) for i in range(2)]
    rows = [{"bytes": None, "path": "images/../images/0.png"}, {"bytes": None, "path": str(inside[1].absolute())}]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    for part in ("train", "test"):
        pq.write_table(pa.table({"image": pa.array(rows, kind), "label": [0, 1]}), tmp_path / f"{part}.parquet")
    assert load(tmp_path).x_train.shape == (2, 1, 8, 8)


@pytest.mark.parametrize("name", ["../../../secret.png", "/etc/passwd"])
def test_paths_in_annotations_stay_in_the_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "tiny"
    png(tmp_path / "secret.png", 8, 8)
    for c in ("n1", "n2"):
        png(folder / "train" / c / "images" / "1.png", 8, 8)
    png(folder / "val" / "images" / "1.png", 8, 8)
    (folder / "val" / "val_annotations.txt").write_text(f"1.png\tn1\n{name}\tn2\n")
    with raises(DataError, value=name, mentions=["val_annotations.txt, line 2"]):
        load(folder)


# Errors that reached the user as tracebacks


@pytest.mark.parametrize(
    ("source", "options", "key"),
    [
        ("~nouser-of-this-name/x", {}, "source"),
        ("a" * 300, {}, "a" * 300),
        (f"{'a' * 300}.npz", {}, f"{'a' * 300}.npz"),
        ("", {}, "source"),
        ("mnist", {"root": 5}, "root"),
        ("mnist", {"root": "~nouser-of-this-name"}, "root"),
        ("TABLE", {"x": []}, "x"),
        ("TABLE", {"x": 5}, "x"),
        ("TABLE", {"x": ["x", 5]}, "x"),
        ("TABLE", {"y": 5}, "y"),
        ("TABLE", {"ids": 5}, "ids"),
        ("TABLE", {"tokenizer": 5}, "tokenizer"),
        ("TABLE", {"splits": 5}, "splits"),
        ("TABLE", {"first_label": 10**30}, "first_label"),
        ("TABLE", {"test": 10**400}, "test"),
        ("TABLE", {"max_gb": 0}, "max_gb"),
        ("TABLE", {"max_gb": float("nan")}, "max_gb"),
        ("TABLE", {"merge_validation": "yes"}, "merge_validation"),
        ("digits", {"public": 0.1, "validation": 10**400}, "validation"),
        ("digits", {"public": 10**30}, "public"),
        ("digits", {"public": float("nan")}, "public"),
        ("digits", {"mean": [[1], [1, 2]], "std": 1}, "mean"),
        ("digits", {"mean": 10**400, "std": 1}, "mean"),
        ("digits", {"mean": 0, "std": 0}, "std"),
    ],
)
def test_odd_sources_and_options(tmp_path: Path, source: str, options: dict[str, Any], key: str) -> None:
    (tmp_path / "t.csv").write_text("x,y\n" + "1,0\n2,1\n" * 8)
    with raises(DataError, key):
        load(tmp_path / "t.csv" if source == "TABLE" else source, **options)


def test_a_single_number_as_labels(tmp_path: Path) -> None:
    x = np.zeros((2, 1))
    np.savez(tmp_path / "scalar.npz", x_train=x, y_train=np.int64(1), x_test=x, y_test=np.arange(2))
    with raises(DataError, "y_train", mentions=["scalar.npz"]):
        load(tmp_path / "scalar.npz")


def leaf(path: Path, content: str) -> Path:
    for part in ("train", "test"):
        (path / part).mkdir()
        (path / part / "all.json").write_text(content)
    return path


@pytest.mark.parametrize(
    "content",
    [
        json.dumps({"user_data": {"w": {"x": [[0.0] * 784], "y": [1]}}}).replace("[1]", "[1e400]"),
        json.dumps({"user_data": {"w": {"x": [[0.0] * 784], "y": [1]}}}).replace("[1]", f"[{'9' * 5000}]"),
        json.dumps({"user_data": {"w": {"x": [[0.0] * 784], "y": [1.5]}}}),
        json.dumps({"user_data": {"w": {"x": [[0.0] * 784], "y": 1}}}),
        json.dumps({"user_data": {"w": {"x": [[0.0] * 784], "y": [[1]]}}}),
        "[" * 100_000,
        '{"user_data": ' * 100_000,
        "",
    ],
)
def test_odd_leaf_files(tmp_path: Path, content: str) -> None:
    path = leaf(tmp_path, content)
    with raises(DataError, str(path / "test" / "all.json"), mentions=["all.json"]):
        load(path)


def test_a_deep_note_in_a_parquet_file(tmp_path: Path) -> None:
    table = pa.table({"x": [0.0, 1.0] * 8, "y": [0, 1] * 8})
    noted = table.replace_schema_metadata({"huggingface": "[" * 100_000})
    pq.write_table(noted, tmp_path / "t.parquet")
    assert load(tmp_path / "t.parquet").n_classes == 2


def test_an_error_of_the_file_system_names_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "folder").mkdir()
    monkeypatch.setattr(Path, "iterdir", fail)
    with raises(DataError, str(tmp_path / "folder"), mentions=["folder", "Permission denied"]):
        load(tmp_path / "folder")


@pytest.mark.parametrize("error", [MemoryError(), RecursionError("too deep"), OverflowError("too large")])
def test_other_errors_name_the_source_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr("fedkeep.data.sources.cifar.recognises", fail)
    with raises(DataError, str(tmp_path), mentions=[str(tmp_path)]) as caught:
        load(tmp_path)
    assert caught.value.__cause__ is error


# Partitions


@pytest.mark.parametrize(
    ("kind", "arguments", "key"),
    [
        ("iid", {"n_clients": 10**9}, "n_clients"),
        ("iid", {"n_clients": 10**5000}, "n_clients"),
        ("shards", {"n_clients": 2, "s": 10**30}, "s"),
        ("dirichlet", {"n_clients": 2, "alpha": 1e300}, "alpha"),
        ("dirichlet", {"n_clients": 2, "alpha": float("nan")}, "alpha"),
        ("dirichlet", {"n_clients": 2, "alpha": 10**400}, "alpha"),
        ("dirichlet", {"n_clients": 2, "alpha": 0.01, "min_size": -(10**30)}, "min_size"),
        ("dirichlet", {"n_clients": 2, "alpha": 0.01, "tries": 10**9}, "tries"),
        ("dirichlet", {"n_clients": 2, "alpha": 0.01, "group": 10**9 + 0.5}, "group"),
        ("label_quantity", {"n_clients": 2, "k": 10**30}, "k"),
        ("iid", {"n_clients": 2, "seed": -1}, "seed"),
        ("iid", {"n_clients": 2, "seed": 10**400}, "seed"),
    ],
)
def test_extreme_values_of_partitions(kind: str, arguments: dict[str, Any], key: str) -> None:
    with raises(FedkeepError, key):
        partition.KINDS[kind](np.arange(40) % 4, **arguments)


@pytest.mark.parametrize("alpha", [5e-324, 1e-300, 1e-9, 1e9, 1e30])
def test_extreme_but_possible_alphas(alpha: float) -> None:
    clients = partition.dirichlet(np.arange(40) % 4, 2, alpha, min_size=1)
    assert sorted(np.concatenate(list(clients)).tolist()) == list(range(40))


@pytest.mark.parametrize("ids", [[1, "a", None], [{}, {}], [[1], [1, 2]], [object(), object()]])
def test_ids_without_an_order(ids: list[Any]) -> None:
    with raises(PartitionError, "ids"):
        partition.by_id(ids)
