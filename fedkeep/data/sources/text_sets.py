"""Text data sets by name: SST-5 (Socher et al. 2013) and AG News (Zhang et al. 2015)."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from fedkeep.data.sources import csv_files, tables
from fedkeep.data.sources.common import Missing, Options, Raw
from fedkeep.errors import DataError

log = logging.getLogger("fedkeep")

SST5_CLASSES = ("very negative", "negative", "neutral", "positive", "very positive")
AG_NEWS_CLASSES = ("World", "Sports", "Business", "Sci/Tech")
OPTIONS = ("tokenizer", "max_length")
_AG_NEWS_TRAIN = 120_000  # texts of the whole set
_AG_NEWS_COLUMNS = ("label", "title", "description")  # of the files of Zhang et al., which have no header


def read_sst5(path: Path, options: Options) -> Raw:
    """Read train* and test*, with the columns label (0, very negative, to 4, very positive) and text."""
    options.reject_except("sst5", *OPTIONS)
    train, test = _require_files(path)
    return tables.read_files(train, test, replace(options, text="text", y="label"), "sst5")


def read_ag_news(path: Path, options: Options) -> Raw:
    """Read train* and test*: the columns label (0 to 3) and text, or Zhang's csv files (1 to 4, without a header)."""
    options.reject_except("ag_news", *OPTIONS)
    parts = [_ag_news_table(one, options) for one in _require_files(path)]
    raw = tables.from_tables(parts[0], parts[1], replace(options, text="text", y="label"), "ag_news")
    if (n := len(raw.train.y)) < _AG_NEWS_TRAIN:
        log.warning("ag_news: %d of %d training texts are in %s", n, _AG_NEWS_TRAIN, path)
    return raw


def _require_files(path: Path) -> tuple[list[Path], list[Path]]:
    train, test = tables.find_files(path)
    for name, files in (("train", train), ("test", test)):
        if not files:
            raise Missing(f"there is no table {path / name}.parquet, .csv, .csv.gz or .jsonl", key=str(path / name))
    return train, test or []


def _ag_news_table(paths: list[Path], options: Options) -> tables.Table:
    """Return a table with the columns label, from 0, and text."""
    if not paths[0].name.lower().endswith((".csv", ".csv.gz")) or csv_files.header(paths[0])[0] == "label":
        return tables.read(paths, replace(options, text="text", y="label"))
    table = tables.read(paths, options, _AG_NEWS_COLUMNS)
    label = table.arrow.column("label").to_numpy()
    if label.dtype.kind not in "iu":
        raise DataError(f"{table.name}: the first column must hold the classes 1 to 4", key=table.name)
    title, text = (table.arrow.column(name).to_pylist() for name in _AG_NEWS_COLUMNS[1:])
    joined = [f"{one or ''} {other or ''}" for one, other in zip(title, text, strict=True)]
    return tables.from_columns({"label": label - 1, "text": joined}, table.name)
