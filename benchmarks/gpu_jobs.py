"""Throughput of several runs at a time on one GPU, with and without NVIDIA's Multi-Process Service (MPS).

    python benchmarks/gpu_jobs.py [--jobs 1,2,3,4,6] [--runs 6] [--problems cnn-10,mlp-10,cnn-2] [--scale 1.0]

The same short runs are divided among 1, 2, 3, ... processes, as `--jobs` divides the runs of a sweep, and timed from
the first round to the last. Processes are started and their simulations set up beforehand, so that start-up (seconds
per process, once) is not part of the figures. MPS is started in private folders and ended afterwards; where the program
nvidia-cuda-mps-control is missing, that part is skipped. The data are random; their content does not affect the time.
Needs nothing but torch, numpy and fedkeep's own packages. `--device cpu` tries the program without a GPU.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

MPS = "nvidia-cuda-mps-control"
WARM_UP = 3  # rounds
COMMON = {"epochs": 5, "lr": 0.01, "momentum": 0.9, "weight_decay": 1e-5}


@dataclass(frozen=True)
class Problem:
    """What the runs train, and how many rounds each of them has."""

    what: str
    model: str
    shape: tuple[int, ...]
    examples: int
    batch: int
    cohort: int
    rounds: int


PROBLEMS = {
    "cnn-10": Problem("FedNTD's CNN, CIFAR-10's shape, cohort 10", "cnn_fedntd", (3, 32, 32), 50_000, 50, 10, 8),
    "mlp-10": Problem("MLP, digits' shape, cohort 10", "mlp", (1, 8, 8), 1_500, 10, 10, 30),
    "cnn-2": Problem("FedNTD's CNN, CIFAR-10's shape, cohort 2", "cnn_fedntd", (3, 32, 32), 50_000, 50, 2, 12),
}


def simulation(problem: Problem, device: str, scale: float) -> Any:
    """Set up a run of FedNTD on random bytes, 100 clients with two classes each (20 for the MLP)."""
    import fedkeep as fk

    n = max(200, int(problem.examples * scale))
    x = np.random.default_rng(0).integers(0, 256, size=(n, *problem.shape), dtype=np.uint8)
    y, test, channels = np.arange(n) % 10, n // 5, problem.shape[0]
    data = fk.data.from_arrays(x, y, x[:test], y[:test], mean=[0.5] * channels, std=[0.25] * channels)
    clients = fk.data.partition.shards(data.y_train, n_clients=100 if n >= 50_000 else 20, s=2, seed=0)
    settings = fk.Settings(
        rounds=10**6, participation=problem.cohort, batch_size=problem.batch, device=device, **COMMON
    )
    return fk.Simulation(fk.methods.FedNTD(), problem.model, data, clients, settings)


def work(pipe: Connection, device: str, scale: float) -> None:
    """Be one of the processes: set up a problem, or run some rounds of it, whenever asked to."""
    import torch

    torch.set_num_threads(1)
    running: Any = None
    while (message := pipe.recv()) is not None:
        kind, value = message
        if kind == "set up":
            running = None  # frees its memory
            running = simulation(PROBLEMS[value], device, scale)
        for _ in range(WARM_UP if kind == "set up" else value):
            running.step()
        if device != "cpu":
            torch.cuda.synchronize()
        pipe.send("done")


class Workers:
    """Processes that run the same simulations."""

    def __init__(self, number: int, device: str, scale: float) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes: list[Connection] = []
        self.processes = []
        for _ in range(number):
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(theirs, device, scale), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def set_up(self, problem: str) -> None:
        """Set up a problem in all processes; in the first one first, which compiles kernels for all."""
        for some in (self.pipes[:1], self.pipes[1:]):
            for pipe in some:
                pipe.send(("set up", problem))
            for pipe in some:
                pipe.recv()

    def seconds(self, runs: int, jobs: int, rounds: int) -> float:
        """Divide the runs among `jobs` processes; return the seconds until all have ended."""
        shares = [len(range(k, runs, jobs)) for k in range(jobs)]
        began = time.perf_counter()
        for pipe, share in zip(self.pipes, shares, strict=False):
            pipe.send(("run", share * rounds))
        for pipe, _ in zip(self.pipes, shares, strict=False):
            pipe.recv()
        return time.perf_counter() - began

    def end(self) -> None:
        """End the processes."""
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if process.is_alive():
                pipe.send(None)
            process.join(20)
            if process.is_alive():
                process.kill()


@contextmanager
def mps(wanted: bool) -> Iterator[None]:
    """Run the block with MPS's daemon in private folders; it is ended afterwards."""
    if not wanted:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        places = {f"CUDA_MPS_{kind}_DIRECTORY": f"{folder}/{kind.lower()}" for kind in ("PIPE", "LOG")}
        for place in places.values():
            Path(place).mkdir()
        before = {key: os.environ.get(key) for key in places}
        os.environ.update(places)
        try:
            subprocess.run([MPS, "-d"], check=True, timeout=20)
            try:
                yield
            finally:
                control("quit")
        finally:
            for key, value in before.items():
                os.environ.pop(key) if value is None else os.environ.update({key: value})


def control(command: str) -> str:
    """Send a command to MPS's daemon and return its answer."""
    done = subprocess.run([MPS], input=f"{command}\n", capture_output=True, text=True, timeout=20, check=False)
    return done.stdout.strip()


def measure(args: argparse.Namespace, with_mps: bool, alone: dict[str, float]) -> None:
    """Print a line for every problem and number of processes; `alone` keeps the time of one process without MPS."""
    jobs = [int(each) for each in args.jobs.split(",")]
    with mps(with_mps):
        workers = Workers(max(jobs), args.device, args.scale)
        try:
            for name in args.problems.split(","):
                workers.set_up(name)
                problem, rounds = PROBLEMS[name], max(1, round(PROBLEMS[name].rounds * args.rounds))
                server = control("get_server_list") if with_mps else ""
                how = f"with MPS (server {server or 'NOT RUNNING'})" if with_mps else "without MPS"
                print(f"{problem.what}; {args.runs} runs of {rounds} rounds, {how}")
                for number in jobs:
                    seconds = workers.seconds(args.runs, number, rounds)
                    first = alone.setdefault(name, seconds)
                    print(
                        f"  {number} at a time  {seconds:7.2f} s   {seconds / args.runs:7.3f} s per run   "
                        f"{first / seconds:5.2f}x",
                        flush=True,
                    )
        finally:
            workers.end()


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default="1,2,3,4,6", help="numbers of processes; the first is what x compares with")
    parser.add_argument("--runs", type=int, default=6)
    parser.add_argument("--problems", default=",".join(PROBLEMS))
    parser.add_argument("--rounds", type=float, default=1.0, help="multiple of the usual number of rounds")
    parser.add_argument("--scale", type=float, default=1.0, help="multiple of the usual number of examples")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    began, alone = time.perf_counter(), dict[str, float]()
    print("x: speed-up over the first line of the problem, one run at a time without MPS")
    measure(args, with_mps=False, alone=alone)
    if args.device == "cpu" or shutil.which(MPS) is None:
        print(f"with MPS: skipped, because {'there is no GPU' if args.device == 'cpu' else MPS + ' is missing'}")
    else:
        measure(args, with_mps=True, alone=alone)
    print(f"{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
