"""Studies: the instruments applied to one round of a run, by name. What comes out is plain data, fit for JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedkeep import forgetting as fg
from fedkeep import tree
from fedkeep._util.text import did_you_mean
from fedkeep.engine.simulation import Simulation
from fedkeep.errors import FedkeepError
from fedkeep.instruments import formulas, surface
from fedkeep.instruments.next_round import NextRound, open_run, train_next_round
from fedkeep.tree import Tree

Result = dict[str, Any]
CHUNK = 1000  # examples through a model at a time
DIRECTIONS = ("hessian", "random")


@dataclass(frozen=True)
class Options:
    """What the costly studies can be told."""

    samples: int = 200  # test examples in a t-SNE; at most as many of a client's in a surface as five times that
    client: int | None = None  # whose loss surface; without one, the cohort's first
    steps: int = 15  # of the surface, each way
    span: float = 1.0
    directions: str = "hessian"  # or "random"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (("samples", 2), ("steps", 2), ("seed", 0)):
            if getattr(self, name) < low:
                raise FedkeepError(f"{name} must be at least {low}, not {getattr(self, name)}")
        if not self.span > 0:
            raise FedkeepError(f"span must be above 0, not {self.span}")
        if self.directions not in DIRECTIONS:
            raise FedkeepError(f"unknown directions {self.directions!r}: {did_you_mean(self.directions, DIRECTIONS)}")


def analyse(
    source: str | Path | Simulation, what: str | Iterable[str] = (), options: Options | None = None, **parts: Any
) -> Result:
    """Train the round after a run's checkpoint (or a simulation's last round) aside, and study it.

    `what` names studies, those of `CHEAP` if left out. `parts` (model, data, clients, method, criterion) are needed for
    runs that were started with `simulate`. Returns {"round": ..., "clients": ids, study: result, ...}.
    """
    names = parse_study_names(what)
    simulation = source if isinstance(source, Simulation) else open_run(source, **parts)
    seen, options = train_next_round(simulation), options or Options()
    return {
        "round": seen.round,
        "clients": seen.ids,
        **{name: STUDIES[name](seen, options) for name in names},
    }


def parse_study_names(what: str | Iterable[str]) -> list[str]:
    """Turn names, or one text with commas, into known studies; "all" is every one, nothing the cheap ones."""
    names = [n.strip() for n in what.split(",")] if isinstance(what, str) else list(what)
    names = [name for name in names if name] or list(CHEAP)
    names = list(STUDIES) if names == ["all"] else list(dict.fromkeys(names))
    for name in names:
        if name not in STUDIES:
            raise FedkeepError(f"unknown instrument {name!r}: {did_you_mean(name, [*STUDIES, 'all'])}")
    return names


def forgetting_by_phase(seen: NextRound, options: Options) -> Result:
    """Say which classes local training lost and which the averaging did; who still knows its own classes."""
    before, clients, after = seen.class_accuracy[0], seen.class_accuracy[1:-1], seen.class_accuracy[-1]
    local, lost = fg.local_forgetting(before, clients), fg.aggregation_forgetting(clients, after)
    counts, pooled = seen.label_counts, seen.label_counts.sum(0)
    return {
        "before": before.tolist(),
        "clients": clients.tolist(),
        "after": after.tolist(),
        "label_counts": counts.tolist(),
        "local_forgetting": local.mean(0).tolist(),
        "aggregation_forgetting": lost.mean(0).tolist(),
        "aggregation_forgetting_of_the_best": lost.max(0).tolist(),
        "round_forgetting": np.maximum(0.0, before - after).tolist(),
        "most_forgotten_locally": _argmax(local.mean(0)),
        "most_forgotten_by_averaging": _argmax(lost.mean(0)),
        "median_forgetting_degree": float(np.nanmedian(fg.forgetting_degree(before, clients))),
        "in_local": _by_model(fg.in_local, before, clients, after, counts, pooled),
        "out_local": _by_model(fg.out_local, before, clients, after, counts, pooled),
        "personalised": fg.personalised(clients, counts).tolist(),
    }


def divergence(seen: NextRound, options: Options) -> Result:
    """Say how far clients went, against how far their labels are from what the global model knows (FedNTD figure 8)."""
    far = formulas.weight_divergence(seen.before, seen.clients)
    labels = fg.distribution_distance(seen.class_accuracy[0], seen.label_counts)
    return {
        "weight_divergence": far.tolist(),
        "distribution_distance": labels.tolist(),
        "relation": formulas.relation(labels, far),
    }


def alignment(seen: NextRound, options: Options) -> Result:
    """Say for the last two dense layers how many neurons keep their preferred class (FedNTD table 2).

    A layer's neurons are what goes into the dense layer above them, after the non-linearity: `layers` goes by that
    layer's name, and is empty where a model has none.
    """
    preferences = [_preferences(seen, params) for params in seen.models]
    before, clients, after = preferences[0], preferences[1:-1], preferences[-1]
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


def gradients(seen: NextRound, options: Options) -> Result:
    """Say how much the clients' gradients disagree at the global weights (FedNTD eq. 8).

    Each is of the plain criterion over all of a client's examples: what a method adds to it is left out.
    """
    each = [_gradient(seen, client) for client in seen.ids]
    stacked = tree.stack(each)
    return {
        "diversity": formulas.gradient_diversity(stacked),
        "norms": formulas.weight_divergence(tree.zeros_like(seen.before), stacked).tolist(),
    }


def loss_before_and_after(seen: NextRound, options: Options) -> Result:
    """Return the test loss before, of each client, and after (Flashback figure 5)."""
    loss = seen.test_loss
    return {
        "before": float(loss[0]),
        "clients": loss[1:-1].tolist(),
        "mean_of_clients": float(loss[1:-1].mean()),
        "after": float(loss[-1]),
    }


def tsne(seen: NextRound, options: Options) -> Result:
    """Lay out the features of all models on some test examples (FedNTD appendix O, FedGKD figure 2)."""
    x, y = seen.test_examples(options.samples)
    task = seen.simulation.task
    with torch.no_grad():
        features = [task.outputs(params, x)[0].flatten(1).double().cpu().numpy() for params in seen.models]
    stacked = np.stack(features)
    return {
        "models": ["before", *(f"client {k}" for k in seen.ids), "after"],
        "y": y.tolist(),
        "points": formulas.tsne(stacked, options.seed).tolist(),
        "silhouette": formulas.separation(stacked, y.cpu().numpy()),
    }


def loss_surface(seen: NextRound, options: Options) -> Result:
    """Return the loss of one client's model, on its own examples, around it (FedNTD figure 14)."""
    client = seen.ids[0] if options.client is None else options.client
    if client not in seen.ids:
        raise FedkeepError(
            f"client {client} does not take part in round {seen.round}: {did_you_mean(str(client), map(str, seen.ids))}"
        )
    x, y = seen.own_examples(client, most=5 * options.samples)
    task, params = seen.simulation.task, tree.take(seen.clients, seen.ids.index(client))

    def loss(w: Tree) -> Tensor:
        return task.criterion(task.apply(w, x), y).mean()

    found: Result = {"client": client, "directions": options.directions, "loss": float(loss(params).detach())}
    if options.directions == "hessian":
        values, along = surface.hessian_directions(loss, params, options.seed)
        found["eigenvalues"] = values.tolist()
    else:
        along = list(surface.random_directions(params, options.seed))
    axis, values = surface.loss_surface(loss, params, (along[0], along[1]), options.span, options.steps)
    sigmas = np.linspace(0, 0.1, 6).tolist()
    noisy = surface.loss_under_noise(loss, params, sigmas, seed=options.seed)
    return {**found, "axis": axis.tolist(), "losses": values.tolist(), "sigma": sigmas, "under_noise": noisy.tolist()}


Study = Callable[[NextRound, Options], Result]
STUDIES: dict[str, Study] = {
    "where": forgetting_by_phase,
    "divergence": divergence,
    "alignment": alignment,
    "gradients": gradients,
    "losses": loss_before_and_after,
    "tsne": tsne,
    "surface": loss_surface,
}
CHEAP = ("where", "divergence", "alignment", "gradients", "losses")


def _argmax(lost: np.ndarray) -> int | None:
    """The class that lost most, or None where none lost anything."""
    lost = np.nan_to_num(lost)
    return int(lost.argmax()) if lost.max() > 0 else None


def _by_model(
    measure: Callable[[Any, Any], np.ndarray], before: Any, clients: Any, after: Any, counts: Any, pooled: Any
) -> Result:
    """The global models against the cohort's pooled labels, each client against its own (FedNTD figure 4)."""
    own = measure(clients, counts)
    return {
        "before": float(measure(before, pooled)),
        "clients": own.tolist(),
        "after": float(measure(after, pooled)),
    }


def _gradient(seen: NextRound, client: int) -> Tree:
    task = seen.simulation.task
    params = tree.map(lambda w: w.detach().requires_grad_(), seen.before)
    x, y = seen.own_examples(client)
    total = tree.zeros_like(seen.before)
    for start in range(0, len(y), CHUNK):
        part = slice(start, start + CHUNK)
        with torch.enable_grad():
            loss = task.criterion(task.apply(params, tree.take(x, part)), y[part]).sum() / len(y)
        grads = torch.autograd.grad(loss, tree.leaves(params), materialize_grads=True)
        total = tree.add(total, tree.like(params, [g.detach() for g in grads]))
    return total


def _preferences(seen: NextRound, params: Tree) -> dict[str, np.ndarray]:
    """Return the preferred class of the neurons below each dense layer, in the order in which the layers are run."""
    task = seen.simulation.task
    model = task.module(params).to(task.device)
    weighted = {name: m for name, m in model.named_modules() if list(m.parameters(recurse=False))}
    order: list[str] = []
    held: dict[str, list[Tensor]] = {}

    def watch(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, given: tuple[Any, ...]) -> None:
            order.append(name)
            if isinstance(module, nn.Linear):
                x = given[0].detach()
                held.setdefault(name, []).append(x.flatten(1, -2).mean(1) if x.ndim > 2 else x)

        return hook

    handles = [module.register_forward_pre_hook(watch(name)) for name, module in weighted.items()]
    x, y = seen.test_examples(len(seen.simulation.y_test))
    with torch.no_grad():
        for start in range(0, len(y), CHUNK):
            model(tree.take(x, slice(start, start + CHUNK)))
    for handle in handles:
        handle.remove()
    hidden = [name for name in dict.fromkeys(order) if name in held and name != order[0]]  # the first sees the inputs
    truth = y.cpu().numpy()
    return {
        name: formulas.class_preference(torch.cat(held[name]).double().cpu().numpy(), truth, task.n_classes)
        for name in hidden
    }
