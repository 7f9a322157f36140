"""Declaration of hyperparameters: dataclass fields with their meaning, bounds and tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fedkeep._util.validate import require_number, require_whole
from fedkeep.errors import MethodError


@dataclass(frozen=True)
class Hyper:
    """Everything declared about a hyperparameter, next to its default.

    `fedavg_at`, `test_value` and `test_with` are for the contract checks. At `fedavg_at` the method equals FedAvg. At
    `test_value`, with the other fields as in `test_with`, the trained weights must differ from those at the default.
    """

    help: str
    low: float | None = None
    above: float | None = None
    high: float | None = None
    choices: tuple[Any, ...] | None = None
    whole: bool = False
    search: tuple[Any, ...] | None = None  # what `fedkeep tune` tries: (low, high) on a log scale, or some choices
    before: Any = None  # the value in runs made before the field existed, if that is not its default
    warning: str = ""  # practical advice, shown by `fedkeep methods NAME`
    fedavg_at: Any = None
    test_value: Any = None
    test_with: dict[str, Any] = field(default_factory=dict)
    only_with: dict[str, Any] = field(default_factory=dict)  # other fields, or "optimizer": no effect without

    def check(self, method: str, name: str, value: Any) -> None:
        """Raise unless the value is one of the choices, or a number within the bounds."""
        key, label = f"method.{name}", f"{name} of {method}"
        if self.choices is not None:
            if not any(value is c or (type(value) is type(c) and value == c) for c in self.choices):
                listing = ", ".join(repr(c) for c in self.choices)
                raise MethodError(
                    f"{label} must be one of {listing}, not {value!r}", key=key, value=value, valid=self.choices
                )
        elif self.whole:
            low, high = (None if bound is None else int(bound) for bound in (self.low, self.high))
            require_whole(key, value, low, high, error=MethodError, label=label)
        else:
            require_number(key, value, self.low, self.above, self.high, error=MethodError, label=label)


def hyper(default: Any, help: str, **declared: Any) -> Any:
    """Declare a hyperparameter: a dataclass field with its meaning, its bounds and how it is tested (see `Hyper`)."""
    return field(default=default, metadata={"hyper": Hyper(help, **declared)})
