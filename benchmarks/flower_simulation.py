"""How long a round takes: fedkeep beside Flower's own simulation (its Ray backend).

    python benchmarks/flower_simulation.py [--cohorts 10,100] [--rounds 4] [--threads 2] [--flower-python PATH]

`make bench-flower` sets up both environments and runs it. Flower has one of its own, .venv-flower, because it pins
packages that fedkeep also uses:

    pip install -c constraints.txt 'flwr[simulation]>=1.41,<1.43' torch

The same for all: FedNTD on scikit-learn's digits (the same arrays), the same division of them among the clients, all
of which train in every round, the same initial MLP 64-64-10, epochs, batch size, SGD with momentum, and an average
weighted by examples; no evaluation; the same machine and version of torch. The accuracies after as many rounds say that
they learn the same. Only the order of the batches differs.

Flower's side is flower_app.py, what an experienced user would write with speed in mind: Flower's FedAvg strategy, data
read once in each worker process, batches indexed from tensors rather than a DataLoader, and the received model's
outputs computed once a round, as fedkeep does. Each of its workers has one torch thread and works in parallel with the
others: `--client-cpus 1` (two workers on two cores) and 0.5 (four) are both run and the faster one is compared.
fedkeep and the plain script of rounds.py run in this process, with torch's usual number of threads, before and after
each of Flower's runs, so that a machine that gets busier or slower meanwhile shows as a wide range.

A round of Flower's lasts from one call of its strategy's `configure_train` to the next, measured inside the ServerApp.
Start-up is from starting a new process to the end of its first round, for Flower with Ray and its workers; of the
rounds, the first is left out.
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
FAIR = {"RAY_worker_niceness": "0"}  # else Ray's workers yield to whatever else runs, its own driver included


@dataclass
class Measured:
    """What is known of one contender."""

    seconds: list[float] = field(default_factory=list)
    start_up: float = 0.0
    accuracy: float = 0.0
    remark: str = ""

    @property
    def median(self) -> float:
        """The median round."""
        return statistics.median(self.seconds)


def weights(one: PlainScript | fk.Simulation) -> dict[str, torch.Tensor]:
    """Return the global model's weights."""
    return one.model.state_dict() if isinstance(one, PlainScript) else one.params


def accuracy(found: dict[str, torch.Tensor], data: fk.data.Dataset) -> float:
    """Return the share of the test examples that a model with these weights gets right."""
    model = fk.models.build("mlp", data.input_shape, data.n_classes)
    model.load_state_dict(found)
    with torch.no_grad():
        return float((model(data.x_test).argmax(1) == data.y_test).float().mean())


def one_round(one: PlainScript | fk.Simulation) -> float:
    """Run a round and return the seconds it took."""
    began = time.perf_counter()
    one.round() if isinstance(one, PlainScript) else one.step()
    return time.perf_counter() - began


def start_up(name: str, cohort: int) -> float:
    """Return the seconds that a new process of ours needs until its first round is done."""
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
    """Run Flower's simulation in a process of its own, on what ours has."""
    data, clients = ours.data, ours.clients
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        held = {"indices": clients.indices, "offsets": clients.offsets}
        np.savez(place / "federation.npz", x=data.x_train.numpy(), y=data.y_train.numpy(), **held)
        np.savez(place / "model.npz", *initial.values())
        training = {"epochs": EPOCHS, "batch": BATCH["digits"], "lr": LR, "momentum": MOMENTUM}
        job = {**job, "folder": folder, "clients": len(clients), "training": training}
        environment = {**os.environ, **QUIET, **FAIR, "FLWR_HOME": folder}
        began = time.time()
        with open(place / "log", "w+") as log:
            command = [python, str(HERE / "flower_app.py"), json.dumps(job)]
            done = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False)
            if done.returncode or not (place / "times.json").exists():
                log.seek(0)
                sys.exit(f"{log.read()[-3000:]}\nFlower's simulation failed, exit status {done.returncode}")
        answer = json.loads((place / "times.json").read_text())
        with np.load(place / "trained.npz") as file:
            reached = accuracy({k: torch.from_numpy(v) for k, v in zip(initial, file.values(), strict=True)}, data)
    times, workers = answer["times"], int(job["cpus"] / job["client_cpus"])
    took = [end - start for start, end in itertools.pairwise(times[1:])]
    busy = statistics.median(answer["busy"][1:]) / workers
    remark = f"Flower, {workers} workers: each is in the client's function for {busy * 1e3:.0f} ms of the median round"
    return Measured(took, times[1] - began, reached, remark)


def measure(cohort: int, rounds: int, python: str, cpus: int, client_cpus: list[float]) -> dict[str, Measured]:
    """Time everyone with this cohort, ours before and after each of Flower's runs."""
    running = contenders("digits", cohort)
    found = {name: Measured() for name in running}
    ours = running["loop"]
    initial = {name: value.numpy().copy() for name, value in weights(running["plain script"]).items()}
    for one in running.values():
        one_round(one)

    def in_turns() -> None:
        for _ in range(rounds):
            for name, one in running.items():
                found[name].seconds.append(one_round(one))

    in_turns()
    for name, one in running.items():
        found[name].accuracy = accuracy(weights(one), ours.data)
    for share in client_cpus:
        job = {"rounds": rounds + 1, "cpus": cpus, "client_cpus": share}
        found[f"Flower, num_cpus={share:g}"] = flower(python, ours, initial, job)
        in_turns()
    for name in running:
        found[name].start_up = start_up(name, cohort)
    return found


def main() -> None:
    """Print a table for every cohort size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cohorts", default="10,100")
    parser.add_argument("--rounds", type=int, default=4, help="between and after Flower's runs, and in each of those")
    parser.add_argument("--flower-python", default=str(HERE.parent / ".venv-flower" / "bin" / "python"))
    parser.add_argument("--client-cpus", default="1,0.5", help="cores for a client of Flower's, each in its own run")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch, for fedkeep and plain")
    parser.add_argument("--first", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    cohorts = [int(cohort) for cohort in args.cohorts.split(",")]
    if args.first:
        one_round(contenders("digits", cohorts[0])[args.first])
        print(time.time())
        return
    if not shutil.which(args.flower_python):
        parser.error(f"no {args.flower_python}: `make bench-flower` makes it, or give --flower-python")
    shares = [int(share) if share.isdecimal() else float(share) for share in args.client_cpus.split(",")]
    cpus = os.cpu_count() or 1
    versions = "import importlib.metadata as m; print(*(f'{p} {m.version(p)}' for p in ('flwr', 'ray', 'torch')))"
    theirs = subprocess.run([args.flower_python, "-c", versions], stdout=subprocess.PIPE, text=True, check=True).stdout
    print(f"fedkeep: torch {torch.__version__}, {torch.get_num_threads()} threads; Flower: {theirs.strip()}")
    print(f"{platform.machine()}, {cpus} cores, load average {os.getloadavg()[0]:.1f} at the start")
    how = f"{EPOCHS} epochs, batch {BATCH['digits']}"
    print(f"digits, MLP 64-64-10, FedNTD, {how}; accuracy after round {args.rounds + 1}")
    for cohort in cohorts:
        found = measure(cohort, args.rounds, args.flower_python, cpus, shares)
        best = min(one.median for name, one in found.items() if name.startswith("Flower"))
        print(f"\ncohort {cohort:<14} ms a round, median (range)  start-up  Flower's best/this  accuracy")
        for name, one in found.items():
            spread = f"({min(one.seconds) * 1e3:.0f} to {max(one.seconds) * 1e3:.0f})"
            print(
                f"  {name:<20} {one.median * 1e3:12.0f} {spread:<15} {one.start_up:7.1f} s {best / one.median:16.2f}x"
                f" {one.accuracy:11.3f}"
            )
        print(*(f"  {one.remark}" for one in found.values() if one.remark), sep="\n")


if __name__ == "__main__":
    main()
