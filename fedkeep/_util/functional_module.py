"""A module as a function of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn


class FunctionalModule:
    """Calls a module with substituted parameters.

    A faster `torch.func.functional_call`: the parameters' locations are found once, not at each call, which saves about
    95 microseconds a call. Uses `nn.Module._parameters`, a private attribute.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        names = {id(p): name for name, p in module.named_parameters()}
        self.places: dict[str, list[tuple[dict[str, Any], str]]] = {name: [] for name in names.values()}
        for part in module.modules():
            for leaf, p in part._parameters.items():
                if p is not None:
                    self.places[names[id(p)]].append((part._parameters, leaf))

    def __call__(self, params: Mapping[str, Tensor], use: Callable[[nn.Module], Any]) -> Any:
        """Return what `use` makes of the module with these parameters."""
        own = [(place, leaf, place[leaf]) for name in params for place, leaf in self.places[name]]
        try:
            for name, weight in params.items():
                for place, leaf in self.places[name]:
                    place[leaf] = weight
            return use(self.module)
        finally:
            for place, leaf, weight in own:
                place[leaf] = weight
