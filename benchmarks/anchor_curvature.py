"""How near FedKA's anchor is to making SGD unstable, at a run's checkpoint.

    FEDKEEP_DATA=folder python benchmarks/anchor_curvature.py RUN

The anchor's term, beta / |T| * the sum of ||z_g - z||^2, is quadratic in the logits z, so at z = z_g its curvature
along the steepest direction is 2 beta / |T| times the largest eigenvalue of J J^T, J being the derivatives of the
anchor's logits by the weights. SGD with momentum m is stable below 2 (1 + m) / lr. The shared example of a class stands
here for a non-dominant class too, of which a client would take an example of its own.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import fedkeep as fk
from fedkeep import tree
from fedkeep.config import Experiment
from fedkeep.runs import read_experiment


def main() -> None:
    """Print the curvature for every client, beside the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of a run of FedKA, with its checkpoint")
    folder = parser.parse_args().run
    method, model, data, clients, settings = Experiment.from_dict(read_experiment(folder)).parts()
    if not isinstance(method, fk.methods.FedKA):
        parser.error(f"{folder} is a run of {method.name}, not of fedka")
    simulation = fk.Simulation(method, model, data, clients, replace(settings, device="cpu", engine="loop"))
    history = fk.load_run(folder)
    if history.params is None:
        parser.error(f"{folder} has no checkpoint")
    logits, derivatives = _logits(simulation, history.params)
    found = []
    for k in range(len(clients)):
        counts = np.bincount(data.y_train[clients[k]], minlength=data.n_classes)
        channels = np.flatnonzero(counts < method.gamma * counts.sum())
        rows = derivatives[channels][:, channels].flatten(0, 1).double()
        largest = torch.linalg.eigvalsh(rows @ rows.T)[-1].item() if len(channels) else 0.0
        found.append(2 * method.beta / max(len(channels), 1) * largest)
    limit = 2 * (1 + settings.momentum) / settings.lr_in(history.saved + 1)
    print(f"{folder}, round {history.saved}: largest logit of the shared examples {logits.abs().max():.0f}")
    print(f"curvature by client: {', '.join(f'{value:.0f}' for value in found)}; SGD is stable below {limit:.0f}")


def _logits(simulation: fk.Simulation, params: tree.Tree) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the shared examples' logits [C, C], and the derivatives of each by all weights [C, C, weights]."""
    weights = tree.map(lambda w: w.clone().requires_grad_(), params)
    z = simulation.task.apply(weights, simulation.server["S"])
    rows = [torch.autograd.grad(one, tree.leaves(weights), retain_graph=True) for one in z.flatten()]
    derivatives = torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])
    return z.detach(), derivatives.unflatten(0, z.shape)


if __name__ == "__main__":
    main()
