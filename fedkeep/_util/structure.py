"""Hashes of what an experiment file cannot hold: a model's structure, and functions and classes of the user's own.

Two models with the same weights can differ in an activation, two loss functions can have the same name. A hash is made
of a text that says what the object does: layers, options and source code, without weights and memory addresses.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import inspect
import re
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from fedkeep._util.text import clip

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.Size)
_MAX_DEPTH = 5
MAX_LAYERS = 40


def structure_hash(value: Any) -> str:
    """Return a short hash of what a module, function or object does."""
    return hashlib.sha256(describe(value).encode(errors="replace")).hexdigest()[:12]


def layer_names(model: nn.Module) -> list[str]:
    """Return the different layers of a model, at most 40, without the names of their options.

    >>> layer_names(nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2), nn.ReLU()))
    ['Linear(8, 4, True)', 'ReLU', 'Linear(4, 2, True)']
    """
    layers = [module for module in model.modules() if not any(True for _ in module.children())]
    return list(dict.fromkeys(map(_layer_name, layers)))[:MAX_LAYERS]


def is_own(kind: type) -> bool:
    """Return whether a class is the user's: neither of torch and fedkeep nor of another installed package."""
    root = kind.__module__.partition(".")[0]
    if root in ("torch", "fedkeep", "builtins"):
        return False
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return not re.search(r"[\\/](site|dist)-packages[\\/]", file)


def describe(value: Any, depth: int = 0) -> str:
    """Return a text that is the same for objects that do the same, as far as a text can say.

    >>> describe(nn.ReLU()) == describe(nn.ReLU()), describe(nn.ReLU()) == describe(nn.Tanh())
    (True, False)
    """
    if isinstance(value, _PLAIN):
        return repr(value)
    if depth > _MAX_DEPTH:
        return type(value).__qualname__
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, list | tuple | set | frozenset):
        parts = [describe(item, depth + 1) for item in value]
        return f"{type(value).__name__}({', '.join(sorted(parts) if isinstance(value, set | frozenset) else parts)})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {describe(item, depth + 1)}' for key, item in value.items())}}}"
    if isinstance(value, nn.Module):
        return "\n".join(_module(name, module, depth) for name, module in value.named_modules(remove_duplicate=False))
    if isinstance(value, functools.partial):
        return f"partial({describe(value.func, depth + 1)}, {describe([value.args, value.keywords], depth + 1)})"
    if isinstance(value, types.MethodType):
        return f"{describe(value.__func__, depth + 1)} of {describe(value.__self__, depth + 1)}"
    if isinstance(value, types.FunctionType):
        return _function(value, depth)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}\n{_source(value, depth)}"
    if dataclasses.is_dataclass(value) or is_own(type(value)):
        return f"{describe(type(value), depth + 1)}({_attributes(value, depth)})"
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _module(name: str, module: nn.Module, depth: int) -> str:
    kind = type(module)
    text = _without_addresses(module.extra_repr())
    return f"{name}: {kind.__qualname__}({text}; {_attributes(module, depth)})\n{_source(kind, depth)}"


def _attributes(value: Any, depth: int) -> str:
    """Return an object's public attributes, without modules and `training`."""
    own = {name: item for name, item in getattr(value, "__dict__", {}).items() if not name.startswith("_")}
    own.pop("training", None)
    if isinstance(value, nn.Module):  # a tensor may be random; modules stand for themselves
        own = {name: tuple(item.shape) if isinstance(item, torch.Tensor) else item for name, item in own.items()}
    shown = {name: describe(item, depth + 1) for name, item in own.items() if not isinstance(item, nn.Module)}
    return ", ".join(f"{name}={text}" for name, text in sorted(shown.items()))


def _source(kind: type, depth: int) -> str:
    """Return the code of a class of the user's own and of its own bases; what `__init__` does shows in the object."""
    lines = []
    for base in (base for base in kind.__mro__ if is_own(base) and base is not object):
        for name, member in vars(base).items():
            function = _unwrapped(member)
            if function is not None and (name == "__call__" or not name.startswith("__")):
                lines.append(f"{base.__qualname__}.{name}: {_function(function, depth + 1)}")
            elif isinstance(member, _PLAIN) and not name.startswith("__"):
                lines.append(f"{base.__qualname__}.{name} = {member!r}")
    return "\n".join(lines)


def _unwrapped(member: Any) -> types.FunctionType | None:
    member = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
    return member if isinstance(member, types.FunctionType) else None


def _function(function: types.FunctionType, depth: int) -> str:
    """Return a function's name; for one of the user's own also its code and what it refers to."""
    name = f"{function.__module__}.{function.__qualname__}".removeprefix("__main__.")
    if (function.__module__ or "").partition(".")[0] in ("torch", "fedkeep") or depth > _MAX_DEPTH:
        return name
    cells = {
        variable: describe(cell.cell_contents, depth + 1)
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        if variable != "__class__" and _is_filled(cell)
    }
    used = {name: describe(item, depth + 1) for name, item in _globals_of(function)}
    defaults = describe([function.__defaults__, function.__kwdefaults__], depth + 1)
    return f"{name}: {_code(function)} {cells} {used} {defaults}"


def _globals_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the numbers and functions of its module that a function refers to."""
    for name in sorted(set(function.__code__.co_names)):
        value = function.__globals__.get(name)
        if value is not function and isinstance(value, bool | int | float | str | types.FunctionType):
            yield name, value


@functools.lru_cache(maxsize=4096)
def _code(function: Callable[..., Any]) -> str:
    """Return a function's code without comments and docstrings; of a lambda, or without source, the compiled code."""
    try:
        if function.__name__ == "<lambda>":
            raise OSError("the source of a lambda is that of the whole statement")
        parsed = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError, ValueError):
        return _compiled(function.__code__)
    for node in ast.walk(parsed):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and ast.get_docstring(node, False):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(parsed)


def _compiled(code: types.CodeType) -> str:
    constants = [_compiled(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts]
    return f"{code.co_code.hex()} {constants} {code.co_names} {code.co_varnames}"


def _is_filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _tensor(value: torch.Tensor) -> str:
    values = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
    return f"tensor {tuple(value.shape)} {value.dtype} {hashlib.sha256(values).hexdigest()[:12]}"


def _layer_name(layer: nn.Module) -> str:
    options = re.sub(r"\b\w+=", "", _without_addresses(layer.extra_repr()))
    return clip(f"{type(layer).__name__}({options})" if options else type(layer).__name__, 80)


def _without_addresses(text: str) -> str:
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)
