"""LoRA adapters (Hu et al., ICLR 2022, arXiv:2106.09685): W x + (alpha / r) B A x, of which only A and B are trained.

Frozen weights are constants of the model. So what is trained is all that clients send, stack and store.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedkeep._util.text import did_you_mean, format_value, list_some
from fedkeep._util.validate import require_number, require_whole
from fedkeep.errors import ModelError

# the layers of a query and a value: in fedkeep and BERT, DistilBERT, DeBERTa, decoders, MPNet and T5, ModernBERT
USUAL_TARGETS = ("query", "value", "q_lin", "v_lin", "query_proj", "value_proj", "q_proj", "v_proj", "q", "v", "Wqkv")
TRAINED = ("classifier", "projection")  # of a network: what is trained next to the adapters


@dataclass(frozen=True)
class Lora:
    """The rank r, the factor alpha (twice the rank by default), dropout before A, and the ends of the layers' names."""

    rank: int = 8
    alpha: float | None = None
    dropout: float = 0.0
    targets: tuple[str, ...] | None = None  # None: queries and values; ("",): every linear layer

    def __post_init__(self) -> None:
        require_whole("lora.rank", self.rank, low=1, high=2**16, error=ModelError)
        if self.alpha is not None:
            require_number("lora.alpha", self.alpha, above=0, error=ModelError)
        require_number("lora.dropout", self.dropout, low=0, below=1, error=ModelError)
        names: Any = self.targets
        if names is not None and (isinstance(names, str) or not all(isinstance(name, str) for name in names)):
            raise ModelError(
                f"lora.targets must be a list of names of layers, not {format_value(names)}",
                key="lora.targets",
                value=names,
            )

    @classmethod
    def of(cls, given: Any) -> Lora:
        """Return the options, given as such, as a rank or as a table.

        >>> Lora.of(4), Lora.of({"rank": 4, "targets": ["query"]}).targets
        (Lora(rank=4, alpha=None, dropout=0.0, targets=None), ('query',))
        """
        if isinstance(given, cls):
            return given
        table = given if isinstance(given, Mapping) else {"rank": given}
        names = [f.name for f in fields(cls)]
        for name in table:
            if name not in names:
                raise ModelError(f"unknown key 'lora.{name}': {did_you_mean(str(name), names)}", key="lora", value=name)
        options = dict(table)
        if isinstance(options.get("targets"), list):
            options["targets"] = tuple(options["targets"])
        return cls(**options)


class LoraLinear(nn.Module):
    """A frozen linear layer with an adapter, whose output is 0 at first."""

    def __init__(self, layer: nn.Linear, options: Lora) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(layer.weight.new_empty(options.rank, layer.in_features))  # A
        self.up = nn.Parameter(layer.weight.new_zeros(layer.out_features, options.rank))  # B
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))
        self.scale = (2 * options.rank if options.alpha is None else options.alpha) / options.rank
        self.dropout = nn.Dropout(options.dropout)

    @property
    def weight(self) -> Tensor:
        """The frozen weight; some models read it."""
        return self.layer.weight

    @property
    def bias(self) -> Tensor | None:
        """The frozen bias."""
        return self.layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output plus the adapter's."""
        return self.layer(x) + F.linear(F.linear(self.dropout(x), self.down), self.up) * self.scale  # type: ignore[no-any-return]

    def merged(self) -> nn.Linear:
        """Return a linear layer that computes the same."""
        layer = copy.deepcopy(self.layer)
        with torch.no_grad():
            layer.weight += self.scale * self.up @ self.down
        return layer


def add_lora(model: nn.Module, lora: Any = 8, train: Iterable[str] = TRAINED) -> nn.Module:
    """Return a copy of a module with adapters at its queries and values, in which all other weights are frozen.

    `lora` is the rank, or a table with `rank`, `alpha`, `dropout` and `targets`, the ends of the names of the linear
    layers that get an adapter. `train` are the beginnings of the names of weights that are trained as they are.

    >>> encoder = nn.TransformerEncoderLayer(8, 2, 16)
    >>> adapted = add_lora(encoder, {"rank": 2, "targets": ["linear1"]})
    >>> [name for name, p in adapted.named_parameters() if p.requires_grad]
    ['linear1.down', 'linear1.up']
    """
    return add_lora_(copy.deepcopy(model), Lora.of(lora), tuple(train))


def add_lora_(model: nn.Module, options: Lora, train: tuple[str, ...] = TRAINED) -> nn.Module:
    """Add adapters to the module itself, and return it."""
    linear = {name: layer for name, layer in model.named_modules() if type(layer) is nn.Linear}
    wanted = USUAL_TARGETS if options.targets is None else options.targets
    chosen = [name for name in linear if _ends_with(name, wanted) and not _begins_with(name, train)]
    if not chosen:
        ends = list(dict.fromkeys(name.rpartition(".")[2] for name in linear if not _begins_with(name, train)))
        raise ModelError(
            f"lora.targets: no linear layer is called {list_some(list(wanted))} (valid: {list_some(ends)})",
            key="lora.targets",
            value=options.targets,
            valid=ends,
        )
    for name, weight in model.named_parameters():
        weight.requires_grad_(weight.requires_grad and _begins_with(name, train))
    for name in chosen:
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, LoraLinear(linear[name], options))
    return model


def merge_lora(model: nn.Module) -> nn.Module:
    """Return a copy of a module with the adapters added to the layers' weights, which computes the same."""
    merged = copy.deepcopy(model)
    for name, layer in list(merged.named_modules()):
        if isinstance(layer, LoraLinear):
            parent, _, own = name.rpartition(".")
            setattr(merged.get_submodule(parent), own, layer.merged())
    return merged


def _ends_with(name: str, ends: Iterable[str]) -> bool:
    return any(not end or name == end or name.endswith(f".{end}") for end in ends)


def _begins_with(name: str, beginnings: Iterable[str]) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in beginnings)
