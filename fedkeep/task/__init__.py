"""The task: the model as pure functions, the loss and the federation's numbers. Nothing about how it is run."""

from fedkeep.task.base import Accelerator, Public
from fedkeep.task.checks import check_forward, check_model
from fedkeep.task.task import Task, describe_criterion

__all__ = ["Accelerator", "Public", "Task", "check_forward", "check_model", "describe_criterion"]
