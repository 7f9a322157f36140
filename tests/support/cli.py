"""The command line, and several processes that share a run, in processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path

LIMIT = 300  # seconds

# Processes that start quickly, because the packages are imported once for all of them
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        *("fedkeep.cli.app", "fedkeep.cli.progress", "fedkeep.experiments.run", "fedkeep.reports.page"),
        *("fedkeep.experiments.sweep", "fedkeep.instruments", "fedkeep.testing"),
        *("numpy.ma", "numpy.random", "pytest", "safetensors.torch"),  # imported when they are needed
    ]
)


def fedkeep(
    *args: str, cwd: Path | None = None, env: Mapping[str, str] | None = None, fresh: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run `fedkeep ARGS` and return its exit code and output.

    The process is a fork of one that has imported the packages, which saves seconds. `fresh` starts a new interpreter:
    for another import path, for the start itself, and for runs in processes of their own.
    """
    if fresh:
        command = [sys.executable, "-m", "fedkeep", *args]
        return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False, cwd=cwd, env=env)
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = _start(None, args, cwd, os.environ if env is None else env, out, err)
        return subprocess.CompletedProcess(["fedkeep", *args], _wait(process), out.read_text(), err.read_text())


def run_ranks(number: int, script: Path | None, *args: str, cwd: Path | None = None) -> str:
    """Run a script, or without one `fedkeep ARGS`, in processes that share a run, as `torchrun` does.

    Return what they print.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        shared = {"WORLD_SIZE": str(number), "LOCAL_WORLD_SIZE": str(number), "OMP_NUM_THREADS": "1"}
        shared |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
        ranks = [{**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(number)]
        processes = [_start(script, args, cwd, env, out, out) for env in ranks]
        codes = [_wait(process) for process in processes]
        assert codes == [0] * number, out.read_text()
        return out.read_text()


def _start(
    script: Path | None, args: tuple[str, ...], cwd: Path | None, env: Mapping[str, str], out: Path, err: Path
) -> BaseProcess:
    process = FORKS.Process(target=_main, args=(script, args, cwd or Path.cwd(), dict(env), out, err))
    process.start()
    return process


def _wait(process: BaseProcess) -> int:
    process.join(LIMIT)
    if process.exitcode is None:
        process.kill()
        raise TimeoutError(f"a process did not end within {LIMIT} seconds")
    return process.exitcode


def _main(script: Path | None, args: tuple[str, ...], cwd: Path, env: dict[str, str], out: Path, err: Path) -> None:
    """Call a script or the command line as a shell would: with arguments, folder, environment and files for output."""
    for path, stream in ((out, 1), (err, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, stream)
        os.close(file)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.argv = [str(script or "fedkeep"), *args]
    if script is not None:
        runpy.run_path(str(script), run_name="__main__")
        return
    from fedkeep.cli import main

    main()
