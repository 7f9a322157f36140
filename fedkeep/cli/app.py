"""The command line.

Exit codes, of every command:

    0    success
    1    a run failed, alone or in a sweep: it diverged, ran into an error, or its process was killed; the others have
         run. Also: a file could not be written, or fedkeep has a bug
    2    invalid input: the command, or every run of it, was refused before any round was trained
    129, 130, 143    ended by SIGHUP, SIGINT (Ctrl-C) or SIGTERM: 128 + the number of the signal
"""

from __future__ import annotations

import io
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Annotated

import typer

from fedkeep._util.text import format_os_error, one_line
from fedkeep._util.version import __version__
from fedkeep.cli import (
    analyse,
    compare,
    demo,
    export,
    flower,
    methods,
    new,
    partition,
    report,
    reproduce,
    run,
    signals,
    tune,
)
from fedkeep.cli.options import CommandGroup
from fedkeep.errors import Diverged, FedkeepError, LostPeer, RunFailed

app = typer.Typer(
    cls=CommandGroup,
    help="Federated learning that keeps what it has learned.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    demo.demo,
    new.new,
    methods.methods,
    partition.partition,
    run.run,
    run.resume,
    tune.tune,
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
        with signals.raising():
            try:
                with only_rank0_prints():
                    app()
            except Exception:
                signals.raise_if_received()
                raise
    except LostPeer as error:
        _print_error(str(error))
        sys.exit(1)
    except FedkeepError as error:
        if os.environ.get("RANK", "0") == "0":
            _print_error(str(error))
        sys.exit(1 if isinstance(error, Diverged | RunFailed) else 2)
    except SystemExit as end:
        if (message := signals.message(end)) is not None:
            _print_error(message)
        raise
    except KeyboardInterrupt:  # raised where neither a command nor typer catches it
        _print_error("interrupted")
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        _print_unexpected(error)
        sys.exit(1)


def _print_unexpected(error: Exception) -> None:
    """Print an error that is not fedkeep's own: in one line what the system refused, with a traceback what is a bug."""
    if isinstance(error, OSError):
        _print_error(format_os_error(error))
    elif isinstance(error, MemoryError):
        _print_error("out of memory")
    else:
        traceback.print_exception(error)
        _print_error(f"this is a bug in fedkeep {__version__}: please report the lines above")


def _print_error(message: str) -> None:
    print(f"fedkeep: {one_line(message, most=2000)}", file=sys.stderr, flush=True)


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

    signals.replace(signal.SIGTERM, on_terminate)
    if os.environ.get("RANK", "0") == "0":
        yield
        return
    with open(os.devnull, "w") as devnull, redirect_stdout(devnull), redirect_stderr(devnull):
        yield
