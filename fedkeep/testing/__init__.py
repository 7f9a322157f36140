"""Contract checks for methods: does a method give the same result in every runtime, and do what it declares?

`CHECKS` lists all checks by name; fedkeep's own methods are tested with the same list. `check_method` runs them on a
method of your own and raises a `MethodError` at the first one that fails; its `key` is the name of the check.

>>> from fedkeep.methods import FedNTD
>>> check_method(FedNTD(), only=["stacked_equals_loop", "hyperparameters_change_the_weights"])
"""

from fedkeep.testing.checks import check_method
from fedkeep.testing.problem import Problem, difference, small_problem
from fedkeep.testing.registry import CHECKS

__all__ = ["CHECKS", "Problem", "check_method", "difference", "small_problem"]
