"""The parts of a run that every runtime makes alike: a simulation, a federation's server, and its nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fedkeep import optim, tree
from fedkeep.data.augment import InputPipeline
from fedkeep.data.dataset import Dataset
from fedkeep.data.plan import ClientPlan, make_plan
from fedkeep.engine.settings import DTYPES, Settings
from fedkeep.errors import DataError, MethodError
from fedkeep.method import FedAvg
from fedkeep.task import Public, Task
from fedkeep.tree import Tree

# What a run begins with


def make_task(
    model: nn.Module,
    settings: Settings,
    n_classes: int,
    n_clients: int,
    public: Public | None,
    criterion: Callable[[Tensor, Tensor], Tensor],
    place: torch.device,
) -> Task:
    """Make the task of a model, on this device."""
    return Task(
        model,
        n_classes,
        n_clients,
        public,
        criterion,
        optimizer=optim.make(settings.optimizer, settings.momentum, settings.weight_decay),
        lr=settings.lr_in,
        device=place,
        dtype=DTYPES[settings.dtype],
        autocast=DTYPES[settings.autocast] if settings.autocast else None,
    )


def make_inputs(data: Dataset | None, settings: Settings, place: torch.device) -> InputPipeline:
    """Make the way from a data set's stored examples to what a model on this device is given."""
    dtype = DTYPES[settings.dtype]
    mean, std = (
        t.to(place, dtype) if t is not None else None for t in ((data.mean, data.std) if data else (None, None))
    )
    return InputPipeline(dtype, mean, std, settings.augment or None)


def prepare_public(public: Public | None, inputs: InputPipeline, place: torch.device) -> Public | None:
    """Bring the server's public examples to its device, as the model is given them."""
    if public is None:
        return None
    x, y, x_val, y_val = (tree.to(part, place) for part in (public.x, public.y, public.x_val, public.y_val))
    return Public(inputs(x), y, inputs(x_val), y_val)


# What a round is made of


def image_size(data: Dataset, settings: Settings) -> tuple[int, int]:
    """Return the height and width that augmentation is planned for: (0, 0) where there are no images to augment."""
    if settings.augment and data.image is None:
        raise DataError(f"augmentation needs images [channels, height, width], not examples of {data.input_shape}")
    return data.image or (0, 0)


def client_plan(settings: Settings, round: int, client: int, n: int, image: tuple[int, int]) -> ClientPlan:
    """Lay out the round of a client with n examples."""
    return make_plan(
        settings.seed, round, client, n, settings.epochs, settings.batch_size, settings.augment or None, image
    )


def _checked(method: FedAvg, hook: str, value: Any) -> Tree:
    """Check what a server hook returned: a method that forgets the weights is told so by its name."""
    if not isinstance(value, dict) or not isinstance(value.get("params"), dict):
        raise MethodError(f'{method.name}: {hook} must return a dict with "params", not {type(value).__name__}')
    bad = [path for path, leaf in tree.items(value) if not isinstance(leaf, torch.Tensor)]
    if bad:
        raise MethodError(f"{method.name}: {hook} must return tensors, but {bad[0]} is not one")
    return value
