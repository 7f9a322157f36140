"""BatchNorm: frozen, or by the statistics of the batch without its padding; the engines agree with plain torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batch_norm import Net, problem
from support.errors import raises
from support.problems import gap, same
from torch import Tensor, nn

import fedkeep as fk
from fedkeep import losses, models, tree
from fedkeep._util.batch_norm import batch_statistics, masked_batch_norm, real_examples
from fedkeep.data.plan import make_plan
from fedkeep.engine import replay
from fedkeep.engine.distributed import Ranks
from fedkeep.engine.evaluate import EVAL_BATCH, Evaluator
from fedkeep.engine.gpu.deferred import Deferred, Pending
from fedkeep.engine.gpu.layers import use_kernels, vmap_with_kernels
from fedkeep.engine.mapping import call_one, map_clients
from fedkeep.engine.scores import Scorer
from fedkeep.engine.setup import image_size
from fedkeep.errors import MethodError, ModelError
from fedkeep.method import FedAvg

CARRIED = [
    "fedavg", "fedavgm", "feddyn", "fedcm", "fedacg", "fedvarp", "fedexp", "fedinit", "fedsam", "fedsol", "fedgkd",
    "fednova", "fedntd", "fedlmd", "gcfed", "fedrs", "fedlc", "fedvls", "fedrod", "feddecorr", "fedprox", "moon",
    "scaffold", "feddistill", "fedgen", "fedalign", "fedkeep",
]  # fmt: skip


@pytest.mark.parametrize("name", CARRIED)
def test_stacked_equals_loop(name: str) -> None:
    loop, stacked = (problem().run(fk.methods.get(name)(), engine=engine) for engine in ("loop", "stacked"))
    assert gap(loop.server, stacked.server) < 1e-10
    assert loop.history.accuracy.tolist() == stacked.history.accuracy.tolist()


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("method", [fk.methods.FedAvg(), fk.methods.FedNTD(beta=0.7, tau=2.0)], ids=lambda m: m.name)
def test_training_is_that_of_plain_torch_on_batches_without_padding(method: Any, engine: str) -> None:
    """FedNTD's teacher sees the batch that the student sees, as in the released code."""
    given_problem = problem()
    simulation = given_problem.run(method, engine=engine)
    s, data = simulation.settings, given_problem.data
    weights = {name: p.detach().double() for name, p in given_problem.model.named_parameters()}
    for number in range(1, s.rounds + 1):
        trained, sizes = [], []
        for client, own in enumerate(given_problem.clients):
            own = torch.as_tensor(own)
            model, teacher = (Net(track_running_stats=False).double() for _ in range(2))
            model.load_state_dict(weights)
            teacher.load_state_dict(weights)
            rate = s.lr_in(number)
            optimizer = torch.optim.SGD(model.parameters(), rate, s.momentum, weight_decay=s.weight_decay)
            plan = make_plan(s.seed, number, client, len(own), s.epochs, s.batch_size, None, image_size(data, s))
            for index, size in zip(plan.index, plan.size, strict=True):
                at = own[index[:size]]
                x, y = simulation.eval_inputs(data.x_train[at]), data.y_train[at]
                if size == 1:  # which torch refuses in BatchNorm1d: the only value of a channel is its mean
                    model.second = teacher.second = _Zero()
                z = model(x)
                loss = F.cross_entropy(z, y)
                if isinstance(method, fk.methods.FedNTD):
                    loss = loss + method.beta * losses.not_true_kl(z, teacher(x).detach(), y, method.tau).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                model.second = teacher.second = nn.BatchNorm1d(6, affine=False, track_running_stats=False)
            trained.append({name: p.detach() for name, p in model.named_parameters()})
            sizes.append(len(own))
        share = torch.tensor(sizes, dtype=torch.float64) / sum(sizes)
        weights = {name: sum(w * one[name] for w, one in zip(share, trained, strict=True)) for name in weights}
    assert gap(simulation.params, weights) < 1e-10


class _Zero(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 0


def test_the_padding_has_no_influence() -> None:
    """A client that is stacked alone has no padding but in the last batch of an epoch; with others, it has more."""
    alone, together = (problem().run(fk.methods.FedAvg(), engine="stacked", at_once=n) for n in (1, None))
    assert gap(alone.params, together.params) < 1e-10


def test_steps_are_recorded_and_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MIN_USES", 1)
    norm = nn.BatchNorm1d(8, track_running_stats=False)
    dense = problem(nn.Sequential(nn.Flatten(), nn.Linear(16, 8), norm, nn.ReLU(), nn.Linear(8, 4)))
    replayed = dense.run(fk.methods.FedNTD(), engine="stacked", rounds=4)
    assert replayed.engine.replay.works
    assert all(recorded is not None for recorded in replayed.engine.replay.recordings.values())
    assert max(recorded.uses for recorded in replayed.engine.replay.recordings.values()) >= 4
    plain = dense.simulation(fk.methods.FedNTD(), engine="stacked", rounds=4)
    plain.engine.replay = None
    plain.run()
    assert same(replayed.params, plain.params)


@pytest.mark.parametrize("trained", [True, False], ids=["affine trained", "affine frozen"])
def test_frozen_layers_keep_their_averages(trained: bool) -> None:
    model = Net()
    with torch.no_grad():
        model.first.running_mean.uniform_(-1, 1)
        model.first.running_var.uniform_(0.5, 2)
    for layer in (model.first, model.second):
        layer.eval()
    model.first.weight.requires_grad_(trained)
    before = {name: b.clone() for name, b in model.named_buffers()}
    loop, stacked = (problem(model).run(fk.methods.FedNTD(), engine=engine) for engine in ("loop", "stacked"))
    assert gap(loop.params, stacked.params) < 1e-12
    assert ("first.weight" in loop.params) == trained
    assert not loop.task.mixes_examples
    final = loop.task.module(loop.params)
    assert all(torch.allclose(b, before[name].to(b.dtype)) for name, b in final.named_buffers())
    x = loop.eval_inputs(loop.x_test[:5])
    assert torch.allclose(loop.task.apply(loop.params, x, train=True), final(x))  # the same in training
    assert not trained or gap({"w": loop.params["first.weight"]}, {"w": model.first.weight.detach().double()}) > 0


def test_running_averages_that_are_not_frozen_raise() -> None:
    with raises(ModelError, "first", "BatchNorm2d", mentions=["track_running_stats=False", "eval()", "nn.GroupNorm"]):
        problem(Net()).simulation(fk.methods.FedAvg())


def test_a_batch_norm_with_its_own_forward_raises() -> None:
    class Own(nn.BatchNorm2d):
        def forward(self, input: Tensor) -> Tensor:
            return input - input.mean()

    model = Net(track_running_stats=False)
    model.first = Own(4, track_running_stats=False)
    with raises(ModelError, "first", "Own"):
        problem(model).simulation(fk.methods.FedAvg())


@pytest.mark.parametrize("name", sorted(set(fk.methods.REGISTRY) - set(CARRIED)))
def test_methods_that_use_single_examples_or_a_public_set_raise(name: str) -> None:
    with raises(MethodError, "model", mentions=[name, "nn.GroupNorm"]):
        problem().run(fk.methods.get(name)())


class Concatenating(FedAvg):
    """Calls the model with more examples than the batch has."""

    name = "concatenating"

    def loss(self, visit: Any, params: Any, batch: Any) -> Tensor:
        z = visit.task.apply(params, torch.cat([batch["x"], batch["x"]]), train=True)[: len(batch["y"])]
        return losses.masked_mean(visit.task.criterion(z, batch["y"]), batch["mask"])


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_a_method_that_calls_the_model_with_other_examples_raises(engine: str) -> None:
    with raises(MethodError, "model", mentions=["nn.GroupNorm"]):
        problem().run(Concatenating(), engine=engine)


class Repeating(Net):
    """Calls its layers with every example twice."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.cat([x, x]))[: len(x)]


def test_a_model_that_changes_the_number_of_examples_raises() -> None:
    """The model is to blame, not the method: with padding, BatchNorm could not tell which rows are real."""
    with raises(ModelError, "model", mentions=["nn.GroupNorm"]):
        problem(Repeating(track_running_stats=False)).run(fk.methods.FedAvg())


def test_the_evaluation_batch_is_the_same_for_any_number_of_models_and_ranks() -> None:
    simulation = problem().simulation(fk.methods.FedAvg())
    n = 2 * EVAL_BATCH + 1  # the last batch has one example
    at = torch.randint(len(simulation.y_test), (n,), generator=torch.Generator().manual_seed(0))
    x, y = simulation.x_test[at], simulation.y_test[at]

    def evaluator(rank: int, size: int) -> Evaluator:
        ranks = Ranks()
        ranks.__dict__.update(rank=rank, size=size)
        scorer = Scorer(y, simulation.task.n_classes)
        return Evaluator(simulation.task, x, y, simulation.eval_inputs, ranks, example_bytes=8, scorer=scorer)

    parts = [evaluator(rank, 4)._own_part() for rank in range(4)]
    assert sorted(k for part in parts for k in range(n)[part]) == list(range(n))
    assert all(part.start % EVAL_BATCH == 0 for part in parts)
    whole = evaluator(0, 1)
    stack = tree.map(lambda w: w.expand(3, *w.shape), simulation.params)
    hits = whole.local_models(stack, 3, map_clients)
    assert torch.equal(hits, whole.local_models(stack, 3, None))
    confusion = torch.as_tensor(np.asarray(whole.read(whole.start(simulation.params), round=0)["confusion"]))
    assert torch.equal(hits[0], confusion.diagonal())


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    st.lists(st.booleans(), min_size=2, max_size=7).filter(lambda mask: sum(mask) > 1),
    st.sampled_from([(), (2,), (3, 2)]),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_masked_statistics_and_gradients_are_torchs_of_the_real_examples(mask, spatial, affine, seed) -> None:
    draw = torch.Generator().manual_seed(seed)
    keep = torch.tensor(mask)
    x = torch.randn(len(mask), 3, *spatial, generator=draw, dtype=torch.float64, requires_grad=True)
    weight, bias = torch.randn(2, 3, generator=draw, dtype=torch.float64) if affine else (None, None)
    direction = torch.randn(int(keep.sum()), 3, *spatial, generator=draw, dtype=torch.float64)
    ours = masked_batch_norm(x, keep, weight, bias, 1e-5)[keep]
    theirs = F.batch_norm(x[keep], None, None, weight, bias, training=True)
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-10)
    ours, theirs = (torch.autograd.grad((out * direction).sum(), x)[0] for out in (ours, theirs))
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-9)
    assert not ours[~keep].any()


@pytest.mark.parametrize("each", [map_clients, vmap_with_kernels])
@pytest.mark.parametrize("call", [lambda model: model(), use_kernels], ids=["torch", "kernels"])
def test_an_output_that_is_not_computed_yet_is_normalised_too(each: Any, call: Any) -> None:
    """What our own kernels on a GPU return for a convolution, under vmap and alone."""
    x, mask = torch.randn(2, 4, 3, 2, 2), torch.tensor([[True, True, True, False], [True] * 4])

    def one(x: Tensor, mask: Tensor) -> Tensor:
        later = Deferred.of(Pending(lambda relu, pool: x * 2, can_pool=False), x.shape, x.dtype, x.device)

        def model() -> Tensor:
            with batch_statistics(len(x)):
                return F.relu(F.batch_norm(later, None, None, training=True))

        with real_examples(mask, padded=True):
            return call(model)

    stacked = each(one, x, mask)
    for k in range(2):
        assert torch.allclose(stacked[k], call_one(one, x[k], mask[k]))
        expected = F.relu(F.batch_norm(2 * x[k][mask[k]], None, None, training=True))
        assert torch.allclose(stacked[k][mask[k]], expected, atol=1e-6)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_kernels_normalise_by_formula_as_torch_does(training: bool, affine: bool) -> None:
    """Images in any memory layout, as our convolutions return them, under vmap and alone."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 4, 4, 3, generator=draw, dtype=torch.float64).movedim(-1, 2).requires_grad_()
    weight, bias = torch.randn(2, 2, 3, generator=draw, dtype=torch.float64).requires_grad_()
    averages = (None, None) if training else (torch.randn(3).double(), torch.rand(3).double() + 0.5)

    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.batch_norm(x, *averages, *((weight, bias) if affine else ()), training=training)

    theirs = map_clients(norm, x, weight, bias)
    direction, given = torch.randn_like(theirs), [x, weight, bias] if affine else [x]
    expected = torch.autograd.grad((theirs * direction).sum(), given)
    alone = torch.stack([use_kernels(lambda k=k: norm(x[k], weight[k], bias[k])) for k in range(2)])
    for ours in (vmap_with_kernels(norm, x, weight, bias), alone):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-10)
        for found, exact in zip(torch.autograd.grad((ours * direction).sum(), given), expected, strict=True):
            assert torch.allclose(found, exact, rtol=0, atol=1e-9)


def test_half_precision_is_normalised_in_float32() -> None:
    x = (torch.randn(64, 2, 8, 8) + 100).to(torch.bfloat16)
    out = masked_batch_norm(x, torch.ones(64, dtype=torch.bool), None, None, 1e-5)
    assert out.dtype == torch.bfloat16
    assert torch.allclose(out.float(), F.batch_norm(x.float(), None, None, training=True), atol=0.02)


def test_resnet10_with_batch_norm_is_fedntds() -> None:
    plain, batch = (models.build("resnet10", (3, 32, 32), 10, norm=norm) for norm in ("group", "batch"))
    norms = [layer for layer in batch.modules() if isinstance(layer, nn.BatchNorm2d)]
    assert len(norms) == sum(isinstance(layer, nn.GroupNorm) for layer in plain.modules()) == 12
    assert not list(batch.buffers())
    assert same(dict(plain.named_parameters()), dict(batch.named_parameters()))  # the same weights at the start
    with raises(ModelError, "norm", "layer", valid=["group", "batch"]):
        models.build("resnet10", (3, 32, 32), 10, norm="layer")
    small = problem(models.build("resnet10", (1, 4, 4), 4, width=2, norm="batch"))
    # small steps: two almost equal pixels of the last stage, normalised to -1 and 1, magnify rounding errors
    loop, stacked = (small.run(fk.methods.FedNTD(), engine=e, lr=0.01, epochs=1) for e in ("loop", "stacked"))
    assert gap(loop.params, stacked.params) < 1e-10
