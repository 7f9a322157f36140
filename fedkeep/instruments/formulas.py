"""Formulas on weights, gradients, activations, features and losses.

K clients, C classes, N examples, D neurons or features, M models, T rounds. Weights and gradients are arrays [P] and
[K, P], or trees of them as fedkeep's models are: {"layer.weight": [...], ...}, clients on a leading axis.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedkeep import tree
from fedkeep.errors import FedkeepError


def weight_divergence(before: Any, clients: Any, order: float = 1) -> np.ndarray:
    """Return |w - w_k|, the distance of each client's weights to the global ones, [K] (FedNTD section 5.2, figure 8).

    The L1 norm over all weights together, as in the paper's notation (table 3); `order=2` gives the Euclidean norm.

    >>> weight_divergence([0.0, 0.0], [[3.0, 4.0], [0.0, 1.0]]).tolist()
    [7.0, 1.0]
    """
    differences = _vectors(clients) - _vector(before)
    return np.asarray(np.linalg.norm(differences, ord=order, axis=1))


def relation(x: Any, y: Any) -> dict[str, float]:
    """Return how two quantities are related: Pearson's r and the least-squares line y = slope x + intercept.

    FedNTD's figure 8 (a, b) shows this for the distance between distributions (x) and the divergence of weights (y)
    over the clients of all rounds. All three are NaN with fewer than two points or a constant x; r also with a
    constant y.

    >>> relation([0.0, 1.0, 2.0], [1.0, 3.0, 5.0])
    {'pearson': 1.0, 'slope': 2.0, 'intercept': 1.0}
    """
    x, y = np.ravel(np.asarray(x, dtype=float)), np.ravel(np.asarray(y, dtype=float))
    if len(x) != len(y):
        raise ValueError(f"x and y must have the same length, not {len(x)} and {len(y)}")
    dx, dy = (x - x.mean(), y - y.mean()) if len(x) else (x, y)
    xx, yy, xy = float(dx @ dx), float(dy @ dy), float(dx @ dy)
    if xx == 0:
        return {"pearson": float("nan"), "slope": float("nan"), "intercept": float("nan")}
    slope = xy / xx
    pearson = xy / float(np.sqrt(xx * yy)) if yy > 0 else float("nan")
    return {"pearson": pearson, "slope": slope, "intercept": float(y.mean() - slope * x.mean())}


def gradient_diversity(gradients: Any) -> float:
    """Return how much the clients' gradients disagree (FedNTD eq. 8).

    Lambda = (1/K sum_k |g_k|^2) / |1/K sum_k g_k|^2: 1 if all are equal, larger the more they cancel, infinite if
    their mean is 0. The gradients are those of the clients' own losses at the global weights.

    >>> gradient_diversity([[1.0, 0.0], [0.0, 1.0]]), gradient_diversity([[2.0, 1.0], [2.0, 1.0]])
    (2.0, 1.0)
    """
    g = _vectors(gradients)
    mean = g.mean(0)
    norm_of_mean = float(mean @ mean)
    mean_norm = float((g**2).sum(1).mean())
    return mean_norm / norm_of_mean if norm_of_mean > 0 else (float("inf") if mean_norm > 0 else float("nan"))


def class_preference(activations: Any, y: Any, n_classes: int) -> np.ndarray:
    """Return the class for which each neuron is most active, [D] (FedNTD appendix M, eq. 19).

    argmax_c h_c, where h_c is the neuron's activation [N, D] over the examples of class c. Eq. 19 takes the sum,
    section 5.1 the mean; they agree on a balanced test set. Choice: the mean. A class without examples is never
    preferred; ties go to the lower class.

    >>> class_preference([[1.0, 0.0], [3.0, 1.0], [0.0, 5.0]], [0, 0, 1], n_classes=3).tolist()
    [0, 1]
    """
    a, y = np.asarray(activations, dtype=float), np.asarray(y)
    if a.ndim != 2 or len(a) != len(y):
        raise ValueError(f"activations must be [examples, neurons] and y [examples], not {a.shape} and {y.shape}")
    member = y[None, :] == np.arange(n_classes)[:, None]
    counts = member.sum(1)
    means = (member.astype(float) @ a) / np.maximum(counts, 1)[:, None]
    return np.asarray(np.where(counts[:, None] > 0, means, -np.inf).argmax(0))


def alignment(one: Any, other: Any) -> float:
    """Return the share of a layer's neurons that prefer the same class in two models (FedNTD section 5.1, table 2).

    1/D sum_d 1[argmax_c h_c^d (one) = argmax_c h_c^d (other)].

    >>> alignment([0, 1, 2, 2], [0, 1, 1, 2])
    0.75
    """
    one, other = np.asarray(one), np.asarray(other)
    if one.shape != other.shape or not one.size:
        raise ValueError(f"the preferences must be of the same neurons, not {one.shape} and {other.shape}")
    return float((one == other).mean())


def loss_transition(local: Any, after: Any) -> np.ndarray:
    """Interleave the local models' mean loss and the new global model's loss, [2T] (Flashback figure 5).

    `local` is [T, K], `after` [T]. Returns l_1, g_1, l_2, g_2, ... with l_t = 1/K sum_k L(w_k,t) and g_t = L(w_t), all
    on the test set. Spikes at positions 0, 2, 4, ... mean that local training moves away from the global objective.

    >>> loss_transition([[2.0, 4.0], [1.0, 2.0]], [1.0, 0.5]).tolist()
    [3.0, 1.0, 1.5, 0.5]
    """
    local, after = np.asarray(local, dtype=float), np.asarray(after, dtype=float)
    if local.ndim != 2 or after.shape != local.shape[:1]:
        raise ValueError(f"local must be [rounds, clients] and after [rounds], not {local.shape} and {after.shape}")
    return np.stack([local.mean(1), after], axis=1).ravel()


def tsne(features: Any, seed: int = 0, perplexity: float = 30.0) -> np.ndarray:
    """Return a joint two-dimensional t-SNE embedding of M models' features on the same N examples, [M, N, 2].

    FedNTD appendix O (figures 19-21) and FedGKD figure 2: t-SNE of the features before the classifier on test examples.
    Neither paper gives its settings. Choice: scikit-learn's TSNE, initialised with the principal components, perplexity
    30, or a third of the number of points if there are few.

    >>> tsne(np.random.default_rng(0).normal(size=(2, 20, 5))).shape
    (2, 20, 2)
    """
    from sklearn.manifold import TSNE

    f = _features(features)
    flat = f.reshape(-1, f.shape[-1])
    if len(flat) < 4:
        raise FedkeepError(f"t-SNE needs at least 4 points, not {len(flat)}", key="features", value=len(flat))
    has_two_components = min(flat.shape) >= 2
    points = TSNE(
        n_components=2,
        perplexity=min(perplexity, (len(flat) - 1) / 3),
        init="pca" if has_two_components else "random",
        random_state=seed,
    ).fit_transform(flat)
    return np.asarray(points, dtype=float).reshape(*f.shape[:2], 2)


def separation(features: Any, y: Any) -> dict[str, float]:
    """Return whether features [M, N, D] cluster by class or by model: the silhouette of each grouping, in [-1, 1].

    FedNTD appendix O shows in t-SNE plots that features of heterogeneous clients cluster by client. Choice: the
    silhouette of the features themselves, not of the embedding, expresses this as a number.

    >>> two = np.array([[[0.0], [9.0]], [[0.1], [9.1]]])  # both models put the two classes far apart
    >>> silhouette = separation(two, [0, 1])
    >>> silhouette["by_class"] > 0.9 > silhouette["by_model"]
    True
    """
    from sklearn.metrics import silhouette_score

    f = _features(features)
    models, examples = f.shape[:2]
    flat = f.reshape(models * examples, -1)
    groupings = {"by_class": np.tile(np.asarray(y), models), "by_model": np.repeat(np.arange(models), examples)}
    return {
        name: float(silhouette_score(flat, group)) if 2 <= len(np.unique(group)) < len(group) else float("nan")
        for name, group in groupings.items()
    }


def _features(features: Any) -> np.ndarray:
    f = np.asarray(features, dtype=float)
    if f.ndim != 3:
        raise ValueError(f"features must be [models, examples, features], not {f.shape}")
    return f


def _vector(weights: Any) -> np.ndarray:
    return np.concatenate([_array(leaf).ravel() for leaf in tree.leaves(weights)])


def _vectors(weights: Any) -> np.ndarray:
    arrays = [_array(leaf) for leaf in tree.leaves(weights)]
    return np.concatenate([a.reshape(len(a), -1) for a in arrays], axis=1)


def _array(leaf: Any) -> np.ndarray:
    """Return a leaf, from any device, as a float64 array."""
    if hasattr(leaf, "detach"):
        leaf = leaf.detach().cpu().double().numpy()
    return np.asarray(leaf, dtype=float)
