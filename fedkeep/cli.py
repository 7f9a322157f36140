"""The command line. Exit codes: 0 fine, 1 failed, 2 bad input."""

from __future__ import annotations

import inspect
import io
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

import fedkeep
from fedkeep import cli_flower, plain
from fedkeep.comparing import compare, show
from fedkeep.errors import Diverged, FedkeepError, LostPeer
from fedkeep.export import commands as export_commands
from fedkeep.history import History
from fedkeep.instruments.commands import analyse
from fedkeep.method import FedAvg
from fedkeep.report import commands
from fedkeep.reproduce.commands import reproduce

if TYPE_CHECKING:
    from fedkeep.describe import Footprint

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

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


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


@app.command()
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
        _print_json(about)
    elif name:
        _one_method(Console(), *found[name])
    else:
        _method_table(Console(), found)


Words = Annotated[
    list[str] | None, typer.Argument(metavar="[FILE.toml] [key=value]...", help="An experiment file and overrides.")
]


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
    from fedkeep import config, sweeping, terminal
    from fedkeep.instruments import study

    extras = sweeping.Extras(tensorboard, tuple(study.check(instruments)) if instruments else (), every)
    extras.callbacks()  # says now, not after the first round, what is missing
    file, overrides = _words(words)
    given = config.read(file) if file else {}
    base = name or given.get("name") or (file.stem if file else "run")
    todo = {}
    for combination in config.sweep(sweep or []):
        said = [*overrides, *combination]
        label = sweeping.folder_name(base, combination if name else said)
        if label in todo:
            raise FedkeepError(f"two runs of this sweep would share the folder {label}")
        todo[label] = config.Experiment.from_dict(config.override(given, said))
    histories: dict[str, History] = {}
    failures: list[FedkeepError] = []
    with terminal.Bar(Console(stderr=True), sum(e.train.rounds for e in todo.values())) as progress:
        for label, outcome in sweeping.run_all(todo, runs, jobs, progress, extras):
            if isinstance(outcome, FedkeepError):
                failures.append(outcome)
                progress.say(f"{label}: {outcome}")
            else:
                histories[label] = outcome
                progress.end(label, outcome)
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


@app.command()
def partition(
    words: Words = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also draw it into this SVG file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Look at a split before training: who holds which classes.

    Example: fedkeep partition data=digits split=dirichlet split.n_clients=20 split.alpha=0.1 -o split.svg
    """
    from fedkeep import config, picture

    file, overrides = _words(words)
    given = {"method": "fedavg", "model": "mlp", **(config.read(file) if file else {})}
    experiment = config.Experiment.from_dict(config.override(given, overrides))
    data, clients = experiment.data_and_clients()
    counts = clients.label_counts(data.y_train, data.n_classes)
    if output is not None:
        if not output.parent.is_dir():
            raise FedkeepError(f"there is no folder {output.parent} to draw the picture in")
        output.write_text(picture.as_svg(counts, f"{data.name}: {experiment.split['kind']}"))
    if as_json:
        _print_json({"sizes": clients.sizes.tolist(), "label_counts": counts.tolist()})
        return
    console = Console()
    console.print(picture.on_terminal(counts, console.width))
    console.print(picture.describe(counts), highlight=False)


def _words(words: list[str] | None) -> tuple[Path | None, list[str]]:
    """Tell the experiment file from the overrides."""
    files = [word for word in words or [] if "=" not in word or word.endswith(".toml")]
    if len(files) > 1:
        raise FedkeepError(f"one experiment file at a time, not {' and '.join(files)}; overrides are key=value")
    return Path(files[0]) if files else None, [word for word in words or [] if word not in files]


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
