"""Read-out by a bias per class: what is tested and saved, while clients start from weights without it.

With `read_out = "bias"`, the best bias per class (`fedkeep.engine.class_bias`) is fitted on the public set after every
round, to the weights that would be tested without it, and added to the bias of the model's last layer. So the tested
model is an ordinary one. The fitted numbers are an entry of the server's tree, under the name of the weight that they
are added to, which no hook of a method sees. So checkpoints, ranks and federations carry them.
"""

from __future__ import annotations

import torch

from fedkeep import tree
from fedkeep.engine.class_bias import fit_class_bias
from fedkeep.engine.settings import Settings
from fedkeep.errors import ConfigError
from fedkeep.runs.server_state import READ_OUT, global_params
from fedkeep.server_training import logits
from fedkeep.task import Public, Task
from fedkeep.tree import Tree

_CHUNK = 1000  # public examples at a time


def with_read_out(server: Tree, task: Task, settings: Settings) -> Tree:
    """Return a first server tree with the bias of the untrained model; unchanged if none is wanted."""
    if settings.read_out is None:
        return server
    if task.public is None:
        raise ConfigError(
            'read_out = "bias" fits a bias on labelled examples of the server, and there is no public set: '
            "load(..., public=0.1), or data.public=0.1 in an experiment",
            key="read_out",
            value=settings.read_out,
        )
    return {**server, READ_OUT: fit_read_out(task, server, _name_of_bias(task, task.public))}


def next_read_out(task: Task, server: Tree, before: Tree) -> Tree:
    """Return the bias for the server's new tree, given that of the round before."""
    [name] = before
    return fit_read_out(task, server, name)


def fit_read_out(task: Task, server: Tree, name: str) -> Tree:
    """Return {name: the best bias per class}, for the weights that are tested without it."""
    public, weights = task.public, global_params({key: server[key] for key in server if key != READ_OUT})
    assert public is not None
    z = torch.cat([logits(task, weights, x, _CHUNK) for x in (public.x, public.x_val)])
    return {name: fit_class_bias(z, torch.cat([public.y, public.y_val])).to(task.device)}


def _name_of_bias(task: Task, public: Public) -> str:
    """Return the trained weight that is added to the logits; found by adding something to each that may be it."""
    x = tree.take(public.x, slice(0, 2))
    added = torch.linspace(1, 2, task.n_classes, device=task.device, dtype=task.dtype)
    z = logits(task, task.init, x)
    close = 64 * torch.finfo(task.dtype if task.autocast is None else task.autocast).eps * (2 + float(z.abs().max()))
    for name, w in reversed(task.init.items()):
        if w.shape == added.shape:
            moved = logits(task, {**task.init, name: w + added}, x) - z
            if float((moved - added).abs().max()) <= close:
                return name
    raise ConfigError(
        'read_out = "bias" is added to the bias of the last layer, and this model has none that is trained: '
        "use one that ends in a Linear layer with a bias",
        key="read_out",
        value="bias",
    )
