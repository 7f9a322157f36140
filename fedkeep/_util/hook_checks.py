"""Checks of a method's class when it is defined: its hooks have the right names and arguments, and its passes exist."""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Mapping
from typing import Any

from fedkeep._util.text import did_you_mean
from fedkeep.errors import MethodError

log = logging.getLogger("fedkeep")

_RENAMED = {"draw": "select_examples", "personal": "personal_params"}
_RESERVED = ("update_client_record",)  # see "Reserved names" in docs/contract.md


def check_hooks(cls: Any, base: type, hooks: Mapping[str, tuple[str, ...]]) -> None:
    """Raise if a hook has the wrong arguments or name; warn about a method whose name is nearly a hook's.

    `base` is the class that has every hook, `hooks` are their arguments after `self`.
    """
    for name, value in vars(cls).items():
        if name in _RENAMED:
            raise MethodError(f"{cls.__name__}.{name}: this hook is called {_RENAMED[name]}", key=name)
        if name in _RESERVED:
            raise MethodError(f"{cls.__name__}.{name}: this name is reserved for a future hook", key=name)
        if name in hooks:
            _require_arguments(cls, name, value, hooks[name])
        else:
            close = difflib.get_close_matches(name, hooks, n=1, cutoff=0.8)
            if close and name not in cls.passes and not hasattr(base, name):
                log.warning("%s.%s is not a hook and is not called; did you mean %s?", cls.__name__, name, close[0])
    if "broadcast_to" in vars(cls) and not cls.reveals:
        raise MethodError(
            f"{cls.__name__} sends something to single clients: say in `reveals` what they learn of other clients, or "
            '"nothing"',
            key="reveals",
        )
    _check_passes(cls, hooks["loss"])


def _check_passes(cls: Any, arguments: tuple[str, ...]) -> None:
    if "loss" not in cls.passes or len(set(cls.passes)) != len(cls.passes):
        raise MethodError(f"{cls.__name__}.passes must name different hooks, `loss` among them", key="passes")
    for name in cls.passes:
        if not callable(getattr(cls, name, None)):
            public = [known for known in dir(cls) if not known.startswith("_")]
            raise MethodError(
                f"{cls.__name__}.passes names {name!r}, which is not a method: {did_you_mean(name, public)}",
                key="passes",
                value=name,
            )
        _require_arguments(cls, name, getattr(cls, name), arguments)
    if cls.uses("refined") and not cls.uses("refine"):
        raise MethodError(f"{cls.__name__}.refined is only called for methods with `refine`", key="refined")
    unused = [hook for hook in ("gradient_point", "combine_gradients") if len(cls.passes) == 1 and cls.uses(hook)]
    if unused:
        raise MethodError(
            f"{cls.__name__}.{unused[0]} is only called for methods with several passes: set `passes`", key=unused[0]
        )
    if len(cls.passes) > 1 and not (cls.uses("gradient_point") or cls.uses("combine_gradients")):
        raise MethodError(
            f"{cls.__name__} has several passes, but uses the gradient of `loss` alone: "
            "override gradient_point or combine_gradients",
            key="passes",
        )


def _require_arguments(cls: type, name: str, hook: Any, arguments: tuple[str, ...]) -> None:
    try:
        inspect.signature(hook).bind(None, *arguments)
    except TypeError:
        raise MethodError(
            f"{cls.__name__}.{name} must take the arguments (self, {', '.join(arguments)})", key=name, valid=arguments
        ) from None
