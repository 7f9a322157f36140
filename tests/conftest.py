"""Fixtures for all tests."""

from __future__ import annotations

import pytest
import torch
from support.problems import Problem, make_problem

torch.set_num_threads(1)
collect_ignore = ["support/existing_app"]  # an app for a test to change, not tests


@pytest.fixture(scope="session")
def problem() -> Problem:
    return make_problem()
