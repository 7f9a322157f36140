"""Normalisation of features from sums that clients can share: number, sum and sum of squares.

Of a federation's examples nothing else is needed: the server adds the clients' sums. For images there is one mean per
channel, of values in [0, 1]; otherwise one per feature.

>>> whole = torch.tensor([[1.0, 7.0], [2.0, 7.0], [6.0, 7.0]])
>>> mean, std = mean_and_std([feature_sums(whole[:1]), feature_sums(whole[1:])])
>>> mean.tolist(), [round(s, 4) for s in std.tolist()]
([3.0, 7.0], [2.1602, 1.0])
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedkeep._util.text import short_name
from fedkeep._util.validate import require_choice
from fedkeep.data.texts import Texts
from fedkeep.errors import DataError, FedkeepError

log = logging.getLogger("fedkeep")

STANDARD = "standard"
CHOICES = (STANDARD,)
_CONSTANT = 1e-7  # a standard deviation of this share of the mean is a rounding error
_AT_ONCE = 2**22  # numbers that are converted to float64 at a time
_FAR_APART = 100  # of the largest values of features, from which on a warning says so


def check_normalise(options: Mapping[str, Any], prefix: str = "", error: type[FedkeepError] = DataError) -> None:
    """Raise unless the option `normalise` is a known one, without `mean` and `std`."""
    if (value := options.get("normalise")) is None:
        return
    require_choice(f"{prefix}normalise", value, CHOICES, f"value of {prefix}normalise", error)
    for other in ("mean", "std"):
        if options.get(other) is not None:
            raise error(
                f"{prefix}normalise and {prefix}{other} exclude each other: give one of them",
                key=f"{prefix}normalise",
                value=value,
            )


class FeatureSums(NamedTuple):
    """What a client shares for the normalisation: how many values each feature has, their sum, and that of squares."""

    n: int
    total: Tensor
    squares: Tensor


def feature_sums(x: Any) -> FeatureSums:
    """Return the sums of a client's examples: for images [n, channels, height, width] per channel, else per feature."""
    if not isinstance(x, Tensor) or x.ndim < 2 or not len(x):
        kind = "texts" if isinstance(x, Texts) else f"a {type(x).__name__}"
        shown = f"of shape {tuple(x.shape)}" if isinstance(x, Tensor) else kind
        raise DataError(
            f"normalise needs examples that are one tensor, [n, features] or images, not {shown}", key="normalise"
        )
    over, scale = ([0, 2, 3], x[0, 0].numel()) if x.ndim == 4 else ([0], 1)
    total = squares = torch.zeros((), dtype=torch.float64)
    for part in torch.split(x, max(1, _AT_ONCE // max(1, x[0].numel()))):
        values = part.double() / 255 if x.dtype == torch.uint8 else part.double()
        total, squares = total + values.sum(over), squares + values.square().sum(over)
    return FeatureSums(len(x) * scale, total, squares)


def mean_and_std(sums: Iterable[FeatureSums]) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of all clients' examples; a feature that is constant has the deviation 1."""
    parts = list(sums)
    if not parts:
        raise DataError("mean and std need the sums of at least one client", key="sums")
    n = sum(part.n for part in parts)
    total, squares = (torch.stack(values).sum(0) for values in ([p.total for p in parts], [p.squares for p in parts]))
    mean = total / n
    std = (squares / n - mean.square()).clamp(min=0).sqrt()
    return mean, torch.where(std > _CONSTANT * mean.abs(), std, 1.0)


def warn_about_scales(x: Any, names: tuple[str, ...] | None) -> None:
    """Log a warning if features [n, features] differ by orders of magnitude."""
    if not isinstance(x, Tensor) or x.ndim != 2 or not x.is_floating_point():
        return
    largest = x.abs().amax(0)
    used = largest > 0
    if not bool(used.any()) or float(largest.max()) < _FAR_APART * float(largest[used].min()):
        return
    low, high = int(torch.where(used, largest, torch.inf).argmin()), int(largest.argmax())
    low_name, high_name = (f"feature {i}" if names is None else short_name(names[i], 40) for i in (low, high))
    log.warning(
        "features differ by orders of magnitude: %s is up to %.4g, %s up to %.4g; the option normalise=\"standard\" of "
        "the data, or data.standardised(), brings them to one scale",
        high_name, float(largest[high]), low_name, float(largest[low]),
    )  # fmt: skip
