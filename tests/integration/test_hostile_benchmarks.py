"""The benchmarks of hostile clients: their attacks reach the server."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in ("hostile_clients", "false_label_counts"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(request.param)


@pytest.mark.parametrize("benchmark", ["hostile_clients"], indirect=True)
def test_an_attack_costs_accuracy(benchmark: ModuleType) -> None:
    honest, flipped = (benchmark.accuracy("fedavg", a, 0, "iid", 10, rounds=2) for a in ("honest", "flip x 10"))
    assert flipped < honest - 10


@pytest.mark.parametrize("benchmark", ["false_label_counts"], indirect=True)
def test_a_false_count_gives_a_client_the_row_of_its_class(benchmark: ModuleType) -> None:
    federation = "10 clients, two shards"
    honest, lying, negating = (benchmark.accuracies(federation, row, 0, 3) for row in list(benchmark.ROWS)[:3])
    assert lying != honest
    assert negating[1] == 0  # the class that it claims
