"""Headings of the studies' values in tables and figures, their units, and whether more of a value is better.

A value is named by its study and its path in the result, such as `alignment.layers.last.clients`; `*` stands for one
or more keys, such as the name of a layer. A list is averaged, so a value per client or class has one heading.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from fedkeep.analysis import personal
from fedkeep.analysis.recoverable import HALF_KEY, STUDY


@dataclass(frozen=True)
class Heading:
    """What a value is called. With the unit %, a share from 0 to 1 is shown as per cent."""

    text: str
    unit: str = ""
    higher_is_better: bool = False

    @property
    def scale(self) -> float:
        """By what the study's value is multiplied."""
        return 100.0 if self.unit == "%" else 1.0

    def __str__(self) -> str:
        return f"{self.text} {self.unit}".rstrip()


def _accuracy(text: str) -> Heading:
    return Heading(text, "%", higher_is_better=True)


def _personal_headings() -> dict[str, Heading]:
    models = {
        personal.GLOBAL: "global model",
        personal.OWN: "method's own models",
        personal.TUNED: "fine-tuned models",
        personal.USED: "clients' models",
    }
    numbers = {
        "mean": "own data",
        "worst_tenth": "own data, worst tenth of clients",
        "weighted": "own data, weighted by examples",
        "took_part": "own data, clients that took part",
        "best": "own data, best analysed round",
        "test_set": "whole test set",
    }
    headings: dict[str, Heading] = {}
    for model, text in models.items():
        headings |= {f"personal.{model}.{key}": _accuracy(f"{text}, {where}") for key, where in numbers.items()}
        headings[f"personal.{model}.spread"] = Heading(f"{text}, own data, spread over clients", "%")
    return headings


HEADINGS = {
    "where.before": _accuracy("global accuracy before"),
    "where.clients": _accuracy("local accuracy"),
    "where.after": _accuracy("global accuracy after"),
    "where.local_forgetting": Heading("local forgetting"),
    "where.aggregation_forgetting": Heading("aggregation forgetting"),
    "where.aggregation_forgetting_of_the_best": Heading("aggregation forgetting, best client"),
    "where.round_forgetting": Heading("round forgetting, last round"),
    "where.median_forgetting_degree": Heading("forgetting degree (median)"),
    "where.in_local.before": _accuracy("own classes, before"),
    "where.in_local.clients": _accuracy("own classes, local"),
    "where.in_local.after": _accuracy("own classes, after"),
    "where.out_local.before": _accuracy("other classes, before"),
    "where.out_local.clients": _accuracy("other classes, local"),
    "where.out_local.after": _accuracy("other classes, after"),
    "where.personalised": _accuracy("personalised accuracy"),
    "divergence.weight_divergence": Heading("weight divergence", "(L1)"),
    "divergence.distribution_distance": Heading("distribution distance", "(L1)"),
    "divergence.relation.pearson": Heading("divergence vs distance", "(Pearson's r)"),
    "alignment.layers.*.clients": Heading("alignment, {} layer, local", higher_is_better=True),
    "alignment.layers.*.after": Heading("alignment, {} layer, global", higher_is_better=True),
    "gradients.diversity": Heading("gradient diversity"),
    "gradients.norms": Heading("gradient norm", "(L2)"),
    "losses.before": Heading("test loss, before"),
    "losses.clients": Heading("test loss, local"),
    "losses.mean_of_clients": Heading("test loss, local"),
    "losses.after": Heading("test loss, after"),
    "tsne.silhouette.by_class": Heading("silhouette by class", higher_is_better=True),
    "tsne.silhouette.by_model": Heading("silhouette by model"),
    "surface.loss": Heading("loss on own examples"),
    "surface.losses": Heading("loss around the local model"),
    "surface.eigenvalues": Heading("Hessian eigenvalues"),
    "surface.under_noise": Heading("loss under noise"),
    "training.in_local": _accuracy("own classes, in training"),
    "training.out_local": _accuracy("other classes, in training"),
    "recoverable.before": _accuracy("class accuracy, no bias"),
    "recoverable.after": _accuracy("class accuracy, with bias"),
    "recoverable.accuracy.before": _accuracy("accuracy, no bias"),
    "recoverable.accuracy.after": _accuracy("accuracy, with bias"),
    "recoverable.forgetting.before": Heading("forgetting, no bias"),
    "recoverable.forgetting.after": Heading("forgetting, with bias"),
    "recoverable.round_forgetting.before": Heading("round forgetting, no bias"),
    "recoverable.round_forgetting.after": Heading("round forgetting, with bias"),
    "recoverable.share": Heading("recoverable share of forgetting"),
    **_personal_headings(),
}
_ON_HALF = f"{STUDY}.{HALF_KEY}."


def heading_of(value: str) -> Heading:
    """Return the heading of a study's value; one made of its name if it has none of its own.

    >>> str(heading_of("divergence.weight_divergence")), str(heading_of("where.clients"))
    ('weight divergence (L1)', 'local accuracy %')
    >>> str(heading_of("alignment.layers.body.2.clients")), str(heading_of("neurons.preferences"))
    ('alignment, body.2 layer, local', 'neurons: preferences')
    """
    if value.startswith(_ON_HALF):
        whole = heading_of(value.replace(_ON_HALF, f"{STUDY}."))
        return replace(whole, text=f"{whole.text} (on half of the test set)")
    for name, heading in HEADINGS.items():
        before, star, after = name.partition("*")
        found = re.fullmatch(f"{re.escape(before)}(.+){re.escape(after)}", value) if star else None
        if found:
            return replace(heading, text=heading.text.format(found[1]))
        if name == value:
            return heading
    study, _, path = value.partition(".")
    return Heading(f"{study}: {path.replace('.', ' ').replace('_', ' ')}")
