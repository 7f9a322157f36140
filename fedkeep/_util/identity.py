"""Checksums of functions and objects that are the same in every process, so that two of them can be told apart."""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

_LIBRARIES = ("torch.", "numpy.", "fedkeep.")  # their functions are identified by name: the versions are recorded
_DEPTH = 20


def checksum(value: Any) -> str:
    """Return a checksum of what a function or object computes with.

    Of a function: its code, defaults, closure, and the numbers, arrays and functions that it uses from its module. Of
    an object: its class, its attributes and its tensors. The code is that of the running version of Python.

    >>> checksum(lambda z: z + 1) == checksum(lambda z: z + 1), checksum(lambda z: z + 1) == checksum(lambda z: z + 2)
    (True, False)
    """
    digest = hashlib.sha256()
    for part in _parts(value, ()):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()[:12]


def _parts(value: Any, inside: tuple[int, ...]) -> Iterator[bytes]:
    """Yield the parts of a value, as bytes; `inside` are the ids of the values around it."""
    if id(value) in inside or len(inside) > _DEPTH:
        return
    inside = (*inside, id(value))
    yield type(value).__qualname__.encode()
    if isinstance(value, torch.Tensor):
        yield from _parts(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy(), inside)
        yield f"{value.dtype} {tuple(value.shape)}".encode()
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        yield f"{value.dtype} {value.shape}".encode()
        yield np.ascontiguousarray(value).tobytes()
    elif isinstance(value, int | float | complex | str | bytes | None | np.generic | torch.dtype | torch.device):
        yield repr(value).encode()
    elif isinstance(value, types.CodeType):
        yield value.co_code
        yield " ".join(value.co_names).encode()
        yield from _all_parts(value.co_consts, inside)
    else:
        yield from _parts_of_object(value, inside)


def _parts_of_object(value: Any, inside: tuple[int, ...]) -> Iterator[bytes]:
    if isinstance(value, list | tuple):
        yield from _all_parts(value, inside)
    elif isinstance(value, set | frozenset):
        yield from sorted(b"".join(_parts(one, inside)) for one in value)
    elif isinstance(value, dict):
        yield from _all_parts([part for item in value.items() for part in item], inside)
    elif isinstance(value, functools.partial):
        yield from _all_parts((value.func, value.args, value.keywords), inside)
    elif isinstance(value, types.MethodType):
        yield from _all_parts((value.__func__, value.__self__), inside)
    elif isinstance(value, types.FunctionType) and not _of_library(value):
        yield from _all_parts(_parts_of_function(value), inside)
    elif isinstance(value, type | types.ModuleType | types.BuiltinFunctionType | types.FunctionType):
        yield _name(value).encode()
    else:
        kind = type(value)
        yield _name(kind).encode()
        if not _of_library(kind):  # the code of a class of the user's own
            yield from _all_parts([vars(kind).get(name) for name in ("__call__", "forward")], inside)
        yield from _all_parts(_attributes(value), inside)


def _all_parts(values: Any, inside: tuple[int, ...]) -> Iterator[bytes]:
    for value in values:
        yield from _parts(value, inside)


def _parts_of_function(function: types.FunctionType) -> list[Any]:
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
    simple = (int, float, str, bytes, torch.Tensor, np.ndarray, types.FunctionType, functools.partial)
    used = [function.__globals__.get(name) for name in function.__code__.co_names]
    return [
        function.__code__,
        function.__defaults__,
        function.__kwdefaults__,
        cells,
        [value for value in used if isinstance(value, simple)],
    ]


def _attributes(value: Any) -> list[Any]:
    """Return the attributes of an object, by name; of a module also its tensors and submodules."""
    own = dict(getattr(value, "__dict__", {}))
    if isinstance(value, torch.nn.Module):
        own = {name: a for name, a in own.items() if not name.startswith("_") and name != "training"}
        own |= dict(value.named_parameters(recurse=False)) | dict(value.named_buffers(recurse=False))
        own |= dict(value.named_children())
    return [part for name in sorted(own) for part in (name, own[name])]


def _of_library(value: Callable[..., Any] | type) -> bool:
    return f"{value.__module__}.".startswith(_LIBRARIES)


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', getattr(value, '__name__', ''))}"
