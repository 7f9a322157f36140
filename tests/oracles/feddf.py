"""FedDF, algorithm 1: `torch.optim.Adam`, `CosineAnnealingLR`, the ensemble asked anew for every batch."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F

from fedkeep.data.seeds import server_seed
from fedkeep.server_training import batches
from oracles.fedavg import Oracle


class FedDFOracle(Oracle):
    def train(self, k, number):
        self.number = number
        return super().train(k, number)

    def divergence(self, locals_, x):
        with torch.no_grad():
            if self.h["average_of"] == "logits":
                target = F.softmax(sum(teacher(x) for teacher in locals_) / len(locals_), 1)
            else:
                target = sum(F.softmax(teacher(x), 1) for teacher in locals_) / len(locals_)
        return F.kl_div(F.log_softmax(self.model(x), 1), target, reduction="batchmean")

    def merge(self, locals_, ids):
        super().merge(locals_, ids)
        x, x_val, h = self.data.public.x, self.data.public.x_val, self.h
        adam = torch.optim.Adam(self.model.parameters(), h["lr"])
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adam, h["max_steps"])
        step, best, lowest, at_step = 0, None, float("inf"), 0
        if h["include_average"]:
            with torch.no_grad():
                best, lowest = copy.deepcopy(self.model.state_dict()), float(self.divergence(locals_, x_val))
        for epoch in batches(server_seed(self.s["seed"], self.number), len(x), h["batch_size"]):
            for at in epoch:
                if step < h["max_steps"]:
                    adam.zero_grad()
                    self.divergence(locals_, x[at]).backward()
                    adam.step()
                    cosine.step()
                    step += 1
            with torch.no_grad():
                value = float(self.divergence(locals_, x_val))
            if value < lowest - 1e-4:
                best, lowest, at_step = copy.deepcopy(self.model.state_dict()), value, step
            if step == h["max_steps"] or step - at_step >= h["patience"]:
                break
        self.model.load_state_dict(best)


ORACLE = FedDFOracle
CASES = [
    {"lr": 1e-3, "batch_size": 128, "max_steps": 10, "patience": 5, "include_average": False, "average_of": "logits"},
    {
        "lr": 0.05,
        "batch_size": 4,
        "max_steps": 15,
        "patience": 3,
        "include_average": False,
        "average_of": "probabilities",
    },
    {"lr": 0.5, "batch_size": 4, "max_steps": 15, "patience": 3, "include_average": True, "average_of": "logits"},
]
