"""The commands for real federations; Flower is imported when one of them runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedkeep.cli.options import AsJson
from fedkeep.errors import FedkeepError

app = typer.Typer(help="The same methods in a real federation, on Flower.", no_args_is_help=True)


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="The app's name: small letters, digits and -.")],
    into: Annotated[Path, typer.Option(help="Where its folder is made.")] = Path(),
) -> None:
    """Write a Flower app that runs as it is: a model, data, a config, and a README with the commands.

    Example: fedkeep flower new ward-7
    """
    _flower()
    from fedkeep.flower import new_app

    folder = new_app.write(name, into)
    typer.echo(f"{folder} is there: {folder / 'README.md'} has the commands that start it")


@app.command("dry-run")
def dry_run(
    folder: Annotated[Path, typer.Argument(metavar="APP", help="The app's folder.")] = Path(),
    node_config: Annotated[str, typer.Option(help="As flower-supernode is given it.")] = "client-id=0",
    run_config: Annotated[str, typer.Option(help="As flwr run is given it.")] = "",
    as_json: AsJson = False,
) -> None:
    """Show what would leave this node, with names, shapes and bytes, before it takes part. Nothing is sent.

    Example: fedkeep flower dry-run . --node-config "client-id=0 data='/srv/images'"
    """
    _flower()
    from fedkeep.flower.dry_run import as_dict, dry_run_app, format_dry_run

    seen = dry_run_app(folder, node_config, run_config)
    print(json.dumps(as_dict(seen), indent=2) if as_json else format_dry_run(seen))


def _flower() -> None:
    try:
        import fedkeep.flower  # noqa: F401
    except ImportError as error:
        raise FedkeepError(str(error)) from None
