"""Starting, continuing and restoring the simulation of a federation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, Unpack, cast

from torch import Tensor, nn

from fedkeep import losses, methods, models
from fedkeep._util.validate import require_label, require_whole
from fedkeep.data.dataset import Dataset
from fedkeep.data.partition import Partition
from fedkeep.data.reductions import require_effect
from fedkeep.engine import distributed, provenance
from fedkeep.engine.extend import round_to_repeat
from fedkeep.engine.federation import Federation
from fedkeep.engine.option_places import require_setting
from fedkeep.engine.progress import with_progress
from fedkeep.engine.settings import DEFAULTS, Settings, SettingsDict
from fedkeep.engine.setup import make_method, require_dataset
from fedkeep.engine.simulation import Callback, Simulation
from fedkeep.engine.user_metrics import Metrics
from fedkeep.errors import RunError
from fedkeep.method import FedAvg
from fedkeep.runs.experiment_file import read_experiment, require_settings
from fedkeep.runs.federation_copy import with_own_files
from fedkeep.runs.files import EXPERIMENT, FEDERATION, is_there
from fedkeep.runs.folder import RunFolder
from fedkeep.runs.history import History
from fedkeep.runs.reading import load_run
from fedkeep.runs.round_logger import RoundLogger
from fedkeep.runs.seals import damaged


def simulate(
    method: FedAvg | str,
    model: nn.Module | str,
    data: Dataset | Any,
    clients: Partition | Iterable[Any],
    *,
    callbacks: Iterable[Callback] = (),
    criterion: Callable[[Tensor, Tensor], Tensor] = losses.cross_entropy,
    metrics: Metrics = None,
    run_dir: str | Path | None = None,
    checkpoint_every: int | None = None,
    keep: int | None = None,
    label: str | None = None,
    progress: bool | None = None,
    resume: bool = False,
    overwrite: bool = False,
    **settings: Unpack[SettingsDict],
) -> History:
    """Run a federation to its last round and return its history.

    `model` is any `nn.Module` from inputs to logits, or a name of `fedkeep.models`. `data` is a data set, or a pair or
    dict of DataFrames, Hugging Face or torch data sets to train and to test on, as for `fedkeep.data.load`. `clients`
    is a partition, or any iterable of index arrays. `criterion` is the loss, one value per example; a loss module is
    taken with reduction="none". `metrics` are functions of your own, by name, of all logits and labels of the test set;
    each returns a number, one per class, or a dict of numbers. The settings are those of `Settings`. A callback is
    called after every round with the simulation and the round's record, to which it may add: numbers in
    `record["metrics"]` are shown with the run. If it has a method `close`, that is called when the run ends, also by an
    error or Ctrl-C.

    With `run_dir` the run is written into this folder. If it already contains a run, `resume=True` continues it, or
    loads it if it is finished, and raises if it is another run; `overwrite=True` replaces it. The run is saved every
    `checkpoint_every` rounds; by default as often as keeps the cost of checkpoints at about 5% of the time. The last
    `keep` checkpoints (3) stay in the folder, each as large as the model. `label` is the name under which
    `fedkeep compare` and the report show the run; it does not affect the result.

    Round, accuracy and time left are shown in a line on a terminal and in a notebook; `progress=True` shows them
    everywhere, `progress=False` nowhere.
    """
    for name in settings:
        require_setting(name)
    checked = Settings(**cast(Any, settings))
    require_effect(checked.reductions, checked.rounds)
    callbacks = with_progress(callbacks, progress)
    saving = {"checkpoint_every": checkpoint_every, "keep": keep}
    for name, number in saving.items():
        if number is not None:
            require_whole(name, number, low=1, error=RunError)
    if label is not None:
        label = require_label(label)
    if resume and overwrite:
        raise RunError("resume and overwrite exclude each other", key="resume", value=True)
    if run_dir is None and (resume or overwrite):
        raise RunError(f"{'resume' if resume else 'overwrite'} needs run_dir", key="run_dir")
    data = require_dataset(data)
    clients = Partition.of(clients, len(data.y_train))
    model_name = model if isinstance(model, str) else None
    net = models.build(model, data.input_shape, data.n_classes, checked.seed) if isinstance(model, str) else model
    federation = Federation(make_method(method), net, data, clients, checked, criterion, metrics, model_name)
    if run_dir is None:
        return make_simulation(federation, callbacks).run()
    path = Path(run_dir)
    if resume and distributed.current_ranks().on_rank0(lambda: is_there(path / EXPERIMENT)):
        return _continue_or_load(path, federation, callbacks, keep)
    return start(make_simulation(federation, callbacks), path, {**saving, "label": label}, overwrite)


def make_simulation(federation: Federation, callbacks: Iterable[Callback] = ()) -> Simulation:
    """Return the simulation of a federation, before its first round."""
    f = federation
    simulation = Simulation(f.method, f.model, f.data, f.clients, f.settings, callbacks, f.criterion, f.metrics)
    simulation.model_name = f.model_name
    return simulation


def start(simulation: Simulation, path: Path, about: dict[str, Any], overwrite: bool = False) -> History:
    """Run a simulation in a new folder; `about` takes precedence in its experiment file, and adds to `made_by`.

    With `overwrite`, a run that the folder contains is deleted first.
    """
    s = simulation
    whole = {
        **provenance.experiment_dict(s.method, s.settings, s.task, s.data.name, len(s.clients), s.data.normalise),
        **about,
        "made_by": {
            **_made_by(s),
            **_fingerprints(s),
            **provenance.identity(s.method, s.task, s.data),
            **provenance.tested(s.evaluator.scorer),
            "model_name": s.model_name,
            **about.get("made_by", {}),
        },
    }
    if isinstance(s.settings.cohorts, tuple):
        whole["train"] = {**whole["train"], "cohorts": FEDERATION}  # the copy in the run folder has the lists
    return _run_in_folder(simulation, lambda: RunFolder.create(path, whole, overwrite))


def _continue_or_load(path: Path, federation: Federation, callbacks: Iterable[Callback], keep: int | None) -> History:
    """Continue the run in a folder, or load it if it is finished; raise if it is the run of another federation."""
    ranks = distributed.current_ranks()
    about = ranks.on_rank0(lambda: with_own_files(read_experiment(path), path))
    require_settings(path, about)
    _require_same_run(path, about, federation)
    if not ranks.on_rank0(lambda: load_run(path, weights=False).finished):
        return continue_run(path, federation, callbacks, keep=keep)
    history, made_by = load_run(path), about.get("made_by", {})
    simulation = restore_simulation(path, made_by, federation)
    provenance.require_same_tests(path, made_by, simulation.evaluator.scorer)
    history.build = simulation.task.module
    return history


def _require_same_run(path: Path, about: Mapping[str, Any], federation: Federation) -> None:
    """Raise unless a run was started with this method and these settings."""
    without_seed = {key: value for key, value in asdict(Settings()).items() if key != "seed"}
    theirs = {
        "method": methods.with_values_before(about["method"]),
        "train": {**without_seed, **about["train"], "seed": about["seed"]},
    }
    ours = {"method": federation.method.to_dict(), "train": asdict(federation.settings)}
    for tables in (ours, theirs):
        tables["train"]["cohorts"] = None  # they are compared by their contents
    different = [
        ("method" if (section, key) == ("method", "name") else key, there, here)
        for section, values in ours.items()
        for key, here in values.items()
        if (there := theirs[section].get(key)) != here
    ]
    for key, there, here in sorted(different, key=lambda each: each[0] == "rounds"):  # a run with other rounds is last
        what, advice = "contains another run", "choose another folder, or replace it with overwrite=True"
        if key == "rounds" and there < here:
            what = "contains a shorter run"
            advice = f"to extend it, use fedkeep.resume(run_dir, rounds={here}, model=..., data=..., clients=...), or, "
            advice += f"if an experiment file started it, fedkeep resume {path} rounds={here}"
        raise RunError(
            f"{path} {what}: {key} is {there!r} there and {here!r} here; {advice}", key=key, value=here, valid=[there]
        )


def continue_run(
    path: Path,
    federation: Federation,
    callbacks: Iterable[Callback] = (),
    from_round: int | None = None,
    keep: int | None = None,
) -> History:
    """Continue the run in a folder, given the same federation as at its start, after its last or an earlier round.

    If the federation has more rounds than the run, the run is extended to them, just before it continues.
    `keep` takes precedence over the number of checkpoints that the run was started with.
    The engine and the number of threads are those of the start, so that the result is bit for bit the same. With
    another number of processes, or other software, it is the same up to rounding, and a warning says so.
    """
    about = distributed.current_ranks().on_rank0(lambda: read_experiment(path))
    require_settings(path, about)
    made_by = about.get("made_by", {})
    simulation = restore_simulation(path, made_by, federation, callbacks)
    provenance.require_same_tests(path, made_by, simulation.evaluator.scorer)
    if "sites" not in made_by:  # its earlier rounds have none
        simulation.evaluator = replace(simulation.evaluator, scorer=simulation.evaluator.scorer.without_sites)
    simulation.ranks.on_rank0(lambda: provenance.warn_about_changes(path, made_by, _made_by(simulation)))
    rounds = simulation.settings.rounds
    repeat = simulation.ranks.on_rank0(lambda: round_to_repeat(path, simulation.settings))
    if repeat is not None:
        from_round = repeat if from_round is None else min(from_round, repeat)
    return _run_in_folder(simulation, lambda: RunFolder.open(path, keep, rounds), from_round)


def _made_by(s: Simulation) -> dict[str, Any]:
    return {**provenance.made_by(s.engine.name, s.task, s.threads), "ranks": s.ranks.size}


def _fingerprints(s: Simulation) -> dict[str, str]:
    given = s.planner.cohorts.fingerprint
    prints = provenance.fingerprints(s.task, s.data, s.clients)
    return prints if given is None else {**prints, "cohorts": given}


def restore_simulation(
    path: Path, made_by: Mapping[str, Any], federation: Federation, callbacks: Iterable[Callback] = ()
) -> Simulation:
    """Return a run's simulation as it was at its start; raise if data, split, model or criterion are not the run's."""
    for key in ("engine", "threads", "criterion", "data", "split", "model"):
        if key not in made_by:
            raise damaged(str(path / EXPERIMENT), EXPERIMENT, f"made_by.{key} is missing")
    settings = replace(federation.settings, engine=made_by["engine"])
    simulation = make_simulation(replace(federation, settings=settings), callbacks)
    for key, value in _fingerprints(simulation).items():
        if not provenance.same_fingerprint(key, value, made_by):
            what = key.replace("_", " ")
            raise RunError(f"{path} was started with a different {what}", key=key, value=value, valid=[made_by[key]])
    if simulation.ranks.size == made_by.get("ranks", 1):
        simulation.threads = made_by["threads"]
    return simulation


def _run_in_folder(
    simulation: Simulation, open_folder: Callable[[], RunFolder], from_round: int | None = None
) -> History:
    """Run in a folder, which only rank 0 opens and writes."""
    with ExitStack() as stack:

        def attach() -> None:
            simulation.attach(stack.enter_context(open_folder()), from_round)
            if simulation.round >= simulation.settings.rounds:  # no round is left that would call them
                for logger in simulation.callbacks:
                    if isinstance(logger, RoundLogger):
                        logger.write_recorded(simulation)

        simulation.ranks.on_rank0(attach)
        return simulation.run()


def _with_settings(function: Callable[..., History]) -> inspect.Signature:
    """Return a signature that lists every setting instead of `**settings`, for help()."""
    own = inspect.signature(function)
    stated = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
    added = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=DEFAULTS[f.name], annotation=f.type)
        for f in fields(Settings)
    ]
    return own.replace(parameters=[*stated, *added])


simulate.__signature__ = _with_settings(simulate)  # type: ignore[attr-defined]
if simulate.__doc__ and Settings.__doc__:  # python -OO removes docstrings
    simulate.__doc__ += "\n    " + Settings.__doc__.strip() + "\n    "
