"""Real federations for tests: SuperLink, SuperNodes and apps as separate processes on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import fedkeep as fk
from fedkeep.runs.reading import read_records

BIN = Path(sys.executable).parent


def free_port() -> int:
    """Return a port that is not in use."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Federation:
    """A SuperLink, its nodes and their logs. On exit it ends all processes it has started, with their children."""

    def __init__(self, folder: Path, insecure: bool = True) -> None:
        self.folder, self.insecure = folder, insecure
        self.port = free_port()
        self.processes: dict[str, subprocess.Popen] = {}
        self.home = folder / "flwr"
        self.home.mkdir(parents=True)
        self.env = {
            **os.environ,
            "FLWR_HOME": str(self.home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{BIN}:{os.environ['PATH']}",
        }
        self.security: dict[str, list[str]] = {"link": ["--insecure"], "node": ["--insecure"], "exec": ["--insecure"]}
        self.connection = {"address": f"127.0.0.1:{self.port}", "insecure": True}
        self.connect()

    def __enter__(self) -> Federation:
        return self

    def __exit__(self, *exc: object) -> None:
        for name in list(self.processes):
            self.kill(name)

    def connect(self) -> None:
        """Write the address of the SuperLink into the config of `flwr`."""
        lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in self.connection.items())
        (self.home / "config.toml").write_text(f'[superlink]\ndefault = "here"\n\n[superlink.here]\n{lines}\n')

    def start(self, name: str, *command: str) -> subprocess.Popen:
        """Start a process that writes to NAME.log."""
        with open(self.folder / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                [str(BIN / command[0]), *command[1:]],
                env=self.env,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                start_new_session=True,
            )
        self.processes[name] = process
        return process

    def kill(self, name: str, how: int = signal.SIGKILL) -> None:
        """End a process and its children."""
        process = self.processes[name]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            return
        if how == signal.SIGKILL:
            self.processes.pop(name)

    def link(self, *more: str) -> None:
        """Start the SuperLink and wait until it answers."""
        self.start(
            "link",
            *("flower-superlink", *self.security["link"], "--host", "127.0.0.1", "--port", str(self.port)),
            *("--disable-runtime-dependency-installation", *more),
        )
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            try:
                if self.insecure:
                    urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2).read()
                else:
                    socket.create_connection(("127.0.0.1", self.port), timeout=2).close()
                return
            except OSError:
                time.sleep(0.3)
        raise AssertionError(self.logs())

    def node(self, client: int, name: str | None = None, more: tuple[str, ...] = (), **config: Any) -> None:
        """Start a SuperNode."""
        values = {"client-id": client, "state-dir": str(self.folder / f"state-{client}"), **config}
        self.start(
            name or f"node-{client}",
            *("flower-supernode", *self.security["node"], "--superlink", f"127.0.0.1:{self.port}"),
            *("--host", "127.0.0.1", "--port", str(free_port()), "--node-config", format_config(values), *more),
        )

    def flwr(self, *args: str, timeout: float = 120) -> str:
        """Run the command `flwr` and return its output."""
        done = subprocess.run(
            [str(BIN / "flwr"), *args], env=self.env, cwd=self.folder, capture_output=True, text=True, timeout=timeout
        )
        assert done.returncode == 0, f"{args}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def run(self, app: Path, **config: Any) -> str:
        """Submit the app; return its run id."""
        values = {"run-dir": str(self.folder / "run"), **config}
        output = self.flwr("run", str(app), "here", "--format", "json", "--run-config", format_config(values))
        run = re.search(r'"run-id":\s*"?(\d+)', output)
        assert run, output
        return run[1]

    def status(self, run: str) -> str:
        """Return the status of a run."""
        output = self.flwr("list", "--run-id", run, "here", "--format", "json")
        status = re.search(r'"status":\s*"([^"]+)"', output)
        assert status, output
        return status[1]

    def rounds(self) -> list[dict[str, Any]]:
        """Return the records written so far."""
        path = self.folder / "run" / "rounds.jsonl"
        return read_records(path) if path.exists() else []

    def wait(self, what: str, test, timeout: float) -> None:
        """Wait until `test` returns true; after `timeout` seconds, fail and show all logs."""
        deadline = time.monotonic() + timeout
        while not test():
            assert time.monotonic() < deadline, f"{what} did not happen in {timeout} s\n{self.logs()}"
            time.sleep(0.5)

    def logs(self) -> str:
        """Return the end of every process's log."""
        return "\n".join(
            f"== {path.stem}\n{path.read_text(errors='replace')[-3000:]}" for path in self.folder.glob("*.log")
        )


def format_config(values: dict[str, Any]) -> str:
    """Return a config as Flower's command line expects it."""
    return " ".join(f"{key}={json.dumps(value)}" for key, value in values.items())


def app_copy(folder: Path, example: str = "flower") -> Path:
    """Copy an example, because Flower writes files into an app's folder."""
    target = folder / "app"
    shutil.copytree(Path(__file__).parents[2] / "examples" / example, target)
    return target


def simulated(method: str = "fedkeep", **changes) -> fk.History:
    """Simulate the federation of the example."""
    data = fk.data.load("digits", public=0.1)
    clients = fk.data.partition.shards(data.y_train, n_clients=2, s=5, seed=0)
    settings = {"participation": 1.0, "epochs": 2, "batch_size": 10, "lr": 0.05, "engine": "loop", **changes}
    return fk.simulate(method, fk.models.build("mlp", (1, 8, 8), 10), data, clients, **settings)
