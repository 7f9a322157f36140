"""Reading run folders, and dividing them into groups and problems.

A group holds the seeds of one experiment. A problem holds the groups that may be compared with each other: same data,
same split, same rounds. What cannot be read is left out, by name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedkeep._util.text import list_some, one_line, printable
from fedkeep.analysis.groups import Group, Problem, Run, Status
from fedkeep.analysis.html import run_set_html
from fedkeep.analysis.identity import same_split_kind
from fedkeep.analysis.labels import set_labels, set_titles
from fedkeep.analysis.record_checks import check_records
from fedkeep.errors import RunError
from fedkeep.runs.history import History
from fedkeep.runs.reading import find_runs, load_run

log = logging.getLogger("fedkeep")


@dataclass(repr=False)
class RunSet:
    """The problems that some run folders solve, and the folders that could not be used."""

    problems: list[Problem]
    left_out: dict[Path, str] = field(default_factory=dict)  # with the reason
    incomplete: bool = False  # whether a run that the user named itself, not by its parent, could not be read

    def __repr__(self) -> str:
        labels = list_some([printable(group.label) for group in self.groups], 6)
        left_out = f", {len(self.left_out)} left out" if self.left_out else ""
        return f"<RunSet: {sum(len(group.runs) for group in self.groups)} runs of {labels}{left_out}>"

    def _repr_html_(self) -> str:
        return run_set_html(self)

    @property
    def groups(self) -> list[Group]:
        """The groups of all problems."""
        return [group for problem in self.problems for group in problem.groups]

    def left_out_as_data(self) -> list[dict[str, str]]:
        """Return the folders that could not be used, as JSON-compatible data."""
        return [{"run": printable(path), "reason": reason} for path, reason in self.left_out.items()]


def _to_path(path: Any) -> Path:
    try:
        return Path(path)
    except TypeError:
        kind = type(path).__name__
        raise RunError(f"a run is given by its folder, not as a {kind}", key="run", value=kind) from None


def read_runs(paths: Iterable[str | Path]) -> RunSet:
    """Read run folders and divide them into problems and groups.

    A run that is damaged or has no evaluated round is left out with a warning, and so is a second run of the same
    experiment and seed. Unfinished and diverged runs form groups of their own.
    """
    given = [_to_path(path) for path in paths]
    if not given:
        raise RunError("no run folder is given", key="run", value=[])
    families: dict[tuple[str, Status, int | None], list[Run]] = {}
    left_out: dict[Path, str] = {}
    for path in (folders := find_runs(given)):
        try:
            run = _read(path)
            status = _status(run.history)
            stopped = None if status == "finished" else run.last_round
            families.setdefault((run.identity.key, status, stopped), []).append(run)
        except Exception as error:  # whatever is wrong with one folder, the others are shown
            left_out[path] = one_line(error)
    incomplete = any(path in left_out for path in given)
    groups = [
        Group("", runs[0].identity.setting, runs, status, notes)
        for (_, status, _), family in families.items()
        for runs, notes in _separate(family, left_out)
    ]
    for path, reason in left_out.items():
        log.warning("%s is left out: %s", printable(path), reason)
    if not groups:
        reasons = f": {next(iter(left_out.values()))}" if len(folders) == 1 else ""
        raise RunError(f"none of these runs can be shown{reasons}", key="run", value=str(folders[0]))
    problems = _problems(groups)
    for problem in problems:
        set_labels(problem.groups)
    set_titles(problems)
    return RunSet(problems, left_out, incomplete)


def _read(path: Path) -> Run:
    """Read a run with everything that comparisons need, so that damage shows now."""
    history = load_run(path, weights=False)
    if not any("confusion" in record for record in history.records if record["round"]):
        if history.diverged:
            raise RunError("it diverged before a round was evaluated", key="run", value=str(path))
        raise RunError("it has no evaluated round yet", key="run", value=str(path))
    check_records(history)
    run = Run(history)
    run.identity.check()
    _ = run.summary, run.class_accuracy, run.seed, run.identity.key, run.identity.problem_key, run.identity.origin
    return run


def _status(history: History) -> Status:
    if history.finished:
        return "finished"
    return "diverged" if history.diverged else "unfinished"


def _separate(family: Sequence[Run], left_out: dict[Path, str]) -> list[tuple[list[Run], list[str]]]:
    """Divide runs with equal settings into groups whose data and splits agree, each with its notes.

    If one seed has several data sets or splits, these are several experiments. Otherwise the split may differ from
    seed to seed, as random splits do; a note says so, unless the experiment file does.
    """
    by_seed: dict[int, set[object]] = {}
    for run in family:
        by_seed.setdefault(run.seed, set()).add(_source(run))
    ambiguous = any(len(sources) > 1 for sources in by_seed.values())
    clusters: list[list[Run]] = []
    for run in family:
        fitting = [runs for runs in clusters if _belongs(run, runs[0], ambiguous)]
        for runs in fitting:
            twin = next((other for other in runs if other.seed == run.seed), None)
            if twin is None:
                runs.append(run)
                break
            if twin.identity.origin == run.identity.origin:
                if run.history.folder is not None:
                    left_out[run.history.folder] = f"it repeats {printable(twin.name)}: same experiment, same seed"
                break
        else:
            clusters.append([run])
    return [(runs, _notes(runs)) for runs in clusters]


def _source(run: Run) -> object:
    """Return what identifies the data and the split of a run."""
    return run.identity.origin.data, run.identity.origin.split


def _belongs(run: Run, first: Run, ambiguous: bool) -> bool:
    """Return whether a run may be another seed of the experiment of `first`."""
    one, other = run.identity.origin, first.identity.origin
    if not ambiguous:
        return same_split_kind(run.identity, first.identity)
    if run.identity.from_file:
        return one.split_seed == other.split_seed
    return _source(run) == _source(first)


def _notes(runs: Sequence[Run]) -> list[str]:
    """Return what is not known of a group of several runs."""
    if len(runs) < 2 or all(run.identity.from_file for run in runs):
        return []
    splits = [run.identity.origin.split for run in runs]
    if None in splits:
        return ["the clients' data are not recorded"]
    return ["the split differs between seeds"] if len(set(splits)) > 1 else []


def _problems(groups: Sequence[Group]) -> list[Problem]:
    """Divide groups into problems: equal tables, and on every common seed the same data and split."""
    problems: list[Problem] = []
    # groups with many seeds first: they say most about which splits belong together
    for group in sorted(groups, key=lambda g: -len(g.runs)):
        fitting = [p for p in problems if _fits(group, p)]
        shared = [p for p in fitting if _sources(p.groups).items() & _sources([group]).items()]
        if shared or len(fitting) == 1:
            (shared or fitting)[0].groups.append(group)
        else:
            problems.append(Problem("", group.runs[0].identity.problem, [group]))
    order = {id(group): position for position, group in enumerate(groups)}
    for problem in problems:
        problem.groups.sort(key=lambda g: order[id(g)])
    # what can be compared comes first
    return sorted(problems, key=lambda p: (not any(g.finished for g in p.groups), order[id(p.groups[0])]))


def _fits(group: Group, problem: Problem) -> bool:
    first, own = problem.groups[0].runs[0].identity, group.runs[0].identity
    if own.problem_key != first.problem_key:
        return False
    theirs, ours = _sources(problem.groups), _sources([group])
    common = theirs.keys() & ours.keys()
    return all(theirs[seed] == ours[seed] for seed in common) and (bool(common) or same_split_kind(own, first))


def _sources(groups: Iterable[Group]) -> dict[int, object]:
    return {run.seed: _source(run) for group in groups for run in group.runs}
