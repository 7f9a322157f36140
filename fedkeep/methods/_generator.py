"""A generator of features: two dense layers with BatchNorm between them, of a label and noise. For FedGen."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fedkeep.task import Task
from fedkeep.tree import Tree

_MOMENTUM, _EPS = 0.1, 1e-5  # of BatchNorm's running statistics, and added to its variance


def new_generator(task: Task, noise: int, hidden: int) -> Tree:
    """Return a generator with random weights, as `nn.Linear` has them; they follow from the run's seed."""
    rng = torch.Generator().manual_seed(task.seed)

    def dense(fan_in: int, fan_out: int) -> Tree:
        drawn = torch.rand(fan_out, fan_in + 1, generator=rng, dtype=torch.float64)
        both = ((2 * drawn - 1) / math.sqrt(fan_in)).to(task.device, task.dtype)
        return {"weight": both[:, :-1].clone(), "bias": both[:, -1].clone()}

    ones = torch.ones(hidden, dtype=task.dtype, device=task.device)
    params = {
        "first": dense(noise + task.n_classes, hidden),
        "norm": {"weight": ones, "bias": torch.zeros_like(ones)},
        "second": dense(hidden, task.n_features),
    }
    return {"params": params, "buffers": {"mean": torch.zeros_like(ones), "var": ones.clone()}}


def generate(generator: Tree, y: Tensor, e: Tensor) -> Tensor:
    """Return the features of labels y [B] with noise e [B, d], by the running statistics."""
    params, buffers = generator["params"], generator["buffers"]
    return _second(params, _first(params, y, e), buffers["mean"], buffers["var"])


def generate_in_training(generator: Tree, y: Tensor, e: Tensor) -> tuple[Tensor, Tree]:
    """Return the features by the statistics of this batch, and the next running statistics."""
    params, n = generator["params"], len(y)
    hidden = _first(params, y, e)
    mean, var = hidden.mean(0), hidden.var(0, correction=0)
    now = {"mean": mean, "var": var * (n / max(n - 1, 1))}
    kept = {key: old + _MOMENTUM * (now[key].detach() - old) for key, old in generator["buffers"].items()}
    return _second(params, hidden, mean, var), kept


def _first(params: Tree, y: Tensor, e: Tensor) -> Tensor:
    weight, bias = params["first"]["weight"], params["first"]["bias"]
    of_noise, of_label = weight[:, : e.shape[-1]], weight[:, e.shape[-1] :]  # the label is one-hot
    hidden: Tensor = F.linear(e.to(weight.dtype), of_noise, bias) + of_label.T[y]
    return hidden


def _second(params: Tree, hidden: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    normal = (hidden - mean) * torch.rsqrt(var + _EPS) * params["norm"]["weight"] + params["norm"]["bias"]
    return F.linear(normal.relu(), params["second"]["weight"], params["second"]["bias"])
