"""One real federation, part of every test run: processes on this machine, digits, FedKeep."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedkeep as fk

pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")

from support.federation import Federation, app_copy, simulated
from support.problems import same


@pytest.mark.federation_smoke
def test_real_federation_equals_the_simulation(tmp_path: Path) -> None:
    with Federation(tmp_path) as federation:
        for client in range(2):
            federation.node(client)  # nodes wait for the SuperLink; starting them first saves time
        federation.link()
        federation.run(app_copy(tmp_path), **{"train.rounds": 2})
        federation.wait("the second round", lambda: len(federation.rounds()) == 3, 150)
    history = fk.load_run(tmp_path / "run")
    assert [r["cohort"] for r in history.records[1:]] == [[0, 1], [0, 1]]
    assert same(simulated(rounds=2).params, history.params)
