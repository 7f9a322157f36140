"""The command line in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from typing import Any


def fedkeep(*args: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    """Run `fedkeep ARGS` and return its exit code and output."""
    return subprocess.run(
        [sys.executable, "-m", "fedkeep", *args], capture_output=True, text=True, timeout=300, check=False, **kwargs
    )
