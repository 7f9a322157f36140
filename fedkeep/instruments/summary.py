"""What the instruments found, in words."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from fedkeep.instruments.study import Result


def sentences(found: Result) -> list[str]:
    """Put every study of `analyse` into a sentence or two."""
    who = ", ".join(map(str, found["clients"][:10])) + (", ..." if len(found["clients"]) > 10 else "")
    start = f"Round {found['round']}, trained aside from round {found['round'] - 1}'s model: clients {who}."
    return [start, *(_SAY[name](result) for name, result in found.items() if name in _SAY)]


def _where(r: Result) -> str:
    local, averaging = (np.nan_to_num(np.array(r[key], dtype=float)) for key in _STEPS)
    said = (
        f"Where: local training loses {local.mean():.3f} of a class's accuracy on average, averaging "
        f"{averaging.mean():.3f}."
    )
    if r["most_forgotten_locally"] is not None:
        c = r["most_forgotten_locally"]
        said += f" Most in local training: class {c} ({r['before'][c]:.0%} before, {local[c]:.2f} lost)."
    if r["most_forgotten_by_averaging"] is not None:
        c = r["most_forgotten_by_averaging"]
        said += f" Most in averaging: class {c} ({averaging[c]:.2f} lost, {r['after'][c]:.0%} after)."
    inside, outside = r["in_local"], r["out_local"]
    return (
        f"{said} On the clients' own classes accuracy goes from {inside['before']:.0%} to "
        f"{np.nanmean(inside['clients']):.0%} at the clients and {inside['after']:.0%} after averaging; on the others "
        f"from {outside['before']:.0%} to {np.nanmean(outside['clients']):.0%} and {outside['after']:.0%}."
    )


def _divergence(r: Result) -> str:
    far, rho = np.array(r["weight_divergence"]), r["relation"]["pearson"]
    said = f"Divergence: clients' weights move {far.mean():.3g} away ({far.min():.3g} to {far.max():.3g})"
    if math.isnan(rho):
        return f"{said}."
    return f"{said}; correlation with the distance of their labels from what the global model knows: {rho:.2f}."


def _alignment(r: Result) -> str:
    if not r["layers"]:
        return "Alignment: this model has no hidden neurons below a dense layer."
    told = [
        f"of the {layer['neurons']} neurons below {name} {np.mean(layer['clients']):.0%} at the clients and "
        f"{layer['after']:.0%} after averaging"
        for name, layer in r["layers"].items()
    ]
    return f"Alignment: neurons that keep their preferred class: {'; '.join(told)}."


def _gradients(r: Result) -> str:
    return f"Gradients: their diversity at the global weights is {r['diversity']:.3g} (1: all clients agree)."


def _losses(r: Result) -> str:
    return (
        f"Losses on the test set: {r['before']:.3f} before, {r['mean_of_clients']:.3f} at the clients on average, "
        f"{r['after']:.3f} after averaging."
    )


def _tsne(r: Result) -> str:
    by_class, by_model = r["silhouette"]["by_class"], r["silhouette"]["by_model"]
    return (
        f"t-SNE: {len(r['y'])} test examples in {len(r['models'])} models; the features' silhouette is {by_class:.2f} "
        f"by class and {by_model:.2f} by model."
    )


def _surface(r: Result) -> str:
    sharp = f"; largest eigenvalues of its Hessian {_numbers(r['eigenvalues'])}" if "eigenvalues" in r else ""
    return (
        f"Surface: client {r['client']}'s loss is {r['loss']:.3f} on its own examples, up to {np.max(r['losses']):.3g} "
        f"within {r['axis'][-1]:g} along two {r['directions']} directions{sharp}; with noise of standard deviation "
        f"{r['sigma'][-1]:g} on its weights {r['under_noise'][-1]:.3f}."
    )


def _numbers(values: list[float]) -> str:
    return " and ".join(f"{value:.3g}" for value in values)


_STEPS = ("local_forgetting", "aggregation_forgetting")
_SAY: dict[str, Callable[[Result], str]] = {
    "where": _where,
    "divergence": _divergence,
    "alignment": _alignment,
    "gradients": _gradients,
    "losses": _losses,
    "tsne": _tsne,
    "surface": _surface,
}
