"""One real federation in every test run: processes on loopback, digits, FedNTD, the same weights as the simulation."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedkeep as fk

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedkeep[flower]'")

from support.federation import Federation, app_copy, simulated
from support.problems import same


@pytest.mark.federation_smoke
def test_a_real_federation_gives_what_the_simulation_gives(tmp_path: Path) -> None:
    with Federation(tmp_path) as federation:
        for client in range(2):
            federation.node(client)  # they wait for the SuperLink, and it costs less time than to wait for it first
        federation.link()
        federation.run(app_copy(tmp_path), **{"train.rounds": 2})
        federation.wait("the second round", lambda: len(federation.rounds()) == 3, 150)
    history = fk.load_run(tmp_path / "run")
    assert [r["cohort"] for r in history.records[1:]] == [[0, 1], [0, 1]]
    assert same(simulated(rounds=2).params, history.params)
