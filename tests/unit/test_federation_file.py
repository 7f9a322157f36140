"""Federation files: splits and cohorts are read back as they were written, and invalid files raise."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.errors import raises

import fedkeep as fk
from fedkeep.data import Partition, partition
from fedkeep.data.federation_file import check_cohorts, format_federation, read_clients, read_cohorts
from fedkeep.engine.cohorts import CohortSequence
from fedkeep.errors import FedkeepError, PartitionError, RunError

PROFILE = settings(derandomize=True, deadline=None, max_examples=50)
COHORTS = st.lists(st.lists(st.integers(0, 30), min_size=1, unique=True), min_size=1, max_size=20)


@st.composite
def splits(draw: Any) -> tuple[Partition, int]:
    """Draw a division of some of n examples, with clients that may have none."""
    n = draw(st.integers(1, 60))
    order = draw(st.permutations(range(n)))
    used = draw(st.integers(1, n))
    cuts = sorted(draw(st.lists(st.integers(0, used), max_size=8)))
    parts = np.split(np.array(order[:used], dtype=np.int64), cuts)
    return Partition.from_parts(parts), n


def write(folder: Path, value: Any) -> Path:
    path = folder / "federation.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


@PROFILE
@given(splits(), COHORTS)
def test_splits_and_cohorts_are_read_back_as_they_were_written(tmp_path_factory, drawn, cohorts) -> None:
    clients, n = drawn
    path = tmp_path_factory.mktemp("written") / "federation.json"
    fk.save_federation(path, clients, cohorts, np.zeros(n))
    again = partition.from_file(np.zeros(n), path)
    assert np.array_equal(again.indices, clients.indices)
    assert np.array_equal(again.offsets, clients.offsets)
    assert read_cohorts(path) == tuple(tuple(sorted(cohort)) for cohort in cohorts)
    assert json.loads(path.read_text())["clients"] == [own.tolist() for own in clients]


@PROFILE
@given(splits(), COHORTS)
def test_writing_what_was_read_gives_the_same_file(tmp_path_factory, drawn, cohorts) -> None:
    path = tmp_path_factory.mktemp("written") / "federation.json"
    text = format_federation(drawn[0], check_cohorts(cohorts))
    path.write_text(text)
    assert format_federation(read_clients(path, np.zeros(drawn[1])), read_cohorts(path)) == text


def test_a_split_of_other_labels_is_refused(tmp_path: Path) -> None:
    """As many examples, but others: what a public set that another seed has drawn leaves for training."""
    path = tmp_path / "federation.json"
    fk.save_federation(path, [[0, 1], [2]], y=np.array([0, 1, 1]))
    assert len(partition.from_file([0, 1, 1], path)) == 2
    with raises(PartitionError, key="file", mentions=["federation.json", "data.seed"]):
        partition.from_file([1, 0, 1], path)


def test_either_part_alone_is_enough_and_the_other_is_then_missed(tmp_path: Path) -> None:
    path = tmp_path / "federation.json"
    fk.save_federation(path, cohorts=np.array([[1, 0], [2, 1]]))
    assert read_cohorts(path) == ((0, 1), (1, 2))
    with raises(PartitionError, key="file", mentions=["federation.json", "clients"]):
        read_clients(path, np.zeros(3))
    fk.save_federation(path, clients=[[0, 2], [], [1]])
    assert read_clients(path, np.zeros(3)).sizes.tolist() == [2, 0, 1]
    with raises(FedkeepError, key="cohorts", mentions=["federation.json", "cohorts"]):
        read_cohorts(path)
    with raises(FedkeepError, key="clients"):
        fk.save_federation(path)
    with raises(PartitionError, key="clients", value=3):
        fk.save_federation(path, clients=[[0, 3]], y=np.zeros(3))


@pytest.mark.parametrize(
    ("value", "mentions"),
    [
        ({"clients": [[0, 1], [2, 5]]}, ["client 1", "5", "0 to 4"]),
        ({"clients": [[0, 1], [1, 2]]}, ["example 1", "clients 0 and 1", "overlap"]),
        ({"clients": [[0, 0], [2]]}, ["example 0", "overlap"]),
        ({"clients": [[0, -1]]}, ["client 0", "-1"]),
        ({"clients": [[0, 1.0]]}, ["client 0", "1.0"]),
        ({"clients": [[0, True]]}, ["client 0", "True"]),
        ({"clients": [[0, "1"]]}, ["client 0"]),
        ({"clients": [[0], 1]}, ["client 1", "1"]),
        ({"clients": [0, 1, 1]}, ["client 0"]),
        ({"clients": [[0, 2**70]]}, ["client 0"]),
        ({"clients": []}, ["clients"]),
        ({"clients": [[], []]}, ["no client"]),
        ({"clients": {"0": [1]}}, ["clients"]),
        ({"examples": 6, "clients": [[0]]}, ["6", "5"]),
        ({"clients": [[0]], "cohort": [[0]]}, ["cohort", "cohorts"]),
        ([[0], [1]], ["clients"]),
        ("{", ["JSON"]),
        ("[" * 100_000, ["JSON"]),
    ],
)
def test_an_invalid_split_names_the_file_and_what_is_wrong(tmp_path: Path, value: Any, mentions: list[str]) -> None:
    path = write(tmp_path, value)
    with raises(PartitionError, key="file", mentions=[str(path), *mentions]):
        partition.from_file(np.zeros(5), path)


def test_overlap_allows_examples_that_several_clients_hold(tmp_path: Path) -> None:
    path = write(tmp_path, {"clients": [[0, 1], [1, 2, 2]]})
    assert partition.from_file(np.zeros(5), path, overlap=True).indices.tolist() == [0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("value", "mentions"),
    [
        ({"cohorts": [[0], []]}, ["round 2"]),
        ({"cohorts": [[0], [1, 0, 1]]}, ["round 2", "client 1"]),
        ({"cohorts": [[0], [-1]]}, ["round 2", "-1"]),
        ({"cohorts": [[0.5]]}, ["round 1", "0.5"]),
        ({"cohorts": [0, 1]}, ["round 1"]),
        ({"cohorts": []}, ["cohorts"]),
        ({"cohorts": "all"}, ["cohorts"]),
    ],
)
def test_invalid_cohorts_name_the_file_and_the_round(tmp_path: Path, value: Any, mentions: list[str]) -> None:
    path = write(tmp_path, value)
    with raises(FedkeepError, key="cohorts", mentions=[str(path), *mentions]):
        read_cohorts(path)
    with raises(FedkeepError, key="cohorts"):
        fk.Settings(cohorts=value["cohorts"] if value["cohorts"] != "all" else 3)


def test_files_that_cannot_be_read_raise(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.json", tmp_path):
        with raises(PartitionError, key="file", mentions=[str(path)]):
            read_clients(path, np.zeros(3))
        with raises(FedkeepError, key="cohorts", mentions=[str(path)]):
            read_cohorts(path)
    os.mkfifo(tmp_path / "pipe")
    with raises(PartitionError, key="file"):
        read_clients(tmp_path / "pipe", np.zeros(3))
    with raises(PartitionError, key="file", value=3):
        partition.from_file(np.zeros(5), 3)
    with raises(RunError):
        fk.save_federation(tmp_path, [[0]])


def test_cohorts_that_do_not_fit_the_run_raise(tmp_path: Path) -> None:
    path = write(tmp_path, {"cohorts": [[0, 1], [2, 3]]})
    few = fk.Settings(rounds=3, cohorts=path)
    assert few.cohorts == str(path)
    with raises(FedkeepError, key="cohorts", value=2, mentions=[str(path), "rounds = 3"]):
        CohortSequence.of(few, 4)
    with raises(FedkeepError, key="cohorts", value=3, mentions=[str(path), "round 2", "0 to 2"]):
        CohortSequence.of(fk.Settings(rounds=2, cohorts=path), 3)
    with raises(FedkeepError, key="hostile"):
        CohortSequence.of(fk.Settings(rounds=2, cohorts=path, aggregation="median"), 4)
    with raises(FedkeepError, key="cohorts"):
        fk.Settings(cohorts=[[0]], dp_clip=1.0, dp_noise=1.0)


def test_rounds_after_the_given_ones_are_drawn() -> None:
    cohorts = CohortSequence.of(fk.Settings(rounds=2, cohorts=[[0, 1], [3], [5, 4, 2]], participation=99), 6)
    assert cohorts.all() == [[0, 1], [3]]
    assert cohorts.sampled(3) == [2, 4, 5]
    assert len(set(cohorts.sampled(4))) == 3
    assert cohorts.fingerprint == CohortSequence.of(fk.Settings(rounds=2, cohorts=((1, 0), (3,))), 4).fingerprint


NUMBERS = st.none() | st.booleans() | st.integers(-3, 9) | st.floats(allow_nan=False) | st.text(max_size=3)
ANYTHING = st.recursive(NUMBERS, lambda inner: st.lists(inner, max_size=4), max_leaves=12)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.dictionaries(st.sampled_from(["examples", "clients", "cohorts", "other"]), ANYTHING, max_size=4))
def test_whatever_a_file_contains_it_is_read_or_raises(tmp_path_factory, content) -> None:
    path = write(tmp_path_factory.mktemp("any"), content)
    for read in (lambda: read_clients(path, np.zeros(5)), lambda: read_cohorts(path)):
        try:
            found = read()
        except FedkeepError as error:
            assert "\n" not in str(error)  # noqa: PT017 (either outcome is right)
            continue
        if isinstance(found, Partition):
            assert [own.tolist() for own in found] == content["clients"]
        else:
            assert [list(cohort) for cohort in found] == [sorted(cohort) for cohort in content["cohorts"]]
