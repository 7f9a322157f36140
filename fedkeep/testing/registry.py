"""What a contract check is: a function that says what it expects of a method. `CHECKS` has all of them, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fedkeep.errors import MethodError
from fedkeep.method import FedAvg
from fedkeep.testing.problem import Problem, difference
from fedkeep.tree import Tree

TOLERANCE = 1e-12  # largest relative difference between engines, in float64

CHECKS: dict[str, Callable[[FedAvg, Problem], None]] = {}


@dataclass(frozen=True)
class Expect:
    """What a check expects of a method; raises `MethodError` where it does not hold."""

    method: FedAvg
    check: str

    def true(self, condition: bool, otherwise: str) -> None:
        """Raise unless the condition holds; `otherwise` says what is wrong."""
        if not condition:
            raise MethodError(f"{self.method.name} fails the check {self.check}: {otherwise}", key=self.check)

    def same(self, a: Tree, b: Tree, otherwise: str, tolerance: float = TOLERANCE) -> None:
        """Raise unless two trees are equal up to a relative tolerance."""
        gap = difference(a, b)
        self.true(gap <= tolerance, f"{otherwise} (relative difference {gap:.2g})")


def check(function: Callable[..., None], name: str = "") -> Callable[..., None]:
    """Add a check to `CHECKS`."""
    name = name or function.__name__.removeprefix("_")

    def run(method: FedAvg, problem: Problem) -> None:
        expect = Expect(method, name)
        try:
            function(method, problem, expect)
        except MethodError as error:
            expect.true(error.key == name, str(error))
            raise
        except Exception as error:  # such as torch's, where a hook cannot be stacked
            message = (str(error).splitlines() or [""])[0]
            raise MethodError(
                f"{method.name} fails the check {name}: {type(error).__name__}: {message}", key=name
            ) from error

    CHECKS[name] = run
    return function
