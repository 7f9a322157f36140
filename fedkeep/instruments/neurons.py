"""Studies of single neurons: the class that each prefers, and features in two dimensions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedkeep import tree
from fedkeep.instruments import formulas
from fedkeep.instruments.next_round import NextRound
from fedkeep.instruments.options import CHUNK, Options, Result, names_of_models
from fedkeep.tree import Tree


def alignment(trial: NextRound, options: Options) -> Result:
    """Return how many neurons keep their preferred class, for the last two dense layers (FedNTD table 2).

    A layer's neurons are the inputs of the dense layer above, after the non-linearity. The keys of `layers` are the
    names of those dense layers; it is empty if the model has none.
    """
    each = [preferences(trial, params) for params in trial.models]
    before, clients, after = each[0], each[1:-1], each[-1]
    return {
        "layers": {
            name: {
                "neurons": len(before[name]),
                "clients": [formulas.alignment(before[name], one[name]) for one in clients],
                "after": formulas.alignment(before[name], after[name]),
            }
            for name in list(before)[-2:]
        }
    }


def neurons(trial: NextRound, options: Options) -> Result:
    """Return the class that each neuron of the last hidden layer prefers in every model (FedNTD figure 17).

    `preferences` is [models][neurons]; both lists are empty if the model has no hidden neurons below a dense layer.
    """
    each = [list(preferences(trial, params).values()) for params in trial.models]
    if not each[0]:
        return {"models": [], "preferences": []}
    return {"models": names_of_models(trial), "preferences": [layers[-1].tolist() for layers in each]}


def circle(trial: NextRound, options: Options) -> Result:
    """Return the angle of each test example's features in every model, in radians (FedNTD figure 18).

    `angles` is [models][examples]. The model must have two features; otherwise the lists are empty.
    """
    x, y = trial.test_examples(5 * options.samples)
    task = trial.simulation.task.without_accelerator
    with torch.no_grad():
        features = [task.outputs(params, x)[0].flatten(1).double().cpu().numpy() for params in trial.models]
    if features[0].shape[1] != 2:
        return {"models": [], "y": [], "angles": []}
    angles = [np.arctan2(one[:, 1], one[:, 0]).round(4).tolist() for one in features]
    return {"models": names_of_models(trial), "y": y.tolist(), "angles": angles}


def preferences(trial: NextRound, params: Tree) -> dict[str, np.ndarray]:
    """Return the preferred class of the neurons below each dense layer, in the order of the forward pass."""
    task = trial.simulation.task.without_accelerator
    model = task.module(params).to(task.device)
    weighted = {name: m for name, m in model.named_modules() if list(m.parameters(recurse=False))}
    order: list[str] = []
    inputs: dict[str, list[Tensor]] = {}

    def record_inputs(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            order.append(name)
            if isinstance(module, nn.Linear):
                x = args[0].detach()
                inputs.setdefault(name, []).append(x.flatten(1, -2).mean(1) if x.ndim > 2 else x)

        return hook

    handles = [module.register_forward_pre_hook(record_inputs(name)) for name, module in weighted.items()]
    x, y = trial.test_examples(len(trial.simulation.y_test))
    with torch.no_grad():
        for start in range(0, len(y), CHUNK):
            model(tree.take(x, slice(start, start + CHUNK)))
    for handle in handles:
        handle.remove()
    # below the first layer are the model's inputs, not neurons
    hidden = [name for name in dict.fromkeys(order) if name in inputs and name != order[0]]
    classes = y.cpu().numpy()
    return {
        name: formulas.class_preference(torch.cat(inputs[name]).double().cpu().numpy(), classes, task.n_classes)
        for name in hidden
    }
