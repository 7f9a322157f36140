"""Round time of fedkeep and of Flower's own simulation (its Ray backend).

    python benchmarks/flower_simulation.py [--cohorts 10,100] [--rounds 4] [--threads 2] [--flower-python PATH]

`make bench-flower` sets up both environments and runs it. Flower has a separate one, .venv-flower, because it pins
packages that fedkeep also uses:

    pip install -c constraints.txt 'flwr[simulation]>=1.41,<1.43' torch

The same for all: FedNTD on scikit-learn's digits (the same arrays), the same partition, all clients in every round, the
same initial MLP 64-64-10, epochs, batch size, SGD with momentum, an average weighted by examples, no evaluation, the
same machine and version of torch. Equal accuracies after the same number of rounds show that they learn the same. Only
the order of the batches differs.

The Flower part is flower_app.py, as an experienced user would write it for speed: Flower's FedAvg strategy, data read
once in each worker process, batches indexed from tensors instead of a DataLoader, and the received model's outputs
computed once per round, as in fedkeep. Its workers run in parallel with one torch thread each. `--client-cpus 1` (two
workers on two cores) and 0.5 (four) are both run; the faster one is compared. fedkeep and the plain script of rounds.py
run in this process, with torch's usual number of threads, before and after each of Flower's runs. If the machine gets
busier or slower in between, the range becomes wide.

Flower's round time is from one call of its strategy's `configure_train` to the next, measured inside the ServerApp.
Start-up is from starting a new process to the end of its first round; for Flower it includes Ray and its workers. The
first round is not part of the round times.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rounds import BATCH, EPOCHS, LR, MOMENTUM, PlainScript, contenders

import fedkeep as fk

HERE = Path(__file__).resolve().parent
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
FAIR = {"RAY_worker_niceness": "0"}  # otherwise Ray's workers have a lower priority than its driver


@dataclass
class Measured:
    """The measurements of one contender."""

    seconds: list[float] = field(default_factory=list)
    start_up: float = 0.0
    accuracy: float = 0.0
    remark: str = ""

    @property
    def median(self) -> float:
        """The median round time."""
        return statistics.median(self.seconds)


def weights(one: PlainScript | fk.Simulation) -> dict[str, torch.Tensor]:
    """Return the global model's weights."""
    return one.model.state_dict() if isinstance(one, PlainScript) else one.params


def accuracy(weights: dict[str, torch.Tensor], data: fk.data.Dataset) -> float:
    """Return the test accuracy of a model with these weights."""
    model = fk.models.build("mlp", data.input_shape, data.n_classes)
    model.load_state_dict(weights)
    with torch.no_grad():
        return float((model(data.x_test).argmax(1) == data.y_test).float().mean())


def one_round(one: PlainScript | fk.Simulation) -> float:
    """Run a round and return the seconds it took."""
    began = time.perf_counter()
    one.round() if isinstance(one, PlainScript) else one.step()
    return time.perf_counter() - began


def start_up(name: str, cohort: int) -> float:
    """Return the seconds until a new process of fedkeep has finished its first round."""
    began = time.time()
    command = [
        sys.executable,
        __file__,
        "--first",
        name,
        "--cohorts",
        str(cohort),
        "--threads",
        str(torch.get_num_threads()),
    ]
    return float(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout) - began


def flower(python: str, ours: fk.Simulation, initial: dict[str, np.ndarray], job: dict[str, Any]) -> Measured:
    """Run Flower's simulation in a separate process, with our data, partition and initial model."""
    data, clients = ours.data, ours.clients
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        partition = {"indices": clients.indices, "offsets": clients.offsets}
        np.savez(path / "federation.npz", x=data.x_train.numpy(), y=data.y_train.numpy(), **partition)
        np.savez(path / "model.npz", *initial.values())
        training = {"epochs": EPOCHS, "batch": BATCH["digits"], "lr": LR, "momentum": MOMENTUM}
        job = {**job, "folder": folder, "clients": len(clients), "training": training}
        environment = {**os.environ, **QUIET, **FAIR, "FLWR_HOME": folder}
        began = time.time()
        with open(path / "log", "w+") as log:
            command = [python, str(HERE / "flower_app.py"), json.dumps(job)]
            done = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False)
            if done.returncode or not (path / "times.json").exists():
                log.seek(0)
                sys.exit(f"{log.read()[-3000:]}\nFlower's simulation failed, exit status {done.returncode}")
        result = json.loads((path / "times.json").read_text())
        with np.load(path / "trained.npz") as file:
            final = accuracy({k: torch.from_numpy(v) for k, v in zip(initial, file.values(), strict=True)}, data)
    times, workers = result["times"], int(job["cpus"] / job["client_cpus"])
    took = [end - start for start, end in itertools.pairwise(times[1:])]
    busy = statistics.median(result["busy"][1:]) / workers
    remark = f"Flower, {workers} workers: each spends {busy * 1e3:.0f} ms of the median round in the client's function"
    return Measured(took, times[1] - began, final, remark)


def measure(cohort: int, rounds: int, python: str, cpus: int, client_cpus: list[float]) -> dict[str, Measured]:
    """Time all contenders with this cohort size, ours before and after each of Flower's runs."""
    running = contenders("digits", cohort)
    measured = {name: Measured() for name in running}
    ours = running["loop"]
    initial = {name: value.numpy().copy() for name, value in weights(running["plain script"]).items()}
    for one in running.values():
        one_round(one)

    def time_ours() -> None:
        for _ in range(rounds):
            for name, one in running.items():
                measured[name].seconds.append(one_round(one))

    time_ours()
    for name, one in running.items():
        measured[name].accuracy = accuracy(weights(one), ours.data)
    for share in client_cpus:
        job = {"rounds": rounds + 1, "cpus": cpus, "client_cpus": share}
        measured[f"Flower, num_cpus={share:g}"] = flower(python, ours, initial, job)
        time_ours()
    for name in running:
        measured[name].start_up = start_up(name, cohort)
    return measured


def main() -> None:
    """Print a table for every cohort size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cohorts", default="10,100")
    parser.add_argument("--rounds", type=int, default=4, help="rounds in, between and after Flower's runs")
    parser.add_argument("--flower-python", default=str(HERE.parent / ".venv-flower" / "bin" / "python"))
    parser.add_argument("--client-cpus", default="1,0.5", help="cores per Flower client; one run for each value")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch threads, not for Flower")
    parser.add_argument("--first", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    cohorts = [int(cohort) for cohort in args.cohorts.split(",")]
    if args.first:
        one_round(contenders("digits", cohorts[0])[args.first])
        print(time.time())
        return
    if not shutil.which(args.flower_python):
        parser.error(f"{args.flower_python} does not exist: run `make bench-flower`, or set --flower-python")
    shares = [int(share) if share.isdecimal() else float(share) for share in args.client_cpus.split(",")]
    cpus = os.cpu_count() or 1
    versions = "import importlib.metadata as m; print(*(f'{p} {m.version(p)}' for p in ('flwr', 'ray', 'torch')))"
    theirs = subprocess.run([args.flower_python, "-c", versions], stdout=subprocess.PIPE, text=True, check=True).stdout
    print(f"fedkeep: torch {torch.__version__}, {torch.get_num_threads()} threads; Flower: {theirs.strip()}")
    print(f"{platform.machine()}, {cpus} cores, load average {os.getloadavg()[0]:.1f} at the start")
    how = f"{EPOCHS} epochs, batch {BATCH['digits']}"
    print(f"digits, MLP 64-64-10, FedNTD, {how}; accuracy after round {args.rounds + 1}")
    for cohort in cohorts:
        measured = measure(cohort, args.rounds, args.flower_python, cpus, shares)
        best = min(one.median for name, one in measured.items() if name.startswith("Flower"))
        print(f"\ncohort {cohort:<12} ms per round, median (range)  start-up  Flower's best/this  accuracy")
        for name, one in measured.items():
            spread = f"({min(one.seconds) * 1e3:.0f} to {max(one.seconds) * 1e3:.0f})"
            print(
                f"  {name:<20} {one.median * 1e3:12.0f} {spread:<15} {one.start_up:7.1f} s {best / one.median:16.2f}x"
                f" {one.accuracy:11.3f}"
            )
        print(*(f"  {one.remark}" for one in measured.values() if one.remark), sep="\n")


if __name__ == "__main__":
    main()
