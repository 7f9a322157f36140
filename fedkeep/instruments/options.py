"""Options of the studies, and what all studies share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedkeep._util.text import list_some
from fedkeep._util.validate import require_bool, require_choice, require_number, require_whole
from fedkeep.errors import FedkeepError
from fedkeep.instruments.next_round import NextRound

Result = dict[str, Any]
CHUNK = 1000  # examples per forward pass
DIRECTIONS = ("hessian", "random")
AUTO, LABELS, OWN_EXAMPLES = "auto", "labels", "own"  # of `personal_data`


@dataclass(frozen=True)
class Options:
    """Options of studies, and of the trial round that they look at."""

    samples: int = 200  # test examples in a t-SNE; a loss surface uses at most 5 times as many of a client's examples
    client: int | None = None  # the client of the loss surface and of the confusion matrix; None: the cohort's first
    steps: int = 15  # points of the loss surface, or of a plane of inputs, along each direction
    span: float = 1.0  # the loss surface goes from -span to span
    directions: str = "hessian"  # or "random"
    seed: int = 0  # of t-SNE, random directions and noise
    split: dict[str, Any] | None = None  # of the trial round, if other than the run's: {"kind": "shards", "s": 2}
    tune_epochs: int | None = None  # of fine-tuning in `personal`; None: as many as in a round, 0: no fine-tuning
    personal_data: str = AUTO  # the test set by the client's "labels", its "own" examples; auto: own, if all have some
    fit_on_test: bool = False  # without a public set, fit a bias on half of the test set and measure on the other half

    def __post_init__(self) -> None:
        for name, low, high in (("samples", 2, None), ("steps", 2, 1001), ("seed", 0, None)):
            require_whole(name, getattr(self, name), low=low, high=high)
        require_number("span", self.span, above=0)
        require_bool("fit_on_test", self.fit_on_test)
        require_choice("directions", self.directions, DIRECTIONS)
        if self.tune_epochs is not None:
            require_whole("tune_epochs", self.tune_epochs, low=0)
        require_choice("personal_data", self.personal_data, (AUTO, LABELS, OWN_EXAMPLES))

    def chosen_client(self, trial: NextRound) -> int:
        """Return the client that is looked at; raise if it is not in the cohort."""
        client = trial.ids[0] if self.client is None else self.client
        if client not in trial.ids:
            cohort = list_some([str(k) for k in trial.ids])
            raise FedkeepError(
                f"client {client} is not in the cohort of round {trial.round} (valid: {cohort})",
                key="client",
                value=client,
                valid=trial.ids,
            )
        return client


def names_of_models(trial: NextRound) -> list[str]:
    """Return the names of `trial.models`."""
    return ["before", *(trial.simulation.clients.name(k) for k in trial.ids), "after"]
