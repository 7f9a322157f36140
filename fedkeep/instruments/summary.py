"""Text summary of the results of `analyse`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np

from fedkeep._util.text import list_some, short_name
from fedkeep.analysis import personal
from fedkeep.analysis.recoverable import PUBLIC
from fedkeep.instruments.formulas import relation
from fedkeep.instruments.options import Result
from fedkeep.runs.history import History

_OWN_AND_OTHER = ("in_local", "out_local")


def sentences(analysis: Result, history: History | None = None) -> list[str]:
    """Format the result of every study as one or a few sentences; a history has the names of classes and clients."""
    history = history or History("", {})
    number = analysis["round"]
    clients = list_some([short_name(history.client_names.get(k, k)) for k in analysis["clients"]])
    start = f"Trial of round {number}, from the model of round {number - 1}. Cohort: {clients}."
    if not analysis["clients"]:  # no study needed a trial
        start = f"Global model of round {number - 1}."
    formats = dict(_FORMATS)
    for name, with_names in _WITH_NAMES.items():
        formats[name] = functools.partial(with_names, history=history)
    return [start, *(formats[name](result) for name, result in analysis.items() if name in formats)]


def _where(r: Result, history: History) -> str:
    phases = ("local_forgetting", "aggregation_forgetting")
    local, averaging = (np.nan_to_num(np.array(r[key], dtype=float)) for key in phases)
    text = (
        f"Where: a class loses {local.mean():.3f} accuracy in local training and {averaging.mean():.3f} in averaging, "
        "mean over classes."
    )
    if r["most_forgotten_locally"] is not None:
        c = r["most_forgotten_locally"]
        name = short_name(history.class_name(c))
        text += f" Most forgotten in local training: {name} ({r['before'][c]:.0%} before, {local[c]:.2f} lost)."
    if r["most_forgotten_by_averaging"] is not None:
        c = r["most_forgotten_by_averaging"]
        name = short_name(history.class_name(c))
        text += f" Most forgotten in averaging: {name} ({averaging[c]:.2f} lost, {r['after'][c]:.0%} after)."
    return f"{text} {_course('own', r['in_local'])} {_course('other', r['out_local'])}"


def _course(which: str, r: Result) -> str:
    return (
        f"Accuracy on the clients' {which} classes: {r['before']:.0%} before, {np.nanmean(r['clients']):.0%} in the "
        f"clients' models, {r['after']:.0%} after averaging."
    )


def _divergence(r: Result) -> str:
    distance, rho = np.array(r["weight_divergence"]), r["relation"]["pearson"]
    text = (
        f"Divergence: the distance of the clients' weights to the global ones is {distance.mean():.3g} on average "
        f"({distance.min():.3g} to {distance.max():.3g})."
    )
    if math.isnan(rho):
        return text
    return f"{text} Its correlation with the distance of their labels from what the global model knows is {rho:.2f}."


def _alignment(r: Result) -> str:
    if not r["layers"]:
        return "Alignment: this model has no hidden neurons below a dense layer."
    layers = [
        f"of the {layer['neurons']} below {name}, {np.mean(layer['clients']):.0%} in the clients' models and "
        f"{layer['after']:.0%} after averaging"
        for name, layer in r["layers"].items()
    ]
    return f"Alignment: neurons that keep their preferred class: {'; '.join(layers)}."


def _gradients(r: Result) -> str:
    return f"Gradients: the diversity at the global weights is {r['diversity']:.3g} (1: all clients agree)."


def _losses(r: Result) -> str:
    return (
        f"Losses on the test set: {r['before']:.3f} before, {r['mean_of_clients']:.3f} in the clients' models (mean), "
        f"{r['after']:.3f} after averaging."
    )


def _probabilities(r: Result) -> str:
    share, probability = (np.array(r[key], dtype=float) for key in ("label_counts", "clients"))
    rho = relation(share / np.maximum(r["largest"], 1), probability)["pearson"]
    return f"Probabilities: the correlation of a class's label count with its mean probability is {rho:.2f}."


def _tsne(r: Result) -> str:
    by_class, by_model = r["silhouette"]["by_class"], r["silhouette"]["by_model"]
    return (
        f"t-SNE: {len(r['y'])} test examples in {len(r['models'])} models. The silhouette of the features is "
        f"{by_class:.2f} by class and {by_model:.2f} by model."
    )


def _surface(r: Result, history: History) -> str:
    name = short_name(history.client_name(r["client"]))
    text = (
        f"Surface: the loss of {name} on its own examples is {r['loss']:.3f}; up to "
        f"{np.max(r['losses']):.3g} within a distance of {r['axis'][-1]:g} along two {r['directions']} directions; "
        f"{r['under_noise'][-1]:.3f} with noise of standard deviation {r['sigma'][-1]:g} on the weights."
    )
    if "eigenvalues" not in r:
        return text
    return f"{text} The largest eigenvalues of its Hessian are {_numbers(r['eigenvalues'])}."


def _training(r: Result) -> str:
    epochs = r["epochs"][-1]
    own, other = ([float(np.nanmean(np.array(r[key][at], dtype=float))) for at in (0, -1)] for key in _OWN_AND_OTHER)
    return (
        f"Training: within {epochs} epoch{'s' * (epochs > 1)} the clients' accuracy goes from {own[0]:.0%} to "
        f"{own[1]:.0%} on their own classes and from {other[0]:.0%} to {other[1]:.0%} on other classes."
    )


def _confusion(r: Result, history: History) -> str:
    before, local = (float(np.trace(matrix) / np.sum(matrix)) for matrix in (r["before"], r["local"]))
    name = short_name(history.client_name(r["client"]))
    return f"Confusion: the test accuracy is {before:.0%} before and {local:.0%} in the model of {name}."


def _neurons(r: Result) -> str:
    if not r["models"]:
        return "Neurons: this model has no hidden neurons below a dense layer."
    preferred = [len(set(one)) for one in (r["preferences"][0], r["preferences"][-1])]
    return (
        f"Neurons: the {len(r['preferences'][0])} neurons of the last hidden layer prefer {preferred[0]} classes "
        f"before and {preferred[1]} after."
    )


def _circle(r: Result) -> str:
    if not r["models"]:
        return "Circle: this model does not have two features."
    return f"Circle: angles of the features of {len(r['y'])} test examples in {len(r['models'])} models."


def _regions(r: Result) -> str:
    if not r["models"]:
        return "Regions: the examples are not points in a plane."
    known = [len({c for row in one for c in row}) for one in (r["classes"][0], r["classes"][-1])]
    return f"Regions: the global model predicts {known[0]} classes before and {known[1]} after."


def _recoverable(r: Result) -> str:
    if not r["fitted_on"]:
        return (
            "Recoverable: this run has no public set to fit a bias on; --fit-on-test fits it on half of the test set "
            "and measures on the other half."
        )
    where = f"{r['n_fitted']} public examples" if r["fitted_on"] == PUBLIC else f"{r['n_fitted']} test examples"
    measured = "" if r["fitted_on"] == PUBLIC else f" on the other {r['n_measured']}"
    text = (
        f"Recoverable: the best bias per class, fitted on {where}, changes the accuracy{measured} from "
        f"{r['accuracy']['before']:.1%} to {r['accuracy']['after']:.1%}."
    )
    if r["rounds"] < 2:
        return f"{text} Forgetting over rounds needs a run with --instruments recoverable --every 1."
    before, after = (r["forgetting"][side] for side in ("before", "after"))
    text += f" Over {r['rounds']} analysed rounds, forgetting is {before:.3f} before and {after:.3f} after"
    return f"{text}: {_share(r['share'])}."


def _personal(r: Result) -> str:
    never = len(r["never_took_part"])
    clients = personal.describe_clients(len(r["clients"]), r["left_out"], (never, never))
    text = f"Personal: accuracy of {clients} on {personal.DATA[r['data']]}, mean over clients:"
    parts = []
    for model in (model for model in personal.MODELS if model in r):
        name, m = personal.describe_model(model, r["epochs"]), r[model]
        parts.append(
            f" {name} {m['mean']:.1%} (spread {m['spread']:.1%}, worst tenth {m['worst_tenth']:.1%}; on the whole test "
            f"set {m['test_set']:.1%})"
        )
    return f"{text}{';'.join(parts)}."


def _share(share: float) -> str:
    if not math.isfinite(share):
        return "nothing is forgotten"
    return f"{share:.0%} is recoverable" if 0 < share < 1 else f"{'all' if share > 0 else 'none'} of it is recoverable"


def _numbers(values: list[float]) -> str:
    return " and ".join(f"{value:.3g}" for value in values)


_FORMATS: dict[str, Callable[[Result], str]] = {
    "divergence": _divergence,
    "alignment": _alignment,
    "gradients": _gradients,
    "losses": _losses,
    "probabilities": _probabilities,
    "tsne": _tsne,
    "training": _training,
    "neurons": _neurons,
    "circle": _circle,
    "regions": _regions,
    "recoverable": _recoverable,
    "personal": _personal,
}
_WITH_NAMES: dict[str, Callable[..., str]] = {"where": _where, "surface": _surface, "confusion": _confusion}
