"""Texts: tokenizers, ragged storage, batches of few widths, and errors of one line."""

from __future__ import annotations

import gzip
import json
import logging
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.errors import raises

import fedkeep as fk
from fedkeep._util.text_form import TextForm
from fedkeep.data import load
from fedkeep.data.augment import InputPipeline
from fedkeep.data.texts import Texts
from fedkeep.data.tokenizers import Words, make_tokenizer
from fedkeep.errors import DataError
from fedkeep.runs.files import fingerprint

FORM = TextForm(max_length=40, vocabulary=100, padding=9, tokenizer="words:100")
LISTS = [[1, 2, 3], [4], list(range(10, 40)), [5, 6]]


@pytest.fixture
def texts() -> Texts:
    return Texts.of(LISTS, FORM)


def write_reviews(path: Path, rows: int = 30, **columns: list) -> Path:
    """Write a csv file of texts about two subjects, with a hospital each."""
    lines = ["review,stars,hospital"]
    lines += [f"{'good' if k % 2 else 'bad'} number {k},{k % 2},h{k % 3}" for k in range(rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


# storage


def test_texts_are_stored_without_padding(texts: Texts) -> None:
    assert len(texts) == 4
    assert texts.tokens.tolist() == [token for one in LISTS for token in one]
    assert texts.tokens.dtype == torch.int16
    assert Texts.of([[40_000]], TextForm(8, 50_000, 0, "t")).tokens.dtype == torch.int32
    assert [texts[k].tolist() for k in range(4)] == LISTS
    assert texts.numel() * texts.element_size() == 2 * 36


@pytest.mark.parametrize("index", [[2, 0], np.array([2, 0]), torch.tensor([2, 0])])
def test_some_texts_share_the_tokens_of_all(texts: Texts, index) -> None:
    some = texts[index]
    assert [some[k].tolist() for k in range(2)] == [LISTS[2], LISTS[0]]
    assert some.tokens is texts.tokens
    assert len(texts[1:]) == 3
    assert len(texts[:0]) == 0


def test_a_batch_is_padded_to_the_longest_of_its_texts(texts: Texts) -> None:
    x = texts[[0, 1]].pad()
    assert x["input_ids"].tolist() == [[1, 2, 3, 9, 9, 9, 9, 9], [4, 9, 9, 9, 9, 9, 9, 9]]
    assert x["attention_mask"].sum(1).tolist() == [3, 1]
    assert (x["input_ids"].dtype, x["attention_mask"].dtype) == (torch.int64, torch.bool)
    assert texts.pad()["input_ids"].shape == (4, 32)
    assert texts.pad(width=2)["input_ids"].tolist() == [[1, 2], [4, 9], [10, 11], [5, 6]]
    assert texts[:0].pad()["input_ids"].shape == (0, 8)
    assert InputPipeline()(texts[[1]], None, 2)["input_ids"].tolist() == [[4, 9]]


@given(st.lists(st.integers(0, 40), max_size=60), st.integers(1, 10))
def test_batches_of_similar_length_hold_every_text_once_and_little_padding(lengths: list[int], size: int) -> None:
    texts = Texts.of([[1] * n for n in lengths], FORM)
    batches = [at.tolist() for at in texts.batches(size)]
    assert sorted(at for batch in batches for at in batch) == list(range(len(lengths)))
    ordered = [lengths[at] for batch in batches for at in batch]
    assert ordered == sorted(lengths, reverse=True)
    for at in batches:
        assert len(at) == 1 or len(at) * texts[at].pad()["input_ids"].shape[1] <= size * FORM.max_length


@pytest.mark.parametrize("most", [1, 7, 8, 64, 100, 512, 4096])
def test_there_are_at_most_eight_widths_and_none_above_the_maximum(most: int) -> None:
    form = TextForm(most, 10, 0, "t")
    widths = {form.width(longest) for longest in range(1, most + 1)}
    assert len(widths) <= 8
    assert max(widths) == most
    assert all(form.width(longest) >= longest for longest in range(1, most + 1))


def test_a_fingerprint_is_of_the_texts_and_not_of_how_they_are_stored(texts: Texts) -> None:
    again = Texts.of([LISTS[2], LISTS[0]], FORM)
    assert fingerprint(texts[[2, 0]]) == fingerprint(again) == fingerprint(Texts.cat([texts[[2]], again[[1]]]))
    assert fingerprint(texts[[0, 2]]) != fingerprint(again)
    assert fingerprint(Texts.of([[1], [2, 3]], FORM)) != fingerprint(Texts.of([[1, 2], [3]], FORM))


# tokenizers


def test_words_are_hashed_without_a_vocabulary() -> None:
    one, other = Words(1000).encode(["The film -- THE film!", "ﬁlm Éclair"], max_length=10)
    assert one[0] == one[4]
    assert one[1] == one[5]
    assert len(one) == 7
    assert len(other) == 2
    assert all(0 < token < 1000 for token in (*one, *other))
    assert Words(1000).encode(["a b c d"], max_length=2) == [Words(1000).encode(["a b"], 9)[0]]
    assert make_tokenizer("words:77").form(5) == TextForm(5, 77, 0, "words:77")
    assert make_tokenizer(None).form(5).tokenizer == "words:16384"


@pytest.mark.parametrize("given", ["words:1", "words:", "words:many", "words:9999999"])
def test_a_number_of_words_that_is_none_raises(given: str) -> None:
    with raises(DataError, "tokenizer"):
        make_tokenizer(given)


# columns


def test_a_column_of_text_is_tokenised_and_travels_through_every_division(tmp_path: Path) -> None:
    path = write_reviews(tmp_path / "a.csv")
    data = load(path, text="review", label="stars", ids="hospital", tokenizer="words:500", max_length=16)
    assert data.input_shape == TextForm(16, 500, 0, "words:500")
    assert (data.n_classes, len(data.x_train), len(data.x_test), data.image) == (2, 24, 6, None)
    good = Words(500).encode(["good"], 1)[0][0]
    assert all((x[0] == good) == bool(y) for x, y in zip(data.x_train, data.y_train, strict=True))
    public = load(path, text="review", label="stars", ids="hospital", tokenizer="words:500", max_length=16, public=0.25)
    assert len(public.x_train) + len(public.public.x) + len(public.public.x_val) == 24
    held = load(path, text="review", label="stars", held_out=0.5, max_length=16)
    assert len(held.x_train) == len(held.x_test) == 12
    by_owner = load(path, text="review", label="stars", ids="hospital", max_length=16, public_ids=1)
    assert len(by_owner.x_train) + len(by_owner.public.x) + len(by_owner.public.x_val) == 24


def test_owners_of_test_texts_become_public_too() -> None:
    x, test = Texts.of([[1], [2], [3], [4]], FORM), Texts.of([[5], [6]], FORM)
    data = fk.data.from_arrays(x, [0, 1, 0, 1], test, [0, 1], ids=[0, 0, 1, 1], test_ids=[0, 1])
    public = data.with_public(1, validation=0, by_id=True).public
    assert sorted(int(one[0]) for one in public.x) in ([1, 2, 5], [3, 4, 6])


def test_classes_are_numbered_alike_in_files_that_lack_some(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\n" + "a note,knee\nanother note,hip\n" * 5)
    assert load(tmp_path / "a.csv").n_classes == 2
    data = load(tmp_path / "a.csv", classes=["heart", "knee", "hip"])
    assert (data.n_classes, set(data.y_train.tolist())) == (3, {1, 2})


def test_several_columns_are_joined(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("title,body,label\none,two three,0\nfour,five,1\n")
    pair = (tmp_path / "a.csv", tmp_path / "a.csv")
    data = load(pair, text=["title", "body"], tokenizer="words:500")
    assert data.x_train[0].tolist() == Words(500).encode(["one two three"], 9)[0]


def test_json_lines_are_a_table(tmp_path: Path) -> None:
    rows = [{"text": f"word {k} " * 50, "label": k % 2} for k in range(20)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, rows[:4])))
    data = load(tmp_path, max_length=8)
    assert (len(data.x_train), len(data.x_test), data.x_train.numel()) == (20, 4, 160)
    (tmp_path / "train.jsonl").write_text('{"text": "a", "label"')
    with raises(DataError, str(tmp_path / "train.jsonl"), mentions=["JSON Lines"]):
        load(tmp_path)


def test_a_text_that_is_cut_is_reported_if_many_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_reviews(tmp_path / "a.csv")
    with caplog.at_level(logging.WARNING, "fedkeep"):
        load(path, text="review", label="stars", max_length=4)
        assert not caplog.records
        load(path, text="review", label="stars", max_length=3)
    [record] = caplog.records
    assert "30 of 30" in record.getMessage()


@pytest.mark.parametrize(
    ("content", "options", "key", "value", "mentions"),
    [
        ("text,label\na,0\nb,1\n", {"label": "lable"}, "y", "lable", ["'lable'", "did you mean label?"]),
        ("text,label\na,0\nb,1\n", {"text": "texts"}, "x", "texts", ["'texts'", "did you mean text?"]),
        ("text,stars\na,0\nb,1\n", {}, "y", None, ["text, stars"]),
        ('text,label\na,0\n" ",1\n"",0\n', {}, "text", 1, ["2 empty texts", "line 3"]),
        ("text,label\n1,0\n2,1\n", {"text": "text"}, "text", "text", ["int64"]),
        ("text,label\na,0\nb,1\n", {"text": "text", "x": "text"}, "text", "text", []),
        ("text,label\na,0\nb,1\n", {"text": ["text", "label"], "y": "label"}, "x", "label", []),
        ("text,label\na,0\nb,1\n", {"text": ["text", "label"]}, "y", None, ["y="]),
        ("text,label\na,0\nb,1\n", {"label": "label", "y": "label"}, "label", "label", []),
        ("text,label\na,x\nb,y\n", {"classes": ["x", "z"]}, None, "y", ["'y'", "x, z"]),
        ("text,label\na,0\nb,2\n", {"classes": ["x", "z"]}, "n_classes", 2, ["label 2"]),
        ("text,label\na,x\nb,\n", {}, "label", 1, ["line 3"]),
        ("text,label\na,x\nb,y\n", {"classes": ["x", "x"]}, "classes", ["x", "x"], []),
        ("text,label\na,0\nb,1\n", {"max_length": 0}, "max_length", 0, []),
        ("text,label\na,0\nb,1\n", {"max_length": 5, "tokenizer": torch.tensor}, "max_length", 5, []),
        ("text,label\na,0\nb,1\n", {"tokenizer": "./nowhere"}, "tokenizer", "./nowhere", []),
        ("text,label\na,0\nb,1\n", {"mean": 1, "std": 1}, "mean", 1, ["texts"]),
    ],
)
def test_bad_input_is_refused_in_one_line(tmp_path: Path, content, options, key, value, mentions) -> None:
    (tmp_path / "a.csv").write_text(content)
    if "tokenizer" in options and isinstance(options["tokenizer"], str):
        pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[text]'")
    with raises(DataError, key or str(tmp_path / "a.csv"), value, mentions=mentions) as caught:
        load((tmp_path / "a.csv", tmp_path / "a.csv"), **options)
    assert "\n" not in str(caught.value)


def test_a_label_of_its_own_in_every_row_is_refused(tmp_path: Path) -> None:
    """As where text and label are interchanged."""
    (tmp_path / "a.csv").write_text("note,ward\n" + "".join(f"note {i},{'xy'[i % 2]}\n" for i in range(30)))
    with raises(DataError, "y", 30, mentions=["30 different labels"]):
        load(tmp_path / "a.csv", text="ward", label="note")


def test_few_examples_of_each_class_need_a_larger_share_for_testing(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,y\n" + "".join(f"{i},{i % 10}\n" for i in range(20)))
    with raises(DataError, "y", 10, mentions=["test=0.3"]):
        load(tmp_path / "a.csv")
    assert len(load(tmp_path / "a.csv", test=0.3).y_test) == 10
    (tmp_path / "b.csv").write_text("a,y\n" + "".join(f"{i},{i + 0.5}\n" for i in range(20)))
    with raises(DataError, mentions=["0.5"]):
        load(tmp_path / "b.csv")


def test_missing_texts_are_to_be_left_out(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    with raises(DataError, "note", 1, mentions=["1 empty cell,"]) as caught:
        load(pa.table({"note": ["a", None, "b"], "ward": [0, 1, 0]}), text="note", label="ward")
    assert "x=" not in str(caught.value), "there is no other column to choose"
    table = pa.table({"note": ["a", None, "b"], "body": ["c", "d", "e"], "ward": [0, 1, 0]})
    with raises(DataError, "note", 1, mentions=["text="]):
        load(table, text=["note", "body"], label="ward")


# data sets by name


def test_sst5_is_read_from_the_files_of_the_hub(tmp_path: Path) -> None:
    folder = tmp_path / "sst5"
    folder.mkdir()
    for part, n in (("train", 10), ("dev", 5), ("test", 5)):
        rows = [{"text": f"a film {k}", "label": k % 5, "label_text": "x"} for k in range(n)]
        (folder / f"{part}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = load("SST-5", root=tmp_path)
    assert (data.name, data.n_classes, len(data.x_train), len(data.x_test)) == ("sst5", 5, 10, 5)
    with raises(DataError, "size"):
        load("sst5", root=tmp_path, size=(8, 8))
    (folder / "test.jsonl").unlink()
    (folder / "dev.jsonl").unlink()
    with raises(DataError, str(folder / "test"), mentions=["hf download SetFit/sst5"]):
        load("sst5", root=tmp_path)


def test_ag_news_is_read_with_and_without_a_header(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "ag_news"
    folder.mkdir()
    rows = [f'"{1 + k % 4}","Title, {k}","text of {k}"' for k in range(8)]
    (folder / "train.csv.gz").write_bytes(gzip.compress("\n".join(rows).encode()))
    (folder / "test.csv").write_text("label,text\n" + "\n".join(f'{k},"Title, {k} text of {k}"' for k in range(4)))
    with caplog.at_level(logging.WARNING, "fedkeep"):
        data = load("ag_news", root=tmp_path)
    assert "8 of 120000" in caplog.text
    assert data.y_train.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [one.tolist() for one in data.x_train[:4]] == [one.tolist() for one in data.x_test]
    (folder / "train.csv.gz").write_bytes(b"\x1f\x8bdamaged")
    with raises(DataError, str(folder / "train.csv.gz")):
        load("ag_news", root=tmp_path)


def test_generated_texts_have_the_form_of_a_data_set() -> None:
    data = load("generated:sst5:100", max_length=32, tokenizer="words:50")
    assert (len(data.x_train), data.n_classes, data.input_shape) == (100, 5, TextForm(32, 50, 0, "words:50"))
    assert 15 < data.x_train.numel() / 100 < 23


@pytest.mark.parametrize(("name", "sizes"), [("sst5", [279, 633, 389, 510, 399]), ("ag_news", [1900] * 4)])
def test_real_texts_are_complete(name: str, sizes: list[int]) -> None:
    folder = os.environ.get("FEDKEEP_TEST_DATA")
    if not folder or not (Path(folder) / name).is_dir():
        pytest.skip(f"FEDKEEP_TEST_DATA names no folder with {name}")
    assert load(name, root=folder).y_test.bincount().tolist() == sizes
