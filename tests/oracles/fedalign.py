"""FedAlign: a narrow copy of the MLP's last hidden layer, and the power method on X X' written out, per example."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from oracles.fedavg import Oracle


def top_singular_value(p, q):
    K = torch.outer(p, q) @ torch.outer(p, q).T
    v = torch.ones(len(p), dtype=p.dtype)
    for _ in range(10):
        m = K @ v
        n = m.norm()
        v = m / n
    return torch.sqrt(n / v.norm())


class FedAlignOracle(Oracle):
    def loss(self, model, teacher, x, y):
        layer, width = model.body[1], self.h["width"]
        rows, columns = round(width * layer.out_features), round(width * layer.in_features)
        ce, gaps = F.cross_entropy(model(x), y), []
        for image in x:
            p = image.flatten()
            narrow = torch.relu(layer.weight[:rows, :columns] @ p[:columns] + layer.bias[:rows])
            with torch.no_grad():
                goal = top_singular_value(p, torch.relu(layer(p)))
            gaps.append((top_singular_value(p[:columns], narrow) - goal) ** 2)
        gap = sum(gaps) / len(gaps)
        return ce + self.h["mu"] * (ce.item() / gap.item()) * gap


ORACLE, CASES = FedAlignOracle, [{"mu": 0.45, "width": 0.25}, {"mu": 2.0, "width": 0.5}]
