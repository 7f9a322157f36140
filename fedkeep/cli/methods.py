"""The command `fedkeep methods`."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedkeep._util.json import to_json
from fedkeep._util.text import one_line
from fedkeep.cli.completion import complete_method
from fedkeep.cli.options import AsJson

if TYPE_CHECKING:
    from fedkeep.engine.footprint import Footprint
    from fedkeep.method import FedAvg

log = logging.getLogger("fedkeep")


def methods(
    name: Annotated[
        str | None, typer.Argument(help="Show this method in full.", autocompletion=complete_method)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the methods, what each does, sends, stores and needs; with NAME, also its hyperparameters and uploads.

    Example: fedkeep methods fedntd
    """
    from fedkeep import methods as registry

    classes = {name: registry.get(name)} if name else registry.discover()
    measured = {key: (cls, size) for key, cls in classes.items() if (size := _footprint(key, cls)) is not None}
    if as_json:
        print(to_json({key: _as_data(cls, size) for key, (cls, size) in measured.items()}, indent=2))
    elif name and name in measured:
        _one_method(Console(), *measured[name])
    elif not name:
        _method_table(Console(), measured)
    if name and not measured:
        raise typer.Exit(1)


def _footprint(key: str, cls: type[FedAvg]) -> Footprint | None:
    """Return a method's footprint; None, with a warning, for one of another package that cannot be trained."""
    from fedkeep.engine.footprint import default_footprint
    from fedkeep.methods import is_built_in

    try:
        return default_footprint(cls)
    except Exception as error:
        if is_built_in(cls):
            raise
        log.warning("the method %s cannot be measured: %s", key, one_line(error))
        return None


def _as_data(cls: type[FedAvg], size: Footprint) -> dict[str, Any]:
    return {
        "summary": _summary(cls),
        "paper": cls.paper,
        "hyperparameters": cls.defaults(),
        "warnings": _warnings(cls),
        "reveals": cls.reveals,
        **asdict(size),
    }


def _summary(cls: type[FedAvg]) -> str:
    """Return the first paragraph of a method's docstring, in one line; "" if it has none of its own."""
    text = vars(cls).get("__doc__") or ""
    if text.startswith(f"{cls.__name__}("):  # written by dataclass, where the author wrote none
        return ""
    return " ".join(inspect.cleandoc(text).partition("\n\n")[0].split())


def _sentence(cls: type[FedAvg]) -> str:
    """Return what a method does: its summary, without a name at the start that says nothing more."""
    name, colon, rest = _summary(cls).partition(": ")
    return (rest if colon and "(" not in name and len(name) < 30 else name + colon + rest).rstrip(".")


def _warnings(cls: type[FedAvg]) -> dict[str, str]:
    """Return the warnings about a method's hyperparameters, by field."""
    return {field: h.warning for field, h in cls.hyperparameters().items() if h.warning}


def _needs(size: Footprint) -> str:
    """Return what a run must have for this method, or "" if every run has it."""
    needs = [f"{'an' if size.public[0] == 'u' else 'a'} {size.public} public set"] if size.public != "no" else []
    needs += [f"at least {size.min_classes} classes"] if size.min_classes > 2 else []
    return f"; needs {' and '.join(needs)}" if needs else ""


def _method_table(console: Console, measured: Mapping[str, tuple[type[FedAvg], Footprint]]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("method", no_wrap=True)
    table.add_column("what it does")
    for head in ("down", "up", "stored"):
        table.add_column(head, justify="right", no_wrap=True)
    for key, (cls, size) in measured.items():
        stored = f"{size.state:.1f}" if size.keeps else "-"
        what = Text(_sentence(cls)) + Text(_needs(size), style="bold")
        table.add_row(Text(key), what, f"{size.down:.1f}", f"{size.up:.1f}", stored)
    console.print(table)
    console.print(
        "down, up: sent to and by a client in a round; stored: kept by a client between visits; in multiples of the "
        "model.\nfedkeep methods NAME shows one method in full: hyperparameters, paper, what it discloses.",
        style="dim",
        highlight=False,
    )


def _one_method(console: Console, cls: type[FedAvg], size: Footprint) -> None:
    def line(text: str) -> None:
        console.print(text, markup=False, highlight=False)

    console.print(Text(cls.name, style="bold") + Text(f"  {cls.paper or 'names no paper'}\n", style="not bold"))
    line(inspect.cleandoc(vars(cls)["__doc__"]) if _summary(cls) else "(no description)")
    line("")
    warnings = _warnings(cls)
    for field, value in cls.defaults().items():
        h = cls.hyperparameters()[field]
        neutral = "" if h.fedavg_at is None else f" (at {h.fedavg_at} it is FedAvg)"
        choices = "" if h.choices is None else f" (valid: {', '.join(map(str, h.choices))})"
        only = "".join(f" (only with {key} = {needed})" for key, needed in h.only_with.items())
        line(f"  {field} = {value}: {h.help}{choices}{neutral}{only}")
        if field in warnings:
            line(f"    warning: {warnings[field]}")
    line(f"  download, per client and round: {', '.join(size.sends)} ({size.down:.2f} models)")
    line(f"  upload, all that the server learns about a client: {', '.join(size.uploads)} ({size.up:.2f} models)")
    if cls.reveals:
        line(f"  other clients learn about a client: {cls.reveals}")
    line(f"  stored by a client between visits: {', '.join(size.keeps) or 'nothing'} ({size.state:.2f} models)")
    line(f"  public examples on the server: {'required, ' + size.public if size.public != 'no' else 'not required'}")
    if size.min_classes > 2:
        line(f"  refuses data of two classes: it needs at least {size.min_classes}")
    line(f"  extra forward pass of a teacher over the client's data: {'yes' if size.teacher else 'no'}")
