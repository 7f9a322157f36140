"""Extending a run to more rounds, with the same result as if it had been started with them.

Nothing is written here: `RunFolder.restore` writes the new number when everything else is known to be right.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedkeep._util.validate import require_whole
from fedkeep.engine import distributed
from fedkeep.engine.settings import Settings
from fedkeep.errors import RunError
from fedkeep.runs.checkpoints import find_checkpoints
from fedkeep.runs.experiment_file import OBSERVED, read_experiment_file, require_settings
from fedkeep.runs.files import ROUNDS
from fedkeep.runs.reading import read_records, saved_round


def read_extended(path: Path, rounds: int | None) -> dict[str, Any]:
    """Return a run's experiment file as if it had more rounds; raise if its earlier rounds would have been others.

    Without a number, it is returned as it is.
    """
    if rounds is not None:
        require_whole("rounds", rounds, low=1, error=RunError)
    about: dict[str, Any] = distributed.current_ranks().on_rank0(lambda: _read_extended(path, rounds))
    return about


def _read_extended(path: Path, rounds: int | None) -> dict[str, Any]:
    experiment = read_experiment_file(path)
    about = experiment.about
    if rounds is None:
        return about
    require_settings(path, about)
    planned = about["train"]["rounds"]
    if rounds == planned:  # the command is repeated after an interruption
        return about
    if rounds < planned:
        raise RunError(f"{path} has {planned} rounds: it can only be extended to more", key="rounds", value=rounds)
    if about.get("made_by", {}).get("engine") in ("flower", OBSERVED):
        raise RunError(f"{path} is a run of a Flower app: set its number of rounds there", key="rounds", value=rounds)
    if experiment.run is None:
        raise RunError(f"{path} has format 1: its number of rounds cannot change", key="rounds", value=rounds)
    settings = Settings.of({**about["train"], "seed": about["seed"]})
    for key, reason in settings.depends_on_rounds.items():
        raise RunError(f"{path} cannot be extended to {rounds} rounds: {reason}", key=key, value=rounds)
    return {**about, "train": {**about["train"], "rounds": rounds}}


def round_to_repeat(path: Path, settings: Settings) -> int | None:
    """Return the checkpoint to continue from, where the newest is of a last round that is not the last any more.

    The last round of a run is always evaluated. If the run has more rounds now, and it is not due, its record would not
    be that of a longer run: the rounds after an earlier checkpoint are repeated then. None: the newest checkpoint will
    do.
    """
    last = saved_round(path)
    every = [(settings.eval_every, "confusion"), (settings.eval_local_every, "local")]
    if not last or last >= settings.rounds or all(n <= 1 or last % n == 0 for n, _ in every):
        return None
    record = read_records(path / ROUNDS)[last]
    if not any(n > 1 and last % n and key in record for n, key in every):
        return None
    earlier = [number for number in find_checkpoints(path) if number < last]
    if not earlier:
        raise RunError(
            f"{path} cannot be extended: its last round, {last}, was evaluated because it was the last (eval_every = "
            f"{settings.eval_every}, eval_local_every = {settings.eval_local_every}), and it has no earlier checkpoint "
            "from which to repeat it",
            key="eval_every",
            value=last,
        )
    return earlier[-1]
