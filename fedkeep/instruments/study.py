"""Studies by name: the instruments applied to one round of a run, with results that can be written as JSON."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedkeep import forgetting as fg
from fedkeep import tree
from fedkeep._util.validate import require_choice
from fedkeep.analysis.personal import with_best
from fedkeep.analysis.recoverable import STUDY
from fedkeep.engine.simulation import Simulation
from fedkeep.instruments import formulas, surface
from fedkeep.instruments.local_training import training
from fedkeep.instruments.neurons import alignment, circle, neurons
from fedkeep.instruments.next_round import NextRound, open_run, train_next_round, untrained, with_split
from fedkeep.instruments.options import CHUNK, Options, Result, names_of_models
from fedkeep.instruments.personal import personal
from fedkeep.instruments.predictions import confusion, regions
from fedkeep.instruments.probabilities import mean_probabilities
from fedkeep.instruments.recoverable import recoverable, with_course
from fedkeep.runs.reading import read_instruments
from fedkeep.tree import Tree

TRIAL = "the trial round"


def analyse(
    source: str | Path | Simulation,
    what: str | Iterable[str] = (),
    options: Options | None = None,
    on_step: Callable[[str], None] = lambda step: None,
    **parts: Any,
) -> Result:
    """Train a trial of the round after a run's checkpoint, or after a simulation's last round, and analyse it.

    `what` names studies; by default those of `CHEAP`. `on_step` is called with `TRIAL` before the trial round, and with
    the name of each study before it starts. `parts` (model, data, clients, method, criterion) are needed for runs that
    were started with `simulate`. Returns {"round": ..., "clients": ids, study: result, ...}. If no study looks at the
    trial round, it is not trained and `clients` is empty.
    """
    names = parse_study_names(what)
    on_step(TRIAL)
    simulation = source if isinstance(source, Simulation) else open_run(source, **parts)
    options = options or Options()
    if options.split:
        simulation = with_split(simulation, options.split)
    trial = untrained(simulation) if set(names) <= set(WITHOUT_TRIAL) else train_next_round(simulation)
    result: Result = {"round": trial.round, "clients": trial.ids}
    for name in names:
        on_step(name)
        result[name] = STUDIES[name](trial, options)
    earlier = [] if isinstance(source, Simulation) else read_instruments(source)
    return with_earlier(result, earlier, trial.round - 1)


def with_earlier(analysis: Result, earlier: Iterable[Result], after_round: int) -> Result:
    """Return an analysis with what its studies make of the earlier analysed rounds of the run."""
    lines = list(earlier)
    return with_best(with_course(analysis, lines, after_round), lines, after_round)


def parse_study_names(what: str | Iterable[str]) -> list[str]:
    """Return the studies named, in a list or with commas: "all" means every study, nothing the cheap ones."""
    names = [n.strip() for n in what.split(",")] if isinstance(what, str) else list(what)
    names = [name for name in names if name] or list(CHEAP)
    for name in names:
        require_choice("what", name, [*STUDIES, "all"], what="instrument")
    return list(STUDIES) if "all" in names else list(dict.fromkeys(names))


def needs_examples(names: Collection[str], fit_on_test: bool) -> bool:
    """Return whether a run with these studies must have labelled examples on the server.

    If all studies are wanted, one that a run cannot have is left empty.
    """
    return STUDY in names and set(names) != set(STUDIES) and not fit_on_test


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
        "models": names_of_models(trial),
        "y": y.tolist(),
        "points": formulas.tsne(stacked, options.seed).tolist(),
        "silhouette": formulas.separation(stacked, y.cpu().numpy()),
    }


def recoverable_forgetting(trial: NextRound, options: Options) -> Result:
    """Return what a bias per class recovers of the global model's class accuracies. It does not look at the trial."""
    return recoverable(trial.simulation, options)


def personalised_accuracy(trial: NextRound, options: Options) -> Result:
    """Return every client's accuracy with what it would use itself. It does not look at the trial."""
    return personal(trial.simulation, options)


def loss_surface(trial: NextRound, options: Options) -> Result:
    """Return the loss around one client's model, on its own examples (FedNTD figure 14)."""
    client = options.chosen_client(trial)
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
    "probabilities": mean_probabilities,
    "tsne": tsne,
    "surface": loss_surface,
    "training": training,
    "confusion": confusion,
    "neurons": neurons,
    "circle": circle,
    "regions": regions,
    "recoverable": recoverable_forgetting,
    "personal": personalised_accuracy,
}
WITHOUT_TRIAL = ("recoverable", "personal")  # studies that need no trial round
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
