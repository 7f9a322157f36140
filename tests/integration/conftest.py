"""Fixtures for the integration tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from multiprocessing.context import ForkServerContext

import pytest
from support.cli import FORKS
from support.problems import Problem, three_clients


@pytest.fixture(scope="module")
def three() -> Problem:
    return three_clients()


@pytest.fixture(scope="session")
def forks() -> ForkServerContext:
    """Processes that start quickly, because fedkeep is imported once for all of them."""
    return FORKS


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the processes of a sweep as forks of one that has imported the packages, which saves seconds for each."""
    monkeypatch.setattr("fedkeep.experiments.workers.PROCESSES", FORKS)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Handle Ctrl-C as Python does, also where these tests run in the background of a shell, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
