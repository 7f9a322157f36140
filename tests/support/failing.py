"""Callbacks that fail, for runs in this process and in others."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import fedkeep as fk


def raising_callbacks() -> list[Any]:
    return [_raise]


def dying_callbacks() -> list[Any]:
    return [_die]


def unpicklable_callbacks() -> list[Any]:
    return [_raise_unpicklable]


def global_lambda_callbacks() -> list[Any]:
    return [_raise_global_lambda]


def lingering_callbacks() -> list[Any]:
    return [_raise_and_linger]


def _raise(simulation: fk.Simulation, record: dict[str, Any]) -> None:
    if simulation.settings.seed == 1:
        raise ZeroDivisionError("first line\nsecond line")


def _die(simulation: fk.Simulation, record: dict[str, Any]) -> None:
    if simulation.settings.seed == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def _raise_and_linger(simulation: fk.Simulation, record: dict[str, Any]) -> None:
    """Fail, and leave a thread for which the process waits before it ends."""
    if simulation.settings.seed == 1:
        threading.Thread(target=time.sleep, args=(300,)).start()
        raise ZeroDivisionError


def _raise_unpicklable(simulation: fk.Simulation, record: dict[str, Any]) -> None:
    if simulation.settings.seed == 1:
        raise fk.errors.FedkeepError("it holds a function", key="callback", value=lambda: None)


def _raise_global_lambda(simulation: fk.Simulation, record: dict[str, Any]) -> None:
    if simulation.settings.seed == 1:
        raise fk.errors.FedkeepError("it holds a function", key="callback", value=_FUNCTIONS["none"])


_FUNCTIONS = {"none": lambda: None}  # pickle raises another error for it than for a local function
