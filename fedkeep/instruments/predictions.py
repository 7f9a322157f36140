"""Studies of what models predict: confusion matrices, and regions of a plane of inputs."""

from __future__ import annotations

import numpy as np
import torch

from fedkeep._util import arrays
from fedkeep.instruments.next_round import NextRound
from fedkeep.instruments.options import Options, Result, names_of_models


def confusion(trial: NextRound, options: Options) -> Result:
    """Return confusion matrices [true][predicted]: before, of one client's model, and after (FedSSD figure 4)."""
    client = options.chosen_client(trial)
    k = trial.ids.index(client)
    return {
        "client": client,
        "label_counts": trial.label_counts[k].tolist(),
        "before": trial.confusion[0].tolist(),
        "local": trial.confusion[1 + k].tolist(),
        "after": trial.confusion[-1].tolist(),
    }


def regions(trial: NextRound, options: Options) -> Result:
    """Return the class that each model predicts in the plane of inputs, `[y][x]` (FedGKD figure 5).

    Inputs must be pairs of numbers; otherwise `models` is empty. The plane covers the training examples. `points` are
    some of each client's examples, as [x, y, class].
    """
    s = trial.simulation
    if s.data.input_shape != (2,):
        return {"models": [], "classes": []}
    low, high = s.x.amin(0), s.x.amax(0)
    axes = [torch.linspace(float(a), float(b), options.steps) for a, b in zip(low, high, strict=True)]
    y, x = torch.meshgrid(axes[1], axes[0], indexing="ij")
    grid = torch.stack([x.ravel(), y.ravel()], dim=1).to(s.x)
    task = s.task.without_accelerator
    with torch.no_grad():
        predicted = [task.apply(params, trial.inputs(grid)).argmax(1).reshape(x.shape) for params in trial.models]
    return {
        "models": names_of_models(trial),
        "x": axes[0].tolist(),
        "y": axes[1].tolist(),
        "classes": [one.tolist() for one in predicted],
        "points": [_points(trial, client, options.samples) for client in trial.ids],
    }


def _points(trial: NextRound, client: int, most: int) -> list[list[float]]:
    """Return at most `most` examples of a client as [x, y, class], evenly spaced over its data."""
    s, examples = trial.simulation, trial.examples_of(client)
    at = torch.from_numpy(examples[arrays.evenly_spaced(len(examples), most)]).to(s.y.device)
    points = torch.column_stack([s.x[at].double(), s.y[at].double()]).cpu().numpy()
    return np.round(points, 4).tolist()  # type: ignore[no-any-return]
