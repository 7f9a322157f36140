"""How long FedNTD's CIFAR-10 round takes on a GPU: 10 of 100 clients, 5 epochs, batch 50, its CNN, a test each round.

    python benchmarks/gpu_round.py [--device cuda] [--rounds 4]

The images are random bytes of CIFAR-10's shape: time does not depend on what they show. No augmentation.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch

import fedkeep as fk


def main() -> None:
    """Print the median round of both runtimes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    x = np.random.default_rng(0).integers(0, 256, size=(50_000, 3, 32, 32), dtype=np.uint8)
    y = np.arange(50_000) % 10
    data = fk.data.from_arrays(x, y, x[:10_000], y[:10_000], mean=[0.49, 0.48, 0.45], std=[0.25, 0.24, 0.26])
    clients = fk.data.partition.shards(data.y_train, n_clients=100, s=2, seed=0)
    for engine in ("loop", "stacked"):
        settings = fk.Settings(rounds=10**6, participation=10, engine=engine, device=args.device)
        simulation = fk.Simulation(fk.methods.FedNTD(), "cnn_fedntd", data, clients, settings)
        simulation.step()
        seconds = []
        for _ in range(args.rounds):
            began = time.perf_counter()
            simulation.step()
            if simulation.task.device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        spread = f"{min(seconds) * 1e3:.0f} to {max(seconds) * 1e3:.0f}"
        print(f"  {engine:<8} {statistics.median(seconds) * 1e3:7.0f} ms a round ({spread})")


if __name__ == "__main__":
    main()
