"""The plain torch loop for methods whose loss uses the client's label counts."""

from __future__ import annotations

from collections import Counter

from oracles.fedavg import Oracle


class LabelCountOracle(Oracle):
    """`self.n` are the label counts of the client that is training, as a list over the classes."""

    def train(self, k, number):
        counted = Counter(self.data.y_train[self.clients[k]].tolist())
        self.n = [counted[c] for c in range(self.data.n_classes)]
        return super().train(k, number)
