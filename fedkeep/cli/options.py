"""Arguments and checks shared by several commands."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from typer.core import TyperGroup

from fedkeep._util.text import did_you_mean, join_names, printable
from fedkeep.cli.completion import complete_experiment
from fedkeep.errors import ConfigError, FedkeepError

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
FitOnTest = Annotated[
    bool,
    typer.Option(
        "--fit-on-test",
        help="recoverable, without a public set: fit the bias on half of the test set, measure on the other half.",
    ),
]
TuneEpochs = Annotated[
    int | None,
    typer.Option(min=0, help="personal: epochs of fine-tuning (default: as many as in a round; 0: none)."),
]
PersonalData = Annotated[
    str,
    typer.Option(
        help="personal: measure on each client's own held-out or test examples (own), on the test set weighted by its "
        "label shares (labels), or on own examples where all clients have some (auto)."
    ),
]
ExperimentArgs = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[FILE.toml] [key=value]...",
        help="An experiment file and overrides.",
        autocompletion=complete_experiment,
    ),
]
Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders that contain run folders.")]

Trust = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MODULE:NAME", help="Your own code that may be run although a run folder names it. May be repeated."
    ),
]


class CommandGroup(TyperGroup):
    """Commands of which a misspelt one is answered with one suggestion; typer and click each add their own."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the first argument names, with the other arguments."""
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            ctx.fail(f"unknown command {args[0]!r}: {did_you_mean(args[0], self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)


def parse_jobs(text: str) -> int | Literal["auto"]:
    """Return the number of runs at a time, or auto; the parser of an option."""
    if text == "auto":
        return "auto"
    if not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"{text!r} is neither a number of at least 1 nor auto.")
    return int(text)


JobsOption = Annotated[
    Any,
    typer.Option(
        "--jobs",
        metavar="N|auto",
        parser=parse_jobs,
        help="Number of runs at a time, each in its own process. auto: 1; 3 on a GPU, 6 with NVIDIA MPS.",
    ),
]


def file_and_overrides(args: list[str] | None) -> tuple[Path | None, list[str]]:
    """Split arguments into the experiment file, if there is one, and the overrides."""
    file, overrides = name_and_overrides(args, "experiment file")
    return Path(file) if file else None, overrides


def name_and_overrides(args: list[str] | None, what: str) -> tuple[str | None, list[str]]:
    """Split arguments into a name or a file, if there is one, and the overrides; `what` is what is named."""
    args = args or []
    names = [arg for arg in args if "=" not in arg or arg.endswith(".toml")]
    if len(names) > 1:
        raise FedkeepError(
            f"only one {what} is possible, not {' and '.join(names)}; overrides are written key=value",
            key=what,
            value=names,
        )
    overrides = [arg for arg in args if arg not in names]
    _require_once(overrides)
    return names[0] if names else None, overrides


def _require_once(overrides: Iterable[str]) -> None:
    """Raise if two overrides have the same key."""
    earlier: dict[str, str] = {}
    for text in overrides:
        key = text.partition("=")[0].strip().removeprefix("train.")
        if key in earlier:
            raise ConfigError(f"{key} is overridden twice: {earlier[key]} and {text}", key=key, value=text)
        earlier[key] = text


@contextmanager
def suggesting_sweeps(overrides: Iterable[str]) -> Iterator[None]:
    """Let an error in an override such as seed=0,1,2 say how to run an experiment with each of the values."""
    try:
        yield
    except ConfigError as error:
        from fedkeep.experiments.overrides import full_key

        for key, _, value in (text.partition("=") for text in overrides):
            several = "," in value and not value.strip().startswith(("[", "{", '"'))
            if several and error.key == full_key(key.strip()) and "--sweep" not in str(error):
                message = f"{error}; for one run per value, use --sweep {key}={value}"
                raise error.converted(type(error), message) from error
        raise


@contextmanager
def log_information() -> Iterator[None]:
    """Print to stderr what fedkeep logs as information too, such as the columns of a table that are used."""
    log, handler = logging.getLogger("fedkeep"), logging.StreamHandler()
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


@contextmanager
def log_once() -> Iterator[None]:
    """Log the same message once only: the same data and runs are read again and again."""
    log, once = logging.getLogger("fedkeep"), _OncePerMessage()
    log.addFilter(once)
    try:
        yield
    finally:
        log.removeFilter(once)


class _OncePerMessage(logging.Filter):
    """Lets the same message through once only."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the message is new."""
        new = record.getMessage() not in self.logged
        self.logged.add(record.getMessage())
        return new


@contextmanager
def naming(file: Path | None, overrides: Iterable[str]) -> Iterator[None]:
    """Let errors in an experiment name the file that it is read from, unless the key was overridden."""
    try:
        yield
    except FedkeepError as error:
        from fedkeep.experiments.overrides import full_key

        wrong = (f"{error.key}.", f"train.{error.key}.")  # the settings themselves do not know their section
        given = [f"{full_key(text.partition('=')[0].strip())}." for text in overrides]
        if file is None or any(one.startswith(key) or key.startswith(one) for key in given for one in wrong):
            raise
        raise error.converted(type(error), f"{file}: {error}") from error


def confirm_code(about: dict[str, Any], trust: Iterable[str] | None, keys: Iterable[str] | None = None) -> None:
    """Trust the code that the user names; on a terminal, ask about the other code that a run's tables name.

    `keys` are those whose code would be run; by default all. What is not confirmed is refused when it is used.
    """
    from fedkeep._util import own_parts
    from fedkeep.experiments.own_parts import named_code

    own_parts.trust(trust or [])
    wanted = [name for key, name in named_code(about).items() if keys is None or key in keys]
    unknown = [name for name in dict.fromkeys(wanted) if not own_parts.is_trusted(name)]
    if unknown and sys.stdin.isatty() and sys.stderr.isatty():
        names = printable(join_names(unknown))
        if typer.confirm(f"This run folder names code: {names}. Run it on this machine?", err=True):
            own_parts.trust(unknown)


def require_fitted_study(studies: Iterable[str], option: str) -> None:
    """Raise if --fit-on-test was given without the study that it is for."""
    from fedkeep.analysis.recoverable import STUDY

    if STUDY not in studies:
        raise FedkeepError(f"--fit-on-test is for {option} {STUDY}", key="--fit-on-test")


def print_page_path(console: Console, output: Path) -> None:
    """Print where the report page is."""
    line = f"\nThe page: {printable(output)} (open it in a browser)"
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def require_writable(output: Path, example: str = "report.html", key: str = "output") -> None:
    """Raise if this cannot be a file to write, before any work is done."""
    if not output.parent.is_dir():
        raise FedkeepError(f"there is no folder {output.parent} to write {output} in", key=key, value=str(output))
    if output.is_dir():
        raise FedkeepError(
            f"{output} is a folder: name the file to write, such as {output / example}", key=key, value=str(output)
        )
    _require_access(output.parent, output, key)


def require_writable_folder(output: Path, key: str = "output") -> None:
    """Raise if this cannot be a folder to write files in, whether it exists or is to be created."""
    existing = next(path for path in (output, *output.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise FedkeepError(f"{existing} is a file, not a folder to write in", key=key, value=str(output))
    _require_access(existing, output, key)


def _require_access(folder: Path, output: Path, key: str) -> None:
    """Raise unless files can be created in the folder: its permissions and its file system allow it."""
    if not os.access(folder, os.W_OK | os.X_OK):
        raise FedkeepError(f"{output} cannot be written: the folder {folder} is read-only", key=key, value=str(output))
