"""FedGen: the generator as an `nn.Module` with `nn.BatchNorm1d`, trained by `torch.optim.Adam`, clients one by one."""

from __future__ import annotations

import copy

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from fedkeep.data.seeds import STEP_NOISE, seed_stream, server_seed
from fedkeep.methods._generator import new_generator
from fedkeep.task import Task
from oracles.fedavg import Oracle

BITS = (1 << 64) - 1


class Generator(nn.Module):
    def __init__(self, noise, classes, hidden, features):
        super().__init__()
        self.first, self.norm = nn.Linear(noise + classes, hidden), nn.BatchNorm1d(hidden)
        self.second, self.classes = nn.Linear(hidden, features), classes

    def forward(self, y, e):
        inputs = torch.cat([e, F.one_hot(y, self.classes).to(e.dtype)], 1)
        return self.second(F.relu(self.norm(self.first(inputs))))


class FedGenOracle(Oracle):
    def begin(self):
        h, task = self.h, Task(self.model, 4, 1, seed=self.s["seed"], dtype=torch.float64)
        self.generator = Generator(h["noise"], 4, h["hidden"], self.model.classifier.in_features).double()
        start = new_generator(task, h["noise"], h["hidden"])["params"]  # its random numbers, nothing else
        self.generator.load_state_dict(
            {f"{layer}.{name}": w for layer, weights in start.items() for name, w in weights.items()}, strict=False
        )
        self.adam = torch.optim.Adam(self.generator.parameters(), h["lr"], weight_decay=1e-2)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.adam, h["decay"])

    def train(self, k, number):
        self.number, self.step = number, 0
        self.seed = int(seed_stream(STEP_NOISE, self.s["seed"], number, k).generate_state(1, np.uint64)[0])
        self.generator.eval()
        return super().train(k, number)

    def draw(self, size):
        """SplitMix64, number by number, with Python's integers."""
        width = 1 + self.h["noise"] * (2 if self.h["beta"] else 1)
        rows = []
        for example in range(size):
            row = []
            for j in range(width):
                z = (self.seed + ((self.step << 40) + (example << 20) + j + 1) * 0x9E3779B97F4A7C15) & BITS
                z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & BITS
                z = (z ^ (z >> 27)) * 0x94D049BB133111EB & BITS
                row.append(((z ^ (z >> 31)) >> 40) / 2**24)
            rows.append(row)
        self.step += 1
        return torch.tensor(rows, dtype=torch.float64)

    def loss(self, model, teacher, x, y):
        z, d = model(x), self.h["noise"]
        value = F.cross_entropy(z, y)
        if self.number == 1:
            return value
        alpha, beta = (max(1e-4, self.h[key] * self.h["decay"] ** self.number) for key in ("alpha", "beta"))
        drawn = self.draw(len(y))
        labels = (drawn[:, 0] * 4).floor().long()
        made = self.generator(labels, drawn[:, 1 : 1 + d]).detach()
        value = value + alpha * F.cross_entropy(model.head(made), labels)
        if self.h["beta"]:
            target = F.softmax(model.head(self.generator(y, drawn[:, 1 + d :])), 1).detach()
            value = value + beta * F.kl_div(F.log_softmax(z, 1), target, reduction="batchmean")
        return value

    def merge(self, locals_, ids):
        rng, h = np.random.default_rng(server_seed(self.s["seed"], self.number)), self.h
        labels = rng.integers(4, size=(h["steps"], h["batch_size"]))
        noise = rng.random((h["steps"], h["batch_size"], h["noise"]))
        counts = [torch.bincount(self.data.y_train[self.clients[k]], minlength=4).double() for k in ids]
        teachers = [copy.deepcopy(m).eval() for m in locals_]
        self.generator.train()
        for y, e in zip(torch.from_numpy(labels), torch.from_numpy(noise), strict=True):
            made = self.generator(y, e)
            total = h["diversity"] * self.alikeness(e, made)
            for model, n_k in zip(teachers, counts, strict=True):
                weight = n_k / sum(counts) if h["weighting"] == "counts" else torch.full((4,), 1 / len(ids)).double()
                total = total + (weight.nan_to_num()[y] * F.cross_entropy(model.head(made), y, reduction="none")).mean()
            self.adam.zero_grad()
            total.backward()
            self.adam.step()
        self.schedule.step()
        super().merge(locals_, ids)

    def alikeness(self, e, made):
        both = list(zip(e, made, strict=True))
        pairs = [(a - b).pow(2).mean() * (f - g).abs().mean() for a, f in both for b, g in both]
        return torch.exp(-torch.stack(pairs).mean())


ORACLE = FedGenOracle
SMALL = {"batch_size": 6, "hidden": 16, "noise": 5, "steps": 7}
CASES = [
    {**SMALL, "alpha": 0.1, "beta": 0.0, "decay": 0.98, "weighting": "counts", "lr": 1e-4, "diversity": 1.0},
    {**SMALL, "alpha": 2.0, "beta": 0.5, "decay": 0.7, "weighting": "uniform", "lr": 0.03, "diversity": 5.0},
]
