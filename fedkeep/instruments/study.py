"""Studies by name: the instruments applied to one round of a run, with results that can be written as JSON."""

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
from fedkeep._util.text import list_some
from fedkeep._util.validate import require_choice, require_number, require_whole
from fedkeep.engine.simulation import Simulation
from fedkeep.errors import FedkeepError
from fedkeep.instruments import formulas, surface
from fedkeep.instruments.next_round import NextRound, open_run, train_next_round
from fedkeep.instruments.probabilities import mean_probabilities
from fedkeep.tree import Tree

Result = dict[str, Any]
CHUNK = 1000  # examples per forward pass
DIRECTIONS = ("hessian", "random")


@dataclass(frozen=True)
class Options:
    """Options of the costly studies, t-SNE and loss surface."""

    samples: int = 200  # test examples in a t-SNE; a loss surface uses at most 5 times as many of a client's examples
    client: int | None = None  # the client of the loss surface; None: the first of the cohort
    steps: int = 15  # points of the loss surface along each direction
    span: float = 1.0  # the loss surface goes from -span to span
    directions: str = "hessian"  # or "random"
    seed: int = 0  # of t-SNE, random directions and noise

    def __post_init__(self) -> None:
        for name, low, high in (("samples", 2, None), ("steps", 2, 1001), ("seed", 0, None)):
            require_whole(name, getattr(self, name), low=low, high=high)
        require_number("span", self.span, above=0)
        require_choice("directions", self.directions, DIRECTIONS)


def analyse(
    source: str | Path | Simulation, what: str | Iterable[str] = (), options: Options | None = None, **parts: Any
) -> Result:
    """Train a trial of the round after a run's checkpoint, or after a simulation's last round, and analyse it.

    `what` names studies; by default those of `CHEAP`. `parts` (model, data, clients, method, criterion) are needed for
    runs that were started with `simulate`. Returns {"round": ..., "clients": ids, study: result, ...}.
    """
    names = parse_study_names(what)
    simulation = source if isinstance(source, Simulation) else open_run(source, **parts)
    trial, options = train_next_round(simulation), options or Options()
    return {
        "round": trial.round,
        "clients": trial.ids,
        **{name: STUDIES[name](trial, options) for name in names},
    }


def parse_study_names(what: str | Iterable[str]) -> list[str]:
    """Return the studies named, in a list or with commas: "all" means every study, nothing the cheap ones."""
    names = [n.strip() for n in what.split(",")] if isinstance(what, str) else list(what)
    names = [name for name in names if name] or list(CHEAP)
    for name in names:
        require_choice("what", name, [*STUDIES, "all"], what="instrument")
    return list(STUDIES) if "all" in names else list(dict.fromkeys(names))


def forgetting_by_phase(trial: NextRound, options: Options) -> Result:
    """Return which classes local training and averaging forget, and how well clients know their own classes."""
    before, clients, after = trial.class_accuracy[0], trial.class_accuracy[1:-1], trial.class_accuracy[-1]
    local, lost = fg.local_forgetting(before, clients), fg.aggregation_forgetting(clients, after)
    counts, pooled = trial.label_counts, trial.label_counts.sum(0)
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


def divergence(trial: NextRound, options: Options) -> Result:
    """Relate clients' weight divergence to the distance of their labels from what the model knows (FedNTD fig. 8)."""
    weights = formulas.weight_divergence(trial.before, trial.clients)
    labels = fg.distribution_distance(trial.class_accuracy[0], trial.label_counts)
    return {
        "weight_divergence": weights.tolist(),
        "distribution_distance": labels.tolist(),
        "relation": formulas.relation(labels, weights),
    }


def alignment(trial: NextRound, options: Options) -> Result:
    """Return how many neurons keep their preferred class, for the last two dense layers (FedNTD table 2).

    A layer's neurons are the inputs of the dense layer above, after the non-linearity. The keys of `layers` are the
    names of those dense layers; it is empty if the model has none.
    """
    preferences = [_preferences(trial, params) for params in trial.models]
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


def gradients(trial: NextRound, options: Options) -> Result:
    """Return how much the clients' gradients disagree at the global weights (FedNTD eq. 8).

    Each is the gradient of the criterion over all of a client's examples, without the terms that a method adds.
    """
    each = [_gradient(trial, client) for client in trial.ids]
    stacked = tree.stack(each)
    return {
        "diversity": formulas.gradient_diversity(stacked),
        "norms": formulas.weight_divergence(tree.zeros_like(trial.before), stacked, order=2).tolist(),
    }


def loss_before_and_after(trial: NextRound, options: Options) -> Result:
    """Return the test loss before, of each client's model, and after (Flashback figure 5)."""
    loss = trial.test_loss
    return {
        "before": float(loss[0]),
        "clients": loss[1:-1].tolist(),
        "mean_of_clients": float(loss[1:-1].mean()),
        "after": float(loss[-1]),
    }


def tsne(trial: NextRound, options: Options) -> Result:
    """Return a joint t-SNE of all models' features on some test examples (FedNTD appendix O, FedGKD figure 2)."""
    x, y = trial.test_examples(options.samples)
    task = trial.simulation.task.without_accelerator
    with torch.no_grad():
        features = [task.outputs(params, x)[0].flatten(1).double().cpu().numpy() for params in trial.models]
    stacked = np.stack(features)
    return {
        "models": ["before", *(f"client {k}" for k in trial.ids), "after"],
        "y": y.tolist(),
        "points": formulas.tsne(stacked, options.seed).tolist(),
        "silhouette": formulas.separation(stacked, y.cpu().numpy()),
    }


def loss_surface(trial: NextRound, options: Options) -> Result:
    """Return the loss around one client's model, on its own examples (FedNTD figure 14)."""
    client = trial.ids[0] if options.client is None else options.client
    if client not in trial.ids:
        cohort = list_some([str(k) for k in trial.ids])
        raise FedkeepError(
            f"client {client} is not in the cohort of round {trial.round} (valid: {cohort})",
            key="client",
            value=client,
            valid=trial.ids,
        )
    x, y = trial.own_examples(client, most=5 * options.samples)
    task, params = trial.simulation.task.without_accelerator, tree.take(trial.clients, trial.ids.index(client))

    def loss(w: Tree) -> Tensor:
        return task.criterion(task.apply(w, x), y).mean()

    result: Result = {"client": client, "directions": options.directions, "loss": float(loss(params).detach())}
    if options.directions == "hessian":
        eigenvalues, directions = surface.hessian_directions(loss, params, options.seed)
        result["eigenvalues"] = eigenvalues.tolist()
    else:
        directions = list(surface.random_directions(params, options.seed))
    axis, values = surface.loss_surface(loss, params, (directions[0], directions[1]), options.span, options.steps)
    sigmas = np.linspace(0, 0.1, 6).tolist()
    noisy = surface.loss_under_noise(loss, params, sigmas, seed=options.seed)
    return {**result, "axis": axis.tolist(), "losses": values.tolist(), "sigma": sigmas, "under_noise": noisy.tolist()}


Study = Callable[[NextRound, Options], Result]
STUDIES: dict[str, Study] = {
    "where": forgetting_by_phase,
    "divergence": divergence,
    "alignment": alignment,
    "gradients": gradients,
    "losses": loss_before_and_after,
    "probabilities": lambda trial, options: mean_probabilities(trial),
    "tsne": tsne,
    "surface": loss_surface,
}
CHEAP = ("where", "divergence", "alignment", "gradients", "losses")


def _argmax(lost: np.ndarray) -> int | None:
    """Return the class that lost most, or None if no class lost anything."""
    lost = np.nan_to_num(lost)
    return int(lost.argmax()) if lost.max() > 0 else None


def _by_model(
    measure: Callable[[Any, Any], np.ndarray], before: Any, clients: Any, after: Any, counts: Any, pooled: Any
) -> Result:
    """Measure the global models with the cohort's pooled labels, each client with its own labels (FedNTD figure 4)."""
    own = measure(clients, counts)
    return {
        "before": float(measure(before, pooled)),
        "clients": own.tolist(),
        "after": float(measure(after, pooled)),
    }


def _gradient(trial: NextRound, client: int) -> Tree:
    task = trial.simulation.task.without_accelerator
    params = tree.map(lambda w: w.detach().requires_grad_(), trial.before)
    x, y = trial.own_examples(client)
    total = tree.zeros_like(trial.before)
    for start in range(0, len(y), CHUNK):
        part = slice(start, start + CHUNK)
        with torch.enable_grad():
            loss = task.criterion(task.apply(params, tree.take(x, part)), y[part]).sum() / len(y)
        grads = torch.autograd.grad(loss, tree.leaves(params), materialize_grads=True)
        total = tree.add(total, tree.like(params, [g.detach() for g in grads]))
    return total


def _preferences(trial: NextRound, params: Tree) -> dict[str, np.ndarray]:
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
