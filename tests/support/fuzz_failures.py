"""An area of fuzzing whose tries fail in every way, to test the runner; the seed says how."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

WAYS = ("accept", "refuse", "raise", "hang", "exhaust memory", "die", "leave a file")


def try_one(seed: int, folder: Path) -> bool:
    assert list(folder.iterdir()) == []
    match WAYS[seed]:
        case "accept":
            return True
        case "raise":
            raise KeyError("lost")
        case "hang":
            time.sleep(3600)
        case "exhaust memory":
            bytearray(8 * 2**30)
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "leave a file":
            (folder / "file").touch()
    return False
