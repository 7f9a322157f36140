"""The data of the report's section on recoverable forgetting, for runs that recorded it."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedkeep._util import arrays
from fedkeep.analysis.groups import Run
from fedkeep.analysis.recoverable import SIDES, STUDY, Course


def recoverable_data(run: Run, most: int) -> dict[str, Any] | None:
    """Return the course before and after the bias, thinned to at most `most` rounds; None if it was not recorded.

    `bias` [T, C] is in shares of `largest`, from 0 (-largest) to 1 (largest); the page stores it in bytes.
    """
    course = Course.of(run.history.instruments)
    if course is None:
        return None
    shown = arrays.evenly_spaced(len(course.rounds), most)
    last = next(line[STUDY] for line in reversed(run.history.instruments) if line.get(STUDY, {}).get("fitted_on"))
    largest = max(0.01, float(np.nanmax(np.abs(course.bias))))
    return {
        "fitted_on": course.fitted_on,
        "n_fitted": last["n_fitted"],
        "n_measured": last["n_measured"],
        "rounds": course.rounds[shown],
        "accuracy": {side: course.accuracy[side][shown].round(4) for side in SIDES},
        "forgetting": {side: course.forgetting_so_far(side)[shown].round(4) for side in SIDES},
        "share": course.share,
        "largest": round(largest, 4),
        "bias": course.bias[shown] / (2 * largest) + 0.5,
    }
