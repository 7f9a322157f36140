"""The commands `fedkeep run` and `fedkeep resume`."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fedkeep._util.json import to_json
from fedkeep._util.text import printable
from fedkeep.cli.compare import show
from fedkeep.cli.completion import complete_change
from fedkeep.cli.options import (
    AsJson,
    ExperimentArgs,
    FitOnTest,
    JobsOption,
    PersonalData,
    Trust,
    TuneEpochs,
    confirm_code,
    file_and_overrides,
    log_once,
    naming,
    require_fitted_study,
    suggesting_sweeps,
)
from fedkeep.cli.signals import hint
from fedkeep.errors import ConfigError, Diverged, FedkeepError, LostPeer, RunFailed

if TYPE_CHECKING:
    from fedkeep.engine.profile import Profile
    from fedkeep.engine.simulation import Callback
    from fedkeep.instruments.options import Options
    from fedkeep.runs.history import History

ToTensorBoard = Annotated[
    bool, typer.Option("--tensorboard", help="Also write TensorBoard event files (extra tensorboard).")
]
ToCsv = Annotated[bool, typer.Option("--csv", help="Also write log.csv in the run folder, a row per round.")]
ToWandB = Annotated[bool, typer.Option("--wandb", help="Also log to Weights & Biases, offline (extra wandb).")]
ToMlflow = Annotated[bool, typer.Option("--mlflow", help="Also log to MLflow (extra mlflow).")]


@dataclass(frozen=True)
class ExtraCallbacks:
    """The callbacks that options of `fedkeep run` add to a run; picklable, so that other processes can make them."""

    tensorboard: bool = False
    instruments: tuple[str, ...] = ()
    every: int = 10
    options: Options | None = None  # of the studies
    profile: Profile | None = None  # of a single run, in this process
    csv: bool = False
    wandb: bool = False
    mlflow: bool = False

    def __call__(self) -> list[Callback]:
        """Return new callbacks for one run."""
        from fedkeep.instruments import Every
        from fedkeep.runs.csv_logger import CSVLogger
        from fedkeep.runs.mlflow_logger import MLflow
        from fedkeep.runs.tensorboard import TensorBoard
        from fedkeep.runs.wandb_logger import WandB

        callbacks: list[Callback] = [Every(self.every, self.instruments, self.options)] if self.instruments else []
        loggers = {TensorBoard: self.tensorboard, CSVLogger: self.csv, WandB: self.wandb, MLflow: self.mlflow}
        callbacks += [logger() for logger, wanted in loggers.items() if wanted]
        return callbacks if self.profile is None else [*callbacks, self.profile]


def run(
    args: ExperimentArgs = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(help="key=a,b,c: one run per value. May be repeated.", autocompletion=complete_change),
    ] = None,
    runs: Annotated[Path, typer.Option(help="Where to create the run folders.")] = Path("runs"),
    name: Annotated[str | None, typer.Option(help="Name of the run folder (with a sweep: its prefix).")] = None,
    jobs: JobsOption = "auto",
    tensorboard: ToTensorBoard = False,
    csv: ToCsv = False,
    wandb: ToWandB = False,
    mlflow: ToMlflow = False,
    instruments: Annotated[
        str, typer.Option(help="Also run these studies, separated by commas (see fedkeep analyse).")
    ] = "",
    every: Annotated[int, typer.Option(min=1, help="Run the studies of --instruments every N rounds.")] = 10,
    fit_on_test: FitOnTest = False,
    tune_epochs: TuneEpochs = None,
    personal_data: PersonalData = "auto",
    profile: Annotated[
        bool, typer.Option("--profile", help="Profile a few rounds: print where the time goes, write a trace.")
    ] = False,
    callback: Annotated[
        list[str] | None,
        typer.Option(metavar="MODULE:NAME", help="Also call your own code after every round. May be repeated."),
    ] = None,
    trust: Trust = None,
    as_json: AsJson = False,
) -> None:
    """Run an experiment or a sweep, one folder per run. Unfinished runs are resumed.

    FILE.toml can also be the name of an experiment that comes with fedkeep: digits.
    --sweep method=all runs all methods that can be trained with the other settings.

    Example: fedkeep run digits lr=0.1 --sweep method=fedavg,fedntd --sweep seed=0,1,2 --jobs 2
    """
    from fedkeep._util import own_parts
    from fedkeep.analysis import personal
    from fedkeep.analysis.recoverable import STUDY
    from fedkeep.cli.progress import ProgressBar
    from fedkeep.engine.profile import Profile
    from fedkeep.experiments.experiment import read
    from fedkeep.experiments.overrides import as_list, expand_sweep, override, sweeps_all_methods
    from fedkeep.experiments.own_parts import trust_given
    from fedkeep.experiments.plan import Change, plan_runs
    from fedkeep.experiments.sweep import run_all
    from fedkeep.instruments.options import AUTO, Options
    from fedkeep.instruments.study import needs_examples, parse_study_names

    studies = tuple(parse_study_names(instruments)) if instruments else ()
    if fit_on_test:
        require_fitted_study(studies, "--instruments")
    if (tune_epochs is not None or personal_data != AUTO) and personal.STUDY not in studies:
        option = "--personal-data" if tune_epochs is None else "--tune-epochs"
        raise FedkeepError(f"{option} is for --instruments {personal.STUDY}", key=option)
    options = Options(tune_epochs=tune_epochs, personal_data=personal_data, fit_on_test=fit_on_test)
    make_callbacks = ExtraCallbacks(
        tensorboard, studies, every, options, Profile() if profile else None, csv, wandb, mlflow
    )
    make_callbacks()  # a missing package is reported now, not after the first round
    file, overrides = file_and_overrides(args)
    if file is None and not overrides:
        raise FedkeepError("no experiment given: fedkeep run FILE.toml, or fedkeep run digits", key="file")
    tables = read(file) if file else {}
    own_parts.trust(trust or [])
    if callback:
        trust_given({"callbacks": callback})
        tables["callbacks"] = [*as_list(tables.get("callbacks")), *callback]
    base = name or tables.get("name") or (file.stem if file else "run")

    def changes(texts: Sequence[str]) -> list[Change]:
        return [(text, partial(override, overrides=[text])) for text in texts]

    @contextmanager
    def checking(texts: list[str]) -> Iterator[None]:
        with naming(file, texts), suggesting_sweeps(overrides):
            yield

    combinations = map(changes, expand_sweep(sweep or [], overrides))
    everything = sweeps_all_methods(sweep or [])
    plan = plan_runs(tables, base, changes(overrides), combinations,
                     all_methods=everything, names_fixed=not name, checking=checking)  # fmt: skip
    todo, left_out = plan.experiments, plan.left_out
    if needs_examples(studies, fit_on_test):
        for experiment in todo.values():
            with naming(file, overrides):
                experiment.require_public_set(f"--instruments {STUDY}", "; or add --fit-on-test")
    for label, reason in left_out.items():
        print(f"fedkeep: {printable(label)} is left out: {reason}", file=sys.stderr)
    if fit_on_test and all(experiment.has_public_set for experiment in todo.values()):
        raise FedkeepError(
            "--fit-on-test has no effect: there is a public set, on which the bias is fitted. Omit the option, or "
            "train without a public set (data.public=none)",
            key="--fit-on-test",
        )
    if profile and (len(todo) > 1 or jobs not in ("auto", 1)):
        raise FedkeepError("--profile is for a single run, in one process: omit --sweep and --jobs", key="--profile")
    histories: dict[str, History] = {}
    refused: list[str] = []  # before their first round
    with (
        log_once(),
        _showing(make_callbacks.profile, as_json),
        hint(lambda: _how_to_resume(runs, todo)),
        ProgressBar(
            Console(stderr=True),
            sum(e.train.rounds for e in todo.values()),
            experiments=dict.fromkeys(todo, str(file or "")) if len(todo) == 1 else {},
        ) as progress,
        closing(run_all(todo, runs, jobs, progress, make_callbacks)) as outcomes,
    ):
        for label, outcome in outcomes:
            if not isinstance(outcome, FedkeepError):
                histories[label] = outcome
            elif _is_refusal(outcome, runs / label):
                refused.append(label)
    if histories:
        _show_runs(histories, as_json, runs)
    if make_callbacks.profile is not None:
        _show_profile(make_callbacks.profile, as_json, finished_before=runs / next(iter(todo)) if histories else None)
    if len(histories) < len(todo):
        raise typer.Exit(2 if len(refused) == len(todo) else 1)


def _is_refusal(error: FedkeepError, folder: Path) -> bool:
    """Return whether a run was refused before its first round, because of its settings or its data."""
    happened = isinstance(error, Diverged | RunFailed | LostPeer)
    return not happened and (isinstance(error, ConfigError) or not folder.exists())


def resume(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="[rounds=N]", help="Extend the run to so many rounds.")
    ] = None,
    as_json: AsJson = False,
    from_round: Annotated[
        int | None, typer.Option(min=0, help="Go back to the checkpoint of this round and repeat the later ones.")
    ] = None,
    trust: Trust = None,
    tensorboard: ToTensorBoard = False,
    csv: ToCsv = False,
    wandb: ToWandB = False,
    mlflow: ToMlflow = False,
) -> None:
    """Resume an interrupted run, or extend a finished one. The result is bit for bit that of an uninterrupted run.

    Example: fedkeep resume runs/digits
    Example: fedkeep resume runs/digits rounds=200
    """
    from fedkeep.cli.progress import ProgressBar
    from fedkeep.engine.extend import read_extended
    from fedkeep.experiments.resume import resume_from_file

    extended = _parse_rounds(changes or [])
    about = read_extended(folder, extended)
    confirm_code(about, trust)
    loggers = ExtraCallbacks(tensorboard, csv=csv, wandb=wandb, mlflow=mlflow)()
    rounds = about.get("train", {}).get("rounds", 0)
    command = f"fedkeep resume {folder}" + (f" rounds={extended}" if extended else "")
    with hint(f"to resume, repeat {command}"), ProgressBar(Console(stderr=True), rounds) as progress:
        progress.start_run(folder.name)
        if from_round is not None:
            progress.show(f"going back to round {from_round}: later rounds are repeated")
        history = resume_from_file(folder, (progress, *loggers), from_round, extended)
        progress.finish_run(folder.name, history, rounds)
    _show_runs({folder.name: history}, as_json, folder.parent)


def _parse_rounds(changes: Sequence[str]) -> int | None:
    """Return the number of rounds that a run is extended to; raise if anything else is to change."""
    rounds = None
    for text in changes:
        key, _, value = text.partition("=")
        if key.strip() not in ("rounds", "train.rounds"):
            raise FedkeepError(
                f"{text!r}: a run is resumed as it was started; only rounds=N can change, to more rounds",
                key=key.strip(),
                value=value,
                valid=["rounds"],
            )
        if not value.strip().isdecimal():
            raise FedkeepError(f"rounds must be a whole number, not {value!r}", key="rounds", value=value)
        rounds = int(value)
    return rounds


@contextmanager
def _showing(profile: Profile | None, as_json: bool) -> Iterator[None]:
    """If the command is interrupted, print what was profiled until then."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        if profile is not None and profile.summary is not None:
            _show_profile(profile, as_json)
        raise


def _show_profile(profile: Profile, as_json: bool, finished_before: Path | None = None) -> None:
    """Print a profile; `finished_before` is the folder of the run if no failure ended it."""
    text = str(profile)
    if profile.n_seen == 0 and finished_before is not None:
        text = f"Nothing was profiled: {printable(finished_before)} was already finished. Use another --name."
    print(f"\n{text}", file=sys.stderr if as_json else sys.stdout)


def _how_to_resume(runs: Path, labels: Collection[str]) -> str:
    """Return what to do after an interruption."""
    started = [runs / label for label in labels if (runs / label).is_dir()]
    if not started:
        return "no run had started"
    return f"repeat the command to resume, or use fedkeep resume {started[0] if len(labels) == 1 else 'RUN'}"


def _show_runs(histories: Mapping[str, History], as_json: bool, runs: Path) -> None:
    from fedkeep.analysis.groups import Group
    from fedkeep.analysis.metric_columns import own_columns
    from fedkeep.analysis.run_set import read_runs
    from fedkeep.analysis.sentences import held_out, nothing_learned
    from fedkeep.cli import heatmap, tables
    from fedkeep.runs.reading import read_instruments

    for label, history in histories.items():
        history.instruments = read_instruments(runs / label)
    if as_json:
        print(to_json({label: _as_data(history) for label, history in histories.items()}, indent=2))
        return
    console = Console()
    if len(histories) == 1:
        [(label, history)] = histories.items()
        console.print(heatmap.heat_map(label, history, min(60, console.width - 14)))
        group = Group.of_histories(history.method, [history])
        console.print(tables.comparison(f"Run in {printable(runs / label)}", {group.label: group}))
        if columns := own_columns([history]):
            console.print(tables.chosen_metrics("", {group.label: group}, columns))
        tables.print_personal(console, [group])
        for line in held_out(read_runs([runs / label]).groups):
            console.print(line, highlight=False, markup=False)
        if history.finished and not group.learned:
            console.print(nothing_learned([group]), highlight=False, markup=False)
    else:
        show(console, read_runs([runs / label for label in histories]))


def _as_data(history: History) -> dict[str, Any]:
    """Return the summary of a run, with the last personalised accuracies if they were recorded."""
    from fedkeep.analysis.personal import STUDY, last_result

    last = last_result(history)
    return {**history.summary(), **({STUDY: {"after_round": last[0], **last[1]}} if last else {})}
