"""The commands that look before anything is trained: `fedkeep methods` and `fedkeep partition`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from fedkeep import plain
from fedkeep.errors import FedkeepError
from fedkeep.method import FedAvg
from fedkeep.options import AsJson, Words, file_and_overrides

if TYPE_CHECKING:
    from fedkeep.describe import Footprint


def methods(
    name: Annotated[str | None, typer.Argument(help="Show one method in full.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the methods: hyperparameters, what each moves, keeps and discloses, measured from its own trees.

    Example: fedkeep methods fedntd
    """
    from fedkeep import describe
    from fedkeep import methods as registry

    chosen = {name: registry.get(name)} if name else registry.discover()
    found = {key: (cls, describe.footprint(cls())) for key, cls in chosen.items()}
    if as_json:
        about = {
            key: {"paper": cls.paper, "hyperparameters": cls.defaults(), **asdict(size)}
            for key, (cls, size) in found.items()
        }
        print(plain.dumps(about, indent=2))
    elif name:
        _one_method(Console(), *found[name])
    else:
        _method_table(Console(), found)


def partition(
    words: Words = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also draw it into this SVG file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Look at a split before training: who holds which classes.

    Example: fedkeep partition data=digits split=dirichlet split.n_clients=20 split.alpha=0.1 -o split.svg
    """
    from fedkeep import changes, config, picture

    file, overrides = file_and_overrides(words)
    given = {"method": "fedavg", "model": "mlp", **(config.read(file) if file else {})}
    experiment = config.Experiment.from_dict(changes.override(given, overrides))
    data, clients = experiment.data_and_clients()
    counts = clients.label_counts(data.y_train, data.n_classes)
    if output is not None:
        if not output.parent.is_dir():
            raise FedkeepError(f"there is no folder {output.parent} to draw the picture in")
        output.write_text(picture.as_svg(counts, f"{data.name}: {experiment.split['kind']}"))
    if as_json:
        print(plain.dumps({"sizes": clients.sizes.tolist(), "label_counts": counts.tolist()}, indent=2))
        return
    console = Console()
    console.print(picture.on_terminal(counts, console.width))
    console.print(picture.describe(counts), highlight=False)


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
        say(f"  {field} = {value}: {h.help}" + (f" (at {h.neutral} it is FedAvg)" if h.neutral is not None else ""))
    say(f"  down, to each client and round: {', '.join(size.sends)} ({size.down:.2f} models)")
    say(f"  up, all that the server learns of a client: {', '.join(size.uploads)} ({size.up:.2f} models)")
    say(f"  kept by a client between visits: {', '.join(size.keeps) or 'nothing'} ({size.state:.2f} models)")
    say(f"  public examples on the server: {'needed, ' + size.public if size.public != 'no' else 'not needed'}")
    say(f"  a teacher's pass over the client's data: {'yes' if size.teacher else 'no'}")
