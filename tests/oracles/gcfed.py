"""GC-Fed: every row of a weight loses its own mean, one row at a time; the classifier's rows at the server."""

from __future__ import annotations

import copy

import torch

from oracles.fedavg import Oracle


class GCFedOracle(Oracle):
    def adjust(self, model, k):
        if self.h["form"] != "global":
            for name, p in model.named_parameters():
                if self.h["form"] == "local" or not name.startswith("classifier"):
                    self.centre(p.grad)

    def merge(self, locals_, ids):
        before = copy.deepcopy(self.model)
        super().merge(locals_, ids)
        with torch.no_grad():
            for (name, w), old in zip(self.model.named_parameters(), before.parameters(), strict=True):
                if self.h["form"] in ("global", "released") or (
                    self.h["form"] == "hybrid" and name.startswith("classifier")
                ):
                    step = w - old
                    self.centre(step)
                    w.copy_(old + step)

    def centre(self, gradient):
        if gradient.dim() == 1:
            if self.h["biases"]:
                gradient -= gradient.sum() / len(gradient)
            return
        for row in gradient:
            row -= row.sum() / row.numel()


ORACLE = GCFedOracle
CASES = [{"form": "hybrid", "biases": False}, {"form": "local", "biases": False}, {"form": "released", "biases": True}]
