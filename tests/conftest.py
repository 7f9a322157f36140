"""Fixtures and command-line options for all tests."""

from __future__ import annotations

import re

import pytest
import torch
from support.methods import METHODS
from support.problems import Problem, make_problem

torch.set_num_threads(1)
collect_ignore = ["support/existing_app"]  # an app for a test to change, not tests


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--methods",
        metavar="NAMES",
        help="of the tests that are parametrised by a method, run those of these methods only (comma-separated names)",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of methods that `--methods` does not list; a test's id contains the name of its method.

    The test of the package comes first: it takes longest, and so the workers end at about the same time.
    """
    items.sort(key=lambda item: item.get_closest_marker("package") is None)
    if config.getoption("--methods") is None:
        return
    chosen = set(config.getoption("--methods").split(","))
    if not chosen <= METHODS.keys():
        unknown = ", ".join(sorted(chosen - METHODS.keys()))
        raise pytest.UsageError(f"--methods: unknown {unknown}; the methods are {', '.join(METHODS)}")
    kept, left_out = [], []
    for item in items:
        callspec = getattr(item, "callspec", None)
        of_methods = set(re.findall(r"\w+", callspec.id)) & METHODS.keys() if callspec else set()
        (left_out if of_methods and not of_methods & chosen else kept).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session")
def problem() -> Problem:
    return make_problem()
