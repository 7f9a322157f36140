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

from fedkeep._util.json import to_json
from fedkeep.cli.options import AsJson
from fedkeep.method import FedAvg

if TYPE_CHECKING:
    from fedkeep.engine.footprint import Footprint


def methods(
    name: Annotated[str | None, typer.Argument(help="Show one method in full.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the methods: hyperparameters, what each moves, keeps and discloses, measured from its own trees.

    Example: fedkeep methods fedntd
    """
    from fedkeep import methods as registry
    from fedkeep.engine import footprint

    chosen = {name: registry.get(name)} if name else registry.discover()
    found = {key: (cls, footprint.footprint(cls())) for key, cls in chosen.items()}
    if as_json:
        about = {
            key: {"paper": cls.paper, "hyperparameters": cls.defaults(), **asdict(size)}
            for key, (cls, size) in found.items()
        }
        print(to_json(about, indent=2))
    elif name:
        _one_method(Console(), *found[name])
    else:
        _method_table(Console(), found)


def _method_table(console: Console, found: Mapping[str, tuple[type[FedAvg], Footprint]]) -> None:
    table = Table(title="Sizes in models, for each client and round", title_justify="left", box=box.SIMPLE_HEAD)
    for head in ("method", "down", "up", "discloses", "client keeps", "public set"):
        table.add_column(head, no_wrap=head == "method")
    for key, (_, size) in found.items():
        table.add_row(
            key,
            f"{size.down:.1f}",
            f"{size.up:.1f}",
            ", ".join(size.uploads),
            f"{', '.join(size.keeps)} ({size.state:.1f})" if size.keeps else "-",
            size.public,
        )
    console.print(table)
    console.print("fedkeep methods NAME shows one in full.", style="dim")


def _one_method(console: Console, cls: type[FedAvg], size: Footprint) -> None:
    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False)

    console.print(f"[bold]{cls.name}[/bold]  {cls.paper}\n")
    say(inspect.getdoc(cls) or "")
    say("")
    for field, value in cls.defaults().items():
        h = cls.hyperparameters()[field]
        say(f"  {field} = {value}: {h.help}" + (f" (at {h.fedavg_at} it is FedAvg)" if h.fedavg_at is not None else ""))
    say(f"  down, to each client and round: {', '.join(size.sends)} ({size.down:.2f} models)")
    say(f"  up, all that the server learns of a client: {', '.join(size.uploads)} ({size.up:.2f} models)")
    say(f"  kept by a client between visits: {', '.join(size.keeps) or 'nothing'} ({size.state:.2f} models)")
    say(f"  public examples on the server: {'needed, ' + size.public if size.public != 'no' else 'not needed'}")
    say(f"  a teacher's pass over the client's data: {'yes' if size.teacher else 'no'}")
