"""Round time of fedkeep's engines and of the plain script that a researcher would write.

    python benchmarks/rounds.py [--problems digits,mnist] [--cohorts 10,100] [--rounds 5] [--threads 2]

All train FedNTD with the same network, batches, epochs and optimiser, on the same machine, one after another in turn.
`2 ranks` are two processes of one thread each. The figure is the median round time without evaluation. mnist are random
bytes of MNIST's shape, 60 images per client; their content does not affect the time.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import fedkeep as fk

EPOCHS, LR, MOMENTUM = 5, 0.05, 0.9
BATCH = {"digits": 10, "mnist": 20}
WHAT = {"digits": "8x8 images, MLP 64-64-10, batch 10", "mnist": "28x28 images, FedNTD's CNN, batch 20"}


class PlainScript:
    """FedNTD as a script: one model copy per client, a DataLoader, torch.optim, an average of state dicts."""

    def __init__(self, model: torch.nn.Module, data: fk.data.Dataset, clients: fk.data.Partition, batch: int) -> None:
        self.model = copy.deepcopy(model)
        x = data.x_train.float() / 255 if data.x_train.dtype == torch.uint8 else data.x_train
        self.loaders = [
            torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x[own], data.y_train[own]), batch, shuffle=True)
            for own in clients
        ]

    def round(self) -> None:
        """Train every client, then average."""
        states = [(self.train(loader), len(loader.dataset)) for loader in self.loaders]
        total = sum(n for _, n in states)
        self.model.load_state_dict({k: sum(s[k] * (n / total) for s, n in states) for k in states[0][0]})

    def train(self, loader: torch.utils.data.DataLoader) -> dict[str, torch.Tensor]:
        """Train one client."""
        model, teacher = copy.deepcopy(self.model), self.model
        optimizer = torch.optim.SGD(model.parameters(), LR, momentum=MOMENTUM)
        for _ in range(EPOCHS):
            for x, y in loader:
                optimizer.zero_grad()
                z = model(x)
                with torch.no_grad():
                    z_g = teacher(x)
                others = torch.ones_like(z, dtype=torch.bool).scatter_(1, y[:, None], False)
                rest = (len(y), z.shape[1] - 1)
                q_l = F.log_softmax(z[others].view(rest), 1)
                q_g = F.softmax(z_g[others].view(rest), 1)
                loss = F.cross_entropy(z, y) + F.kl_div(q_l, q_g, reduction="batchmean")
                loss.backward()
                optimizer.step()
        return model.state_dict()


def problem(name: str, cohort: int) -> tuple[torch.nn.Module, fk.data.Dataset, fk.data.Partition]:
    """Make the model, the data and a partition among `cohort` clients."""
    if name == "digits":
        data = fk.data.load("digits")
        return fk.models.build("mlp", data.input_shape, 10), data, fk.data.partition.iid(data.y_train, cohort, seed=0)
    x, y = np.random.default_rng(0).integers(0, 256, (60 * cohort, 1, 28, 28), np.uint8), np.arange(60 * cohort) % 10
    data = fk.data.from_arrays(x, y, x[:100], y[:100], mean=[0.13], std=[0.31])
    return fk.models.build("cnn_fedntd", (1, 28, 28), 10), data, fk.data.partition.iid(data.y_train, cohort, seed=0)


def simulation(name: str, cohort: int, engine: str) -> fk.Simulation:
    """Set up fedkeep with all clients in every round."""
    common = {"rounds": 10**6, "participation": 1.0, "epochs": EPOCHS, "batch_size": BATCH[name], "lr": LR}
    common |= {"momentum": MOMENTUM, "weight_decay": 0.0, "lr_decay": 1.0, "eval_every": 10**6}
    model, data, clients = problem(name, cohort)
    return fk.Simulation(fk.methods.FedNTD(), model, data, clients, fk.Settings(engine=engine, **common))


def contenders(name: str, cohort: int) -> dict[str, PlainScript | fk.Simulation]:
    """Set up the plain script and both engines on the same problem."""
    script = PlainScript(*problem(name, cohort), BATCH[name])
    return {"plain script": script, **{engine: simulation(name, cohort, engine) for engine in ("loop", "stacked")}}


def timed(step: Callable[[], Any]) -> float:
    """Return the seconds that a call takes."""
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def distributed(name: str, cohort: int, rounds: int, ranks: int) -> list[float]:
    """Time rounds distributed over processes of one thread each, started by `torchrun`."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*launcher, __file__, "--problems", name, "--cohorts", str(cohort), "--rounds", str(rounds), "--rank"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return list(json.loads(done.stdout.splitlines()[-1]))


def as_rank(name: str, cohort: int, rounds: int) -> None:
    """Run as one of those processes."""
    sim = simulation(name, cohort, "auto")
    sim.step()
    seconds = [timed(sim.step) for _ in range(rounds)]
    if sim.ranks.first:
        print(json.dumps(seconds))


def main() -> None:
    """Print a table for every problem and cohort size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", default="digits,mnist")
    parser.add_argument("--cohorts", default="10,100")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        as_rank(args.problems, int(args.cohorts), args.rounds)
        return
    torch.set_num_threads(args.threads)
    print(f"torch {torch.__version__}, {args.threads} threads, {platform.machine()}; FedNTD, {EPOCHS} epochs,")
    print(f"median of {args.rounds} rounds after one warm-up round, in turn; x: speed-up over the plain script")
    for name in args.problems.split(","):
        print(f"{name}: {WHAT[name]}")
        for cohort in [int(cohort) for cohort in args.cohorts.split(",")]:
            if name == "mnist" and cohort > 10:
                continue
            running = contenders(name, cohort)
            steps = {who: one.round if isinstance(one, PlainScript) else one.step for who, one in running.items()}
            seconds: dict[str, list[float]] = {}
            for turn in range(args.rounds + 1):
                for who, step in steps.items():
                    taken = timed(step)
                    if turn:
                        seconds.setdefault(who, []).append(taken)
            seconds[f"{args.threads} ranks"] = distributed(name, cohort, args.rounds, args.threads)
            base = statistics.median(seconds["plain script"])
            for who, values in seconds.items():
                middle = statistics.median(values)
                spread = f"({min(values) * 1e3:.0f} to {max(values) * 1e3:.0f})"
                print(
                    f"  cohort {cohort:>4}  {who:<13} {middle * 1e3:8.1f} ms per round {spread}  {base / middle:5.2f}x"
                )


if __name__ == "__main__":
    main()
