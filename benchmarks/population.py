"""What a large population costs: round time and memory with 1,000 and with 1,000,000 clients, the cohort being 10.

    python benchmarks/population.py [--clients 1000,1000000] [--rounds 50]

Every client holds 20 examples of 8 numbers, made for the purpose. Each population runs in a process of its own; memory
is what the process holds after the rounds beyond what it held with the examples and labels alone, the division among
clients included. The populations take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

EXAMPLES, FEATURES, COHORT = 20, 8, 10


def one(clients: int, rounds: int) -> dict[str, float]:
    """Measure one population, in this process."""
    import gc

    import numpy as np
    import torch

    import fedkeep as fk

    torch.set_num_threads(1)
    n = clients * EXAMPLES
    rng = np.random.default_rng(0)
    y = rng.integers(0, 4, n)
    x = rng.normal(size=(n, FEATURES)).astype(np.float32)
    x[:, :4] += np.eye(4, dtype=np.float32)[y]
    data = fk.data.from_arrays(x, y, x[:1000], y[:1000])
    held = x.nbytes + y.nbytes
    gc.collect()
    before = resident()
    split = fk.data.Partition(np.arange(n), np.arange(clients + 1) * EXAMPLES)
    settings = fk.Settings(rounds=10**6, participation=COHORT, epochs=5, batch_size=5, engine="stacked")
    sim = fk.Simulation(fk.methods.Scaffold(), "mlp", data, split, settings)
    for _ in range(5):
        sim.step()
    seconds = [sim.step()["seconds"] for _ in range(rounds)]
    gc.collect()
    return {"seconds": statistics.median(seconds), "more": (resident() - before) / 1e6, "held": held / 1e6}


def resident() -> int:
    """Return the bytes of memory this process holds now (Linux)."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def main() -> None:
    """Print a line for every population, and the ratio of the largest to the smallest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default="1000,1000000")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(args.one, args.rounds)))
        return
    sizes = [int(size) for size in args.clients.split(",")]
    found: dict[int, list[dict[str, float]]] = {size: [] for size in sizes}
    for _ in range(args.repeats):
        for size in sizes:
            command = [sys.executable, __file__, "--one", str(size), "--rounds", str(args.rounds)]
            found[size].append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    middle = {size: statistics.median(r["seconds"] for r in results) for size, results in found.items()}
    print(f"SCAFFOLD, a cohort of {COHORT}; median of {args.rounds} rounds in each of {args.repeats} processes")
    for size, results in found.items():
        more = max(r["more"] for r in results)
        print(
            f"  {size:>9,} clients  {middle[size] * 1e3:7.2f} ms a round  {middle[size] / middle[sizes[0]]:5.2f}x   "
            f"{more:7.1f} MB beyond the data itself ({results[0]['held']:.0f} MB)"
        )


if __name__ == "__main__":
    main()
