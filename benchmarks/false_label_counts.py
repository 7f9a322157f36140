"""Cost of one client of FedKeep that lies about its label counts: accuracy on the digits, and of the class it claims.

    python benchmarks/false_label_counts.py [--seeds 3] [--rounds 40]

Client 0 claims all its examples for the class of which it has fewest, whenever it takes part. It uploads either the
weights that it trained, or these with the row of that class negated. A cell is the mean over the seeds of the final
accuracy, and of that class, in percent. This is a simulation, so no upload is rejected.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
from hostile_clients import HOSTILE, Hostile, print_row

import fedkeep as fk
from fedkeep.forgetting import class_accuracy
from fedkeep.methods._classifier import classifier
from fedkeep.tree import Tree

FEDERATIONS: dict[str, tuple[int, dict[str, Any]]] = {  # clients per round, and the split
    "10 clients, Dirichlet 0.5": (10, {"kind": "dirichlet", "n_clients": 10, "alpha": 0.5}),
    "10 clients, two shards": (10, {"kind": "shards", "n_clients": 10, "s": 2}),
    "5 of 50 clients, two shards": (5, {"kind": "shards", "n_clients": 50, "s": 2}),
}
ROWS = {  # what client 0 does: (lies about its counts, negates the row, rows by label counts)
    "honest": (False, False, True),
    "lies, and sends the weights that it trained": (True, False, True),
    "lies, and negates the row": (True, True, True),
    "negates the row, `rows=False`": (False, True, False),
    "honest, `rows=False`": (False, False, False),
}


class WithLiar(Hostile):
    """A simulation in which client 0 claims one class for all its examples, or negates that class's row."""

    claimed: int
    lies: bool
    negates: bool

    def forge(self, upload: Tree, k: int, number: int) -> None:
        """Replace client 0's label counts, its row, or both."""
        if self.lies:
            upload["mu"][k] = 0
            upload["mu"][k, self.claimed] = upload["n"][k]
        if self.negates:
            for name in classifier(self.task, "fedkeep"):
                upload["params"][name][k, self.claimed] *= -1


def accuracies(federation: str, row: str, seed: int, rounds: int) -> tuple[float, float]:
    """Return the final accuracy and that of the claimed class, in percent."""
    participation, about = FEDERATIONS[federation]
    lies, negates, rows = ROWS[row]
    data = fk.data.load("digits")
    split = dict(about)
    clients = getattr(fk.data.partition, split.pop("kind"))(data.y_train, seed=seed, **split)
    train = {"epochs": 2, "batch_size": 10, "lr": 0.05, "momentum": 0.0, "weight_decay": 0.0, "lr_decay": 1.0}
    settings = fk.Settings(rounds=rounds, participation=participation, seed=seed, eval_every=rounds, **train)
    simulation = WithLiar(fk.methods.FedKeep(rows=rows), "mlp", data, clients, settings)
    counts = np.bincount(data.y_train[torch.as_tensor(clients[HOSTILE])].numpy(), minlength=data.n_classes)
    simulation.claimed, simulation.lies, simulation.negates = int(counts.argmin()), lies, negates
    history = simulation.run()
    of_class = class_accuracy(np.asarray(history.records[-1]["confusion"]))[simulation.claimed]
    return 100 * float(history.accuracy[-1]), 100 * float(of_class)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    print_row(["", *FEDERATIONS])
    print_row(["---"] * (len(FEDERATIONS) + 1))
    for row in ROWS:
        cells = [
            np.mean([accuracies(name, row, seed, args.rounds) for seed in range(args.seeds)], axis=0)
            for name in FEDERATIONS
        ]
        print_row([row, *(f"{overall:.1f}, {of_class:.1f}" for overall, of_class in cells)])


if __name__ == "__main__":
    main()
