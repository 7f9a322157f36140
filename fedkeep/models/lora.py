"""LoRA adapters (Hu et al., ICLR 2022, arXiv:2106.09685): W x + (alpha / r) B A x, of which only A and B are trained.

Frozen weights are constants of the model. So what is trained is all that clients send, stack and store.
"""

from __future__ import annotations

import copy
import logging
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

log = logging.getLogger("fedkeep")

# layers of a query and a value: in fedkeep and BERT, DistilBERT, DeBERTa, decoders, MPNet and T5, ModernBERT, GPT-2
USUAL_TARGETS = (
    "query", "value", "q_lin", "v_lin", "query_proj", "value_proj", "q_proj", "v_proj", "q", "v", "Wqkv", "c_attn",
)  # fmt: skip
TRAINED = ("classifier", "projection")  # of fedkeep's networks: what is trained next to the adapters
# classifiers, and new layers before them, of models for sequence classification
_HEADS = ("classifier", "pre_classifier", "classification_head", "score")


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

    @property
    def wanted(self) -> tuple[str, ...]:
        """The ends of the layers' names, given or usual."""
        return USUAL_TARGETS if self.targets is None else self.targets

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

    def __init__(self, layer: nn.Module, options: Lora) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        n_out, n_in = self.weight.T.shape if _is_transposed(layer) else self.weight.shape
        self.down = nn.Parameter(self.weight.new_empty(options.rank, n_in))  # A
        self.up = nn.Parameter(self.weight.new_zeros(n_out, options.rank))  # B
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))
        self.scale = (2 * options.rank if options.alpha is None else options.alpha) / options.rank
        self.dropout = nn.Dropout(options.dropout)

    @property
    def weight(self) -> Tensor:
        """The frozen weight; some models read it."""
        return self.layer.weight  # type: ignore[return-value]

    @property
    def bias(self) -> Tensor | None:
        """The frozen bias."""
        return self.layer.bias  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output plus the adapter's."""
        return self.layer(x) + F.linear(F.linear(self.dropout(x), self.down), self.up) * self.scale  # type: ignore[no-any-return]

    def merged(self) -> nn.Module:
        """Return a layer that computes the same."""
        layer: Any = copy.deepcopy(self.layer)
        with torch.no_grad():
            added = self.scale * self.up @ self.down
            layer.weight += added.T if _is_transposed(layer) else added
        return layer  # type: ignore[no-any-return]


def add_lora(model: nn.Module, lora: Any = 8, train: Iterable[str] | None = None) -> nn.Module:
    """Return a copy of a module with adapters at its queries and values, in which all other weights are frozen.

    `lora` is the rank, or a table with `rank`, `alpha`, `dropout` and `targets`, the ends of the names of the linear
    layers that get an adapter. `train` are the beginnings of the names of weights that are trained as they are; by
    default those of the classifier: of layers with a usual name, and of the linear layer that is declared last.

    >>> model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16), nn.Linear(8, 3))
    >>> adapted = add_lora(model, {"rank": 2, "targets": ["linear1"]})
    >>> [name for name, p in adapted.named_parameters() if p.requires_grad]
    ['0.linear1.down', '0.linear1.up', '1.weight', '1.bias']
    """
    options = Lora.of(lora)
    names = _find_classifier(model, options) if train is None else _require_names(model, train)
    return add_lora_(copy.deepcopy(model), options, names)


def _find_classifier(model: nn.Module, options: Lora) -> tuple[str, ...]:
    """Return the names of the layers that are taken for the classifier; warn if none has a usual name.

    What is to have an adapter is not a part of it.
    """
    layers = dict(model.named_modules())
    usual = [name for name in layers if name.rpartition(".")[2] in _HEADS]
    beside = dict.fromkeys("".join(name.rpartition(".")[:2]) + "projection" for name in usual)
    named = [end for end in options.wanted if end]  # "" is every layer but these
    chosen = [name for name in (*usual, *beside) if name in layers and not _ends_with(name, named)]
    last = [name for name, layer in layers.items() if _is_linear(layer)][-1:]
    if last and not _begins_with(last[0], chosen) and not _ends_with(last[0], options.wanted):
        chosen += last
    if not chosen:
        log.warning("add_lora trains the adapters alone: train= names the classifier, if there is one")
    elif not usual:
        log.warning("add_lora takes %s for the classifier and trains it: train= names others", last[0])
    return tuple(chosen)


def _require_names(model: nn.Module, given: Iterable[str]) -> tuple[str, ...]:
    names = () if isinstance(given, str) else tuple(given)
    if isinstance(given, str) or not all(isinstance(name, str) for name in names):
        raise ModelError(
            f"train must be a list of beginnings of names, not {format_value(given)}", key="train", value=given
        )
    weights = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for name in names:
        if not any(_begins_with(weight, [name]) for weight in weights):
            raise ModelError(
                f"train: no weight's name begins with {name!r}: {did_you_mean(name, weights)}",
                key="train",
                value=name,
                valid=weights,
            )
    return names


def add_lora_(model: nn.Module, options: Lora, train: tuple[str, ...] = TRAINED) -> nn.Module:
    """Add adapters to the module itself, and return it."""
    # a layer that is used under two names has one adapter, under both
    linear = {name: layer for name, layer in model.named_modules(remove_duplicate=False) if _is_linear(layer)}
    chosen = [name for name in linear if _ends_with(name, options.wanted) and not _begins_with(name, train)]
    if not chosen:
        ends = list(dict.fromkeys(name.rpartition(".")[2] for name in linear if not _begins_with(name, train)))
        raise ModelError(
            f"lora.targets: no linear layer is called {list_some(list(options.wanted))} (valid: {list_some(ends)})",
            key="lora.targets",
            value=options.targets,
            valid=ends,
        )
    weights = list(model.named_parameters(remove_duplicate=False))  # one may have two names
    trained = {id(weight) for name, weight in weights if weight.requires_grad and _begins_with(name, train)}
    for _, weight in weights:
        weight.requires_grad_(id(weight) in trained)
    adapted: dict[nn.Module, LoraLinear] = {}
    for name in chosen:
        layer, (parent, _, own) = linear[name], name.rpartition(".")
        adapted[layer] = adapted.get(layer) or LoraLinear(layer, options)
        setattr(model.get_submodule(parent), own, adapted[layer])
    return model


def merge_lora(model: nn.Module) -> nn.Module:
    """Return a copy of a module with the adapters added to the layers' weights, which computes the same."""
    merged = copy.deepcopy(model)
    layers: dict[nn.Module, nn.Module] = {}
    for name, layer in list(merged.named_modules(remove_duplicate=False)):
        if isinstance(layer, LoraLinear):
            parent, _, own = name.rpartition(".")
            layers[layer] = layers.get(layer) or layer.merged()
            setattr(merged.get_submodule(parent), own, layers[layer])
    return merged


def _is_linear(layer: nn.Module) -> bool:
    return type(layer) is nn.Linear or _is_transposed(layer)


def _is_transposed(layer: nn.Module) -> bool:
    """Whether this is a linear layer as GPT-2 has it, whose weight is [inputs, outputs]."""
    return type(layer).__name__ == "Conv1D" and type(layer).__module__.startswith("transformers.")


def _ends_with(name: str, ends: Iterable[str]) -> bool:
    return any(not end or name == end or name.endswith(f".{end}") for end in ends)


def _begins_with(name: str, beginnings: Iterable[str]) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in beginnings)
