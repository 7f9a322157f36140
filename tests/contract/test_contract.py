"""The contract, checked for every method of the registry and for one more that uses every hook.

Each test here was written against a fault found in published code: a loss without gradient, an alias of the server's
tensors, a default that silences the method, a hook that is never called, state that is lost or shared.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from support.methods import METHODS, EveryHook
from support.problems import Problem, gap, make_problem, same

import fedkeep as fk
from fedkeep import tree
from fedkeep.data.augment import Augment
from fedkeep.engine.gpu.graphs import graph_sizes
from fedkeep.engine.local import ClientJob, LocalTraining
from fedkeep.engine.loop import Loop
from fedkeep.engine.stacked import Stacked
from fedkeep.method import FedAvg

EXACT = 1e-12


every_method = pytest.mark.parametrize("name", METHODS)
VARIANTS = {
    "plain": {},
    "all clients, adam": {"participation": 1.0, "optimizer": "adam", "lr": 0.01},
    "clipped, one batch": {"clip_norm": 0.5, "batch_size": 100},
    "batches of one": {"batch_size": 1, "epochs": 1},
    "augmented": {"augment": Augment(crop=1, flip=True, cutout=2)},
    "two at once": {"participation": 1.0, "at_once": 2},
}


@every_method
@pytest.mark.parametrize("variant", VARIANTS)
def test_stacked_equals_loop(problem: Problem, name: str, variant: str) -> None:
    method, changes = METHODS[name](), {**VARIANTS[variant], "eval_local_every": 1}
    loop = problem.run(method, engine="loop", **{**changes, "at_once": None})
    stacked = problem.run(method, engine="stacked", **changes)
    assert gap(loop.server, stacked.server) < EXACT
    assert set(loop.states) == set(stacked.states)
    for client in loop.states:
        assert gap(loop.states[client], stacked.states[client]) < EXACT
    for a, b in zip(loop.history.records[1:], stacked.history.records[1:], strict=True):
        assert a["cohort"] == b["cohort"]
        assert a["local"] == b["local"]
        assert a["confusion"] == b["confusion"]
        assert (a["bytes_up"], a["bytes_down"]) == (b["bytes_up"], b["bytes_down"])
        assert a["train_loss"] == pytest.approx(b["train_loss"], rel=1e-9)


@every_method
def test_clients_that_have_finished_are_left_alone(problem: Problem, name: str) -> None:
    """As on a GPU, where steps exist for a few numbers of clients only: some are computed for nothing."""

    class Rounded:
        def __init__(self, engine: Stacked) -> None:
            self.engine = engine

        def run(self, held, live, lr):
            sizes = graph_sizes(len(tree.leaves(held["params"])[0]))
            for s, number in enumerate(live):
                active = min(size for size in sizes if size >= number)
                self.engine._step(held, torch.tensor([s]), active, 0 if number < active else active, lr)
            return held

    changes = {"participation": 1.0, "clip_norm": 1.0}
    loop, stacked = (problem.simulation(METHODS[name](), engine=engine, **changes) for engine in ("loop", "stacked"))
    stacked.engine.graphs = Rounded(stacked.engine)
    loop.run(), stacked.run()
    assert gap(loop.server, stacked.server) < EXACT
    assert loop.history.records[-1]["train_loss"] == pytest.approx(stacked.history.records[-1]["train_loss"], rel=1e-9)


@every_method
def test_through_the_wire_equals_loop_exactly(problem: Problem, name: str) -> None:
    plain, wired = problem.simulation(METHODS[name]()), problem.simulation(METHODS[name](), wire=True)
    plain.run(), wired.run()
    assert same(plain.server, wired.server)
    assert all(same(plain.states[k], wired.states[k]) for k in plain.states)


@every_method
def test_order_of_clients_does_not_matter(problem: Problem, name: str) -> None:
    sim = problem.simulation(METHODS[name](), participation=1.0)
    shared = sim.method.broadcast(sim.server)
    jobs = [sim._job(k, 1, shared) for k in range(len(problem.clients))]
    for engine in (Loop(sim.local, sim.x, sim.y), Stacked(sim.local, sim.x, sim.y)):
        results = []
        for order in (jobs, jobs[::-1]):
            trained = engine.train(shared, order, 0.1)
            cohort = fk.method.Cohort(tuple(job.id for job in order), 1, 0)
            results.append(sim.method.aggregate(sim.task, sim.server, trained.upload, cohort))
        assert gap(*results) < EXACT


@every_method
def test_padding_does_not_matter(problem: Problem, name: str) -> None:
    """A batch with padded places, filled with other examples, gives the same step as without."""
    sim = problem.simulation(METHODS[name]())
    shared = sim.method.broadcast(sim.server)
    client = sim.method.init_client(sim.task, shared["params"])
    plain, padded = (_one_step(sim.local, shared, client, sim, pad) for pad in (0, 3))
    assert gap(plain, padded) < EXACT


def _one_step(local: LocalTraining, shared, client, sim, pad: int) -> tree.Tree:
    """Take one step and one measurement by hand, on a batch of 4 real and `pad` padded examples."""
    y = sim.y[:8]
    x = local.inputs(sim.x[:8])
    job = sim._job(5, 1, shared)
    counts = np.bincount(y[:4].numpy(), minlength=4)
    facts = tree.take(local.facts([job.plan], counts[None], 0.1), 0)
    mine = local.method.prepare(local.task, shared, client, facts)
    batch = {"x": x[: 4 + pad], "y": y[: 4 + pad], "mask": torch.arange(4 + pad) < 4}
    with torch.no_grad():
        notes = local.note(shared, mine, x, y)
        batch.update(local.drawn(shared, mine, facts, sim.x[:8], y, np.linspace(0, 1, 8), notes))
    params = tree.map(torch.clone, shared["params"])
    loss = local.step(params, local.task.optimizer.init(params), batch, shared, mine, 0.1)
    batch["place"] = torch.arange(4 + pad)
    measured = local.measure(params, batch, shared, mine) if local.method.uses("measure") else {}
    return {"params": params, "loss": loss, "measured": measured}


@every_method
def test_neutral_hyperparameter_gives_fedavg(problem: Problem, name: str) -> None:
    neutral = {f: h.neutral for f, h in METHODS[name].hyperparameters().items() if h.neutral is not None}
    if not neutral:
        pytest.skip(f"{name} has no hyperparameter that turns it into FedAvg")
    reference = problem.run(FedAvg()).params
    for field, value in neutral.items():
        assert gap(reference, problem.run(METHODS[name](**{field: value})).params) < EXACT


@every_method
def test_every_hyperparameter_moves_the_weights(problem: Problem, name: str) -> None:
    for field, h in METHODS[name].hyperparameters().items():
        assert h.other is not None, f"{name}.{field} does not say how to test it"
        base = METHODS[name](**h.within)
        moved = dataclasses.replace(base, **{field: h.other})
        assert gap(problem.run(base).params, problem.run(moved).params) > 1e-6, field


@every_method
def test_default_is_not_fedavg(problem: Problem, name: str) -> None:
    """A default of zero that silences the method is the quietest of bugs."""
    if name == "fedavg":
        pytest.skip("it is FedAvg")
    assert gap(problem.run(FedAvg()).params, problem.run(METHODS[name]()).params) > 1e-6


@every_method
def test_hyperparameters_refuse_nonsense(name: str) -> None:
    for field in METHODS[name].hyperparameters():
        for nonsense in ("1", None, float("nan"), -1.0, float("inf"), [1.0]):
            with pytest.raises(fk.errors.MethodError, match=field):
                METHODS[name](**{field: nonsense})


@every_method
def test_nothing_given_is_changed_in_place(problem: Problem, name: str) -> None:
    """An alias of the server's tensors, written to, would show here."""
    sim = problem.simulation(METHODS[name]())
    for engine in (Loop(sim.local, sim.x, sim.y), Stacked(sim.local, sim.x, sim.y)):
        server = tree.map(torch.clone, sim.server)
        shared = sim.method.broadcast(server)
        jobs = [sim._job(k, 1, shared) for k in (0, 3, 5)]
        before = tree.map(torch.clone, {"server": server, "shared": shared, "jobs": _states(jobs)})
        trained = engine.train(shared, jobs, 0.1)
        uploads = tree.map(torch.clone, trained.upload)
        after = sim.method.aggregate(sim.task, server, trained.upload, fk.method.Cohort((0, 3, 5), 1, 0))
        assert same(before, {"server": server, "shared": shared, "jobs": _states(jobs)})
        assert same(uploads, trained.upload)
        trees_of = lambda t: {x.untyped_storage().data_ptr() for x in tree.leaves(t)}  # noqa: E731
        assert not trees_of(after["params"]) & trees_of(server["params"])


def _states(jobs: list[ClientJob]) -> tree.Tree:
    return {str(job.id): job.client for job in jobs}


@every_method
def test_trees_keep_their_shapes(problem: Problem, name: str) -> None:
    sim = problem.simulation(METHODS[name](), participation=1.0)
    shape = lambda t: [(path, leaf.shape, leaf.dtype) for path, leaf in tree.items(t)]  # noqa: E731
    server, shared = shape(sim.server), shape(sim.method.broadcast(sim.server))
    client = shape(sim.method.init_client(sim.task, sim.params))
    sim.step(), sim.step()
    assert shape(sim.server) == server
    assert shape(sim.method.broadcast(sim.server)) == shared
    assert all(shape(sim.states[k]) == client for k in sim.states)


@every_method
def test_hard_clients(name: str) -> None:
    """One-class clients, a class nobody has, a single client, a client without examples: finite, and it learns."""
    problem = make_problem(participation=1.0, lr=0.03)  # a loss quadratic in the logits cannot take large steps
    y = problem.data.y_train.numpy()
    one_class = [np.flatnonzero(y == c) for c in (0, 1, 3)]  # class 2 is absent everywhere
    for clients in (one_class, [*one_class, np.array([], dtype=int)], [np.arange(len(y))], [np.array([0])]):
        sim = dataclasses.replace(problem, clients=clients).run(METHODS[name]())
        assert all(bool(t.isfinite().all()) for t in tree.leaves(sim.server))
        assert gap(sim.task.init, sim.params) > 1e-6


@every_method
def test_uploads_name_the_weights_and_n(problem: Problem, name: str) -> None:
    """The server's weight of a client is in that client's upload, not taken from elsewhere."""
    sim = problem.simulation(METHODS[name]())
    shared = sim.method.broadcast(sim.server)
    job = sim._job(5, 1, shared)
    upload = sim.engine.train(shared, [job], 0.1).upload
    assert gap(tree.take(upload["params"], 0), sim.task.init) > 0
    assert float(upload["n"][0]) == len(problem.clients[5])


def test_the_suite_knows_every_hook() -> None:
    """If the contract grows, EveryHook must grow with it."""
    known = {"name", "uses", "hyperparameters", "defaults", "described"}
    hooks = [n for n in vars(FedAvg) if not n.startswith("_") and callable(getattr(FedAvg, n)) and n not in known]
    assert [hook for hook in hooks if not EveryHook.uses(hook)] == []


@every_method
def test_every_client_has_a_model_of_its_own(problem: Problem, name: str) -> None:
    sim = problem.run(METHODS[name]())
    visited, never = sorted(sim.states)[:1] or [0], len(problem.clients)
    for client in (*visited, next((k for k in range(never) if k not in sim.states), 0)):
        logits = sim.task.apply(sim.personal(client), sim.x_test)
        assert bool(logits.isfinite().all())
    if name == "every_hook":
        assert gap(sim.params, sim.personal(visited[0])) > 1e-6


class Dropping(torch.nn.Module):
    """A network that answers at random while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = torch.nn.Linear(16, 32), torch.nn.Linear(32, 4)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(self.body(x.flatten(1)).relu(), 0.5, self.training)

    def head(self, h: torch.Tensor) -> torch.Tensor:
        return self.out(h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x))


@every_method
def test_teachers_are_in_evaluation_mode(problem: Problem, name: str) -> None:
    """Notes, and what `prepare` computes, must not depend on dropout: a teacher in training mode would."""
    sim = dataclasses.replace(problem, model=Dropping()).simulation(METHODS[name]())
    sim.step()
    shared = sim.method.broadcast(sim.server)
    job = sim._job(5, 2, shared)
    facts = tree.take(sim.local.facts([job.plan], job.counts[None], 0.1), 0)
    said = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        local = sim.method.prepare(sim.task, shared, job.client, facts)
        said.append({"local": local, "note": sim.local.note(shared, local, sim.x[:8], sim.y[:8])})
    assert same(*said)


@every_method
def test_clients_remember_each_for_itself(problem: Problem, name: str) -> None:
    """No state is lost between visits, and none is shared: not the numbers, and not the memory they live in."""
    sim = problem.simulation(METHODS[name](), participation=1.0, rounds=2)
    sim.run()
    if not len(sim.states):
        pytest.skip(f"{name} keeps nothing at its clients")
    assert set(sim.states) == set(range(len(problem.clients)))
    places = [leaf.untyped_storage().data_ptr() for k in sim.states for leaf in tree.leaves(sim.states[k])]
    assert len(set(places)) == len(places)
    large = [k for k in sim.states if any(leaf.numel() > 1 for leaf in tree.leaves(sim.states[k]))]
    assert all(gap(sim.states[a], sim.states[b]) > 1e-9 for a in large for b in large if a < b)
    fresh = sim.method.init_client(sim.task, sim.params)
    assert all(gap(fresh, sim.states[k]) > 1e-9 or name == "moon" for k in sim.states)


def test_a_loss_without_gradient_is_refused(problem: Problem) -> None:
    class Silent(FedAvg):
        name = "silent"

        def loss(self, task, params, batch, shared, local):
            with torch.no_grad():
                return super().loss(task, params, batch, shared, local)

    for engine in ("loop", "stacked"):
        with pytest.raises(fk.errors.MethodError, match="no gradient"):
            problem.run(Silent(), engine=engine)


def test_an_error_says_at_which_stage(problem: Problem) -> None:
    class Broken(FedAvg):
        name = "broken"

        def finish(self, *args):
            raise KeyError("oops")

    with pytest.raises(KeyError) as caught:
        problem.run(Broken())
    assert caught.value.__notes__ == ["while broken was at: finish"]
