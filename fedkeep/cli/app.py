"""The command line. Exit codes: 0 success, 1 failure, 2 invalid input."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Annotated

import typer

from fedkeep._util.text import printable
from fedkeep._util.version import __version__
from fedkeep.cli import analyse, compare, demo, export, flower, methods, partition, report, reproduce, run
from fedkeep.errors import Diverged, FedkeepError, LostPeer

app = typer.Typer(
    help="Federated learning that keeps what it has learned.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    demo.demo,
    methods.methods,
    partition.partition,
    run.run,
    run.resume,
    compare.compare,
    report.report,
    report.watch,
    analyse.analyse,
    export.export,
    export.plot,
    reproduce.reproduce,
):
    app.command()(command)
app.add_typer(flower.app, name="flower")


def _version(requested: bool) -> None:
    if requested:
        typer.echo(f"fedkeep {__version__}")
        raise typer.Exit


@app.callback()
def _app(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; invalid input ends with a message of one line, not with a traceback."""
    for stream in (sys.stdout, sys.stderr):  # a terminal without block characters shows "?" instead
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        with only_rank0_prints():
            app()
    except LostPeer as error:
        print(f"fedkeep: {printable(error)}", file=sys.stderr, flush=True)
        sys.exit(1)
    except FedkeepError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"fedkeep: {printable(error)}", file=sys.stderr, flush=True)
        sys.exit(1 if isinstance(error, Diverged) else 2)
    except SystemExit as end:
        if end.code == 130:  # typer's exit code for Ctrl-C
            print(
                "fedkeep: interrupted; a run in a folder is resumed by the same command, or by fedkeep resume RUN",
                file=sys.stderr,
            )
        raise


@contextmanager
def only_rank0_prints() -> Iterator[None]:
    """Of the processes of `torchrun`, let only rank 0 write to the terminal; any process that is terminated says so."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield
        return
    stderr = sys.stderr

    def on_terminate(number: int, frame: object) -> None:
        print("fedkeep: the run was terminated; to resume, use fedkeep resume RUN", file=stderr, flush=True)
        os._exit(1)

    signal.signal(signal.SIGTERM, on_terminate)
    if os.environ.get("RANK", "0") == "0":
        yield
        return
    with open(os.devnull, "w") as devnull, redirect_stdout(devnull), redirect_stderr(devnull):
        yield
