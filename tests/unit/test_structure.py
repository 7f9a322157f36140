"""Hashes of models, losses and methods: the same for objects that do the same, different otherwise."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import fedkeep as fk
from fedkeep._util.structure import is_own, layer_names, structure_hash
from fedkeep.task import describe_criterion

GAMMA = 2.0


class Net(nn.Module):
    def __init__(self, activation: Any = torch.relu, scale: float = 1.0) -> None:
        super().__init__()
        self.layer, self.activation, self.scale = nn.Linear(4, 2), activation, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return self.scale * self.activation(self.layer(x))  # a comment


def relu_net() -> nn.Module:
    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.relu(x)

    return Inner()


def tanh_net() -> nn.Module:
    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.tanh(x)

    Inner.__qualname__ = relu_net().__class__.__qualname__
    return Inner()


def focal(z: torch.Tensor, y: torch.Tensor, gamma: float = 1.0) -> torch.Tensor:
    loss = F.cross_entropy(z, y, reduction="none")
    return (1 - torch.exp(-loss)) ** (gamma * GAMMA) * loss


def test_weights_and_the_object_do_not_matter() -> None:
    torch.manual_seed(0)
    first = structure_hash(nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.1)))
    torch.manual_seed(1)
    assert structure_hash(nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.1))) == first
    assert structure_hash(Net()) == structure_hash(Net())
    trained = Net().eval()
    assert structure_hash(trained) == structure_hash(Net())
    assert structure_hash(functools.partial(focal, gamma=2.0)) == structure_hash(functools.partial(focal, gamma=2.0))
    assert structure_hash(relu_net()) == structure_hash(relu_net())


def test_models_with_the_same_weights_that_compute_something_else_differ() -> None:
    models = [
        nn.Sequential(nn.Linear(4, 2), nn.ReLU()),
        nn.Sequential(nn.Linear(4, 2), nn.Tanh()),
        nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.1)),
        nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.2)),
        Net(),
        Net(torch.tanh),
        Net(lambda x: x + 1),
        Net(lambda x: x - 1),
        Net(scale=2.0),
        relu_net(),
        tanh_net(),
    ]
    assert len({structure_hash(model) for model in models}) == len(models)


def test_losses_that_compute_something_else_differ(monkeypatch: Any) -> None:
    losses = [
        focal,
        functools.partial(focal, gamma=2.0),
        functools.partial(focal, gamma=3.0),
        lambda z, y: F.cross_entropy(z, y, reduction="none"),
        lambda z, y: 2 * F.cross_entropy(z, y, reduction="none"),
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(label_smoothing=0.1),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0])),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0])),
        fk.losses.cross_entropy,
    ]
    hashes = [describe_criterion(loss) for loss in losses]
    assert len(set(hashes)) == len(losses)
    monkeypatch.setitem(globals(), "GAMMA", 3.0)
    assert describe_criterion(focal) != hashes[0], "a constant of its module is part of what it computes"


def test_only_code_of_the_users_own_is_hashed() -> None:
    assert is_own(Net)
    assert not is_own(nn.Linear)
    assert not is_own(fk.methods.FedNTD)


def test_layers_are_named_once_and_in_short() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(100)], nn.Linear(4, 2, bias=False))
    assert layer_names(model) == ["Linear(4, 4, True)", "ReLU", "Linear(4, 2, False)"]
    assert len(layer_names(nn.Sequential(*[nn.Linear(k, k + 1) for k in range(1, 90)]))) == 40
