"""Fixtures for the tests on Flower."""

from __future__ import annotations

import pytest
from support.problems import Problem, three_clients


@pytest.fixture(scope="module")
def three() -> Problem:
    return three_clients()
