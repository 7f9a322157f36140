"""Curvature of FedKA's anchor term at a run's checkpoint, compared with the stability limit of SGD.

    FEDKEEP_DATA=folder python benchmarks/anchor_curvature.py RUN [--client 0 --betas 0.008,0.01,0.012,0.015]

The anchor term, beta / |T| * the sum of ||z_g - z||^2, is quadratic in the logits z. At z = z_g, its curvature in the
steepest direction is 2 beta / |T| times the largest eigenvalue of J J^T, where J are the derivatives of the anchor's
logits by the weights. SGD with momentum m is stable below 2 (1 + m) / lr. For non-dominant classes, the shared example
is used instead of one of the client's own examples.

With `--betas`, one client is also trained for the round after the checkpoint with each value of beta. The curvature is
proportional to beta; the output shows whether training diverges where it is above the limit.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch

import fedkeep as fk
from fedkeep import tree
from fedkeep.engine.simulate import make_simulation
from fedkeep.experiments.build import build
from fedkeep.experiments.experiment import Experiment


def main() -> None:
    """Print the curvature of every client and the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run folder of FedKA with a checkpoint")
    parser.add_argument("--client", type=int, default=0)
    parser.add_argument("--betas", type=lambda text: [float(beta) for beta in text.split(",")], default=[])
    args = parser.parse_args()
    folder = args.run
    try:
        history = fk.load_run(folder)
        federation = build(Experiment.from_dict(history.about))
        method, data, clients, settings = federation.method, federation.data, federation.clients, federation.settings
        if not isinstance(method, fk.methods.FedKA):
            parser.error(f"{folder} is a run of {method.name}, not of fedka")
        if history.saved is None:
            parser.error(f"{folder} has no checkpoint")
        simulation = make_simulation(replace(federation, settings=replace(settings, device="cpu", engine="loop")))
    except fk.errors.FedkeepError as error:
        parser.error(str(error))
    logits, derivatives = _logits(simulation, history.params)
    curvatures = []
    for k in range(len(clients)):
        counts = torch.bincount(data.y_train[clients[k]], minlength=data.n_classes)
        missing, scarce = method._classes({"label_counts": counts, "n": counts.sum()})
        selected = {"both": missing | scarce, "non_dominant": scarce, "missing": missing}[method.parts]
        anchor = selected.nonzero()[: method.mu, 0]
        rows = derivatives[anchor][:, missing | scarce].flatten(0, 1).double()
        largest = torch.linalg.eigvalsh(rows @ rows.T)[-1].item() if len(anchor) else 0.0
        curvatures.append(2 * method.beta / max(len(anchor), 1) * largest)
    limit = 2 * (1 + settings.momentum) / settings.lr_in(history.saved + 1)
    print(f"{folder}, round {history.saved}: largest logit of the shared examples {logits.abs().max():.3g}")
    print(f"curvature by client: {', '.join(f'{value:.3g}' for value in curvatures)}; SGD is stable below {limit:.3g}")
    for beta in args.betas:
        losses = _train_one(simulation, replace(method, beta=beta), history, args.client)
        curvature, finite = curvatures[args.client] * beta / method.beta, torch.isfinite(losses).all()
        outcome = f"largest loss {losses.max():.3g}, last {losses[-1]:.3g}" if finite else "diverged"
        print(f"client {args.client}, beta {beta:g}: curvature {curvature:.3g}, {outcome}", flush=True)


def _train_one(simulation: fk.Simulation, method: fk.methods.FedKA, history: fk.History, client: int) -> torch.Tensor:
    """Train one client for the round after the checkpoint, and return the loss of every step."""
    model, settings = simulation.task.module(history.params), simulation.settings
    again = fk.Simulation(method, model, simulation.data, simulation.clients, settings)
    shared = method.broadcast(again.server)
    job = again.job(client, history.saved + 1)
    return again.engine.train(shared, [job], settings.lr_in(history.saved + 1)).losses[:, 0]


def _logits(simulation: fk.Simulation, params: tree.Tree) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of the shared examples [C, C], and their derivatives by all weights [C, C, weights]."""
    weights = tree.map(lambda w: w.clone().requires_grad_(), params)
    z = simulation.task.apply(weights, simulation.server["S"])
    rows = [torch.autograd.grad(one, tree.leaves(weights), retain_graph=True) for one in z.flatten()]
    derivatives = torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])
    return z.detach(), derivatives.unflatten(0, z.shape)


if __name__ == "__main__":
    main()
