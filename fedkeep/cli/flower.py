"""The commands `fedkeep flower ...` for real federations; Flower is imported when one of them runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedkeep.cli.options import AsJson, CommandGroup
from fedkeep.errors import FedkeepError

app = typer.Typer(cls=CommandGroup, help="Run the same methods in a real federation, on Flower.", no_args_is_help=True)


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="Name of the app: lower-case letters, digits and -.")],
    into: Annotated[Path, typer.Option(help="Where to create its folder.")] = Path(),
) -> None:
    """Create a Flower app that runs as it is: model, data, config, and a README with the commands.

    Example: fedkeep flower new ward-7
    """
    _require_flower()
    from fedkeep.flower import new_app

    folder = new_app.write(name, into)
    typer.echo(f"Created {folder}; {folder / 'README.md'} lists the commands that start it")


@app.command("dry-run")
def dry_run(
    folder: Annotated[Path, typer.Argument(metavar="APP", help="The app's folder.")] = Path(),
    node_config: Annotated[str, typer.Option(help="As passed to flower-supernode.")] = "client-id=0",
    run_config: Annotated[str, typer.Option(help="As passed to flwr run.")] = "",
    as_json: AsJson = False,
) -> None:
    """Show what this node would send: names, shapes and bytes. Nothing is sent.

    Example: fedkeep flower dry-run . --node-config "client-id=0 data='/srv/images'"
    """
    _require_flower()
    from fedkeep.flower.dry_run import as_dict, dry_run_app, format_dry_run

    result = dry_run_app(folder, node_config, run_config)
    print(json.dumps(as_dict(result), indent=2) if as_json else format_dry_run(result))


def _require_flower() -> None:
    """Raise an error that says how to install Flower, if it is missing."""
    try:
        import fedkeep.flower  # noqa: F401
    except ImportError as error:
        raise FedkeepError(str(error)) from None
