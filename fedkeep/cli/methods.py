"""The command `fedkeep methods`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedkeep._util.json import to_json
from fedkeep.cli.options import AsJson

if TYPE_CHECKING:
    from fedkeep.engine.footprint import Footprint
    from fedkeep.method import FedAvg


def methods(
    name: Annotated[str | None, typer.Argument(help="Show this method in full.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the methods and what each sends, stores and discloses; with NAME, its hyperparameters too.

    Example: fedkeep methods fedntd
    """
    from fedkeep import methods as registry
    from fedkeep.engine import footprint

    classes = {name: registry.get(name)} if name else registry.discover()
    measured = {key: (cls, footprint.footprint(cls())) for key, cls in classes.items()}
    if as_json:
        about = {
            key: {
                "paper": cls.paper,
                "hyperparameters": cls.defaults(),
                "warnings": _warnings(cls),
                "reveals": cls.reveals,
                **asdict(size),
            }
            for key, (cls, size) in measured.items()
        }
        print(to_json(about, indent=2))
    elif name:
        _one_method(Console(), *measured[name])
    else:
        _method_table(Console(), measured)


def _warnings(cls: type[FedAvg]) -> dict[str, str]:
    """Return the warnings about a method's hyperparameters, by field."""
    return {field: h.warning for field, h in cls.hyperparameters().items() if h.warning}


def _method_table(console: Console, measured: Mapping[str, tuple[type[FedAvg], Footprint]]) -> None:
    table = Table(
        title="Sizes per client and round, in multiples of the model", title_justify="left", box=box.SIMPLE_HEAD
    )
    for head in ("method", "download", "upload", "discloses", "client stores", "public set"):
        table.add_column(head, no_wrap=head == "method")
    for key, (_, size) in measured.items():
        table.add_row(
            Text(key),
            f"{size.down:.1f}",
            f"{size.up:.1f}",
            Text(", ".join(size.uploads)),
            Text(f"{', '.join(size.keeps)} ({size.state:.1f})" if size.keeps else "-"),
            size.public,
        )
    console.print(table)
    console.print("fedkeep methods NAME shows one method in full.", style="dim")


def _one_method(console: Console, cls: type[FedAvg], size: Footprint) -> None:
    def line(text: str) -> None:
        console.print(text, markup=False, highlight=False)

    console.print(Text(cls.name, style="bold") + Text(f"  {cls.paper}\n", style="not bold"))
    line(inspect.getdoc(cls) or "")
    line("")
    warnings = _warnings(cls)
    for field, value in cls.defaults().items():
        h = cls.hyperparameters()[field]
        neutral = "" if h.fedavg_at is None else f" (at {h.fedavg_at} it is FedAvg)"
        line(f"  {field} = {value}: {h.help}{neutral}")
        if field in warnings:
            line(f"    warning: {warnings[field]}")
    line(f"  download, per client and round: {', '.join(size.sends)} ({size.down:.2f} models)")
    line(f"  upload, all that the server learns about a client: {', '.join(size.uploads)} ({size.up:.2f} models)")
    if cls.reveals:
        line(f"  other clients learn about a client: {cls.reveals}")
    line(f"  stored by a client between visits: {', '.join(size.keeps) or 'nothing'} ({size.state:.2f} models)")
    line(f"  public examples on the server: {'required, ' + size.public if size.public != 'no' else 'not required'}")
    line(f"  extra forward pass of a teacher over the client's data: {'yes' if size.teacher else 'no'}")
