"""Reading run folders: experiment files, records, checkpoints and whole histories."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedkeep._util.json import without_nan
from fedkeep.errors import ForeignFile, RunError
from fedkeep.runs.checkpoints import (
    CheckpointHeader,
    newest_checkpoint,
    read_header,
    require_files,
    require_lines,
)
from fedkeep.runs.experiment_file import ExperimentFile, read_experiment_file, require_settings
from fedkeep.runs.experiment_file import read_experiment as read_experiment
from fedkeep.runs.experiment_file import require_folder as require_folder
from fedkeep.runs.files import DIVERGED, ENDED, EXPERIMENT, INSTRUMENTS, ROUNDS, is_there, read_bytes, write_atomic
from fedkeep.runs.history import History, Record
from fedkeep.runs.label_counts import read_label_counts
from fedkeep.runs.records import Lines, read_lines
from fedkeep.runs.records import read_records as read_records
from fedkeep.runs.releases import RELEASES, Releases
from fedkeep.runs.seals import damaged, foreign, parse_json, seal_lines, unseal_json, unseal_lines, unseal_text
from fedkeep.runs.server_state import global_params
from fedkeep.runs.trees import read_tree

log = logging.getLogger("fedkeep")


def find_runs(paths: Iterable[str | Path]) -> list[Path]:
    """Return the run folders that paths name: each path itself, or the run folders directly below it."""
    runs: list[Path] = []
    for path in map(Path, paths):
        require_folder(path)
        if (path / EXPERIMENT).exists():
            runs.append(path)
        elif path.is_dir() and (below := sorted(p.parent for p in path.glob(f"*/{EXPERIMENT}"))):
            runs += below
        else:
            deeper = (p.parent.parent for depth in (2, 3, 4) for p in sorted(path.glob("*/" * depth + EXPERIMENT)))
            nearest = next(deeper, None)
            hint = f"; there are some in {nearest}" if nearest else ""
            raise RunError(
                f"{path} is not a run folder and contains none{hint}",
                key="run",
                value=str(path),
                valid=[str(nearest)] if nearest else None,
            )
    return list(dict.fromkeys(runs))


def read_instruments(run_dir: str | Path, experiment: ExperimentFile | None = None) -> list[dict[str, Any]]:
    """Return the results that `Every` wrote into a run folder; an empty list if there are none."""
    path = Path(run_dir) / INSTRUMENTS
    if not is_there(path):
        return []
    run, data = (experiment or read_experiment_file(Path(run_dir))).run, read_bytes(path)
    if run is not None:
        return unseal_lines(path, data, run)
    lines = enumerate(data.splitlines(), start=1)
    return [parse_json(f"{path}, line {number}", path.name, line, number) for number, line in lines]


def write_instruments(run_dir: Path, results: list[dict[str, Any]]) -> None:
    """Write the results of all analysed rounds into a run folder."""
    run, lines = read_experiment_file(run_dir).run, [without_nan(result) for result in results]
    plain = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    write_atomic(run_dir / INSTRUMENTS, plain if run is None else seal_lines(INSTRUMENTS, lines, run))


def saved_round(path: Path) -> int | None:
    """Return the round of a run's newest checkpoint, or None if there is none yet."""
    run = read_experiment_file(path).run
    file = newest_checkpoint(path, run)
    return None if file is None else read_header(file, run).round


def was_stopped(path: Path) -> bool:
    """Return whether a callback stopped the run in a folder, and nothing has resumed it since."""
    run = read_experiment_file(path).run
    ended, file = _read_ended(path, run), newest_checkpoint(path, run)
    header = read_header(file, run) if file is not None else None
    ends = [(ended["round"], ended["reason"])] if ended is not None else []
    ends += [(header.round, header.ended)] if header is not None else []
    last = read_bytes(path / ROUNDS).count(b"\n") - 1 if is_there(path / ROUNDS) else -1
    return (last, "stopped") in ends


def load_run(path: str | Path, weights: bool = True) -> History:
    """Return the history of a run as far as it has come. The run may be finished, running or interrupted.

    A damaged or foreign file raises `RunError`, whose `key` is the file's name. A damaged checkpoint is only reported,
    because the rounds do not depend on it. With `weights=False` its weights are not read, which is faster.
    """
    path = Path(path)
    experiment = read_experiment_file(path)
    about = experiment.about
    require_settings(path, about)
    ended = _read_ended(path, experiment.run)
    history = History(about["method"]["name"], settings_of(about), about=about, folder=path)
    header = _read_checkpoint(history, experiment, weights)
    table = read_label_counts(path, experiment) or {}
    if "client_names" in table:
        history.client_names = dict(zip(table["ids"], table["client_names"], strict=True))
    sites = about.get("made_by", {}).get("sites")
    history.site_names = tuple(map(str, sites)) if isinstance(sites, list) else ()
    history.instruments = read_instruments(path, experiment)
    lines = read_lines(path / ROUNDS, experiment)  # after the checkpoint: a running process writes it last
    if header is not None:
        require_lines(lines, header, experiment)
        require_files(header, experiment)
    history.records = lines.records
    history.class_names = _class_names(table, about, history.records)
    if experiment.run is not None and is_there(path / RELEASES):
        releases = Releases(path / RELEASES, experiment.run)  # after the records: a release is written before its round
        releases.require_all_of(history.records)
        history.released = releases.epsilon
    reason = _reason(path, lines, ended, header)
    if reason == "finished" and lines.records[-1]["round"] < about["train"]["rounds"]:
        reason = None  # it was extended since
    history.diverged = _read_diverged(path, experiment.run, required=reason == "diverged")
    history.ended = None if history.diverged else reason
    if weights and ended is not None and history.saved is not None and history.saved < ended["round"]:
        log.warning("%s has no checkpoint of its last round; the history is loaded without weights", path)
        history.params, history.saved = {}, None
    history.verified = experiment.verified and history.verified
    return history


def _class_names(table: dict[str, Any], about: dict[str, Any], records: list[Record]) -> tuple[str, ...] | None:
    """Return the class names of a run, if there is one for each class of its records; a federation has no table."""
    names = table.get("class_names") or about.get("made_by", {}).get("class_names")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return None
    by_class = [record.get("confusion", record.get("hits")) for record in records]
    return tuple(names) if all(len(one) == len(names) for one in by_class if isinstance(one, list)) else None


def settings_of(about: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a run from its experiment file."""
    settings = {**about["train"], "seed": about["seed"]}
    if ran_with := about.get("made_by", {}).get("engine"):
        settings["engine"] = ran_with  # instead of "auto"
    return settings


def _read_checkpoint(history: History, experiment: ExperimentFile, weights: bool) -> CheckpointHeader | None:
    """Return the newest checkpoint's header, and load its weights into the history; None if there is none to use."""
    assert history.folder is not None
    file = newest_checkpoint(history.folder, experiment.run)
    if file is None:
        if weights:
            log.warning("%s has no checkpoint; the history is loaded without weights", history.folder)
        return None
    try:
        header = read_header(file, experiment.run)
        if weights:
            server = read_tree(file, experiment.run)[0]["server"]
            history.params, history.saved = global_params(server), header.round
        return header
    except ForeignFile:
        raise
    except RunError as error:
        if not is_there(file):  # a running process has replaced it by a newer one
            return _read_checkpoint(history, experiment, weights)
        log.warning("%s; the history is loaded without %s", error, "weights" if weights else "looking at it")
        history.verified = False
    return None


def _read_ended(path: Path, run: str | None) -> dict[str, Any] | None:
    file = path / ENDED
    if run is None or not is_there(file):
        return None
    ended, _ = unseal_json(str(file), ENDED, read_bytes(file).removesuffix(b"\n"), run, ENDED)
    return ended


def _reason(path: Path, lines: Lines, ended: dict[str, Any] | None, header: CheckpointHeader | None) -> str | None:
    """Return why a run ended, or None if it has not: it may have been resumed since, which adds lines."""
    last = len(lines.records) - 1
    if ended is not None and ended["round"] > last:
        raise RunError(
            f"{path / ROUNDS} is damaged: the run ended after round {ended['round']}, its last line is of round {last}",
            key=ROUNDS,
            value=last,
            valid=[ended["round"]],
        )
    if ended is not None and ended["line"] != lines.checks[ended["round"]]:
        raise damaged(str(path / ENDED), ENDED, "it does not belong to these rounds")
    if ended is not None and ended["round"] == last:
        return str(ended["reason"])
    return header.ended if header is not None and header.round == last else None


def _read_diverged(path: Path, run: str | None, required: bool) -> str | None:
    file = path / DIVERGED
    if not is_there(file) and not required:
        return None
    body, owner = unseal_text(file, read_bytes(file))
    if run is not None and owner is None:
        raise damaged(str(file), DIVERGED, "its last line, with the checksum, is missing or was changed")
    if run is not None and owner != run:
        raise foreign(str(file), DIVERGED, owner, run)
    return body.decode(errors="replace").strip()
