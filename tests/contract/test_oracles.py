"""Every method against a plain torch loop of its paper's formulas, written without fedkeep's code."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

import numpy as np
import pytest
import torch
from oracles.fedntd import FedNTDOracle
from support.problems import Problem, gap

import fedkeep as fk
from fedkeep import tree

ORACLES = {name: importlib.import_module(f"oracles.{name}") for name in fk.methods.REGISTRY}
CASES = [(name, hyper) for name, module in ORACLES.items() for hyper in module.CASES]


def test_every_hyperparameter_is_in_some_case() -> None:
    for name, module in ORACLES.items():
        cases = {key for case in module.CASES for key in case}
        assert cases == set(fk.methods.REGISTRY[name].hyperparameters()), name


@pytest.fixture(scope="module")
def oracle_params(problem: Problem) -> Callable[[int], tree.Tree]:
    """Return the weights of an oracle after three rounds, trained once for both engines."""

    @functools.cache
    def train(case: int) -> tree.Tree:
        name, hyper = CASES[case]
        return ORACLES[name].ORACLE(problem, **hyper).run(3)

    return train


@pytest.mark.parametrize(
    ("case", "engine"),
    [
        pytest.param(case, engine, id=f"{engine}-{name} {hyper}")
        for case, (name, hyper) in enumerate(CASES)
        for engine in ("loop", "stacked")
    ],
)
def test_three_rounds_equal_the_oracle(
    problem: Problem, oracle_params: Callable[[int], tree.Tree], case: int, engine: str
) -> None:
    name, hyper = CASES[case]
    assert gap(oracle_params(case), problem.run(fk.methods.get(name)(**hyper), engine=engine).params) < 1e-10


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_personal_heads_of_fedrod_equal_the_oracle(problem: Problem, engine: str) -> None:
    oracle = ORACLES["fedrod"].ORACLE(problem, gamma=1.0, personal_head=True)
    oracle.run(3)
    sim, generic = (problem.run(fk.methods.FedRoD(personal_head=own), engine=engine) for own in (True, False))
    assert gap(generic.params, sim.params) == 0, "the generic model is the same, bit for bit"
    assert set(oracle.heads) == set(sim.state.clients)
    for k in oracle.heads:
        own = sim.task.apply(sim.personal_params(k), sim.x_test)
        assert gap({"z": oracle.personal_logits(k, sim.x_test)}, {"z": own}) < 1e-10
        assert gap({"z": own}, {"z": sim.task.apply(sim.params, sim.x_test)}) > 1e-3
    new = problem.simulation(sim.method)
    assert gap(new.personal_params(0), new.params) == 0, "before its first visit a client uses the generic model"


def test_one_local_training_of_fedntd_equals_plain_torch(problem: Problem) -> None:
    """The paper's formula and `torch.optim.SGD`, to 1e-12."""
    oracle = FedNTDOracle(problem, beta=1.0, tau=1.0).train(k=5, number=1)
    sim = problem.simulation(fk.methods.FedNTD(beta=1.0, tau=1.0))
    shared = sim.method.broadcast(sim.server)
    at = problem.clients[5]
    ours = sim.local.train_one(shared, {}, sim.x[at], sim.y[at], sim.job(5, 1).plan, lr=0.1)
    assert gap({n: p.detach() for n, p in oracle.named_parameters()}, ours.params) < 1e-12


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_optimisers_equal_torch(name: str, momentum: float) -> None:
    rng = torch.Generator().manual_seed(0)
    w = {
        "a": torch.randn(3, generator=rng, dtype=torch.float64),
        "b": torch.randn(2, 2, generator=rng, dtype=torch.float64),
    }
    theirs = [p.clone().requires_grad_() for p in w.values()]
    if name == "sgd":
        reference = torch.optim.SGD(theirs, 0.1, momentum=momentum, weight_decay=0.01)
    else:
        kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name]
        reference = kind(theirs, 0.1, betas=(momentum, 0.999), weight_decay=0.01)
    ours = fk.optim.make(name, momentum, weight_decay=0.01)
    state = ours.init(w)
    for _ in range(5):
        grads = {k: torch.randn(v.shape, generator=rng, dtype=torch.float64) for k, v in w.items()}
        for p, g in zip(theirs, grads.values(), strict=True):
            p.grad = g
        reference.step()
        w, state = ours.update(grads, state, w, 0.1)
    assert gap(dict(zip(w, [p.detach() for p in theirs], strict=True)), w) < 1e-12


@pytest.mark.parametrize("stacked", [False, True], ids=["one", "stacked"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_optimisers_in_place_are_their_formulas(name: str, momentum: float, stacked: bool) -> None:
    """In float32, with gradients laid out otherwise than the weights."""
    rng = torch.Generator().manual_seed(0)
    optimizer = fk.optim.make(name, momentum, weight_decay=0.01)
    over = torch.vmap if stacked else lambda fn: fn
    w = {"a": torch.randn(2, 3, generator=rng), "b": torch.randn(2, 4, 5, generator=rng)}
    state = over(optimizer.init)(w)
    mine, kept = tree.map(torch.clone, w), tree.map(torch.clone, state)
    for _ in range(5):
        grads = {"a": torch.randn(2, 3, generator=rng), "b": torch.randn(2, 5, 4, generator=rng).mT}
        w, state = over(lambda g, s, w: optimizer.update(g, s, w, 0.1))(grads, state, w)
        optimizer.update_(grads, kept, mine, 0.1)
    assert gap(w, mine) < 1e-5
    assert gap(state, kept) < 1e-5


@pytest.mark.parametrize("name", ["adam", "adamw"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_adam_learns_in_half_precision(dtype: torch.dtype, name: str) -> None:
    """Its moments and its counter are float32: in bfloat16 0.999 is 1, in float16 1e-8 is 0."""
    adam, w = fk.optim.make(name, 0.9, weight_decay=0.01), {"w": torch.ones(3, dtype=dtype)}
    state = adam.init(w)
    for _ in range(20):
        w, state = adam.update({"w": 2 * w["w"]}, state, w, 0.1)
    assert w["w"].dtype == dtype
    assert float(w["w"].abs().max()) < 0.5


def test_effective_steps_are_the_displacement_of_a_constant_gradient() -> None:
    for momentum in (0.0, 0.5, 0.9):
        sgd = fk.optim.SGD(momentum)
        w, g = {"w": torch.zeros(1, dtype=torch.float64)}, {"w": torch.ones(1, dtype=torch.float64)}
        state = sgd.init(w)
        for t in range(1, 30):
            w, state = sgd.update(g, state, w, 0.5)
            assert sgd.effective_steps(t) == pytest.approx(-float(w["w"]) / 0.5, rel=1e-12)
    assert np.isclose(fk.optim.Adam().effective_steps(7), 7)
