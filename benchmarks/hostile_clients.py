"""Cost of one hostile client of ten, for every way to aggregate: accuracy on the digits after an attack.

    python benchmarks/hostile_clients.py [--split dirichlet] [--seeds 3] [--rounds 20] [--clients 10]

Ten clients of `--clients` take part in every round, and client 0 attacks whenever it does. This is a simulation, so no
upload is rejected; a federation's server rejects changes above ten norms (`fedkeep.flower.Limits`). A cell is the mean
final accuracy over the seeds, in points, less that of the honest run with the same aggregation; the last column less
the honest run with plain averaging, for the worst attack. The line below a table says what the other clients reach
without the hostile one's examples: part of the cost is that they are missing.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

import fedkeep as fk
from fedkeep import tree
from fedkeep.engine.settings import SMALLEST_COHORT
from fedkeep.tree import Tree

HOSTILE = 0  # the client that attacks
SPLITS: dict[str, Callable[..., fk.data.Partition]] = {
    "iid": fk.data.partition.iid,
    "dirichlet": functools.partial(fk.data.partition.dirichlet, alpha=0.5),
    "shards": functools.partial(fk.data.partition.shards, s=2),
}


def move(scale: float) -> Callable[..., Tree]:
    """Return the attack that uploads this multiple of the honest change."""
    return lambda own, server, others, rng: tree.map(lambda w, g: g + scale * (w - g), own, server)


def noise(own: Tree, server: Tree, others: Tree, rng: np.random.Generator) -> Tree:
    """Upload random weights."""
    return tree.map(lambda w: torch.from_numpy(rng.normal(size=w.shape)).to(w), own)


def far_away(own: Tree, server: Tree, others: Tree, rng: np.random.Generator) -> Tree:
    """Upload weights that are all shifted by one number, 99 times the server's norm in all."""
    norm = float(tree.dot(server, server)) ** 0.5
    size = sum(w.numel() for w in tree.leaves(server))
    return tree.map(lambda g: g + 99 * max(norm, 1.0) / size**0.5, server)


def hidden(own: Tree, server: Tree, others: Tree, rng: np.random.Generator) -> Tree:
    """Upload the mean of the others, less 1.5 of their standard deviations: known as "a little is enough"."""
    return tree.map(lambda t: t.mean(0) - 1.5 * t.std(0), others)


ATTACKS: dict[str, Callable[..., Tree] | None] = {
    "honest": None,
    "sign flip": move(-1.0),
    "flip x 10": move(-10.0),
    "scaled x 50": move(50.0),
    "noise": noise,
    "far away": far_away,
    "hidden": hidden,
    "n = 1e9": move(-1.0),
    "labels": None,  # trains honestly on labels 9 - y
}


class Hostile(fk.Simulation):
    """A simulation in which client 0 forges its uploads."""

    def forge(self, upload: Tree, k: int, number: int) -> None:
        """Change the uploads of round `number` in place; those of client 0 are at position k."""
        raise NotImplementedError

    def apply(self, result: Any) -> Any:
        """Let client 0 forge its upload, then apply the round."""
        if HOSTILE in (cohort := result.plan.cohort):
            upload = tree.map(torch.clone, result.clients["upload"])
            self.forge(upload, cohort.index(HOSTILE), result.plan.round)
            result = dataclasses.replace(result, clients={**result.clients, "upload": upload})
        return super().apply(result)


class Attacked(Hostile):
    """A simulation in which client 0's weights are replaced by an attack."""

    attack: str = "honest"

    def forge(self, upload: Tree, k: int, number: int) -> None:
        """Replace the weights of client 0."""
        if (attack := ATTACKS.get(self.attack)) is None:
            return
        others = tree.take(upload["params"], [i for i in range(len(upload["n"])) if i != k])
        rng = np.random.default_rng([self.settings.seed, number])
        forged = attack(tree.take(upload["params"], k), self.params, others, rng)
        tree.map(lambda t, w: t[k].copy_(w), upload["params"], forged)
        if self.attack == "n = 1e9":
            upload["n"][k] = 1e9


def accuracy(method: str, attack: str, seed: int, split: str, clients: int, **settings: Any) -> float:
    """Return the final accuracy of one run, in points."""
    data = fk.data.load("digits")
    parts = SPLITS[split](data.y_train, n_clients=clients, seed=seed)
    if attack == "labels":
        labels = data.y_train.clone()
        labels[parts[HOSTILE]] = 9 - labels[parts[HOSTILE]]
        data = dataclasses.replace(data, y_train=labels)
    indices = [np.array([], dtype=int) if attack == "absent" and k == HOSTILE else own for k, own in enumerate(parts)]
    train = {"participation": 10, "epochs": 2, "batch_size": 32, "lr": 0.2, "momentum": 0.0, **settings}
    train |= {"weight_decay": 0.0, "lr_decay": 1.0, "eval_every": train["rounds"], "seed": seed}
    simulation = Attacked(method, "mlp", data, indices, fk.Settings(**train))
    simulation.attack = attack
    try:
        return 100 * simulation.run().accuracy[-1]
    except fk.errors.Diverged:
        return 10.0  # as good as guessing


def main() -> None:
    """Run everything and print one table per method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--split", choices=list(SPLITS), default="dirichlet")
    parser.add_argument("--methods", default="fedavg,fedntd")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--aggregations", default=",".join(SMALLEST_COHORT))
    args = parser.parse_args()
    for method in args.methods.split(","):

        def mean_accuracy(attack: str, aggregation: str, method: str = method) -> float:
            options = {"rounds": args.rounds, "aggregation": aggregation}
            runs = [accuracy(method, attack, seed, args.split, args.clients, **options) for seed in range(args.seeds)]
            return float(np.mean(runs))

        print(f"\n{method}, {args.split}, 10 of {args.clients} clients, {args.rounds} rounds, {args.seeds} seeds\n")
        print_row(["aggregation", *ATTACKS, "worst, to plain"])
        print_row(["---"] * (len(ATTACKS) + 2))
        plain = mean_accuracy("honest", "mean")
        for aggregation in args.aggregations.split(","):
            cells = {attack: mean_accuracy(attack, aggregation) for attack in ATTACKS}
            honest = cells.pop("honest")
            drops = [f"{value - honest:+.1f}" for value in cells.values()]
            print_row([aggregation, f"{honest:.1f}", *drops, f"{min(cells.values()) - plain:+.1f}"])
        print(f"\nwithout the hostile client's examples: {mean_accuracy('absent', 'mean') - plain:+.1f}", flush=True)


def print_row(cells: Iterable[str]) -> None:
    """Print a row of a Markdown table."""
    print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
