"""Cost of differential privacy: accuracy and epsilon on the digits, for several amounts of noise.

    python benchmarks/privacy.py [--methods fedavg,fedntd] [--seeds 3] [--clients 100] [--cohort 100] [--rounds 20]

Clients have equal shares of the examples. Epsilon is at delta = 1e-3, for a client's whole contribution to the run.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

import fedkeep as fk

NOISE: list[float | None] = [None, 1.0, 3.0, 6.0, 12.0]


def run(method: str, seed: int, clients: int, **settings: Any) -> fk.History:
    """Return the history of one run."""
    data = fk.data.load("digits")
    parts = fk.data.partition.iid(data.y_train, clients, seed=seed)
    train = {"epochs": 2, "batch_size": 20, "lr": 0.5, "momentum": 0.0, "weight_decay": 0.0, "lr_decay": 1.0}
    return fk.simulate(method, "mlp", data, parts, eval_every=settings["rounds"], seed=seed, **train, **settings)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="fedavg,fedntd,scaffold")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--cohort", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--clip", type=float, default=1.0)
    args = parser.parse_args()
    print(f"{args.cohort} of {args.clients} clients, {args.rounds} rounds, dp_clip = {args.clip:g}\n")
    methods = args.methods.split(",")
    print(f"| dp_noise | epsilon | {' | '.join(methods)} |")
    print("|---" * (len(methods) + 2) + "|")
    for noise in NOISE:
        private = {} if noise is None else {"dp_clip": args.clip, "dp_noise": noise, "dp_delta": 1e-3}
        cells, epsilons = [], []
        for method in methods:
            runs = [
                run(method, seed, args.clients, participation=args.cohort, rounds=args.rounds, **private)
                for seed in range(args.seeds)
            ]
            accuracy = [100 * history.accuracy[-1] for history in runs]
            cells.append(f"{np.mean(accuracy):.1f} ± {np.std(accuracy, ddof=min(1, args.seeds - 1)):.1f}")
            epsilons += [history.epsilon for history in runs if history.epsilon is not None]
        shown = f"{max(epsilons):.1f}" if epsilons else "none"
        print(f"| {noise or 'none'} | {shown} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
