"""Building blocks that every runtime makes in the same way: the simulation, a federation's server, and its nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fedkeep import methods, optim, tree
from fedkeep._util.text_form import TextForm
from fedkeep.data.augment import InputPipeline
from fedkeep.data.dataset import Dataset
from fedkeep.data.plan import ClientPlan, make_plan
from fedkeep.data.sources import load
from fedkeep.data.sources.objects import has_parts
from fedkeep.data.texts import Texts
from fedkeep.engine.settings import DTYPES, Settings
from fedkeep.errors import DataError, FedkeepError, MethodError, ModelError
from fedkeep.method import FedAvg
from fedkeep.task import Public, Task


def require_dataset(data: Any) -> Dataset:
    """Return the data set; objects of other libraries, to train and to test on, are loaded. Raise for anything else."""
    if has_parts(data):
        return load(data)
    if not isinstance(data, Dataset):
        raise DataError(
            f"the data must come from fedkeep.data.load or from_arrays, not as {type(data).__name__}; of one table, "
            "fedkeep.data.load holds out a test set",
            key="data",
            value=data,
        )
    return data


def make_method(method: FedAvg | str) -> FedAvg:
    """Return the method, with its defaults if it is given by name; raise if it is something else."""
    chosen = methods.get(method)() if isinstance(method, str) else method
    if isinstance(chosen, type) and issubclass(chosen, FedAvg):
        raise MethodError(
            f"the method must be an instance, not a class: write {chosen.__name__}()", key="method", value=method
        )
    if not isinstance(chosen, FedAvg):
        raise MethodError(
            f"the method must be an instance, such as FedNTD(), or a name, not {method!r}",
            key="method",
            value=method,
        )
    return chosen


def require_callbacks(callbacks: Any) -> tuple[Callable[..., None], ...]:
    """Return the callbacks, of which a single one may be given; raise if one cannot be called."""
    given = (callbacks,) if callable(callbacks) else tuple(callbacks)
    for callback in given:
        if not callable(callback):
            raise FedkeepError(
                f"a callback is called with the simulation and the record; {callback!r} cannot be called",
                key="callbacks",
                value=callback,
            )
    return given


def make_task(
    model: nn.Module,
    settings: Settings,
    n_classes: int,
    n_clients: int,
    public: Public | None,
    criterion: Callable[[Tensor, Tensor], Tensor],
    place: torch.device,
) -> Task:
    """Return the task of a model on this device."""
    return Task(
        model,
        n_classes,
        n_clients,
        public,
        criterion,
        **client_training(settings),
        seed=settings.seed,
        device=place,
        dtype=DTYPES[settings.dtype],
        autocast=DTYPES[settings.autocast] if settings.autocast else None,
    )


def client_training(settings: Settings) -> dict[str, Any]:
    """Return what a task knows of the clients' training: their optimiser and learning rates."""
    optimizer = optim.make(settings.optimizer, settings.momentum, settings.weight_decay)
    return {"optimizer": optimizer, "lr": settings.lr_in, "base_lr": settings.lr}


def require_fitting_texts(model: Any, x: Any) -> None:
    """Raise if a text model was made for another tokenizer than that of these texts, or for shorter texts."""
    form = getattr(model, "text_form", None)
    if not isinstance(x, Texts) or not isinstance(form, TextForm):
        return
    if x.form.tokenizer != form.tokenizer:
        raise ModelError(
            f"the model was made for the tokenizer {form.tokenizer}, but the texts are tokens of {x.form.tokenizer}",
            key="tokenizer",
            value=x.form.tokenizer,
            valid=[form.tokenizer],
        )
    if x.form.max_length > form.max_length:
        raise ModelError(
            f"the texts have up to {x.form.max_length} tokens, but the model has {form.max_length} positions: load the "
            f"data with max_length = {form.max_length} or less",
            key="max_length",
            value=x.form.max_length,
        )


def make_inputs(data: Dataset | None, settings: Settings, place: torch.device) -> InputPipeline:
    """Return the pipeline from a data set's stored examples to a model's inputs on this device."""
    dtype = DTYPES[settings.dtype]
    mean, std = (
        t.to(place, dtype) if t is not None else None for t in ((data.mean, data.std) if data else (None, None))
    )
    return InputPipeline(dtype, mean, std, settings.augment or None)


def prepare_public(public: Public | None, inputs: InputPipeline, place: torch.device) -> Public | None:
    """Return the server's public examples on its device, as the model gets them."""
    if public is None:
        return None
    x, y, x_val, y_val = (tree.to(part, place) for part in (public.x, public.y, public.x_val, public.y_val))
    return Public(inputs(x), y, inputs(x_val), y_val)


def image_size(data: Dataset, settings: Settings) -> tuple[int, int]:
    """Return the height and width of the images to augment; (0, 0) if the examples are not images."""
    if settings.augment and data.image is None:
        raise DataError(
            f"augmentation needs images [channels, height, width], not examples of {data.input_shape}", key="augment"
        )
    if settings.augment and data.image and settings.augment.crop > (most := settings.augment.largest_crop(data.image)):
        raise DataError(
            f"augment.crop = {settings.augment.crop} adds more padding than the images {data.image} allow: "
            f'{most} pixels with padding="{settings.augment.padding}"',
            key="augment.crop",
            value=settings.augment.crop,
        )
    return data.image or (0, 0)


def client_plan(
    settings: Settings, round: int, client: int, n: int, image: tuple[int, int], hold_out: float = 0.0
) -> ClientPlan:
    """Return the plan of a client with n examples in a round; it holds out a share of them if the method says so."""
    return make_plan(
        settings.seed,
        round,
        client,
        n,
        settings.epochs,
        settings.batch_size,
        settings.augment or None,
        image,
        settings.drop_last,
        hold_out,
    )
