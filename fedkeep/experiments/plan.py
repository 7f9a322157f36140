"""The runs of a sweep: an experiment for each combination of values, in a folder named after its overrides."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from fedkeep.errors import FedkeepError, UnsupportedMethod
from fedkeep.experiments.experiment import Experiment
from fedkeep.experiments.own_parts import trust_given
from fedkeep.experiments.sweep import folder_name

Change = tuple[str, Callable[[dict[str, Any]], dict[str, Any]]]  # as in a folder's name, and what it does to the tables


@dataclass
class Plan:
    """Experiments by the names of their folders, and the reasons why others are left out."""

    experiments: dict[str, Experiment] = field(default_factory=dict)
    left_out: dict[str, UnsupportedMethod] = field(default_factory=dict)


def plan_runs(
    tables: dict[str, Any],
    base: Any,
    fixed: Sequence[Change],
    combinations: Iterable[Sequence[Change]],
    *,
    all_methods: bool = False,
    names_fixed: bool = True,
    checking: Callable[[list[str]], AbstractContextManager[Any]] = lambda texts: nullcontext(),
) -> Plan:
    """Return the runs of a sweep.

    With `all_methods`, methods that cannot be trained with the other settings are left out; otherwise they raise.
    Folders are named after the `fixed` changes too if `names_fixed`. Errors are raised inside of `checking`.
    """
    plan = Plan()
    for combination in combinations:
        changes = [*fixed, *combination]
        label = folder_name(base, [text for text, _ in (changes if names_fixed else combination)])
        if label in plan.experiments:
            raise FedkeepError(f"two runs of this sweep have the same folder {label}", key="sweep", value=label)
        changed = tables
        for _, change in changes:
            changed = change(changed)
        with checking([text for text, _ in changes]):
            for _, change in changes:
                trust_given(change({}))
            try:
                plan.experiments[label] = Experiment.from_dict(changed, given=True)
            except UnsupportedMethod as error:
                if not all_methods:
                    raise
                plan.left_out[label] = error
    if plan.left_out and not plan.experiments:
        raise next(iter(plan.left_out.values()))
    return plan
