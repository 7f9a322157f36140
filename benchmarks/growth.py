"""Time and memory of a round for growing cohorts and models, in both engines.

    python benchmarks/growth.py [--rounds 3] [--threads 2]

FedAvg on random examples of 64 numbers, 20 per client, one epoch, batch size 10. Every measurement runs in a separate
process; memory is the peak beyond what the process used before the first round. The rule of `engine="auto"` is based on
the last column: stacked where it is faster.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

import numpy as np
import torch

import fedkeep as fk

COHORTS = (1, 10, 100, 1000)
WIDTHS = (8, 64, 256, 512, 1024, 2048)  # of two hidden layers


def measure(engine: str, cohort: int, width: int, rounds: int) -> dict[str, float]:
    """Measure rounds in this process."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal(size=(20 * cohort, 64), dtype=np.float32), rng.integers(0, 10, 20 * cohort)
    data = fk.data.from_arrays(x, y, x[:10], y[:10])
    model = fk.models.build("mlp", (64,), 10, hidden=(width, width))
    clients = fk.data.partition.iid(data.y_train, cohort, seed=0)
    settings = fk.Settings(rounds=10**6, participation=1.0, epochs=1, batch_size=10, engine=engine, eval_every=10**6)
    simulation = fk.Simulation("fedavg", model, data, clients, settings)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    simulation.step()
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        simulation.step()
        seconds.append(time.perf_counter() - began)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    weights = sum(w.numel() for w in fk.tree.leaves(simulation.params))
    return {"ms": statistics.median(seconds) * 1e3, "MB": memory / 1e3, "weights": weights}


def measure_in_new_process(engine: str, cohort: int, width: int, args: argparse.Namespace) -> dict[str, float]:
    """Measure rounds in a new process."""
    point = json.dumps([engine, cohort, width])
    command = [sys.executable, __file__, "--point", point, "--rounds", str(args.rounds), "--threads", str(args.threads)]
    return dict(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def print_row(label: str, cohort: int, width: int, args: argparse.Namespace) -> None:
    """Measure and print one line."""
    loop, stacked = (measure_in_new_process(engine, cohort, width, args) for engine in ("loop", "stacked"))
    print(
        f"  {label.format(**stacked)}  loop {loop['ms']:9.1f} ms {loop['MB']:7.0f} MB   "
        f"stacked {stacked['ms']:9.1f} ms {stacked['MB']:7.0f} MB   {loop['ms'] / stacked['ms']:5.2f}x",
        flush=True,
    )


def main() -> None:
    """Print a line for every cohort size and every model size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--point", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.point:
        print(json.dumps(measure(*json.loads(args.point), args.rounds)))
        return
    print(f"torch {torch.__version__}, {args.threads} threads; x: speed-up of stacked over loop")
    print("clients in the cohort, a model of 64-64-64-10")
    for cohort in COHORTS:
        print_row(f"{cohort:>9,} clients", cohort, 64, args)
    print("weights of the model, a cohort of 10")
    for width in WIDTHS:
        print_row("{weights:>9,} weights", 10, width, args)


if __name__ == "__main__":
    main()
