"""The contract: every method, and two more that use every hook, against every check of `fedkeep.testing.CHECKS`.

Each check was written against a fault found in published code: a loss without gradient, an alias of the server's
tensors, a default that silences the method, a hook that is never called, state that is lost or shared.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from support.errors import raises
from support.methods import METHODS, SAM, EveryHook, quick
from support.problems import Problem, gap

from fedkeep import tree
from fedkeep.errors import MethodError
from fedkeep.method import HOOKS, FedAvg, hyper
from fedkeep.methods import GCFed
from fedkeep.testing import CHECKS, check_method

INSTANCES = {name: quick(name) for name in METHODS}  # one each: checks share the runs of an instance


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", METHODS)
def test_methods_keep_the_contract(problem: Problem, name: str, check: str) -> None:
    CHECKS[check](INSTANCES[name], problem)


@pytest.mark.parametrize("name", sorted(METHODS.keys() - {"moon"}))
def test_a_visit_changes_the_clients_state(problem: Problem, name: str) -> None:
    sim = problem.finished(INSTANCES[name], participation=1.0, rounds=2, eval_local_every=1)  # as the checks do
    new = sim.method.init_client(sim.task, sim.params)
    assert all(gap(new, sim.state.clients[k]) > 1e-9 for k in sim.state.clients)


def test_every_hook_is_used_by_a_test_method() -> None:
    assert [hook for hook in HOOKS if not EveryHook.uses(hook)] == []
    not_hooks = {"name", "uses", "hyperparameters", "defaults", "values_before", "without_effect", "to_dict"}
    public = [n for n in vars(FedAvg) if not n.startswith("_") and callable(getattr(FedAvg, n)) and n not in not_hooks]
    assert set(public) == set(HOOKS)


def test_personal_params_of_a_visited_client_are_its_own(problem: Problem) -> None:
    sim = problem.run(EveryHook())
    assert gap(sim.params, sim.personal_params(next(iter(sim.state.clients)))) > 1e-6


# The checks find what they should


class Unmasked(FedAvg):
    def loss(self, visit, params, batch):
        return visit.task.criterion(visit.task.apply(params, batch["x"], train=True), batch["y"]).mean()


class Writing(FedAvg):
    def prepare(self, visit):
        visit.shared["params"]["classifier.bias"].add_(0.1)
        return {}


class Random(FedAvg):
    def correct(self, visit, params, grads):
        return tree.map(lambda g: g + torch.tensor(float(torch.rand(1, generator=RNG))), grads)


RNG = torch.Generator().manual_seed(0)


class Growing(FedAvg):
    def aggregate(self, task, server, uploads, cohort):
        return {**super().aggregate(task, server, uploads, cohort), str(cohort.round): torch.zeros(1)}


class TeacherInTraining(FedAvg):
    def annotate(self, visit, x, y):
        return {"z": visit.task.apply(visit.shared["params"], x, train=True)}


class WritingGradients(FedAvg):
    def correct(self, visit, params, grads):
        for g in tree.leaves(grads):
            g.mul_(0.5)
        return grads


class WritingWeights(FedAvg):
    def correct(self, visit, params, grads):
        for w in tree.leaves(params):
            w.mul_(0.999)
        return grads


class WritingBatch(FedAvg):
    def loss(self, visit, params, batch):
        batch["x"].mul_(0.5)
        return super().loss(visit, params, batch)


class WritingAtTheStart(FedAvg):
    def init_server(self, task, params):
        params["classifier.bias"].add_(0.1)
        return super().init_server(task, params)


class WritingInBroadcast(FedAvg):
    def broadcast(self, server):
        server["params"]["classifier.bias"].add_(0.1)
        return super().broadcast(server)


class AddingInBroadcast(FedAvg):
    def broadcast(self, server):
        server["sent"] = torch.ones(1)
        return super().broadcast(server)


class WritingInAggregate(FedAvg):
    def aggregate(self, task, server, uploads, cohort):
        server["params"]["classifier.bias"].add_(1)
        return super().aggregate(task, server, uploads, cohort)


class WritingUploads(FedAvg):
    def aggregate(self, task, server, uploads, cohort):
        uploads["n"].mul_(2)
        return super().aggregate(task, server, uploads, cohort)


class Remembering(FedAvg):
    def init_client(self, task, params):
        return {"last": torch.zeros(2, dtype=task.dtype)}


class Aliasing(FedAvg):
    def aggregate(self, task, server, uploads, cohort):
        return server


@dataclass(frozen=True)
class Unused(FedAvg):
    mu: float = hyper(0.1, "nothing", test_value=1.0)


@dataclass(frozen=True)
class NotFedAvg(FedAvg):
    mu: float = hyper(0.1, "a shift", fedavg_at=0.0)

    def aggregate(self, task, server, uploads, cohort):
        averaged = super().aggregate(task, server, uploads, cohort)
        return {"params": tree.map(lambda w: w + 0.1 + self.mu, averaged["params"])}


@dataclass(frozen=True)
class Unchecked(FedAvg):
    mu: float = hyper(0.1, "anything", choices=(0.1, "1"))


class Silent(FedAvg):
    def loss(self, visit, params, batch):
        return super().loss(visit, params, batch)


class WeighsClients(FedAvg):
    averaged = ("params",)

    def finish(self, visit, params, measured):
        return {"params": params, "n": visit.facts["n"], "tau": visit.facts["steps"]}, visit.client

    def aggregate(self, task, server, uploads, cohort):
        return {"params": tree.mean(uploads["params"], uploads["n"] * uploads["tau"])}


@dataclass(frozen=True)
class WeighsWithAnOption(WeighsClients):
    wrong: bool = hyper(False, "declare that it averages", choices=(True, False), test_value=True)

    @property
    def averaged(self):
        return ("params",) if self.wrong else ()


class TracksUndeclared(FedAvg):
    def prepare(self, visit):
        return {"tracked": {"steps": torch.zeros_like(visit.facts["lr"])}}

    def loss(self, visit, params, batch):
        return super().loss(visit, params, batch), {"steps": torch.ones_like(visit.facts["lr"])}


class NeedsNoClassifier(FedAvg):
    needs: ClassVar[dict[str, str]] = {"classifier": ""}


class NeedsEveryUpload(FedAvg):
    needs: ClassVar[dict[str, str]] = {"every_upload": ""}


@dataclass(frozen=True)
class UsesPushWithAdam(FedAvg):
    push: float = hyper(0.0, "a shift of the gradient", test_value=1.0, only_with={"optimizer": "sgd"})

    def correct(self, visit, params, grads):
        return tree.map(lambda g: g + self.push, grads)


@dataclass(frozen=True)
class UsesBothAlways(FedAvg):
    on: bool = hyper(False, "a switch", choices=(True, False), test_value=True)
    shift: float = hyper(0.1, "a shift of the gradient", test_value=1.0, only_with={"on": True})

    def correct(self, visit, params, grads):
        return tree.map(lambda g: g + self.shift * (2 if self.on else 1), grads)


class CorrectsUncalled(FedAvg):
    corrects = False

    def correct(self, visit, params, grads):
        return tree.map(lambda g: 2 * g, grads)


class AveragesUnknown(FedAvg):
    averaged = ("params", "dc")


@pytest.mark.parametrize(
    ("method", "check"),
    [
        (Unmasked(), "stacked_equals_loop"),
        (Unmasked(), "padding_does_not_matter"),
        (Writing(), "arguments_stay_unchanged"),
        (WritingGradients(), "arguments_stay_unchanged"),
        (WritingWeights(), "arguments_stay_unchanged"),
        (WritingBatch(), "arguments_stay_unchanged"),
        (WritingAtTheStart(), "arguments_stay_unchanged"),
        (WritingInBroadcast(), "arguments_stay_unchanged"),
        (AddingInBroadcast(), "arguments_stay_unchanged"),
        (WritingInAggregate(), "arguments_stay_unchanged"),
        (WritingUploads(), "arguments_stay_unchanged"),
        (Random(), "stacked_equals_loop"),
        (Random(), "runs_are_reproducible"),
        (Growing(), "trees_keep_their_shapes"),
        (TeacherInTraining(), "teachers_are_in_evaluation_mode"),
        (Remembering(), "client_states_are_separate"),
        (Aliasing(), "arguments_stay_unchanged"),
        (Aliasing(), "hard_clients_are_trained"),
        (Unused(), "hyperparameters_change_the_weights"),
        (NotFedAvg(), "fedavg_value_gives_fedavg"),
        (Unchecked(), "hyperparameters_reject_nonsense"),
        (Silent(), "default_differs_from_fedavg"),
        (WeighsClients(), "averaged_entries_are_averaged"),
        (WeighsWithAnOption(), "averaged_entries_are_averaged"),
        (TracksUndeclared(), "needs_are_declared"),
        (NeedsNoClassifier(), "needs_are_declared"),
        (AveragesUnknown(), "averaged_entries_are_averaged"),
        (NeedsEveryUpload(), "needs_are_declared"),
        (CorrectsUncalled(), "gradients_stay_where_correct_is_not_called"),
        (UsesPushWithAdam(), "hyperparameters_without_effect_have_none"),
        (UsesBothAlways(), "hyperparameters_without_effect_have_none"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_broken_rule_is_found_and_named(method: FedAvg, check: str) -> None:
    with raises(MethodError, key=check):
        check_method(method, only=[check])


@pytest.mark.parametrize("name", ["feddf", "fedexp", "fedfomo", "fedkeep", "fednova", "fedpac", "fedvarp", "flashback"])
def test_methods_that_declare_nothing_do_more_than_average(problem: Problem, name: str) -> None:
    declared = type(name, (METHODS[name],), {"averaged": ("params",), "name": name})
    with raises(MethodError, key="averaged_entries_are_averaged"):
        CHECKS["averaged_entries_are_averaged"](declared(), problem)


def test_hyperparameters_without_bounds_may_be_negative() -> None:
    @dataclass(frozen=True)
    class Signed(FedAvg):
        mu: float = hyper(0.1, "a shift", test_value=-0.1)

    check_method(Signed(), only=["hyperparameters_reject_nonsense"])


def test_causes_are_checked_before_their_effects() -> None:
    for method in (WritingBatch(), Writing()):
        with raises(MethodError, key="arguments_stay_unchanged"):
            check_method(method)


def test_check_method_runs_all_checks_or_those_named() -> None:
    with raises(MethodError, key="method", value="fedntd"):
        check_method("fedntd")
    with raises(MethodError, key="default_differs_from_fedavg"):
        check_method(Silent())
    check_method(Silent(), only=["stacked_equals_loop"])
    with raises(Exception, key="only", value="stacked_equals_lop", valid=["stacked_equals_loop"]):
        check_method(Silent(), only=["stacked_equals_lop"])


# Hooks


def test_a_loss_without_gradient_is_rejected(problem: Problem) -> None:
    class NoGradient(FedAvg):
        def loss(self, visit, params, batch):
            with torch.no_grad():
                return super().loss(visit, params, batch)

    for engine in ("loop", "stacked"):
        with raises(MethodError, key="loss"):
            problem.run(NoGradient(), engine=engine)


def test_a_loss_of_several_numbers_is_rejected(problem: Problem) -> None:
    class Several(FedAvg):
        def loss(self, visit, params, batch):
            return visit.task.criterion(visit.task.apply(params, batch["x"], train=True), batch["y"])

    with raises(MethodError, key="loss"):
        problem.run(Several())


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("sums", [None, {}, {"n": torch.zeros(3).double()}, {"n": torch.zeros(2)}, "other"], ids=str)
def test_sums_that_are_not_those_of_prepare_are_rejected(problem: Problem, sums, engine: str) -> None:
    class Tracking(FedAvg):
        def prepare(self, visit):
            return {} if sums == "other" else {"tracked": {"n": torch.zeros(2).double()}}

        def loss(self, visit, params, batch):
            loss = super().loss(visit, params, batch)
            return loss if sums is None else (loss, {"n": torch.zeros(2).double()} if sums == "other" else sums)

    with raises(MethodError, key="loss"):
        problem.run(Tracking(), engine=engine)


def test_an_error_names_stage_and_client(problem: Problem) -> None:
    class Broken(FedAvg):
        name: ClassVar[str] = "broken"

        def finish(self, visit, params, measured):
            raise KeyError("oops")

    with pytest.raises(KeyError) as caught:
        problem.run(Broken())
    notes = " ".join(caught.value.__notes__)
    first = problem.simulation(Broken()).planner.cohort(1)[0][0]
    assert all(part in notes for part in ("finish", "broken", f"client {first}"))


@pytest.mark.parametrize(
    ("hook", "part"),
    [
        ("prepare", "local"),
        ("annotate", "sent"),
        ("loss", "sent"),
        ("annotate", "client"),
        ("annotate", "facts"),
        ("rehearse", "facts"),
        ("select_examples", "client"),
        ("loss", "client"),
        ("correct", "client"),
        ("measure", "client"),
        ("personal_params", "facts"),
    ],
)
@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_a_hook_cannot_read_what_it_may_not_see(problem: Problem, hook: str, part: str, engine: str) -> None:
    def peek(self, visit, *args):
        getattr(visit, part)
        return getattr(FedAvg, hook)(self, visit, *args)

    method = type("Peeking", (FedAvg,), {hook: peek})()
    with raises(MethodError, key=f"visit.{part}", value=hook):
        problem.run(method, engine=engine).personal_params(0)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("loss", "task, params, batch, shared, local"),
        ("correct", "grads, params, shared, local"),
        ("prepare", "task, shared, client, facts"),
        ("start", "shared, client"),
        ("annotate", "task, shared, local, x, y"),
        ("finish", "shared, params, local, client, facts, measured"),
        ("measure", "task, params, batch, shared, local"),
        ("draw", "task, shared, facts, y, valid, noise, note"),
        ("personal", "shared, client"),
        ("broadcast", "server, cohort"),
    ],
)
def test_old_signatures_fail_when_the_class_is_made(name: str, arguments: str) -> None:
    function = eval(f"lambda self, {arguments}: None")
    with raises(MethodError, key=name):
        type("Old", (FedAvg,), {name: function})


def test_reserved_names_fail_when_the_class_is_made() -> None:
    with raises(MethodError, key="update_client_record"):
        type("Early", (FedAvg,), {"update_client_record": lambda self, server, client: {}})


def test_a_name_close_to_a_hooks_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    type("Misspelt", (FedAvg,), {"anotate": lambda self, visit, x, y: {}})
    assert "anotate" in caplog.text
    assert "annotate" in caplog.text
    caplog.clear()
    type("Declares", (FedAvg,), {"corrects": False, "correct": lambda self, visit, params, grads: grads})
    assert not caplog.text


class SentInOtherForms(FedAvg):
    reveals = "nothing"

    def broadcast_to(self, server, client):
        return {"own": torch.zeros(1 + client)}


class RefiningPadding(FedAvg):
    def prepare(self, visit):
        return {"seen": torch.zeros_like(visit.facts["n"])}

    def refine(self, visit, batch):
        return {"seen": visit.local["seen"] + len(batch["y"])}


@pytest.mark.parametrize(
    ("method", "check"),
    [(SentInOtherForms(), "trees_keep_their_shapes"), (RefiningPadding(), "padding_does_not_matter")],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_broken_rules_before_training_are_found_and_named(method: FedAvg, check: str) -> None:
    with raises(MethodError, key=check):
        check_method(method, only=[check])


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize(
    ("hook", "function"),
    [
        ("broadcast_to", lambda self, server, client: torch.zeros(1)),
        ("broadcast_to", lambda self, server, client: {"id": client}),
        ("refine", lambda self, visit, batch: {"other": torch.zeros(1)}),
        ("frozen", lambda self, task: ["no such weight"]),
        ("frozen", lambda self, task: list(task.init)),
        ("centred_weights", lambda self, task: ["no such weight"]),
        ("centred_weights", lambda self, task: "classifier.weight"),
        ("centred_weights", lambda self, task: None),
        ("frozen", lambda self, task: [0, "classifier.weight"]),
    ],
    ids=["tensor", "number", "another form", "unknown", "all", "centred unknown", "text", "nothing", "a number"],
)
def test_a_wrong_result_of_a_hook_before_training_raises(problem: Problem, hook: str, function, engine: str) -> None:
    with raises(MethodError, key=hook):
        problem.run(type("Wrong", (FedAvg,), {hook: function, "reveals": "nothing"})(), engine=engine)


class CentresAndShifts(FedAvg):
    def centred_weights(self, task):
        return list(task.init)

    def correct(self, visit, params, grads):
        return tree.map(lambda g: g + 1, grads)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_gradients_are_centred_then_corrected(problem: Problem, engine: str) -> None:
    """All that is left of a row's mean is the shift of 1, once in each of one client's steps."""
    settings = {"epochs": 1, "momentum": 0.0, "weight_decay": 0.0, "engine": engine}
    sim = problem.simulation(CentresAndShifts(), **settings)
    job = sim.job(5, 1)
    trained = sim.engine.train({"params": sim.params}, [job], 0.1).params
    for name, w in sim.params.items():
        if w.ndim == 2:
            assert torch.allclose((trained[name][0] - w).mean(1), torch.tensor(-0.1 * job.plan.steps).double())


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("method", [CentresAndShifts(), GCFed(form="local")], ids=["corrected", "centred"])
def test_gradients_are_clipped_last(problem: Problem, method: FedAvg, engine: str) -> None:
    """The step of a clipped gradient is as long as the norm allows."""
    settings = {"epochs": 1, "batch_size": 50, "momentum": 0.0, "weight_decay": 0.0, "clip_norm": 0.01}
    sim = problem.simulation(method, **settings, engine=engine)
    trained = tree.take(sim.engine.train({"params": sim.params}, [sim.job(5, 1)], 0.1).params, 0)
    step = tree.sub(trained, sim.params)
    assert tree.dot(step, step).sqrt().item() == pytest.approx(0.1 * 0.01, rel=1e-3)


def test_a_method_with_correct_corrects_whatever_its_parent_declares() -> None:
    class Doubled(GCFed):
        def correct(self, visit, params, grads):
            return tree.map(lambda g: 2 * g, grads)

    assert Doubled().corrects
    assert not GCFed().corrects


def test_what_is_sent_to_one_client_must_be_explained() -> None:
    with raises(MethodError, key="reveals"):
        type("Silent", (FedAvg,), {"broadcast_to": lambda self, server, client: {}})


def test_refined_needs_refine() -> None:
    with raises(MethodError, key="refined"):
        type("Waiting", (FedAvg,), {"refined": lambda self, visit, passes: passes > 2})


class Selecting(FedAvg):
    """Up to four random own examples; padding has weight 0, as docs/contract.md shows."""

    def select_examples(self, visit, y, valid, noise, note):
        index = torch.where(valid, noise, -1).topk(4).indices
        return index, valid[index].to(noise.dtype)

    def loss(self, visit, params, batch):
        selected = batch["selected"]
        z = visit.task.apply(params, selected["x"], train=True)
        own = (selected["weight"] * visit.task.criterion(z, selected["y"])).sum() / selected["weight"].sum()
        return super().loss(visit, params, batch) + own


def test_a_selection_may_name_padding_with_weight_0(problem: Problem) -> None:
    """Clients have at least three examples here, the selection four places: the stacked engine pads."""
    loop_sizes = [len(own) for own in problem.clients]
    assert min(loop_sizes) == 3
    larger = dataclasses.replace(problem, clients=[own for own in problem.clients if len(own) > 3])
    CHECKS["stacked_equals_loop"](Selecting(), larger)
    sim = problem.simulation(Selecting(), engine="stacked", participation=1.0)
    sim.run()
    assert all(bool(w.isfinite().all()) for w in tree.leaves(sim.params))


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize(
    ("hook", "function"),
    [
        ("select_examples", lambda self, visit, y, valid, noise, note: (noise < 0.1, valid.to(noise.dtype))),
        ("select_examples", lambda self, visit, y, valid, noise, note: noise.topk(1).indices),
        ("select_examples", lambda self, visit, y, valid, noise, note: (noise.topk(2).indices, noise[:1])),
        ("finish", lambda self, visit, params, measured: {"params": params, "n": visit.facts["n"]}),
    ],
    ids=["mask", "index alone", "other number of weights", "upload alone"],
)
def test_a_wrong_result_of_a_client_hook_raises(problem: Problem, hook: str, function, engine: str) -> None:
    with raises(MethodError, key=hook):
        problem.run(type("Wrong", (FedAvg,), {hook: function})(), engine=engine)


def test_a_method_that_is_not_a_dataclass_raises() -> None:
    class Undecorated(FedAvg):
        mu: float = hyper(0.1, "a weight")

    with raises(MethodError, key="undecorated"):
        Undecorated()


# Several gradients per step


@pytest.mark.parametrize(
    ("passes", "hooks"),
    [
        (("ascent",), {"ascent": lambda self, visit, params, batch: 0}),
        (("loss", "loss"), {}),
        (("loss", "missing"), {}),
        (("ascent", "loss"), {"ascent": lambda self, visit, params: 0}),
        (("ascent", "loss"), {"ascent": lambda self, visit, params, batch: 0}),
    ],
    ids=["without loss", "twice", "no such hook", "wrong arguments", "gradient unused"],
)
def test_wrong_passes_fail_when_the_class_is_made(passes: tuple[str, ...], hooks: dict) -> None:
    with pytest.raises(MethodError):
        type("Wrong", (FedAvg,), {"passes": passes, **hooks})


def test_hooks_of_several_passes_need_several_passes() -> None:
    with raises(MethodError, key="combine_gradients"):
        type("Single", (FedAvg,), {"combine_gradients": lambda self, visit, params, grads: grads["loss"]})


def test_combined_gradients_must_be_one_gradient(problem: Problem) -> None:
    class All(SAM):
        def combine_gradients(self, visit, params, grads):
            return grads

    with raises(MethodError, key="combine_gradients"):
        problem.run(All())


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_two_gradients_per_step_equal_plain_torch(problem: Problem, engine: str) -> None:
    """SAM's two passes, against torch.optim.SGD and the paper's formula, over one client's whole visit."""
    sim = problem.simulation(SAM(rho=0.1), engine=engine)
    job, at = sim.job(5, 1), problem.clients[5]
    ours = sim.engine.train(sim.method.broadcast(sim.server), [job], 0.1)
    model = sim.task.module(sim.task.init).train()
    names, weights = zip(*model.named_parameters(), strict=True)
    s = problem.settings
    optimizer = torch.optim.SGD(weights, 0.1, momentum=s["momentum"], weight_decay=s["weight_decay"])
    for index, size in zip(job.plan.index, job.plan.size, strict=True):
        x, y = sim.x[at[index[:size]]], sim.y[at[index[:size]]]
        loss = torch.nn.functional.cross_entropy(model(x), y)
        ascent = torch.autograd.grad(loss, weights)
        scale = 0.1 / torch.sqrt(sum((g**2).sum() for g in ascent))
        with torch.no_grad():
            for w, g in zip(weights, ascent, strict=True):
                w += scale * g
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for w, g in zip(weights, ascent, strict=True):
                w -= scale * g
        optimizer.step()
    trained = {name: w.detach() for name, w in zip(names, weights, strict=True)}
    assert gap(trained, tree.take(ours.params, 0)) < 1e-10
