"""Extending a run to more rounds, with the same result as if it had been started with them."""

from __future__ import annotations

from pathlib import Path

from fedkeep._util.validate import require_whole
from fedkeep.engine import distributed
from fedkeep.engine.settings import Settings
from fedkeep.errors import RunError
from fedkeep.runs.checkpoints import find_checkpoints
from fedkeep.runs.experiment_file import OBSERVED, read_experiment_file, require_settings
from fedkeep.runs.extension import write_extension
from fedkeep.runs.files import ROUNDS
from fedkeep.runs.folder import RunFolder
from fedkeep.runs.reading import read_records, saved_round


def extend(path: Path, rounds: int) -> None:
    """Set the number of rounds of a run to a larger one; raise if its earlier rounds would have been others."""
    require_whole("rounds", rounds, low=1, error=RunError)
    distributed.current_ranks().on_rank0(lambda: _extend(path, rounds))


def _extend(path: Path, rounds: int) -> None:
    experiment = read_experiment_file(path)
    about = experiment.about
    require_settings(path, about)
    planned = about["train"]["rounds"]
    if rounds == planned:  # the command is repeated after an interruption
        return
    if rounds < planned:
        raise RunError(f"{path} has {planned} rounds: it can only be extended to more", key="rounds", value=rounds)
    if about.get("made_by", {}).get("engine") in ("flower", OBSERVED):
        raise RunError(f"{path} is a run of a Flower app: set its number of rounds there", key="rounds", value=rounds)
    settings = Settings.of({**about["train"], "seed": about["seed"]})
    for key, reason in settings.depends_on_rounds.items():
        raise RunError(f"{path} cannot be extended to {rounds} rounds: {reason}", key=key, value=rounds)
    with RunFolder.open(path):  # no other process uses it
        round_to_repeat(path, settings)
        write_extension(path, experiment.run, rounds)


def round_to_repeat(path: Path, settings: Settings) -> int | None:
    """Return the checkpoint to continue from, where the newest is of a last round that has been extended.

    The last round of a run is always evaluated. If it is no longer the last, and not due, its record would not be that
    of a longer run: the rounds after an earlier checkpoint are repeated then. None: the newest checkpoint will do.
    """
    last = saved_round(path)
    every = [(settings.eval_every, "confusion"), (settings.eval_local_every, "local")]
    if not last or all(n <= 1 or last % n == 0 for n, _ in every):
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
