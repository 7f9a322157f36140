"""Recording of what a user's own Flower app forgets: `forgetting(strategy, model, test_data, run_dir=...)`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from fedkeep._util.rng import preserved
from fedkeep._util.validate import require_whole
from fedkeep.errors import ConfigError
from fedkeep.flower.class_test import ClassTest, FunctionTest, ModelTest
from fedkeep.flower.observed_run import ObservedRun
from fedkeep.flower.observer import MARK, Observer
from fedkeep.flower.round_loop import RoundLoop
from fedkeep.flower.server import configure_logging
from fedkeep.flower.strategy_api import MessageApi, api_of

S = TypeVar("S")


def forgetting(
    strategy: S,
    model: Any = None,
    test_data: Any = None,
    *,
    run_dir: str | Path,
    confusion: Callable[[Any], Any] | None = None,
    num_rounds: int | None = None,
    every: int = 1,
    local_every: int = 0,
    label: str | None = None,
    seed: int = 0,
    device: str = "cpu",
    keep: int = 3,
    resume: bool = False,
) -> S:
    """Return the same strategy; from now on its rounds are tested class by class and recorded in a run folder.

    The strategy computes the same as without, bit for bit. What is wrong with the arguments is raised before the first
    round. Later, whatever fails here is logged once, and the federation continues.

    Parameters
    ----------
    strategy
        A strategy of Flower, or one of your own: of `flwr.serverapp.strategy`, or of the older `flwr.server.strategy`.
        If one strategy wraps another, pass the outer one.
    model
        The model whose arrays the app sends: a `torch.nn.Module`, or a class or function that returns one.
    test_data
        The examples to test with: (x, y), a torch DataLoader or data set of such pairs, a data set of `fedkeep.data`,
        or a function that returns one of these.
    run_dir
        The run folder, a new one. `fedkeep report` and `fedkeep compare` read it.
    confusion
        Instead of model and test data, a function from the app's arrays, as an `evaluate_fn` gets them, to the
        confusion matrix [true class, predicted class], to this matrix and the test loss, or to None if there is nothing
        to test, such as a model without trees.
    num_rounds
        The number of rounds; only for strategies that are not told by `start`: older ones, and in a loop of your own.
    every
        Test the global model every so many rounds, and in the last one.
    local_every
        Test every client's model too, every so many rounds; 0: never. The clients must send whole models.
    label
        The name of the run in comparisons; by default the strategy's.
    seed
        The seed of the app, if it has one; runs that differ only in it are compared as one group.
    device
        Where the model is tested.
    keep
        How many of the last global models stay in the folder; 0: none is saved.
    resume
        Whether to continue a run that is in the folder and not finished. The app must start from its last saved
        weights, `fedkeep.load_run(run_dir).params`. The strategy's own state is not saved.
    """
    configure_logging()
    api = api_of(strategy)
    _require_new(strategy)
    if num_rounds is not None:
        require_whole("num_rounds", num_rounds, low=1, error=ConfigError)
    elif not isinstance(api, MessageApi):
        raise ConfigError(f"num_rounds is needed for a {type(strategy).__name__} of flwr.server", key="num_rounds")
    for key, value, low in (("every", every, 1), ("local_every", local_every, 0), ("keep", keep, 0), ("seed", seed, 0)):
        require_whole(key, value, low=low, error=ConfigError)
    if label is not None and not (isinstance(label, str) and label.strip()):
        raise ConfigError(f"label must be a text, not {label!r}", key="label", value=label)
    run = ObservedRun(Path(run_dir).expanduser(), keep, resume)
    with preserved():
        test = _test(model, test_data, confusion, device)
    options = {"num_rounds": num_rounds, "every": every, "local_every": local_every}
    Observer(strategy, api, test, run, {"seed": seed, "label": label}, **options).attach()
    return strategy


def _test(model: Any, test_data: Any, confusion: Any, device: str) -> ClassTest:
    """Return what tests the model."""
    if confusion is not None and not callable(confusion):
        kind = type(confusion).__name__
        raise ConfigError(f"confusion must be a function of the app's arrays, not {kind}", key="confusion")
    if confusion is not None:
        if model is not None or test_data is not None:
            raise ConfigError("pass model and test_data, or confusion, not both", key="confusion")
        return FunctionTest(confusion)
    for key, value in (("model", model), ("test_data", test_data)):
        if value is None:
            raise ConfigError(f"{key} is missing: pass model and test_data, or confusion", key=key)
    return ModelTest(model, test_data, device)


def _require_new(strategy: Any) -> None:
    """Raise if a strategy records its rounds already."""
    if isinstance(strategy, RoundLoop):
        raise ConfigError("a strategy of fedkeep records its rounds itself: pass run_dir to it", key="strategy")
    if hasattr(strategy, MARK):
        raise ConfigError("this strategy is observed already: call forgetting once", key="strategy")
