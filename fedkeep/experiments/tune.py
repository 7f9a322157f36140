"""Choice of hyperparameters: random search with successive halving over rounds, on held-out training examples.

Every method gets the same number of tries and rounds. The first try of a method is the experiment as it is; the others
draw what is searched. After a ninth of the rounds the best third of a method's tries continues, after a third of the
rounds the best ninth; the first try always does, so that the best can be compared with it.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep import methods
from fedkeep._util.hyperparameters import Hyper
from fedkeep._util.text import did_you_mean, list_some
from fedkeep._util.validate import require_whole
from fedkeep.errors import ConfigError, FedkeepError
from fedkeep.experiments.experiment import Experiment
from fedkeep.experiments.jobs import Jobs
from fedkeep.experiments.overrides import as_table, full_key, override
from fedkeep.experiments.own_parts import trust_given
from fedkeep.experiments.run import is_run_of
from fedkeep.experiments.sweep import Progress, run_all
from fedkeep.forgetting import smoothed
from fedkeep.method import FedAvg
from fedkeep.runs.history import History

ETA = 3  # one of so many tries continues
HELD_OUT = 0.1  # of the training examples, unless the experiment says otherwise
_LR_FACTOR = 4.0  # the learning rate is searched from a quarter to four times the experiment's
_DIGITS = 3  # of the values that are drawn
_REPEATED = 1000  # so many draws in a row that were there already: there are no others


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, drawn uniformly on a log scale; whole numbers are rounded."""

    low: float
    high: float
    whole: bool = False

    def draw(self, rng: np.random.Generator) -> float | int:
        """Return a number with a few digits."""
        value = math.exp(rng.uniform(math.log(self.low), math.log(self.high)))
        if self.whole:
            return round(value)
        return float(f"{min(max(value, self.low), self.high):.{_DIGITS}g}")


@dataclass(frozen=True)
class Choices:
    """Some values, drawn with the same probability."""

    values: tuple[Any, ...]

    def draw(self, rng: np.random.Generator) -> Any:
        """Return one of the values."""
        return self.values[int(rng.integers(len(self.values)))]


Space = Mapping[str, Range | Choices]  # by key


@dataclass(frozen=True)
class Try:
    """One setting of a method: its overrides, and its experiments by seed."""

    method: str
    number: int
    overrides: tuple[str, ...]
    experiments: Mapping[int, Experiment]

    def folder(self, seed: int) -> str:
        """Return the name of the run folder of a seed."""
        return f"{self.method}/try-{self.number}-seed-{seed}"


@dataclass
class Tried:
    """How a try ended: after which round, with which score of each seed; -inf for a run that diverged or failed."""

    try_: Try
    round: int = 0
    scores: dict[int, float] = field(default_factory=dict)
    failure: str | None = None

    @property
    def score(self) -> float:
        """The mean score over the seeds."""
        return statistics.fmean(self.scores.values()) if self.scores else -math.inf


def parse_space(texts: Sequence[str]) -> Space:
    """Parse `key=low:high` (a range on a log scale) and `key=a,b,c` (choices).

    >>> parse_space(["lr=0.01:0.1", "method.form=inside,outside"])
    {'train.lr': Range(low=0.01, high=0.1, whole=False), 'method.form': Choices(values=('inside', 'outside'))}
    """
    space: dict[str, Range | Choices] = {}
    for text in texts:
        key, equals, written = (part.strip() for part in text.partition("="))
        full = full_key(key) if key and equals else ""
        require_searchable(key, full)
        low, colon, high = written.partition(":")
        try:
            if not (full and written):
                raise ValueError
            if colon:
                ends = float(low), float(high)
                if not (0 < ends[0] < ends[1] < math.inf):
                    raise ValueError
                whole = all(end.strip().isdigit() for end in (low, high))
                space[full] = Range(*ends, whole)
            else:
                space[full] = Choices(tuple(value.strip() for value in written.split(",")))
        except ValueError:
            raise ConfigError(
                f"{text!r} is not a search: write key=low:high with 0 < low < high, or key=a,b,c",
                key="search",
                value=text,
            ) from None
    return space


def require_searchable(key: str, full: str) -> None:
    """Raise if tries that differ in this key would not be compared on the same problem after the same rounds."""
    section, _, name = full.partition(".")
    if full and (section not in ("method", "model", "train") or name in ("", "name", "rounds")):
        advice = "choose the number of seeds with --seeds" if full == "seed" else f"set it, as in {key}=..."
        raise ConfigError(
            f"{key} cannot be searched, because tries are compared on the same problem after the same rounds: {advice}",
            key=full,
        )


def require_hyperparameters(search: Iterable[str], names: Sequence[str]) -> None:
    """Raise if a searched key is a hyperparameter of none of these methods."""
    valid = sorted({field for name in names for field in methods.get(name).hyperparameters()})
    for full in search:
        section, _, field_ = full.partition(".")
        if section == "method" and field_ not in valid:
            those = names[0] if len(names) == 1 else f"none of {list_some(names)}"
            verb = "has no" if len(names) == 1 else "has a"
            suggestion = did_you_mean(field_, valid, "method") if valid else "they have none"
            raise ConfigError(f"{those} {verb} hyperparameter {field_!r}: {suggestion}", key=full, valid=valid)


def space_of(method: FedAvg, optimizer: str, lr: float) -> Space:
    """Return what is searched by default: the learning rate, and what the method declares and uses."""
    space: dict[str, Range | Choices] = {"train.lr": Range(lr / _LR_FACTOR, lr * _LR_FACTOR)}
    for name, declared in method.hyperparameters().items():
        if declared.search is not None and name not in method.without_effect(optimizer):
            choices = declared.choices is not None
            space[f"method.{name}"] = Choices(declared.search) if choices else _to_range(declared)
    return space


def _to_range(declared: Hyper) -> Range:
    assert declared.search is not None
    low, high = declared.search
    return Range(low, high, declared.whole)


def draw_tries(
    tables: dict[str, Any], overrides: Sequence[str], method: str, number: int, seeds: int, search: Space
) -> list[Try]:
    """Return a method's tries; the first is the experiment as it is. `search` replaces and adds to what is searched."""
    first = _experiments(tables, [f"method={method}", *overrides], seeds)
    applicable = {key: one for key, one in search.items() if _applies(key, method)}
    fixed = {full_key(text.partition("=")[0].strip()) for text in overrides}
    if "seed" in fixed:
        raise ConfigError("seed cannot be set here: choose the number of seeds, 0, 1, ..., with --seeds", key="seed")
    if both := sorted(fixed & search.keys()):
        raise ConfigError(f"{both[0]} is both set and searched: omit one of them", key=both[0])
    train = first[0].train
    space = {**space_of(methods.make(first[0].method), train.optimizer, train.lr), **applicable}
    space = {key: one for key, one in space.items() if key not in fixed}
    tries = [Try(method, 0, (), first)]
    for drawn in _draw_different(space):
        if len(tries) == number:
            break
        experiments = _experiments(tables, [f"method={method}", *overrides, *drawn], seeds)
        if experiments[0].to_dict() != first[0].to_dict():
            tries.append(Try(method, len(tries), drawn, experiments))
    return tries


def _draw_different(space: Space) -> Iterator[tuple[str, ...]]:
    """Yield settings, none of them twice; end when there seem to be no others."""
    rng, drawn = np.random.default_rng(0), set[tuple[str, ...]]()
    repeated = 0
    while repeated < _REPEATED:
        setting = tuple(f"{key}={_written(one.draw(rng))}" for key, one in space.items())
        repeated = repeated + 1 if setting in drawn or not setting else 0
        if not repeated:
            drawn.add(setting)
            yield setting


def stages(rounds: int, tries: int) -> list[tuple[int, int]]:
    """Return (round, number of a method's tries that run to it): all, the best third, the best ninth.

    >>> stages(90, 18), stages(60, 1), stages(4, 3)
    ([(10, 18), (30, 6), (90, 2)], [(60, 1)], [(1, 3), (4, 1)])
    """
    if tries == 1:
        return [(rounds, 1)]
    found = {max(1, rounds // part): -(-tries * part // ETA**2) for part in (1, ETA, ETA**2)}
    return sorted(found.items())


def most_rounds(tries: Mapping[str, Sequence[Try]], rounds: int) -> int:
    """Return how many rounds all runs have together, at most: if the experiments as they are never are the best."""
    most = max(len(some) for some in tries.values())
    seeds = len(next(iter(tries.values()))[0].experiments)
    return seeds * sum(
        until * min(number + 1, len(some)) for until, number in stages(rounds, most) for some in tries.values()
    )


def tune(
    tries: Mapping[str, Sequence[Try]],
    rounds: int,
    folder: Path,
    jobs: Jobs,
    progress: Progress,
) -> dict[str, list[Tried]]:
    """Run the tries of every method, and return them by method, the best first. Runs that exist are continued."""
    for one in itertools.chain.from_iterable(tries.values()):
        _require_own_runs(one, folder)
    found = {method: [Tried(one) for one in some] for method, some in tries.items()}
    for until, number in stages(rounds, max(len(some) for some in tries.values())):
        running = [tried for some in found.values() for tried in _continued(some, number) if tried.failure is None]
        _run_stage(running, until, folder, jobs, progress)
        for some in found.values():
            some.sort(key=lambda tried: (-tried.round, -tried.score, tried.try_.number))
    return found


def _require_own_runs(one: Try, folder: Path) -> None:
    """Raise if runs of this try exist that belong to another search."""
    for seed, experiment in one.experiments.items():
        try:
            is_run_of(experiment, folder / one.folder(seed))
        except ConfigError as error:
            raise ConfigError(
                f"{folder} holds another search, of another experiment or with other keys (try {one.number} of "
                f"{one.method} differs in {error.key}): choose another folder with --runs",
                key=error.key,
                value=error.value,
            ) from error


def _continued(some: Sequence[Tried], number: int) -> list[Tried]:
    """Return the best tries, and the experiment as it is, to which the others are compared."""
    return [tried for place, tried in enumerate(some) if place < number or tried.try_.number == 0]


def _run_stage(running: Sequence[Tried], until: int, folder: Path, jobs: Jobs, progress: Progress) -> None:
    """Run tries up to a round and note their scores."""
    by_folder = {tried.try_.folder(seed): (tried, seed) for tried in running for seed in tried.try_.experiments}
    experiments = {name: tried.try_.experiments[seed] for name, (tried, seed) in by_folder.items()}
    for tried in running:
        tried.round, tried.scores = until, {}
    with closing(run_all(experiments, folder, jobs, progress, until=until)) as outcomes:
        for name, outcome in outcomes:
            tried, seed = by_folder[name]
            if isinstance(outcome, FedkeepError):
                tried.scores[seed], tried.failure = -math.inf, str(outcome)
            else:
                tried.scores[seed] = _score(outcome, until)


def _score(history: History, until: int) -> float:
    """Return the smoothed accuracy after a round; a run of an earlier search may have come further."""
    accuracy = [value for number, value in zip(history.rounds, history.accuracy, strict=True) if number <= until]
    return float(smoothed(accuracy)[-1]) if accuracy else -math.inf


def _experiments(tables: dict[str, Any], overrides: Sequence[str], seeds: int) -> dict[int, Experiment]:
    """Return an experiment for every seed; unless it says otherwise, it is tested on held-out training examples."""
    require_whole("seeds", seeds, low=1)
    trust_given(override({}, overrides))
    changed = override(tables, overrides)
    if isinstance(data := as_table("data", changed.get("data")), dict):
        changed["data"] = {"held_out": HELD_OUT, **data}
    return {seed: Experiment.from_dict({**changed, "seed": seed}, given=True) for seed in range(seeds)}


def _written(value: Any) -> str:
    """Return a value as an override has it."""
    return value if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else repr(value)


def _applies(key: str, method: str) -> bool:
    """Return whether a searched key exists for this method."""
    section, _, name = key.partition(".")
    return section != "method" or name in methods.get(method).hyperparameters()
