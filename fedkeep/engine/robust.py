"""Robust averaging: uploads are changed before a method's `aggregate`, so that a few hostile clients do little harm.

Every client counts alike. Its number of examples `n` is its own claim, and with honest weights n = 1e9 is an attack;
so are its label counts.

- median, trimmed_mean: the entries that the method only averages become their coordinate-wise median or trimmed mean.
- clip: a client's change is scaled down to the median norm of the cohort's changes.
- krum, multi_krum: only the client, or all but `hostile` of the clients, with the closest neighbours are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedkeep import tree
from fedkeep.engine.settings import Settings
from fedkeep.errors import FedkeepError, MethodError
from fedkeep.method import Cohort, FedAvg
from fedkeep.tree import Tree

NEEDS_MEAN = ("median", "trimmed_mean")  # replace the uploads, so only for what the server uses by its mean


def require_averaged(method: FedAvg, settings: Settings) -> None:
    """Raise if this method cannot be aggregated like this."""
    if settings.aggregation in NEEDS_MEAN and not method.averaged:
        raise MethodError(
            f'{method.name} uses more than the mean of the uploads, so aggregation = "{settings.aggregation}" cannot '
            f"replace it{advice(method)}; clip, krum and multi_krum work for every method",
            key="aggregation",
            value=settings.aggregation,
            valid=["mean", "clip", "krum", "multi_krum"],
        )


def advice(method: FedAvg) -> str:
    """Return how a method can do with the mean of the uploads, as the end of a clause; "" if it cannot."""
    option = method.needs.get("every_upload")
    return f" ({option})" if option else ""


def require_enough(settings: Settings, uploads: int) -> None:
    """Raise if there are too few uploads to withstand the hostile ones."""
    if uploads < settings.smallest_cohort:
        raise FedkeepError(
            f'aggregation = "{settings.aggregation}" with hostile = {settings.hostile} needs at least '
            f"{settings.smallest_cohort} clients in a round, and there are {uploads}",
            key="hostile",
            value=settings.hostile,
        )


def resist(method: FedAvg, server: Tree, uploads: Tree, cohort: Cohort, settings: Settings) -> tuple[Tree, Cohort]:
    """Return the uploads and the cohort that the method aggregates instead of these."""
    size, kind = len(cohort.ids), settings.aggregation
    require_enough(settings, size)
    if "params" not in uploads:
        raise MethodError(f'{method.name} uploads no "params", which robust averaging needs', key="aggregation")
    uploads = with_equal_sizes(method, uploads)
    if kind in NEEDS_MEAN:
        trim = (size - 1) // 2 if kind == "median" else settings.hostile
        means = {
            entry: tree.map(lambda t: trimmed_mean(t, trim), uploads[entry]) for entry in averaged(method, uploads)
        }
        return with_mean(uploads, means, size), cohort
    if kind == "clip":
        return {**uploads, **clip_to_median_norm(server, uploads, _entries(method, uploads))}, cohort
    keep = 1 if kind == "krum" else size - settings.hostile
    chosen = krum(server, uploads, _entries(method, uploads), settings.hostile, keep)
    index = torch.tensor(chosen, device=uploads["n"].device if "n" in uploads else None)
    return tree.take(uploads, index), replace(cohort, ids=tuple(cohort.ids[k] for k in chosen))


def with_equal_n(uploads: Tree) -> Tree:
    """Return the uploads with one example for every client, so that all count alike."""
    return {**uploads, "n": torch.ones_like(uploads["n"])} if "n" in uploads else uploads


def with_equal_sizes(method: FedAvg, uploads: Tree) -> Tree:
    """Return the uploads as if every client had the median number of examples, in the classes that it says."""
    if "n" not in uploads:
        return uploads
    n = uploads["n"].double()
    median = trimmed_mean(n, (len(n) - 1) // 2)
    factor = median / n.clamp(min=1)
    counts = [entry for entry, bound in method.bounds.items() if bound.total == "n" and entry in uploads]
    scaled = {entry: tree.map(lambda t: _times(t, factor), uploads[entry]) for entry in counts}
    return {**uploads, **scaled, "n": median.to(uploads["n"].dtype).expand(len(n))}


def _times(values: Tensor, factor: Tensor) -> Tensor:
    """Return each client's values [K, ...] times its factor [K]."""
    return values * factor.to(values.dtype).reshape(-1, *[1] * (values.ndim - 1))


def with_mean(uploads: Tree, means: Tree, size: int) -> Tree:
    """Return the uploads with these means in place of every client's own entries."""
    return {**uploads, **tree.map(lambda t: t.expand(size, *t.shape), means)}


def changes(server: Tree, uploads: Tree, entries: Sequence[str]) -> Tree:
    """Return how much each client changed: its weights minus the server's; other entries are changes already."""
    moved = {"params": tree.map(lambda t, w: t - w, uploads["params"], server["params"])}
    return {entry: moved.get(entry, uploads[entry]) for entry in entries}


def trimmed_mean(values: Tensor, trim: int) -> Tensor:
    """Return the mean over clients without the `trim` smallest and largest values of each coordinate.

    >>> trimmed_mean(torch.tensor([[1.0], [9.0], [2.0], [3.0]]), 1)
    tensor([2.5000])
    """
    return values.sort(0).values[trim : len(values) - trim].mean(0)


def norms(change: Tree, size: int) -> Tensor:
    """Return the norm of every client's change, [K]."""
    squares = [t.reshape(size, -1).double().square().sum(1) for t in tree.leaves(change)]
    return torch.stack(squares).sum(0).sqrt()


def clip_to_median_norm(server: Tree, uploads: Tree, entries: Sequence[str]) -> Tree:
    """Return the entries, each client's change of each scaled down to the median norm of that entry."""
    clipped = {}
    for entry, change in changes(server, uploads, entries).items():
        size = len(tree.leaves(change)[0])
        norm = norms(change, size)
        factor = (trimmed_mean(norm, (size - 1) // 2) / norm.clamp(min=1e-300)).clamp(max=1.0)
        scaled = tree.map(lambda t, f=factor: _times(t, f), change)
        base = server["params"] if entry == "params" else tree.map(lambda t: torch.zeros_like(t[0]), scaled)
        clipped[entry] = tree.map(torch.add, scaled, base)
    return clipped


def krum(server: Tree, uploads: Tree, entries: Sequence[str], hostile: int, keep: int) -> list[int]:
    """Return the positions of the `keep` clients with the smallest scores, in increasing order.

    A client's score is the sum of its squared distances to the K - hostile - 2 clients closest to it. With several
    entries, each counts in multiples of the median squared distance, so that none hides behind another.
    """
    size, total = len(tree.leaves(uploads)[0]), torch.zeros((), dtype=torch.float64)
    for change in changes(server, uploads, entries).values():
        flat = torch.cat([t.reshape(size, -1).double() for t in tree.leaves(change)], 1).cpu()
        distance = torch.stack([(flat - row).square().sum(1) for row in flat])
        total = total + distance / distance[~torch.eye(size, dtype=torch.bool)].median().clamp(min=1e-300)
    closest = total.sort(1).values[:, 1 : max(1, size - hostile - 2) + 1]
    return sorted(closest.sum(1).argsort(stable=True)[:keep].tolist())


def averaged(method: FedAvg, uploads: Tree) -> tuple[str, ...]:
    """Return the entries that the method averages, of those that its options let clients upload."""
    return tuple(entry for entry in method.averaged if entry in uploads)


def _entries(method: FedAvg, uploads: Tree) -> tuple[str, ...]:
    """Return the entries that are compared between clients."""
    return averaged(method, uploads) or ("params",)
