"""Mean probabilities of the classes in local models, next to the clients' label counts (Flashback, appendix B)."""

from __future__ import annotations

import numpy as np

from fedkeep import tree
from fedkeep.instruments.next_round import NextRound
from fedkeep.instruments.options import Options, Result
from fedkeep.server_training import logits


def mean_probabilities(trial: NextRound, options: Options) -> Result:
    """Return each class's mean probability in each client's model, over the public set, and the label counts, [K, C].

    Without a public set, over the test set. `largest` [C] is the most examples of a class that any client has.
    """
    s = trial.simulation
    task = s.task.without_accelerator
    x = task.public.x if task.public is not None else trial.test_examples(len(s.y_test))[0]
    models = (tree.take(trial.clients, k) for k in range(len(trial.ids)))
    means = [logits(task, params, x).softmax(-1).mean(0).double().cpu().numpy() for params in models]
    y = s.data.y_train.numpy()
    largest = np.max([np.bincount(y[own], minlength=task.n_classes) for own in s.clients], axis=0)
    return {
        "clients": np.stack(means).tolist(),
        "label_counts": trial.label_counts.tolist(),
        "largest": largest.tolist(),
    }
