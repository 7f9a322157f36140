"""Power cuts: whatever a cut leaves on disk, a resumed run ends with the same weights, client states and records."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.power_cut import recorded, states_after_cuts, write_state
from support.runs import assert_same_run, interrupt_small, run_small

import fedkeep as fk

RUN = Path("deep") / "runs" / "x"
STATES = int(os.environ.get("FEDKEEP_POWER_CUTS", "30"))  # states per scenario; 0: all of them


def first_run(path: Path) -> None:
    run_small(path, "scaffold", rounds=4)


def resume(path: Path) -> None:
    fk.resume(path)


def go_back(path: Path) -> None:
    fk.resume(path, from_round=2)


def nothing(path: Path) -> None:
    """The run folder does not exist yet."""


SCENARIOS: dict[str, tuple[Callable[[Path], None], Callable[[Path], object]]] = {
    "first run": (nothing, first_run),
    "resume": (interrupt_small, resume),
    "go back": (first_run, go_back),
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_run_survives_a_power_cut(tmp_path: Path, scenario: str) -> None:
    prepare, act = SCENARIOS[scenario]
    first_run(tmp_path / "whole")
    root = tmp_path / "recorded"
    root.mkdir()
    prepare(root / RUN)
    with recorded(root) as (disk, operations):
        act(root / RUN)
    assert_same_run(tmp_path / "whole", root / RUN)
    states = list(states_after_cuts(disk, operations, seed=0, tries=3 if STATES else 10))
    assert len(states) > 50
    for state in random.Random(1).sample(states, min(STATES, len(states)) if STATES else len(states)):
        cut = tmp_path / "cut"
        write_state(state, cut)
        if (cut / RUN / "experiment.toml").exists():
            fk.resume(cut / RUN)
        else:  # cut before the experiment was on disk
            run_small(cut / RUN, "scaffold", rounds=4)
        assert_same_run(tmp_path / "whole", cut / RUN)
        left = [p.name for p in cut.rglob("*") if p.name.endswith(".part") or p.name == "abandoned"]
        assert not left
        shutil.rmtree(cut)


def test_the_recording_finds_a_folder_that_is_not_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without syncing folders there are cuts after which client states are lost: the test above can fail."""
    import fedkeep.runs.files

    monkeypatch.setattr(fedkeep.runs.files, "sync_folder", lambda folder: None)
    root = tmp_path / "recorded"
    root.mkdir()
    with recorded(root) as (disk, operations):
        first_run(root / RUN)
    lost = 0
    for state in states_after_cuts(disk, operations, seed=0, tries=3):
        files = {path.name for path in state}
        named = any(name.startswith("checkpoint-2") for name in files)
        lost += named and not any("clients" in path.parts and path.suffix == ".safetensors" for path in state)
    assert lost
