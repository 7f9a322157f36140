"""FedKA. Chen, Zhu and Zheng, "Towards Fast and Stable Federated Learning: Confronting Heterogeneity via Knowledge
Anchor", ACM MM 2023, definitions 1-2, eq. 2-3 and algorithm 1.

Where the paper leaves a choice:

- gamma, the share below which a class is non-dominant, is given nowhere: 0.05, where section 3.2 sees forgetting set
  in. beta is chosen from {0.5, 0.1, 0.01, 0.001}, never said which: 0.01.
- `recentre = True` is not in the paper. Eq. 3 sees a common shift of all logits, cross-entropy does not. The anchor
  stops clients from lowering missing logits while cross-entropy goes on raising dominant ones, so the mean logit
  climbs from round to round until nothing is finite. After averaging, the classifier's weight and bias therefore lose
  their mean over classes: no softmax and no argmax changes. `False` is the paper's letter.
- The shared example of a class is the first of that class in the server's public training part. It is the server's,
  not a client's gift as in section 4, and is sent along in every round.
- Anchor examples are not augmented, so the global model's logits of them are computed once a round.
- Down-sampling to mu happens once a round, before the first step (algorithm 1; the text says "for mini-batch local
  training"), over missing and non-dominant classes alike. The mean in eq. 3 is over the examples that remain.
- "L2 distance" (text) is the squared one (eq. 3), a sum over channels and a mean over examples.
- `parts` (table 6) leaves anchor examples out; the channels of eq. 3 are those of all missing and non-dominant
  classes in any case. The table's caption says "dominant classes only" for KA (M), its text "missing": missing. The
  caption of figure 4 and the conclusion say "dominant" where non-dominant is meant, and eq. 2 has C_n in both cases.
- Loss of an example (`sampling`, table 7): the task's loss under the global model that was received.
- Averages go over the cohort's examples; algorithm 1 divides by |D|, which under partial participation shrinks weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedkeep import tree
from fedkeep.errors import MethodError
from fedkeep.losses import anchor_gap, masked_mean
from fedkeep.method import Cohort, FedAvg, hyper
from fedkeep.task import Task
from fedkeep.tree import Tree

_HOW = "give the data a public part, such as load(..., public=1, validation=0): one example of each class"


@dataclass(frozen=True)
class FedKA(FedAvg):
    """FedKA: in every step, hold the logits of a few examples of the classes a client lacks where they were."""

    name: ClassVar[str] = "fedka"
    paper: ClassVar[str] = "Chen et al., ACM MM 2023"
    beta: float = hyper(0.01, "weight of the anchor", low=0, other=0.1)
    gamma: float = hyper(0.05, "share of examples below which a class is non-dominant", low=0, high=1, other=0.5)
    mu: int = hyper(10, "examples in the anchor, at most", low=1, whole=True, other=1)
    sampling: str = hyper(
        "random",
        "which of its examples a client takes for a non-dominant class: any, that of largest or of smallest loss",
        choices=("random", "hard", "proficient"),
        other="hard",
        within={"gamma": 0.5},
    )
    parts: str = hyper(
        "both",
        "the classes that are in the anchor",
        choices=("both", "non_dominant", "missing"),
        other="missing",
        within={"gamma": 0.5},
    )
    recentre: bool = hyper(
        True, "take the mean over classes out of the classifier after averaging", choices=(True, False), other=False
    )

    # The server

    def init_server(self, task: Task, params: Tree) -> Tree:
        """Keep the shared set S: row c is one example of class c."""
        if task.public is None:
            raise MethodError(f"{self.name} needs examples that all clients share: {_HOW}")
        places = [(task.public.y == c).nonzero()[:1, 0] for c in range(task.n_classes)]
        lacking = ", ".join(str(c) for c, place in enumerate(places) if not len(place))
        if lacking:
            raise MethodError(f"{self.name}: the public training part has no example of class {lacking}; {_HOW}")
        if self.recentre:
            self._check_recentring(task, params)
        return {"params": params, "S": tree.take(task.public.x, torch.cat(places))}

    def broadcast(self, server: Tree) -> Tree:
        """Send the weights and the shared set."""
        return {"params": server["params"], "S": server["S"]}

    def aggregate(self, task: Task, server: Tree, uploads: Tree, cohort: Cohort) -> Tree:
        """Average, and recentre the classifier."""
        params = tree.mean(uploads["params"], uploads["n"])
        return {"params": recentred(task, params) if self.recentre else params, "S": server["S"]}

    def _check_recentring(self, task: Task, params: Tree) -> None:
        """Refuse a model whose probabilities would change, which tells that no plain linear layer makes the logits."""
        assert task.public is not None
        x = tree.take(task.public.x, slice(8))
        with torch.no_grad():
            before, after = (task.apply(w, x).softmax(-1) for w in (params, recentred(task, params)))
        if float((before - after).abs().max()) > (1e-4 if task.autocast is None else 1e-2):
            raise MethodError(
                f"{self.name}: recentring {classifier(task)[0]} changes the model's probabilities, so it is not the "
                "linear layer that gives the logits; let the model end with one, or set recentre=False"
            )

    # The client

    def prepare(self, task: Task, shared: Tree, client: Tree, facts: Tree) -> Tree:
        """Sort the classes, and compute the global model's logits of the shared set."""
        missing, scarce = self._classes(facts)
        return {"missing": missing, "channels": missing | scarce, "z_g": task.apply(shared["params"], shared["S"])}

    def annotate(self, task: Task, shared: Tree, local: Tree, x: Any, y: Tensor) -> Tree:
        """Note the global model's logits z_g."""
        return {"z_g": task.apply(shared["params"], x)}

    def draw(
        self, task: Task, shared: Tree, facts: Tree, y: Tensor, valid: Tensor, noise: Tensor, note: Tree
    ) -> tuple[Tensor, Tensor]:
        """Name an own example for each class, and weigh by 1 the at most mu classes that are in the anchor.

        A missing class has a weight too; the loss puts the shared example into its place.
        """
        missing, scarce = self._classes(facts)
        wanted = {"both": missing | scarce, "non_dominant": scarce, "missing": missing}[self.parts]
        order = torch.where(wanted, shuffled(noise[0], task.n_classes), -1)
        kept = wanted & (order >= order.topk(min(self.mu, task.n_classes)).values[-1])
        if self.sampling == "random":
            score = noise
        else:
            score = task.criterion(note["z_g"], y) * (1 if self.sampling == "hard" else -1)
        own = valid & (y == torch.arange(task.n_classes, device=y.device)[:, None])
        return torch.where(own, score, -torch.inf).argmax(1), kept.to(noise.dtype)

    def loss(self, task: Task, params: Tree, batch: Tree, shared: Tree, local: Tree) -> Tensor:
        """Return mean CE + beta / |T| * the sum over the anchor T of ||z_g - z||^2 over the channels kept."""
        drawn, y = batch["drawn"], batch["y"]
        weight, slot = drawn["weight"].topk(min(self.mu, task.n_classes))
        missing = local["missing"][slot]

        def choose(theirs: Tensor, own: Tensor) -> Tensor:
            return torch.where(missing.reshape(-1, *[1] * (own.ndim - 1)), theirs[slot], own[slot])

        anchor = tree.map(choose, shared["S"], drawn["x"])
        z = task.apply(params, tree.map(lambda *ts: torch.cat(ts), batch["x"], anchor), train=True)
        gaps = anchor_gap(z[len(y) :], choose(local["z_g"], drawn["note"]["z_g"]), local["channels"])
        held: Tensor = (weight * gaps).sum() / weight.sum().clamp(min=1)
        return masked_mean(task.criterion(z[: len(y)], y), batch["mask"]) + self.beta * held

    def _classes(self, facts: Tree) -> tuple[Tensor, Tensor]:
        """Definition 1: the missing and the non-dominant classes, [C] each."""
        counts = facts["label_counts"]
        return counts == 0, (counts > 0) & (counts / facts["n"] < self.gamma)


def classifier(task: Task) -> list[str]:
    """Name the last weight matrix with a row for each class, and its bias where it has one."""
    C, names = task.n_classes, list(task.init)
    rows = [name for name in names if task.init[name].ndim == 2 and len(task.init[name]) == C]
    if not rows:
        raise MethodError(
            f"fedka: none of the model's weights is a matrix of {C} rows, one for each class, so there is no "
            "classifier to recentre; let the model end with a trainable linear layer, or set recentre=False"
        )
    bias = rows[-1].removesuffix("weight") + "bias"
    return [rows[-1], *([bias] if bias in names and task.init[bias].shape == (C,) else [])]


def recentred(task: Task, params: Tree) -> Tree:
    """Take its mean over classes out of the classifier: every example's logits shift by one number."""
    return {**params, **{name: params[name] - params[name].mean(0) for name in classifier(task)}}


def shuffled(u: Tensor, size: int) -> Tensor:
    """Give `size` things a random order, as integers, from one uniform number.

    It seeds Park and Miller's generator: x <- 48271 x modulo 2^31 - 1.
    """
    prime = 2**31 - 1
    powers = torch.tensor([pow(48271, i + 1, prime) for i in range(size)], device=u.device)
    return (u * prime).long() % prime * powers % prime
