"""The contract checks, by name."""

from __future__ import annotations

import copy
import dataclasses
import functools
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedkeep import models, tree
from fedkeep._util.validate import require_choice
from fedkeep.bounds import broken_bound
from fedkeep.data.augment import Augment
from fedkeep.engine import robust
from fedkeep.engine.loop import Loop
from fedkeep.engine.simulation import Simulation
from fedkeep.engine.stacked import Stacked
from fedkeep.engine.upload_form import upload_form
from fedkeep.errors import MethodError
from fedkeep.method import HOOKS, NEEDS, Cohort, FedAvg, Hyper
from fedkeep.runs.folder import RunFolder
from fedkeep.testing.fixtures import (
    SurplusClients,
    WithDropout,
    changed_by_the_server,
    changed_in_a_step,
    corrected,
    local_of,
    one_step,
)
from fedkeep.testing.problem import Problem, difference, small_problem
from fedkeep.testing.registry import CHECKS, TOLERANCE, Expect, check
from fedkeep.testing.uploads import received_uploads, upload_names
from fedkeep.tree import Tree

CHANGED = 1e-6  # smallest relative difference that counts as another result
_FEDAVG = FedAvg()


def _trained(problem: Problem, method: FedAvg, **changes: Any) -> Simulation:
    """Return a finished run in the loop engine. Checks share it: each may only read it."""
    return problem.finished(method, **{**changes, "engine": "loop", "eval_local_every": 1})


def check_method(method: FedAvg, only: Iterable[str] | None = None) -> None:
    """Run all checks, or only those named; raise `MethodError` at the first that fails. Its `key` names the check."""
    if not isinstance(method, FedAvg):
        raise MethodError(f"check_method takes a method, such as FedNTD(), not {method!r}", key="method", value=method)
    problem = small_problem()
    for name in CHECKS if only is None else only:
        require_choice("only", name, CHECKS, what="check")
        CHECKS[name](method, problem)


# Causes first: the checks below see their effects


@check
def _hyperparameters_reject_nonsense(method: FedAvg, problem: Problem, expect: Expect) -> None:
    for field, h in method.hyperparameters().items():
        signed = h.choices is None and h.low is None and h.above is None
        for nonsense in ("1", None, float("nan"), float("inf"), [1.0], *(() if signed else (-1.0,))):
            try:
                dataclasses.replace(method, **{field: nonsense})
            except MethodError as error:
                expect.true(error.key == f"method.{field}", f"{field} = {nonsense!r} raises an error of {error.key}")
            else:
                expect.true(False, f"{field} = {nonsense!r} is accepted")


@check
def _arguments_stay_unchanged(method: FedAvg, problem: Problem, expect: Expect) -> None:
    sim = problem.simulation(method)
    for hook, changed in changed_by_the_server(sim).items():
        expect.true(not changed, f"{hook} wrote into its arguments ({', '.join(changed)})")
    for engine in (Loop(sim.local, sim.x, sim.y), Stacked(sim.local, sim.x, sim.y)):
        server = tree.map(torch.clone, sim.server)
        shared = method.broadcast(server)
        jobs = [sim.job(k, 1) for k in (0, 3, 5)]
        own = {str(job.id): {"state": job.client, "sent": job.sent} for job in jobs}
        arguments = {"server": server, "shared": shared, "own": own}
        before = tree.map(torch.clone, arguments)
        uploads = engine.train(shared, jobs, 0.1).upload
        uploads_before = tree.map(torch.clone, uploads)
        after = method.aggregate(sim.task, server, uploads, Cohort((0, 3, 5), 1, 0))
        expect.same(before, arguments, "a hook changed its arguments", tolerance=0)
        expect.same(uploads_before, uploads, "aggregate changed the uploads", tolerance=0)
        shares = _memory(after["params"]) & _memory(server["params"])
        expect.true(not shares, "aggregate returned the memory of the server's old weights")
    for hook, changed in changed_in_a_step(sim).items():
        expect.true(not changed, f"{hook} wrote into its arguments ({', '.join(changed)})")


@check
def _trees_keep_their_shapes(method: FedAvg, problem: Problem, expect: Expect) -> None:
    new, sim = problem.simulation(method), _trained(problem, method, participation=1.0, rounds=2)
    before, after = (tree.spec({"server": s.server, "shared": method.broadcast(s.server)}) for s in (new, sim))
    expect.true(before == after, "the server's tree or broadcast changed names, shapes or dtypes")
    forms = {tree.spec(s.job(k, 1).sent) for s in (new, sim) for k in range(len(problem.clients))}
    expect.true(len(forms) == 1, "what is sent to one client alone changed names, shapes or dtypes")
    state = tree.spec(method.init_client(new.task, new.params))
    for k in sim.state.clients:
        same = state == tree.spec(sim.state.clients[k])
        expect.true(same, "a client's state changed names, shapes or dtypes")


@check
def _padding_does_not_matter(method: FedAvg, problem: Problem, expect: Expect) -> None:
    sim = problem.simulation(method)
    without, padded = (one_step(sim, pad) for pad in (0, 3))
    expect.same(without, padded, "padded examples change a step")


# Engines agree


def _stacked_equals_loop(
    method: FedAvg, problem: Problem, expect: Expect, tolerance: float = TOLERANCE, **changes: Any
) -> None:
    if changes.get("optimizer", "sgd") not in method.optimizers:
        return  # it is refused before a run starts
    loop = _trained(problem, method, **{**changes, "at_once": None})
    stacked = problem.run(method, engine="stacked", **{"eval_local_every": 1, **changes})
    expect.same(loop.server, stacked.server, "the server's trees differ between loop and stacked engine", tolerance)
    a, b = loop.state.clients, stacked.state.clients
    expect.true(set(a) == set(b), "loop and stacked engine store states of different clients")
    for k in a:
        expect.same(a[k], b[k], f"the state of client {k} differs between loop and stacked engine", tolerance)
    for x, y in zip(loop.history.records[1:], stacked.history.records[1:], strict=True):
        for key in ("cohort", "local", "confusion", "bytes_up", "bytes_down"):
            expect.true(x[key] == y[key], f"`{key}` of round {x['round']} differs between the engines")
        close = abs(x["train_loss"] - y["train_loss"]) <= 1e-9 * abs(x["train_loss"])
        expect.true(close, f"the loss of round {x['round']} differs between the engines")


check(_stacked_equals_loop, "stacked_equals_loop")
_VARIANTS: dict[str, dict[str, Any]] = {  # two rounds each: the second has states and a trained server
    "stacked_equals_loop_with_adam": {"participation": 1.0, "optimizer": "adam", "lr": 0.01},
    "stacked_equals_loop_with_clipping": {"clip_norm": 0.5, "batch_size": 100},
    "stacked_equals_loop_with_batches_of_one": {"batch_size": 1, "epochs": 1},
    "stacked_equals_loop_with_augmentation": {"augment": Augment(crop=1, flip=True, cutout=2)},
    "stacked_equals_loop_with_reflected_augmentation": {"augment": Augment(crop=2, flip=True, padding="reflect")},
    "stacked_equals_loop_without_last_batches": {"drop_last": True, "participation": 1.0},
    "stacked_equals_loop_in_chunks": {"participation": 1.0, "at_once": 2},
}
for _name, _changes in _VARIANTS.items():
    check(functools.partial(_stacked_equals_loop, rounds=2, **_changes), _name)


@check
def _stacked_equals_loop_with_dropout(method: FedAvg, problem: Problem, expect: Expect) -> None:
    # ten times the tolerance: dropped features have small variances, by which a method may divide
    dropping = dataclasses.replace(problem, model=WithDropout())
    _stacked_equals_loop(method, dropping, expect, 10 * TOLERANCE, rounds=2)


@check
def _finished_clients_stay_unchanged(method: FedAvg, problem: Problem, expect: Expect) -> None:
    changes: dict[str, Any] = {"participation": 1.0, "clip_norm": 1.0}
    loop, stacked = (problem.simulation(method, engine=engine, **changes) for engine in ("loop", "stacked"))
    assert isinstance(stacked.engine, Stacked)
    stacked.engine.graphs = SurplusClients(stacked.engine)  # type: ignore[assignment]
    loop.run(), stacked.run()
    expect.same(loop.server, stacked.server, "a finished client's weights changed")


@check
def _bytes_change_nothing(method: FedAvg, problem: Problem, expect: Expect) -> None:
    direct, sent = _trained(problem, method), problem.run(method, wire=True)
    expect.same(direct.server, sent.server, "messages sent as bytes give another result", tolerance=0)
    for k in direct.state.clients:
        what = f"the state of client {k} is another after it was sent as bytes"
        expect.same(direct.state.clients[k], sent.state.clients[k], what, tolerance=0)


@check
def _runs_are_reproducible(method: FedAvg, problem: Problem, expect: Expect) -> None:
    first, second = _trained(problem, method), problem.run(method)
    expect.same(first.server, second.server, "a second run differs", tolerance=0)


@check
def _client_order_does_not_matter(method: FedAvg, problem: Problem, expect: Expect) -> None:
    sim = problem.simulation(method, participation=1.0)
    shared = method.broadcast(sim.server)
    jobs = [sim.job(k, 1) for k in range(len(problem.clients))]
    for engine in (Loop(sim.local, sim.x, sim.y), Stacked(sim.local, sim.x, sim.y)):
        results = []
        for order in (jobs, jobs[::-1]):
            uploads = engine.train(shared, order, 0.1).upload
            results.append(method.aggregate(sim.task, sim.server, uploads, Cohort(tuple(j.id for j in order), 1, 0)))
        expect.same(results[0], results[1], "another order of the clients gives another result")


@check
def _averaged_entries_are_averaged(method: FedAvg, problem: Problem, expect: Expect) -> None:
    """With equal n, the mean can replace every client's averaged entries; also where an option changes which."""
    _require_averaged(method, problem, expect)
    for other in (_with_test_value(method, field) for field in method.hyperparameters()):
        if other.averaged != method.averaged:
            _require_averaged(other, problem, expect)


def _require_averaged(method: FedAvg, problem: Problem, expect: Expect) -> None:
    sim = problem.run(method, participation=1.0, rounds=1)
    jobs = [sim.job(k, 2) for k in range(len(problem.clients))]
    uploads = sim.engine.train(method.broadcast(sim.server), jobs, 0.1).upload
    known = upload_names(type(method)(), problem) | uploads.keys()
    unknown = [entry for entry in method.averaged if entry not in known or entry == "n"]
    expect.true(not unknown, f"`averaged` names {', '.join(unknown)}, which is no entry of the upload or its weight")
    uploads = robust.with_equal_n(uploads)
    means = {entry: tree.map(lambda t: t.mean(0), uploads[entry]) for entry in robust.averaged(method, uploads)}
    cohort = Cohort(tuple(job.id for job in jobs), 2, 0)
    averaged = robust.with_mean(uploads, means, len(jobs))
    results = [method.aggregate(sim.task, sim.server, each, cohort) for each in (uploads, averaged)]
    what = "aggregate uses more of the entries in `averaged` than their mean"
    expect.same(results[0], results[1], what, tolerance=1e-10)


@check
def _needs_are_declared(method: FedAvg, problem: Problem, expect: Expect) -> None:
    """Sums that a loss tracks, and a model whose classifier is fixed, agree with `needs`; also where options differ."""
    fixed = models.build("mlp", problem.data.input_shape, problem.data.n_classes, head="etf")
    for one in (method, *(_with_test_value(method, field) for field in method.hyperparameters())):
        if one is method or one.needs != method.needs:
            unknown = ", ".join(one.needs.keys() - NEEDS.keys())
            expect.true(not unknown, f"`needs` names {unknown}; valid: {', '.join(NEEDS)}")
            sim = problem.simulation(one)
            shared, job = one.broadcast(sim.server), sim.job(5, 1)
            facts = tree.take(sim.local.facts([job.plan], job.counts[None], 0.1), 0)
            tracks = "tracked" in local_of(sim, shared, job, facts, sim.x, sim.y, n=8, pad=0)
            expect.true(tracks == ("whole_batches" in one.needs), "`tracked` and the need of whole_batches differ")
            both = "every_upload" in one.needs and "params" in one.averaged
            expect.true(not both, "it needs every_upload, and `averaged` says that the mean suffices")
            try:
                dataclasses.replace(problem, model=fixed).simulation(one)
                trained = True
            except MethodError:
                trained = False
            expect.true(trained != ("classifier" in one.needs), "a fixed classifier and the need of one differ")


@check
def _gradients_stay_where_correct_is_not_called(method: FedAvg, problem: Problem, expect: Expect) -> None:
    """Where `corrects` is False, `correct` returns the gradients as they are; also where an option decides."""
    for one in (method, *(_with_test_value(method, field) for field in method.hyperparameters())):
        if one.uses("correct") and not one.corrects:
            before, after = corrected(problem.simulation(one))
            expect.same(before, after, "`corrects` is False, but `correct` changes gradients", tolerance=0)


def _with_test_value(method: FedAvg, field: str) -> FedAvg:
    """Return the method with another value of this hyperparameter."""
    h = method.hyperparameters()[field]
    return method if h.test_value is None else dataclasses.replace(method, **{**_other_fields(h), field: h.test_value})


def _other_fields(h: Hyper) -> dict[str, Any]:
    """Return the values that other fields have where this hyperparameter is tested."""
    return {**{key: value for key, value in h.only_with.items() if key != "optimizer"}, **h.test_with}


# Hyperparameters


@check
def _fedavg_value_gives_fedavg(method: FedAvg, problem: Problem, expect: Expect) -> None:
    values = {f: h.fedavg_at for f, h in method.hyperparameters().items() if h.fedavg_at is not None}
    for field, value in values.items():
        params = problem.run(dataclasses.replace(method, **{field: value})).params
        expect.same(_trained(problem, _FEDAVG).params, params, f"at {field} = {value!r} it is not FedAvg")


@check
def _hyperparameters_change_the_weights(method: FedAvg, problem: Problem, expect: Expect) -> None:
    trained = {repr(method): _all_weights(_trained(problem, method))}  # most hyperparameters are compared with it

    def weights(of: FedAvg) -> Tree:
        if repr(of) not in trained:
            trained[repr(of)] = _all_weights(problem.run(of))
        return trained[repr(of)]

    for field, h in method.hyperparameters().items():
        expect.true(h.test_value is not None, f"{field} declares no test_value")
        base = dataclasses.replace(method, **_other_fields(h))
        changed = difference(weights(base), weights(dataclasses.replace(base, **{field: h.test_value}))) > CHANGED
        expect.true(changed, f"{field} = {h.test_value!r} changes nothing: is it used?")


@check
def _hyperparameters_without_effect_have_none(method: FedAvg, problem: Problem, expect: Expect) -> None:
    """Without what `only_with` names, another value gives the same weights."""
    for field, h in method.hyperparameters().items():
        optimizer = "adam" if "optimizer" in h.only_with else "sgd"
        if field not in method.without_effect(optimizer):
            continue
        other = dataclasses.replace(method, **{field: h.test_value})
        default, changed = (_all_weights(problem.run(one, optimizer=optimizer)) for one in (method, other))
        only = ", ".join(f"{key} = {value!r}" for key, value in h.only_with.items())
        expect.same(default, changed, f"{field} changes the weights without {only}, against its `only_with`")


def _all_weights(sim: Simulation) -> Tree:
    """Return the weights of the global model, and of one with a client's own."""
    visited = next(iter(sorted(sim.state.clients)), 0)
    return {"params": sim.params, "own": sim.personal_params(visited)}


@check
def _default_differs_from_fedavg(method: FedAvg, problem: Problem, expect: Expect) -> None:
    trains = [hook for hook in (*HOOKS, *method.passes) if hook not in ("personal_params", "init_client")]
    if any(method.uses(hook) for hook in trains if hasattr(FedAvg, hook)):
        changed = difference(_trained(problem, _FEDAVG).params, _trained(problem, method).params) > CHANGED
        expect.true(changed, "with its defaults it trains exactly as FedAvg does")


# Purity and structure


@check
def _client_states_are_separate(method: FedAvg, problem: Problem, expect: Expect) -> None:
    sim = _trained(problem, method, participation=1.0, rounds=2)
    states = sim.state.clients
    if not len(states):
        return
    expect.true(set(states) == set(range(len(problem.clients))), "a visited client's state is missing")
    places = [leaf.untyped_storage().data_ptr() for k in states for leaf in tree.leaves(states[k])]
    expect.true(len(set(places)) == len(places), "two clients' states share memory")
    large = [k for k in states if any(leaf.numel() > 1 for leaf in tree.leaves(states[k]))]
    distinct = all(difference(states[a], states[b]) > 1e-9 for a in large for b in large if a < b)
    expect.true(distinct, "two clients have the same state")


@check
def _checkpoints_hold_all_state(method: FedAvg, problem: Problem, expect: Expect) -> None:
    """Two rounds, through files into new objects, one more round: bit for bit the uninterrupted run."""
    whole = _trained(problem, method)
    with tempfile.TemporaryDirectory() as path:
        with RunFolder.create(Path(path), {"checkpoint_every": 1}) as folder:
            problem.simulation(method, rounds=2).attach(folder).run()
        with RunFolder.open(Path(path)) as folder:
            resumed = problem.simulation(method).attach(folder)
            resumed.run()
            a, b = whole.state.clients, resumed.state.clients
            expect.same(whole.server, resumed.server, "a resumed run ends with another server tree", tolerance=0)
            expect.true(set(a) == set(b), "a resumed run has states of other clients")
            for k in a:
                expect.same(a[k], b[k], f"the state of client {k} is another in a resumed run", tolerance=0)


@check
def _uploads_are_the_clients_own(method: FedAvg, problem: Problem, expect: Expect) -> None:
    sim = problem.simulation(method)
    upload = tree.take(sim.engine.train(method.broadcast(sim.server), [sim.job(5, 1)], 0.1).upload, 0)
    if "params" in upload:
        expect.true(difference(upload["params"], sim.task.init) > 0, "the uploaded weights are untrained")
    if "n" in upload:
        own = float(upload["n"]) == len(problem.clients[5])
        expect.true(own, "`n` is not the client's number of examples")


@check
def _honest_uploads_keep_their_bounds(method: FedAvg, problem: Problem, expect: Expect) -> None:
    names = upload_names(type(method)(), problem) | upload_names(method, problem)
    unknown = method.bounds.keys() - FedAvg.bounds.keys() - names
    expect.true(not unknown, f"bounds are declared for {sorted(unknown)}, which no client uploads")
    for changes in ({"dtype": "float64"}, {"dtype": "float32"}, {"drop_last": True}):
        for sim, received in received_uploads(method, problem, participation=1.0, **changes):
            broken = broken_bound(method.bounds, received)
            what = f"{broken[0]} {broken[1].reason}" if broken else ""
            expect.true(broken is None, f"an honest upload breaks a bound: {what}")
            form = tree.spec(upload_form(method, sim.task, received.server))
            expect.true(form == tree.spec(received.upload), "the form of its upload depends on the data")


@check
def _teachers_are_in_evaluation_mode(method: FedAvg, problem: Problem, expect: Expect) -> None:
    sim = dataclasses.replace(problem, model=WithDropout()).simulation(method)
    sim.step()
    shared, job = method.broadcast(sim.server), sim.job(5, 2)
    facts = tree.take(sim.local.facts([job.plan], job.counts[None], 0.1), 0)
    results = []
    for seed in (1, 2):
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(seed)
            local = local_of(sim, shared, job, facts, sim.x, sim.y, n=8, pad=0)
            results.append({"local": local, "note": sim.local.hooks.annotate(shared, local, sim.x[:8], sim.y[:8])})
    what = "prepare, refine or annotate depends on dropout: apply the model without train=True"
    expect.same(results[0], results[1], what, tolerance=0)


@check
def _hard_clients_are_trained(method: FedAvg, problem: Problem, expect: Expect) -> None:
    """One-class clients, a class nobody has, a single client, a client without examples."""
    y = problem.data.y_train.numpy()
    one_class = [np.flatnonzero(y == c) for c in (0, 1, 3)]
    settings = {**problem.settings, "participation": 1.0, "lr": 0.03}  # losses quadratic in logits need small steps
    for clients in (one_class, [*one_class, np.array([], dtype=int)], [np.arange(len(y))], [np.array([0])]):
        sim = dataclasses.replace(problem, clients=clients, settings=settings).run(copy.copy(method))
        finite = all(bool(t.isfinite().all()) for t in tree.leaves(sim.server))
        expect.true(finite, "the server's tree is NaN or infinite")
        learned = difference(sim.task.init, sim.params) > CHANGED
        expect.true(learned, "the weights did not change")


@check
def _personal_params_are_usable(method: FedAvg, problem: Problem, expect: Expect) -> None:
    sim = _trained(problem, method)
    visited = next(iter(sorted(sim.state.clients)), 0)
    new = next((k for k in range(len(problem.clients)) if k not in sim.state.clients), 0)
    for client in (visited, new):
        logits = sim.task.apply(sim.personal_params(client), sim.x_test)
        finite = bool(logits.isfinite().all())
        expect.true(finite, f"client {client}'s own model gives NaN or infinity")


def _memory(value: Tree) -> set[int]:
    return {leaf.untyped_storage().data_ptr() for leaf in tree.leaves(value)}
