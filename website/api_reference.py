"""The API reference, from signatures and docstrings: one Markdown page per public module."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import fedkeep

# public modules in the order of the navigation; the names in fk.__all__ that are no modules are on the first page
MODULES = {
    "fedkeep": "Training, and reading runs",
    "fedkeep.data": "Data",
    "fedkeep.data.partition": "Splits among clients",
    "fedkeep.models": "Models",
    "fedkeep.methods": "Methods",
    "fedkeep.forgetting": "Measures of forgetting",
    "fedkeep.metrics": "Metrics",
    "fedkeep.instruments": "Studies of models",
    "fedkeep.runs.tensorboard": "TensorBoard",
    "fedkeep.flower": "Federations on Flower",
    "fedkeep.errors": "Errors",
    "fedkeep.method": "The contract of a method",
    "fedkeep.visit": "What hooks work with",
    "fedkeep.task": "The model as functions",
    "fedkeep.tree": "Trees of tensors",
    "fedkeep.losses": "Losses",
    "fedkeep.optim": "Optimisers",
    "fedkeep.bounds": "Bounds of honest uploads",
    "fedkeep.server_training": "Training at the server",
    "fedkeep.testing": "Checks for your own method",
}
_LISTED = re.compile(r"[A-Za-z_]\w*(, \w+)*( \([^)]*\))?: ")  # a line that explains arguments


def pages() -> dict[str, str]:
    """Return the pages by their path in the site."""
    return {f"api/{name}.md": _page(importlib.import_module(name), title) for name, title in MODULES.items()}


def public_names(module: ModuleType) -> list[str]:
    """Return the public names of a module that are not modules: those of `__all__`, or those defined in it."""
    listed = getattr(module, "__all__", None)
    own = [
        n for n, v in vars(module).items() if not n.startswith("_") and getattr(v, "__module__", "") == module.__name__
    ]
    names = [name for name in (own if listed is None else listed) if not name.startswith("__")]
    return sorted((n for n in names if not inspect.ismodule(getattr(module, n))), key=str.lower)


def _page(module: ModuleType, title: str) -> str:
    name, about = module.__name__, inspect.getdoc(module) or ""
    about = about.partition("\n\n")[0] if module is fedkeep else about  # the front page has the example
    entries = (_entry(public, getattr(module, public)) for public in public_names(module))
    return f"# {title}\n\n`import {name}`\n\n{_prose(about)}\n\n" + "\n".join(entries)


def _entry(name: str, value: Any) -> str:
    """Return the heading, signature and description of one name, of a class with its members."""
    if not isinstance(value, type | FunctionType) or not value.__module__.startswith("fedkeep"):
        return f"## {name}\n\n```python\n{_constant(value)}\n```\n"
    parts = [f"## {name}\n", _signature(name, value), _prose(_own_doc(value))]
    if isinstance(value, type):
        parts += [_hyperparameters(value), *(_member(name, *member) for member in _members(value))]
    return "\n".join(part for part in parts if part) + "\n"


def _members(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield the public functions and properties that a class itself defines and documents."""
    for name, value in vars(cls).items():
        value = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        member = value.fget if isinstance(value, property) else getattr(value, "func", value)  # cached properties too
        if not name.startswith("_") and inspect.isfunction(member) and inspect.getdoc(member):
            yield name, value if isinstance(value, property) else member


def _member(owner: str, name: str, value: Any) -> str:
    signature = "" if isinstance(value, property) else _signature(name, value)
    return "\n".join(part for part in (f"### {owner}.{name}\n", signature, _prose(inspect.getdoc(value) or "")) if part)


def _signature(name: str, value: Any) -> str:
    if isinstance(value, type) and issubclass(value, dict):  # a TypedDict: its keys
        return "```python\n" + "".join(f"{key}: {kind}\n" for key, kind in _annotations(value)) + "```\n"
    signature = inspect.signature(value)
    shown = [_parameter(p) for key, p in signature.parameters.items() if key not in ("self", "cls")]
    returned = (
        "" if isinstance(value, type) or not signature.return_annotation else f" -> {signature.return_annotation}"
    )
    text = f"{name}({', '.join(shown)}){returned}"
    if len(text) > 88:
        text = f"{name}(\n" + "".join(f"    {part},\n" for part in shown) + f"){returned}"
    return f"```python\n{text}\n```\n"


def _annotations(value: type) -> list[tuple[str, str]]:
    return [(key, getattr(kind, "__forward_arg__", str(kind))) for key, kind in value.__annotations__.items()]


def _parameter(parameter: inspect.Parameter) -> str:
    """Return a parameter as it is written in the source: annotations are strings, defaults may be objects."""
    kind = parameter.annotation
    text = str(parameter).replace(repr(kind), kind, 1) if isinstance(kind, str) else str(parameter)
    return re.sub(r"= <.*>$", "= ...", text)


def _hyperparameters(cls: type) -> str:
    """Return a list of a method's hyperparameters, with what they mean."""
    if not (dataclasses.is_dataclass(cls) and issubclass(cls, importlib.import_module("fedkeep.method").FedAvg)):
        return ""
    return "".join(f"- `{name}`: {_text(h.help)}\n" for name, h in cls.hyperparameters().items())


def _own_doc(value: Any) -> str:
    """Return an object's own docstring; dataclass and inheritance would add others."""
    text = value.__doc__ or ""
    return "" if text.startswith(f"{value.__name__}(") else inspect.cleandoc(text)


def _prose(text: str) -> str:
    """Return a docstring as Markdown: examples as code, lines that explain arguments as a list."""
    out = []
    for block in text.split("\n\n"):
        lines = block.split("\n")
        if block.startswith(">>>"):
            out.append(f"```pycon\n{block}\n```")
        elif block.startswith("    "):
            out.append(block)
        elif sum(bool(_LISTED.match(line)) for line in lines) > 1:
            out.append("\n".join(f"- {_text(line)}" if _LISTED.match(line) else f"    {_text(line)}" for line in lines))
        else:
            out.append(_text(block))
    return "\n\n".join(out) + "\n" if text else ""


def _text(text: str) -> str:
    """Return text in which only `code` is markup."""
    parts = re.split(r"(`+[^`]+`+)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([<>*_\[\]|])", r"\\\1", part) for part in parts)


def _constant(value: Any) -> str:
    """Return a constant, of a table only its keys."""
    return ", ".join(map(repr, value)) if isinstance(value, dict) else repr(value)
