"""How long a round takes: fedkeep's runtimes beside the plain script a researcher would write.

    python benchmarks/rounds.py [--cohorts 10,100] [--rounds 5] [--threads 2]

All train FedNTD on scikit-learn's digits with the same network, batches, epochs and optimiser, on the same machine in
the same process, one after another, in turns; the figure is the median round, evaluation left out.
"""

from __future__ import annotations

import argparse
import copy
import platform
import statistics
import time

import torch
import torch.nn.functional as F

import fedkeep as fk

EPOCHS, BATCH, LR, MOMENTUM = 5, 10, 0.05, 0.9


class PlainScript:
    """FedNTD as a script: a copy of the model for each client, a DataLoader, torch.optim, an average of state dicts."""

    def __init__(self, model: torch.nn.Module, data: fk.data.Dataset, clients: fk.data.Partition) -> None:
        self.model = copy.deepcopy(model)
        self.loaders = [
            torch.utils.data.DataLoader(
                torch.utils.data.TensorDataset(data.x_train[own], data.y_train[own]), BATCH, shuffle=True
            )
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


def contenders(cohort: int) -> dict[str, PlainScript | fk.Simulation]:
    """Set up every way to run the same federation, all of its clients in every round."""
    data = fk.data.load("digits")
    clients = fk.data.partition.iid(data.y_train, n_clients=cohort, seed=0)
    model = fk.models.build("mlp", data.input_shape, data.n_classes)
    common = {"rounds": 10**6, "participation": 1.0, "epochs": EPOCHS, "batch_size": BATCH, "lr": LR}
    common |= {"momentum": MOMENTUM, "weight_decay": 0.0, "lr_decay": 1.0, "eval_every": 10**6}
    found: dict[str, PlainScript | fk.Simulation] = {"plain script": PlainScript(model, data, clients)}
    for engine in ("loop", "stacked"):
        found[engine] = fk.Simulation(fk.methods.FedNTD(), model, data, clients, fk.Settings(engine=engine, **common))
    return found


def main() -> None:
    """Print a table for every cohort size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cohorts", default="10,100")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"torch {torch.__version__}, {args.threads} threads, {platform.machine()}; digits, MLP 64-64-10, FedNTD,")
    print(f"{EPOCHS} epochs, batch {BATCH}; median of {args.rounds} rounds after one to warm up")
    for cohort in map(int, args.cohorts.split(",")):
        seconds: dict[str, list[float]] = {}
        running = contenders(cohort)
        for turn in range(args.rounds + 1):
            for name, one in running.items():
                began = time.perf_counter()
                one.round() if isinstance(one, PlainScript) else one.step()
                if turn:
                    seconds.setdefault(name, []).append(time.perf_counter() - began)
        base = statistics.median(seconds["plain script"])
        for name, values in seconds.items():
            middle = statistics.median(values)
            spread = f"{min(values) * 1e3:.0f} to {max(values) * 1e3:.0f}"
            print(f"  cohort {cohort:>4}  {name:<13} {middle * 1e3:8.1f} ms a round ({spread})  {base / middle:5.2f}x")


if __name__ == "__main__":
    main()
