"""A federation's saved states: going back at the server, and the private files of the nodes."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from support.errors import raises
from support.problems import Problem, same

import fedkeep as fk

pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")

from flwr.app import Context, RecordDict
from support.flower_grid import grid_of, strategy_of

from fedkeep.errors import RunError
from fedkeep.flower.client_state import KEPT, ContextStates, FolderStates
from fedkeep.runs.checkpoints import find_checkpoints
from fedkeep.runs.trees import write_tree

RUN, OTHER = "00ff00ff00ff00ff", "11ee11ee11ee11ee"


def test_the_server_goes_back_to_a_kept_round(three: Problem, tmp_path: Path) -> None:
    method = fk.methods.get("scaffold")()
    grid = grid_of(three, method, **{"state-dir": str(tmp_path / "nodes")})
    strategy_of(three, method, run_dir=tmp_path / "run", rounds=5, keep=3).start(grid)
    assert list(find_checkpoints(tmp_path / "run")) == [3, 4, 5]
    assert fk.load_run(tmp_path / "run").ended == "finished"
    with raises(RunError, key="from_round", value=1, valid=[3, 4, 5]):
        strategy_of(three, method, run_dir=tmp_path / "run", rounds=5, from_round=1)
    again = strategy_of(three, method, run_dir=tmp_path / "run", rounds=5, from_round=3)
    assert again.federation.state.round == 3
    again.start(grid)
    assert same(three.run(method, rounds=5).server, again.federation.state.server)
    assert not any("fresh" in record for record in again.federation.state.history.records)
    assert not (tmp_path / "run" / "abandoned").exists()


@pytest.mark.parametrize("state", ["../../" + OTHER + "/client-0/2", "2", 2.0, True, -1, None, 10**30])
def test_a_state_is_named_by_a_whole_number_only(tmp_path: Path, state: Any) -> None:
    FolderStates(tmp_path, OTHER, 0).save(2, {"c": torch.ones(1)}, keep=0)
    with raises(RunError, key="state", value=state):
        FolderStates(tmp_path, RUN, 0).load(state)


@pytest.mark.parametrize("run", ["../" + OTHER, "", "x" * 8, 5])
def test_a_run_is_named_by_hexadecimal_digits_only(tmp_path: Path, run: Any) -> None:
    with raises(RunError, key="run", value=run):
        FolderStates(tmp_path, run, 0)


def test_states_are_private_checked_and_bounded(tmp_path: Path, caplog: Any) -> None:
    states = FolderStates(tmp_path / "states", RUN, 3)
    for number in range(1, 9):
        states.save(number, {"c": torch.full((2,), float(number))}, keep=1)
    files = sorted(int(p.stem) for p in states.path.iterdir())
    assert files == [1, *range(9 - KEPT, 9)]
    for path in (tmp_path / "states", *(tmp_path / "states").rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
    assert float(states.load(8)["c"][0]) == 8
    (states.path / "8.safetensors").write_bytes((states.path / "7.safetensors").read_bytes())
    assert states.load(8) is None
    assert "8.safetensors" in caplog.text
    other = FolderStates(tmp_path / "states", OTHER, 3)
    other.save(8, {"c": torch.zeros(2)}, keep=0)
    (states.path / "8.safetensors").write_bytes((other.path / "8.safetensors").read_bytes())
    assert states.load(8) is None
    write_tree(states.path / "8.safetensors", {"c": torch.ones(2)}, {"round": 8})  # by an earlier version
    assert float(states.load(8)["c"][0]) == 1


def test_states_in_the_context_are_bounded_alike() -> None:
    states = ContextStates(Context(1, 1, {}, RecordDict(), {}), RUN, 3)
    for number in range(1, 13):
        states.save(number, {"c": torch.full((2,), float(number))}, keep=1)
    assert [number for number in range(1, 13) if states.load(number) is not None] == [1, *range(13 - KEPT, 13)]


def test_a_linked_state_folder_is_refused(tmp_path: Path) -> None:
    states = FolderStates(tmp_path / "states", RUN, 3)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "1.safetensors").write_bytes(b"mine")
    (tmp_path / "states" / RUN).mkdir(parents=True)
    states.path.symlink_to(tmp_path / "outside")
    with raises(RunError, key="client-3"):
        states.save(9, {"c": torch.zeros(2)}, keep=0)
    assert [p.name for p in (tmp_path / "outside").iterdir()] == ["1.safetensors"]
