"""The server hooks of a method, with checks of what they return."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch

from fedkeep import tree
from fedkeep.data.seeds import server_seed
from fedkeep.engine import privacy, requirements, robust
from fedkeep.engine.divergence import require_finite_server
from fedkeep.engine.privacy import RandomBytes
from fedkeep.engine.read_out import next_read_out, with_read_out
from fedkeep.engine.settings import Settings
from fedkeep.engine.weight_average import next_average, with_average
from fedkeep.errors import MethodError
from fedkeep.method import Cohort, FedAvg
from fedkeep.runs.server_state import AVERAGE, READ_OUT, without_own_entries
from fedkeep.task import Task
from fedkeep.tree import Tree

log = logging.getLogger("fedkeep")


def make_cohort(settings: Settings, ids: Iterable[int], round: int) -> Cohort:
    """Return the cohort of a round, with the seed of the server's own random numbers in it."""
    return Cohort(tuple(ids), round, server_seed(settings.seed, round))


def init_server(method: FedAvg, task: Task, settings: Settings) -> Tree:
    """Return the server's first tree, with the average of the weights and the read-out if the settings want them."""
    server = _checked(method, "init_server", method.init_server(task, task.init))
    for name, use in ((AVERAGE, "the average of the weights over rounds"), (READ_OUT, "the bias that is tested")):
        if name in server:
            raise MethodError(f'{method.name}: "{name}" is reserved for {use}', key="init_server")
    return with_read_out(with_average(server, settings.average_weights), task, settings)


def broadcast(method: FedAvg, server: Tree) -> Tree:
    """Return what goes to every client."""
    return _checked(method, "broadcast", method.broadcast(without_own_entries(server)))


def broadcast_to(method: FedAvg, server: Tree, client: int) -> Tree:
    """Return what goes to one client alone; nothing for most methods."""
    if not method.uses("broadcast_to"):
        return {}
    sent: Any = method.broadcast_to(without_own_entries(server), client)
    if not isinstance(sent, dict):
        kind = type(sent).__name__
        raise MethodError(f"{method.name}: broadcast_to must return a dict, not {kind}", key="broadcast_to", value=kind)
    return _require_tensors(method, "broadcast_to", sent)


def require_supported(method: FedAvg, settings: Settings, n_clients: int) -> None:
    """Raise if this method cannot be trained or aggregated as the settings say."""
    requirements.require_settings(method, settings)
    if settings.cohorts is None:  # given ones are checked when they are read
        robust.require_enough(settings, settings.cohort_size(n_clients))
    if settings.aggregation == "mean" and settings.hostile != Settings.hostile:
        log.warning('hostile = %d has no effect with aggregation = "mean": choose another', settings.hostile)
    for name in method.without_effect(settings.optimizer):
        if (value := method.to_dict()[name]) != method.defaults()[name]:
            needed = " and ".join(f"{k} = {v}" for k, v in method.hyperparameters()[name].only_with.items())
            log.warning("%s = %s has no effect: %s uses it only with %s", name, value, method.name, needed)
    if settings.private:
        privacy.require_accountant(settings, n_clients)


def aggregate(
    method: FedAvg,
    task: Task,
    server: Tree,
    uploads: Tree,
    cohort: Cohort,
    settings: Settings,
    random_bytes: RandomBytes | None = None,
    check: bool = True,
) -> Tree:
    """Return the server's next tree; raise `Diverged` if it has NaN or infinite numbers.

    Without `check`, the host does not read it, and so does not wait for the device.

    Robust averaging and differential privacy change the uploads, and the method does not notice. `random_bytes` is the
    source of the noise; by default it follows from the seed.
    """
    if settings.private:
        source = random_bytes or privacy.seeded_bytes(settings.seed, cohort.round)
        size = settings.cohort_size(task.n_clients)
        uploads = privacy.privatise(method, _sent(method, server), uploads, cohort, settings, size, source)
    elif not settings.plain_mean:
        uploads, cohort = robust.resist(method, _sent(method, server), uploads, cohort, settings)
    own = without_own_entries(server)
    new = tree.detach(_checked(method, "aggregate", method.aggregate(task, own, uploads, cohort)))
    if settings.average_weights is not None:
        new = {**new, AVERAGE: next_average(server[AVERAGE], new["params"], settings.average_weights)}
    if settings.read_out is not None:
        new = {**new, READ_OUT: next_read_out(task, new, server[READ_OUT])}
    if check:
        require_finite_server(cohort.round, new)
    return new


def _sent(method: FedAvg, server: Tree) -> Tree:
    """Return the server's tree with the weights that clients got: their changes are measured from there."""
    return {**server, "params": broadcast(method, server)["params"]}


def _checked(method: FedAvg, hook: str, value: Any) -> Tree:
    """Raise unless a server hook returned a tree of tensors with "params"."""
    if not isinstance(value, dict) or not isinstance(value.get("params"), dict):
        raise MethodError(
            f'{method.name}: {hook} must return a dict with "params", the weights, not '
            + (
                f"one with {', '.join(map(str, value)) or 'nothing'}"
                if isinstance(value, dict)
                else type(value).__name__
            ),
            key=hook,
        )
    return _require_tensors(method, hook, value)


def _require_tensors(method: FedAvg, hook: str, value: Tree) -> Tree:
    bad = [path for path, leaf in tree.items(value) if not isinstance(leaf, torch.Tensor)]
    if bad:
        raise MethodError(f"{method.name}: {hook} must return tensors, but {bad[0]} is not one", key=hook, value=bad[0])
    return value
