"""Accuracy with float32, TF32 and bfloat16: FedNTD and FedAvg on CIFAR-10 with the same seeds.

    FEDKEEP_DATA=folder python benchmarks/precision.py [--rounds 100] [--seeds 3]

Shards with two classes per client, 10 of 100 clients per round, FedNTD's CNN and defaults. The seeds determine cohorts,
batches and initial weights; only rounding differs between the precisions.
"""

from __future__ import annotations

import argparse
import statistics
import time

import fedkeep as fk

PRECISIONS = {"float32": {"tf32": False}, "TF32": {}, "bfloat16": {"autocast": "bfloat16"}}


def main() -> None:
    """Print accuracy and forgetting, mean and standard deviation over seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--source", default="cifar10")
    args = parser.parse_args()
    data = fk.data.load(args.source)
    print(f"{args.source}, {args.rounds} rounds, {args.seeds} seeds: smoothed accuracy in %, forgetting, time per run")
    for method in ("fedavg", "fedntd"):
        for name, changes in PRECISIONS.items():
            summaries, seconds = [], []
            for seed in range(args.seeds):
                clients = fk.data.partition.shards(data.y_train, n_clients=100, s=2, seed=seed)
                began = time.perf_counter()
                history = fk.simulate(
                    method, "cnn_fedntd", data, clients, rounds=args.rounds, participation=10, seed=seed, **changes
                )
                seconds.append(time.perf_counter() - began)
                summaries.append(history.summary())
            accuracy, forgetting = ([one[key] for one in summaries] for key in ("smoothed", "forgetting"))
            spread = statistics.stdev(accuracy) if len(accuracy) > 1 else 0.0
            print(
                f"  {method:<8} {name:<9} {100 * statistics.mean(accuracy):5.2f} ±{100 * spread:4.2f}   "
                f"{statistics.mean(forgetting):.3f}   {statistics.mean(seconds):5.1f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
