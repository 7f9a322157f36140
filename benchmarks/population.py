"""Round time and memory with a hundred to a million clients and a cohort of 10.

    python benchmarks/population.py [--clients 100,10000,1000000] [--rounds 100]

Every client has 20 synthetic examples of 8 numbers. For the time, all populations are in one process and run round by
round in turn. For the memory, each runs in a separate process: the memory after the rounds minus the memory with only
the examples and labels. The partition is included.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import subprocess
import sys

import numpy as np
import torch

import fedkeep as fk

EXAMPLES, FEATURES, COHORT = 20, 8, 10


def make_data(clients: int) -> fk.data.Dataset:
    """Make synthetic examples."""
    n = clients * EXAMPLES
    rng = np.random.default_rng(0)
    y = rng.integers(0, 4, n)
    x = rng.standard_normal(size=(n, FEATURES), dtype=np.float32)
    x[np.arange(n), y] += 1
    return fk.data.from_arrays(x, y, x[:1000], y[:1000])


def make_simulation(data: fk.data.Dataset, clients: int) -> fk.Simulation:
    """Partition them, and set up SCAFFOLD, which also keeps a state for every visited client."""
    split = fk.data.Partition(np.arange(len(data.y_train)), np.arange(clients + 1) * EXAMPLES)
    settings = fk.Settings(rounds=10**6, participation=COHORT, epochs=5, batch_size=5, engine="stacked")
    return fk.Simulation(fk.methods.Scaffold(), "mlp", data, split, settings)


def resident() -> float:
    """Return the resident memory of this process in MB (Linux)."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 1e6


def memory(clients: int, rounds: int) -> float:
    """Return the memory of a population without its data, measured in this process."""
    data = make_data(clients)
    before = resident()
    simulation = make_simulation(data, clients)
    for _ in range(rounds):
        simulation.step()
    return resident() - before


def main() -> None:
    """Print a line for every population, compared with the smallest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default="100,10000,1000000")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--memory", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.memory:
        print(memory(args.memory, args.rounds))
        return
    sizes = [int(size) for size in args.clients.split(",")]
    megabytes = {}
    for size in sizes:
        command = [sys.executable, __file__, "--memory", str(size), "--rounds", str(args.rounds)]
        megabytes[size] = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    running = {size: make_simulation(make_data(size), size) for size in sizes}
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    for turn in range(args.rounds + 5):
        for size, simulation in running.items():
            record = simulation.step()
            if turn >= 5:
                seconds[size].append(record["seconds"])
    print(f"SCAFFOLD, a cohort of {COHORT}, 1 thread; median of {args.rounds} rounds, in turn")
    base = statistics.median(seconds[sizes[0]])
    for size in sizes:
        middle = statistics.median(seconds[size])
        print(
            f"  {size:>9,} clients  {middle * 1e3:7.2f} ms per round  {middle / base:5.2f}x   "
            f"{megabytes[size]:6.1f} MB without the data, {megabytes[size] - megabytes[sizes[0]]:5.1f} MB more"
        )


if __name__ == "__main__":
    main()
