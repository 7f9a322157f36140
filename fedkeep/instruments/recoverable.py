"""Recoverable forgetting: how much of what a global model forgot is a shift of its logits by one number per class.

The best bias per class is fitted on labelled examples that are not measured, and added to the logits of the global
model; nothing is trained. `fedkeep.engine.class_bias` has the formula, `fedkeep.analysis.recoverable` the course
over rounds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fedkeep import forgetting, tree
from fedkeep.analysis.recoverable import PUBLIC, STUDY, TEST_HALF, Course
from fedkeep.engine import device
from fedkeep.engine.class_bias import fit_class_bias
from fedkeep.engine.evaluate import EVAL_BATCH
from fedkeep.engine.simulation import Simulation
from fedkeep.errors import FedkeepError
from fedkeep.instruments.options import Options, Result
from fedkeep.metrics import count_pairs
from fedkeep.server_training import logits


def recoverable(simulation: Simulation, options: Options) -> Result:
    """Return the class accuracies of the global model before and after the best bias per class, and the bias.

    The bias is fitted on the public set, both parts, and measured on the test set. Without a public set, and if
    `options.fit_on_test` allows it, one half of the test set is for fitting and the other for measuring. Otherwise
    `fitted_on` is None, and there is nothing else.
    """
    s = simulation
    if not can_fit(s, options):
        return {"fitted_on": None}
    with device.numerics(s.settings, s.task.device, s.threads), torch.no_grad():
        z = _test_logits(s)
        public = s.task.public
        if public is not None:
            fit_z = torch.cat([logits(s.task, s.params, x, EVAL_BATCH) for x in (public.x, public.x_val)])
            fit_y, measured_z, measured_y = torch.cat([public.y, public.y_val]), z, s.y_test
        else:
            half = fitting_half(s.y_test).to(z.device)
            fit_z, fit_y, measured_z, measured_y = z[half], s.y_test[half], z[~half], s.y_test[~half]
        bias = fit_class_bias(fit_z, fit_y)
        models = measured_z, measured_z.double() + bias.to(z.device)
        tables = [count_pairs(measured_y, one.argmax(1), one.shape[1]).cpu().numpy() for one in models]
    return {
        "fitted_on": PUBLIC if public is not None else TEST_HALF,
        "n_fitted": len(fit_y),
        "n_measured": len(measured_y),
        "bias": bias.tolist(),
        "before": forgetting.class_accuracy(tables[0]).tolist(),
        "after": forgetting.class_accuracy(tables[1]).tolist(),
        "accuracy": {"before": float(forgetting.accuracy(tables[0])), "after": float(forgetting.accuracy(tables[1]))},
    }


def can_fit(simulation: Simulation, options: Options) -> bool:
    """Return whether there are labelled examples to fit a bias on."""
    return simulation.task.public is not None or (options.fit_on_test and len(simulation.y_test) > 1)


def require_examples(simulation: Simulation, options: Options) -> None:
    """Raise if there are no labelled examples to fit a bias on."""
    if not can_fit(simulation, options):
        raise FedkeepError(
            f"{STUDY} fits a bias on labelled examples of the server, and this run has no public set: data.public=0.1, "
            "or --fit-on-test to fit on half of the test set and measure on the other half",
            key=STUDY,
        )


def fitting_half(y: Tensor) -> Tensor:
    """Return which examples are for fitting: of each class every second, from its second on.

    >>> fitting_half(torch.tensor([0, 0, 1, 0, 1, 2])).tolist()
    [False, True, False, False, True, False]
    """
    y = y.cpu()
    chosen = torch.zeros(len(y), dtype=torch.bool)
    for c in sorted(set(y.tolist())):
        chosen[(y == c).nonzero().flatten()[1::2]] = True
    return chosen


def with_course(analysis: Result, earlier: Iterable[dict[str, Any]], after_round: int) -> Result:
    """Return an analysis with the forgetting over this and the earlier analysed rounds, if it has this study."""
    own = analysis.get(STUDY, {})
    if not own.get("fitted_on"):
        return analysis
    lines = [line for line in earlier if line["after_round"] < after_round]
    course = Course.of([*lines, {"after_round": after_round, STUDY: own}])
    assert course is not None
    return {**analysis, STUDY: {**own, **course.summary()}}


def _test_logits(s: Simulation) -> Tensor:
    """Return the logits of the test set, [n, C], in the batches of the evaluation."""
    parts = (slice(start, start + EVAL_BATCH) for start in range(0, len(s.y_test), EVAL_BATCH))
    return torch.cat([s.task.apply(s.params, s.eval_inputs(tree.take(s.x_test, part))) for part in parts])
