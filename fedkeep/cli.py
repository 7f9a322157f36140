"""The command line. Exit codes: 0 fine, 1 failed, 2 bad input."""

from __future__ import annotations

import io
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import fedkeep
from fedkeep import cli_flower, looking, plain
from fedkeep.comparing import compare, show
from fedkeep.errors import Diverged, FedkeepError, LostPeer
from fedkeep.export import commands as export_commands
from fedkeep.history import History
from fedkeep.instruments.commands import analyse
from fedkeep.options import AsJson, Words, file_and_overrides
from fedkeep.report import commands
from fedkeep.reproduce.commands import reproduce

app = typer.Typer(
    help="Federated learning that keeps what it has learned.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command()(commands.report)
app.command()(commands.watch)
app.add_typer(cli_flower.app, name="flower")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedkeep {fedkeep.__version__}")
        raise typer.Exit


@app.callback()
def _app(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    seeds: Annotated[int, typer.Option(min=1, help="How often to run each method, with seeds 0, 1, ...")] = 3,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds of each run.")] = 60,
    as_json: AsJson = False,
    svg: Annotated[Path | None, typer.Option(help="Also save what is shown as an SVG picture.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the report page is written.")] = Path(
        "fedkeep-demo.html"
    ),
) -> None:
    """FedAvg beside FedProx, SCAFFOLD and FedNTD on embedded data: who forgets, and how much. Under two minutes.

    Ends with a report page that shows it round by round.

    Example: fedkeep demo --seeds 1
    """
    from fedkeep import demo as job
    from fedkeep import table, terminal
    from fedkeep.report import write as write_report

    if svg is not None and not svg.parent.is_dir():
        raise FedkeepError(f"there is no folder {svg.parent} to save the picture in")
    commands.check_output(output)
    with tempfile.TemporaryDirectory(prefix="fedkeep-demo-") as folder:
        with terminal.Bar(Console(stderr=True), seeds * len(job.METHODS) * rounds) as progress:
            runs = job.run(Path(folder), seeds, rounds, (progress,), progress.begin, progress.end)
        write_report([folder], output, "fedkeep demo")
    if as_json and svg is None:
        _print_summaries(runs)
        return
    console = Console(record=svg is not None, width=100 if svg else None, file=io.StringIO() if as_json else None)
    console.print(
        f"Handwritten digits, {job.CLIENTS} clients with about {job.SHARDS} digits each, "
        f"{job.SETTINGS['participation']} of them a round, {rounds} rounds, {seeds} seed{'s' * (seeds > 1)}.\n"
    )
    for name in ("fedavg", "fedntd"):
        console.print(terminal.heat_map(name, runs[name][0], min(60, console.width - 14)))
    title = "Accuracy and forgetting" + (", mean±standard deviation over seeds" if seeds > 1 else "")
    console.print(table.comparison(title, runs))
    console.print(job.verdict(runs))
    if svg is not None:
        console.save_svg(str(svg), title="fedkeep demo")
    if as_json:
        _print_summaries(runs)
    else:
        commands.say_where(Console(), output)


def _print_json(value: Any) -> None:
    print(plain.dumps(value, indent=2))


def _print_summaries(runs: Mapping[str, list[History]]) -> None:
    _print_json({name: [h.summary() for h in histories] for name, histories in runs.items()})


app.command()(looking.methods)


@app.command()
def run(
    words: Words = None,
    sweep: Annotated[list[str] | None, typer.Option(help="key=a,b,c: a run for each value; may be repeated.")] = None,
    runs: Annotated[Path, typer.Option(help="Where run folders are made.")] = Path("runs"),
    name: Annotated[str | None, typer.Option(help="The run folder's name (with a sweep: how names begin).")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="How many runs at a time, each in a process of its own.")] = 1,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write TensorBoard event files (extra tensorboard).")
    ] = False,
    instruments: Annotated[
        str, typer.Option(help="Also study the models: divergence, alignment, ... (see fedkeep analyse), with commas.")
    ] = "",
    every: Annotated[int, typer.Option(min=1, help="After how many rounds --instruments look again.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Run an experiment, or a sweep of them, each into a folder of its own; go on with those that are there already.

    FILE.toml may also be the name of an experiment that comes with fedkeep: digits. method=all sweeps all methods.

    Example: fedkeep run digits lr=0.1 --sweep method=fedavg,fedntd --sweep seed=0,1,2 --jobs 2
    """
    from fedkeep import changes, config, sweeping, terminal
    from fedkeep.instruments import study

    extras = sweeping.Extras(tensorboard, tuple(study.check(instruments)) if instruments else (), every)
    extras.callbacks()  # says now, not after the first round, what is missing
    file, overrides = file_and_overrides(words)
    given = config.read(file) if file else {}
    base = name or given.get("name") or (file.stem if file else "run")
    todo = {}
    for combination in changes.sweep(sweep or []):
        said = [*overrides, *combination]
        label = sweeping.folder_name(base, combination if name else said)
        if label in todo:
            raise FedkeepError(f"two runs of this sweep would share the folder {label}")
        todo[label] = config.Experiment.from_dict(changes.override(given, said))
    histories: dict[str, History] = {}
    failures: list[FedkeepError] = []
    with terminal.Bar(Console(stderr=True), sum(e.train.rounds for e in todo.values())) as progress:
        for label, outcome in sweeping.run_all(todo, runs, jobs, progress, extras):
            if isinstance(outcome, FedkeepError):
                failures.append(outcome)
            else:
                histories[label] = outcome
    if histories:
        _show_runs(histories, as_json, runs)
    if failures:
        raise typer.Exit(2 if len(todo) == 1 and not isinstance(failures[0], Diverged) else 1)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")], as_json: AsJson = False
) -> None:
    """Go on with an interrupted run: to the same final weights as if nothing had happened.

    Example: fedkeep resume runs/digits
    """
    from fedkeep import config, terminal
    from fedkeep.runs import read_experiment

    rounds = read_experiment(folder).get("train", {}).get("rounds", 0)
    with terminal.Bar(Console(stderr=True), rounds) as progress:
        progress.begin(folder.name)
        history = config.resume(folder, (progress,))
        progress.end(folder.name, history)
    _show_runs({folder.name: history}, as_json, folder.parent)


app.command()(compare)
app.command()(reproduce)
app.command()(analyse)
app.command()(export_commands.export)
app.command()(export_commands.plot)
app.command()(looking.partition)


def _show_runs(histories: Mapping[str, History], as_json: bool, runs: Path) -> None:
    from fedkeep import table, terminal
    from fedkeep.compare import group

    if as_json:
        _print_json({label: h.summary() for label, h in histories.items()})
        return
    console = Console()
    if len(histories) == 1:
        [(label, history)] = histories.items()
        console.print(terminal.heat_map(label, history, min(60, console.width - 14)))
        console.print(table.comparison(f"Run in {runs / label}", {history.method: [history]}))
    else:
        show(console, group([runs / label for label in histories]))


def main() -> None:
    """Run the command line; bad input ends in one line, not in a traceback."""
    for stream in (sys.stdout, sys.stderr):  # a terminal without the characters of a picture gets others in their place
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        with _one_speaker():
            app()
    except LostPeer as error:
        print(f"fedkeep: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
    except FedkeepError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"fedkeep: {error}", file=sys.stderr, flush=True)
        sys.exit(1 if isinstance(error, Diverged) else 2)
    except SystemExit as end:
        if end.code == 130:  # what typer makes of Ctrl-C
            print("fedkeep: interrupted; the same command again, or fedkeep resume, goes on from here", file=sys.stderr)
        raise


@contextmanager
def _one_speaker() -> Iterator[None]:
    """Among the processes of `torchrun` only rank 0 writes to the terminal, but whoever is told to end says so."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield
        return
    stderr = sys.stderr

    def told(number: int, frame: object) -> None:
        print("fedkeep: this run was ended from outside; fedkeep resume goes on with it", file=stderr, flush=True)
        os._exit(1)

    signal.signal(signal.SIGTERM, told)
    if os.environ.get("RANK", "0") == "0":
        yield
        return
    with open(os.devnull, "w") as silence, redirect_stdout(silence), redirect_stderr(silence):
        yield
