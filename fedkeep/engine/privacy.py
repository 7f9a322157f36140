"""Differential privacy of whole clients: every upload is clipped, and noise is added to the sum.

In each round the server computes from the uploads u_k, k in the cohort, and from nothing else of the clients,

    mean = (sum_k u_k min(1, C / ||u_k||) + z C g) / K,     C = dp_clip, z = dp_noise, g standard normal,

where u_k is everything that the method averages: the change of the weights, and other entries, as one vector. K is
the size of the cohort, also if some clients did not reply. The method's `aggregate` gets this mean in place of every
client's entries, so all it computes is post-processing. docs/privacy.md says what that protects and what not.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fedkeep import tree
from fedkeep._util.optional import require_extra
from fedkeep.data.seeds import PRIVACY, generator
from fedkeep.engine import robust
from fedkeep.engine.settings import Settings
from fedkeep.errors import MethodError
from fedkeep.method import Cohort, FedAvg
from fedkeep.tree import Tree

log = logging.getLogger("fedkeep")

RandomBytes = Callable[[int], bytes]
ACCOUNTANT = "opacus.accountants.analysis.rdp"
_ORDERS = [1 + k / 100 for k in range(1, 100)] + [2 + k / 10 for k in range(100)] + [12 * 1.1**k for k in range(80)]


def require_accountant(settings: Settings, n_clients: int) -> None:
    """Raise if epsilon cannot be computed; warn if it would not mean much."""
    require_extra(ACCOUNTANT, "privacy", "differential privacy")
    if settings.dp_delta >= 1 / n_clients:
        log.warning("dp_delta = %g allows one of %d clients to be disclosed: choose less", settings.dp_delta, n_clients)


def require_averaged(method: FedAvg) -> None:
    """Raise if a method uses more of the uploads than means that can be clipped and noised."""
    if "params" not in method.averaged:
        raise MethodError(
            f"{method.name} uses more than the mean of the clients' weights, so noise on the mean does not make it "
            f"differentially private{robust.advice(method)}",
            key="dp_noise",
            value=method.name,
        )


def seeded_bytes(seed: int, round: int) -> RandomBytes:
    """Return a source of random bytes that follows from the seed, for a simulation."""
    return generator(PRIVACY, seed, round).bytes


def system_bytes(count: int) -> bytes:
    """Return random bytes of the operating system, for a federation."""
    return os.urandom(count)


def privatise(
    method: FedAvg, server: Tree, uploads: Tree, cohort: Cohort, settings: Settings, size: int, source: RandomBytes
) -> Tree:
    """Return the uploads with the clipped and noised mean in place of every client's; `size` is the K above."""
    extra = sorted(uploads.keys() - {*method.averaged, "n"})
    if extra:
        raise MethodError(
            f"{method.name} uploads {', '.join(extra)}, which is neither clipped nor noised: it cannot be "
            "differentially private",
            key="dp_noise",
            value=method.name,
        )
    assert settings.dp_clip is not None
    assert settings.dp_noise is not None
    clip, deviation = settings.dp_clip, settings.dp_noise * settings.dp_clip
    change = robust.changes(server, uploads, robust.averaged(method, uploads))
    factor = (clip / robust.norms(change, len(cohort.ids)).clamp(min=1e-300)).clamp(max=1.0)

    def noised_mean(t: Tensor) -> Any:
        noise = normals(math.prod(t.shape[1:]), source).reshape(t.shape[1:])
        total = torch.tensordot(factor, t.double(), dims=1)
        return (total + deviation * noise.to(total.device)) / size

    means = tree.map(noised_mean, change)
    means["params"] = tree.map(lambda w, d: w.double() + d, server["params"], means["params"])
    means = tree.map(lambda m, t: m.to(t.dtype), means, {entry: uploads[entry] for entry in change})
    return robust.with_mean(robust.with_equal_n(uploads), means, len(cohort.ids))


def normals(count: int, source: RandomBytes) -> Tensor:
    """Return standard normal numbers, each from 52 random bits by the inverse of the distribution function."""
    bits = np.frombuffer(source(8 * count), dtype="<u8") >> np.uint64(12)
    uniform = torch.from_numpy((bits.astype(np.float64) + 0.5) / 2.0**52)
    return cast(Tensor, torch.special.ndtri(uniform))


def most_rounds(cohorts: Iterable[Sequence[int]]) -> int:
    """Return the largest number of rounds that any single client took part in."""
    return max(Counter(client for cohort in cohorts for client in cohort).values(), default=0)


def epsilon(settings: Settings, cohorts: Iterable[Sequence[int]]) -> float:
    """Return epsilon at `dp_delta` after these rounds, for the client that took part most often."""
    assert settings.dp_noise is not None
    return compute_epsilon(settings.dp_noise, settings.dp_delta, most_rounds(cohorts))


@functools.cache
def compute_epsilon(noise: float, delta: float, rounds: int) -> float:
    """Return an upper bound of epsilon for a client in so many rounds, from Opacus's Renyi accountant."""
    if rounds == 0:
        return 0.0
    rdp = require_extra(ACCOUNTANT, "privacy", "differential privacy")
    spent = rdp.compute_rdp(q=1.0, noise_multiplier=noise, steps=rounds, orders=_ORDERS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # other orders could give a smaller bound
        return max(0.0, float(rdp.get_privacy_spent(orders=_ORDERS, rdp=spent, delta=delta)[0]))


def public_record(record: dict[str, Any]) -> dict[str, Any]:
    """Return a round's record without what depends on single clients' data and is not noised.

    >>> public_record({"round": 1, "train_loss": 0.3, "failed": {"2": "its update was rejected: params moved by 7"}})
    {'round': 1, 'train_loss': None, 'failed': {'2': 'no usable update'}}
    """
    public = {**record, "train_loss": None}
    if "failed" in record:
        public["failed"] = dict.fromkeys(record["failed"], "no usable update")
    return public
