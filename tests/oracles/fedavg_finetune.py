"""FedAvg with fine-tuning on the server's labelled public set: `torch.optim.SGD` and early stopping by hand."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F

from fedkeep.data.seeds import server_seed
from fedkeep.server_training import batches
from oracles.fedavg import Oracle


class TunedOracle(Oracle):
    """Trains the average on the public set; what is descended there is `server_loss`."""

    def train(self, k, number):
        self.number = number
        return super().train(k, number)

    def server_loss(self, z, at):
        return F.cross_entropy(z, self.data.public.y[at])

    def tune(self):
        """At most E_s epochs; stop after `patience` epochs that are not better by 1e-4; keep the best epoch.

        With `include_average`, the average is epoch 0.
        """
        public, s, h = self.data.public, self.s, self.h
        lr = s["lr"] * s["lr_decay"] ** (self.number - 1)
        sgd = torch.optim.SGD(self.model.parameters(), lr, momentum=s["momentum"])
        epochs = batches(server_seed(s["seed"], self.number), len(public.y), h["batch_size"])
        values, kept = [], None
        if h["include_average"]:
            with torch.no_grad():
                values = [float(F.cross_entropy(self.model(public.x_val), public.y_val))]
            kept, best = 0, copy.deepcopy(self.model.state_dict())
        for _ in range(h["E_s"]):
            for at in next(epochs):
                sgd.zero_grad()
                self.server_loss(self.model(public.x[at]), at).backward()
                sgd.step()
            with torch.no_grad():
                value = float(F.cross_entropy(self.model(public.x_val), public.y_val))
            if kept is None or value < values[kept] - 1e-4:
                kept, best = len(values), copy.deepcopy(self.model.state_dict())
            values.append(value)
            if len(values) - 1 - kept >= h["patience"]:
                break
        if kept is not None:
            self.model.load_state_dict(best)

    def merge(self, locals_, ids):
        super().merge(locals_, ids)
        self.tune()


ORACLE = TunedOracle
CASES = [
    {"E_s": 4, "batch_size": 50, "patience": 2, "include_average": False},
    {"E_s": 6, "batch_size": 4, "patience": 1, "include_average": False},
    {"E_s": 0, "batch_size": 4, "patience": 1, "include_average": False},
    {"E_s": 20, "batch_size": 1, "patience": 2, "include_average": True},
    {"E_s": 0, "batch_size": 4, "patience": 1, "include_average": True},
]
