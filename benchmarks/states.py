"""Cost of client states: SCAFFOLD with FedNTD's CNN, until about 2,000 clients have been visited.

    python benchmarks/states.py [--visits 2000] [--cohort 20]

Each client has one image, so that most of the time is spent on states, not on training. Every round ends with a
checkpoint. Printed are the number of clients with a state, the size of the states on disk, the peak memory of the
process, and how much each checkpoint wrote. The folder is removed afterwards; it needs about 7 MB of disk per visit.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import fedkeep as fk
from fedkeep import tree
from fedkeep.runs.folder import RunFolder

POPULATION = 100_000


def main() -> None:
    """Run the rounds and print their cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--visits", type=int, default=2000)
    parser.add_argument("--cohort", type=int, default=20)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, size=(POPULATION, 1, 28, 28), dtype=np.uint8)
    y = np.arange(POPULATION) % 10
    data = fk.data.from_arrays(x, y, x[:10], y[:10])
    clients = fk.data.Partition(np.arange(POPULATION), np.arange(POPULATION + 1))
    rounds = args.visits // args.cohort
    settings = fk.Settings(rounds=rounds, participation=args.cohort, epochs=1, eval_every=rounds, engine="loop")
    with tempfile.TemporaryDirectory() as folder, RunFolder.create(Path(folder), {"checkpoint_every": 10**9}) as run:
        sim = fk.Simulation(fk.methods.Scaffold(), "cnn_fedntd", data, clients, settings).attach(run)
        one = tree.nbytes({"c_k": sim.params})
        written, seconds = [], []
        for _ in range(rounds):
            sim.step()
            unsaved = len(sim.state.clients._unsaved)
            began = time.perf_counter()
            run.checkpoint(sim.round, sim.server, sim.state.clients)
            seconds.append(time.perf_counter() - began)
            written.append(unsaved)
        on_disk = sum(p.stat().st_size for p in Path(folder, "clients").rglob("*.safetensors"))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        states = sim.state.clients
        print(f"torch {torch.__version__}; a state is {one / 1e6:.1f} MB, the cache {states.cache_bytes / 1e6:.0f} MB")
        print(f"  {len(states)} clients have a state: {on_disk / 1e9:.1f} GB on disk")
        cached = states._cached_bytes / 1e6
        print(f"  memory: {cached:.0f} MB of states in the cache, peak of the process {peak:.0f} MB")
        print(f"  a checkpoint wrote {np.mean(written):.1f} of them on average, in {np.median(seconds):.2f} s")


if __name__ == "__main__":
    main()
