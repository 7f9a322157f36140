"""The command `fedkeep tune`."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedkeep._util.json import to_json
from fedkeep._util.text import format_mean
from fedkeep.cli.completion import complete_change, complete_method
from fedkeep.cli.options import AsJson, ExperimentArgs, JobsOption, Trust, file_and_overrides, naming
from fedkeep.cli.signals import hint
from fedkeep.errors import FedkeepError, UnsupportedMethod

if TYPE_CHECKING:
    from fedkeep.experiments.tune import Tried


ALL = "all"


def tune(
    args: ExperimentArgs = None,
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="Methods, comma-separated, or all; by default the experiment's.",
            autocompletion=complete_method,
        ),
    ] = None,
    tries: Annotated[int, typer.Option(min=1, help="Settings to try of every method, the experiment's included.")] = 9,
    search: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=LOW:HIGH|KEY=A,B",
            help="Also search this key, on a log scale or among values. May be repeated.",
            autocompletion=complete_change,
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of every setting, with the seeds 0, 1, ...")] = 1,
    runs: Annotated[Path, typer.Option(help="Where to create the run folders.")] = Path("runs/tune"),
    jobs: JobsOption = "auto",
    trust: Trust = None,
    as_json: AsJson = False,
) -> None:
    """Choose hyperparameters on held-out training examples, with the same budget for every method.

    Random search with successive halving: all tries run a ninth of the rounds, the best third of them a third, the best
    ninth all rounds. A tenth of the training examples (data.held_out) takes the place of the test set, which is not
    used. Searched are the learning rate, from a quarter to four times the experiment's, and what a method declares.
    Keys that are overridden are not searched. To resume, or with more --tries to go on, repeat the command.

    Example: fedkeep tune digits --methods fedavg,fedntd --tries 9 --search method.tau=1:4
    """
    from fedkeep._util import own_parts
    from fedkeep.cli.progress import ProgressBar
    from fedkeep.experiments.build import build
    from fedkeep.experiments.experiment import read
    from fedkeep.experiments.overrides import override
    from fedkeep.experiments.tune import draw_tries, most_rounds, parse_space, require_hyperparameters
    from fedkeep.experiments.tune import tune as run_tries

    own_parts.trust(trust or [])
    file, overrides = file_and_overrides(args)
    if file is None and not overrides:
        raise FedkeepError("no experiment given: fedkeep tune FILE.toml, or fedkeep tune digits", key="file")
    tables = read(file) if file else {}
    names = _method_names(methods, override(tables, overrides).get("method"))
    space = parse_space(search or [])
    require_hyperparameters(space, names)
    with naming(file, [*overrides, *(search or []), *(["method="] if methods else [])]):
        drawn = {}
        for name in names:
            try:
                drawn[name] = draw_tries(tables, overrides, name, tries, seeds, space)
            except UnsupportedMethod as error:
                if methods != ALL or (name == names[-1] and not drawn):
                    raise
                print(f"fedkeep: {name} is left out: {error}", file=sys.stderr)
        for name, some in drawn.items():
            if len(some) < tries:
                print(f"fedkeep: {name} has {len(some)} different settings, not {tries}", file=sys.stderr)
        names = list(drawn)
        federation = build(drawn[names[0]][0].experiments[0])  # what cannot work is refused once, not in every try
        federation.settings.cohort_size(len(federation.clients))
    rounds = drawn[names[0]][0].experiments[0].train.rounds
    bar = ProgressBar(Console(stderr=True), most_rounds(drawn, rounds))
    with hint("repeat the command to resume"), bar as progress:
        found = run_tries(drawn, rounds, runs, jobs, progress)
    if as_json:
        print(to_json({name: [_as_data(tried) for tried in some] for name, some in found.items()}, indent=2))
    else:
        _print(Console(), found, runs)
    if all(some[0].failure is not None for some in found.values()):
        raise typer.Exit(1)


def _method_names(given: str | None, of_experiment: Any) -> list[str]:
    from fedkeep.experiments.overrides import as_table
    from fedkeep.methods import discover

    if given is not None:
        if given.strip() == ALL:
            return list(discover())
        names = list(dict.fromkeys(name.strip() for name in given.split(",")))
        if not all(names):
            raise FedkeepError(f"--methods {given!r} has an empty name", key="--methods", value=given)
        return names
    table = as_table("method", of_experiment)
    name = table.get("name") if isinstance(table, dict) else None
    if not isinstance(name, str):
        raise FedkeepError("no method given: --methods fedavg,fedntd, or method = in the file", key="method")
    return [name]


def _as_data(tried: Tried) -> dict[str, Any]:
    one = tried.try_
    scores = {str(seed): None if math.isinf(score) else score for seed, score in tried.scores.items()}
    return {"try": one.number, "overrides": list(one.overrides), "round": tried.round, "scores": scores,
            "failure": tried.failure, "folders": [one.folder(seed) for seed in one.experiments]}  # fmt: skip


def _print(console: Console, found: Mapping[str, Sequence[Tried]], runs: Path) -> None:
    """Print the best try of every method next to its first, and how to run it."""
    grid = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("method", "held out %", "as given %", "tries", "best setting"):
        grid.add_column(heading, justify="right" if "%" in heading or heading == "tries" else "left")
    for name, some in found.items():
        first = next(tried for tried in some if tried.try_.number == 0)
        best = some[0]
        setting = " ".join(best.try_.overrides) or "as given"
        grid.add_row(name, _format(best), _format(first), str(len(some)), Text("-" if best.failure else setting))
    console.print(grid)
    if all(some[0].failure is not None for some in found.values()):
        console.print(f"\nAll tries failed. All runs: {runs}", style="dim", markup=False, highlight=False)
        return
    console.print(
        "\nSmoothed accuracy on held-out training examples; mean\u00b1standard deviation over seeds. The test set was "
        f"not used: run the best setting without data.held_out, with other seeds. All runs: {runs}",
        style="dim", markup=False, highlight=False,
    )  # fmt: skip


def _format(tried: Tried) -> str:
    if tried.failure is not None:
        return "failed"
    scores = list(tried.scores.values())
    return format_mean(tried.score, statistics.stdev(scores) if len(scores) > 1 else None, 1, scale=100)
