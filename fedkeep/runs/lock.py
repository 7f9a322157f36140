"""The lock of a run folder, which one process at a time holds."""

from __future__ import annotations

from pathlib import Path

from filelock import FileLock, Timeout

from fedkeep.errors import RunError
from fedkeep.runs.files import require_replaceable


def lock_folder(path: Path) -> FileLock:
    """Lock the folder of this file. The system releases the lock when the process ends, however it ends."""
    require_replaceable(path)
    lock = FileLock(path, blocking=False, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        raise RunError(
            f"another process is using {path.parent}; wait for it or stop it first",
            key="run_dir",
            value=str(path.parent),
        ) from None
    except (OSError, NotImplementedError) as error:
        raise RunError(
            f"{path} cannot be locked ({getattr(error, 'strerror', None) or error}): the folder must be writable",
            key=path.name,
            value=str(path),
        ) from error
    return lock
