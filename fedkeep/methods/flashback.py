"""Flashback. Aljahdali et al., "Flashback: Understanding and Mitigating Forgetting in Federated Learning", arXiv 2024,
eq. 3 and algorithm 1.

Where the paper leaves a choice, or contradicts itself:

- Label counts are raw counts. The text calls them "relative", but its examples (a client with "significantly larger
  data for a class than the global model has encountered", pi growing by gamma mu_k) only make sense raw.
- 0/0 = 0 in alpha: in a class that nobody knows the weights add up to 0, not to 1 as section 4.1 says of all classes.
- The distillation term is not multiplied by T^2 (with it a prototype ended 7 points lower and forgot more). T stands
  in both of its softmaxes, 1 in the cross-entropy.
- Server distillation: the clients' optimiser with fresh momentum and this round's learning rate, no weight decay,
  batch 50, no augmentation, shuffled by the cohort's seed. Algorithm 1 takes E_s epochs, appendix D.2 trains "until
  early stopping gets triggered": both, E_s = 20 at most, stopping by the plain cross-entropy of the validation part
  (the weighted KL can be negative), gain of at least 1e-4, patience 2, the best epoch restored. The average that
  training starts from is no epoch.
- r_k is the client's own state and is sent along; pi grows while gamma r_k <= 1, compared as r_k <= floor(1/gamma
  + 1e-9). gamma: 0.025 for CIFAR-10, 0.1 for CINIC-10 and FEMNIST.
- Public set of CIFAR-10: 1125 examples to train and, at that share, 375 to validate; appendix E's percentages (1125 are
  "1.88%", 9000 are "15%") are of all 60,000 images, while appendix D.1 speaks of 2.5% of the training set.
- `knowledge = "mean_probability"` (appendix B, which says "probability (logits)"): mu_k is the softmax of client k's
  model, at temperature 1, averaged over the public training part; nu is the client's own label shares, never sent.
- `side` (appendix E, figure 10): pi is updated in all; at "server" clients train with cross-entropy, at "client" the
  server only averages.
- `client_loss = "ntd"` (figure 11): all of the local loss is FedNTD's, CE + NTD with beta = tau = 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedkeep import server_training, tree
from fedkeep.losses import dynamic_alpha, dynamic_kl, masked_mean, not_true_kl
from fedkeep.method import Cohort, FedAvg, hyper
from fedkeep.task import Task
from fedkeep.tree import Tree


@dataclass(frozen=True)
class Flashback(FedAvg):
    """Flashback: distil at the clients and on the server, each teacher in the classes that it has seen."""

    name: ClassVar[str] = "flashback"
    paper: ClassVar[str] = "Aljahdali et al., arXiv 2024"
    gamma: float = hyper(0.025, "share of its label counts a client adds to the global at a visit", above=0, high=1,
                         other=0.5)  # fmt: skip
    T: float = hyper(3.0, "temperature of the distilled softmaxes", above=0, other=1.0)
    E_s: int = hyper(20, "most epochs on the server a round", low=1, whole=True, other=1)
    batch_size: int = hyper(50, "examples a step on the server", low=1, whole=True, other=2)
    patience: int = hyper(2, "epochs without gain that end it", low=1, whole=True, other=5, within={"batch_size": 3})
    knowledge: str = hyper("label_count", "what a model is taken to know", choices=("label_count", "mean_probability"),
                           other="mean_probability")  # fmt: skip
    side: str = hyper("both", "where to distil", choices=("both", "client", "server"), other="client")
    client_loss: str = hyper("dynamic", "what clients distil by", choices=("dynamic", "ntd"), other="ntd")

    # The server

    def init_server(self, task: Task, params: Tree) -> Tree:
        """Start with pi = 0: the global model knows nothing."""
        if self._looks:
            server_training.require_public(task, self.name, validation=self.side != "client")
        return {"params": params, "pi": torch.zeros(task.n_classes, dtype=task.dtype, device=task.device)}

    def broadcast(self, server: Tree) -> Tree:
        """Send the weights, and pi to clients that weigh by it."""
        return {"params": server["params"], **({"pi": server["pi"]} if self._weighs else {})}

    def aggregate(self, task: Task, server: Tree, uploads: Tree, cohort: Cohort) -> Tree:
        """Average (line 10), distil from the clients' models and the last global one (11-13), update pi (14-19)."""
        params, pi = super().aggregate(task, server, uploads, cohort)["params"], server["pi"]
        x = server_training.require_public(task, self.name).x if self._looks else None
        teachers = server_training.ensemble(task, uploads["params"], x) if self._looks else pi.new_zeros(0)
        mu = uploads["mu"] if self.knowledge == "label_count" else teachers.softmax(-1).mean(1)
        if self.side != "client":
            teachers = torch.cat([teachers, server_training.logits(task, server["params"], x)[None]])
            params = self._distil(task, params, pi, teachers, torch.cat([mu, pi[None]]), cohort)
        growing = (uploads["r"] <= math.floor(1 / self.gamma + 1e-9)).to(pi.dtype)
        return {"params": params, "pi": pi + self.gamma * (growing[:, None] * mu).sum(0)}

    def _distil(self, task: Task, params: Tree, nu: Tensor, teachers: Tensor, mu: Tensor, cohort: Cohort) -> Tree:
        """Descend eq. 3 on the public set; teachers are logits [K, n, C], mu [K, C] their counts."""
        public = server_training.require_public(task, self.name)
        alpha_s, alpha = dynamic_alpha(nu, mu)

        def loss(w: Tree, at: Tensor) -> Tensor:
            z, y = task.apply(w, tree.take(public.x, at), train=True), public.y[at]
            distilled = dynamic_kl(z, teachers[:, at], alpha[:, None], self.T).sum(0)
            return (alpha_s[y] * task.criterion(z, y) + distilled).mean()

        how = {"epochs": self.E_s, "batch_size": self.batch_size, "patience": self.patience}
        return server_training.train_labelled(task, params, loss, cohort, **how)

    # The client

    def init_client(self, task: Task, params: Tree) -> Tree:
        """Start with r = 0 visits."""
        return {"r": torch.zeros((), dtype=task.dtype, device=task.device)}

    def prepare(self, task: Task, shared: Tree, client: Tree, facts: Tree) -> Tree:
        """Weigh the client's own knowledge against the global model's (line 6)."""
        if not self._weighs:
            return {}
        nu = facts["label_counts"] if self.knowledge == "label_count" else facts["label_counts"] / facts["n"]
        alpha_s, alpha = dynamic_alpha(nu, shared["pi"][None])
        return {"alpha_s": alpha_s, "alpha": alpha[0]}

    def annotate(self, task: Task, shared: Tree, local: Tree, x: Any, y: Tensor) -> Tree:
        """Note the global model's logits z_g."""
        return {} if self.side == "server" else {"z_g": task.apply(shared["params"], x)}

    def loss(self, task: Task, params: Tree, batch: Tree, shared: Tree, local: Tree) -> Tensor:
        """Return the mean of alpha_s[y] CE(z, y) + sum_c alpha[c] p_g[c] log(p_g[c] / p[c]) (eq. 3)."""
        z, y, note = task.apply(params, batch["x"], train=True), batch["y"], batch["note"]
        value = task.criterion(z, y)
        if self._weighs:
            value = local["alpha_s"][y] * value + dynamic_kl(z, note["z_g"], local["alpha"], self.T)
        elif self.side != "server":
            value = value + not_true_kl(z, note["z_g"], y)
        return masked_mean(value, batch["mask"])

    def finish(
        self, shared: Tree, params: Tree, local: Tree, client: Tree, facts: Tree, measured: Tree
    ) -> tuple[Tree, Tree]:
        """Count the visit; upload it, and the label counts where these are the knowledge."""
        r = client["r"] + 1
        counts = {"mu": facts["label_counts"]} if self.knowledge == "label_count" else {}
        return {"params": params, "n": facts["n"], "r": r, **counts}, {"r": r}

    @property
    def _weighs(self) -> bool:
        """Whether clients distil by eq. 3, and so need pi."""
        return self.side != "server" and self.client_loss == "dynamic"

    @property
    def _looks(self) -> bool:
        """Whether the server needs its public set."""
        return self.side != "client" or self.knowledge == "mean_probability"
