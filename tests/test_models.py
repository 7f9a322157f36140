"""Models: the papers' networks, what the engines refuse and why, and what they leave as it was."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from conftest import gap
from torch import nn

import fedkeep as fk
from fedkeep import models
from fedkeep.errors import ModelError
from fedkeep.task import Task, check_forward, check_model

COLOUR, GREY = (3, 32, 32), (1, 28, 28)

# Weights and biases of each layer, from the input on.
COUNTS = {
    # 3072 -> 64 -> 10
    ("mlp", COLOUR): (3072 * 64 + 64) + (64 * 10 + 10),
    ("mlp", GREY): (784 * 64 + 64) + (64 * 10 + 10),
    # padded: 32 -> pool 16 -> pool 8, 64 * 8 * 8 = 4096; 28 -> 14 -> 7, 64 * 7 * 7 = 3136
    ("cnn_fedntd", COLOUR): (3 * 25 * 32 + 32) + (32 * 25 * 64 + 64) + (4096 * 512 + 512) + (512 * 10 + 10),
    ("cnn_fedntd", GREY): (25 * 32 + 32) + (32 * 25 * 64 + 64) + (3136 * 512 + 512) + (512 * 10 + 10),
    # unpadded: 32 -> 28 -> pool 14 -> 10 -> pool 5, 16 * 5 * 5 = 400; 28 -> 24 -> 12 -> 8 -> 4, 16 * 4 * 4 = 256
    ("cnn_fedssd", COLOUR): (3 * 25 * 6 + 6) + (6 * 25 * 16 + 16) + (400 * 120 + 120) + (120 * 84 + 84) + 850,
    ("cnn_fedssd", GREY): (25 * 6 + 6) + (6 * 25 * 16 + 16) + (256 * 120 + 120) + (120 * 84 + 84) + 850,
    # unpadded: 64 * 5 * 5 = 1600 and 64 * 4 * 4 = 1024
    ("cnn_fedka", COLOUR): (3 * 25 * 32 + 32) + (32 * 25 * 64 + 64) + (1600 * 512 + 512) + (512 * 10 + 10),
    ("cnn_fedka", GREY): (25 * 32 + 32) + (32 * 25 * 64 + 64) + (1024 * 512 + 512) + (512 * 10 + 10),
}
TOTALS = [197_322, 50_890, 2_156_490, 1_663_370, 62_006, 44_426, 878_538, 582_026]
WIDTHS = {"mlp": 64, "cnn_fedntd": 512, "cnn_fedssd": 84, "cnn_fedka": 512}


@pytest.mark.parametrize(("case", "total"), list(zip(COUNTS, TOTALS, strict=True)))
def test_networks_have_the_papers_size_and_give_logits(case, total):
    name, shape = case
    model = models.build(name, shape, 10)
    assert sum(p.numel() for p in model.parameters()) == COUNTS[case] == total
    x = torch.zeros(2, *shape)
    assert model(x).shape == (2, 10)
    assert model.features(x).shape == (2, WIDTHS[name])
    assert torch.equal(model.head(model.features(x)), model(x))


def test_every_network_of_the_registry_is_counted():
    assert {name for name, _ in COUNTS} == set(models.REGISTRY)


@pytest.mark.parametrize(("name", "smallest"), [("cnn_fedntd", 4), ("cnn_fedssd", 16), ("cnn_fedka", 16)])
def test_images_too_small_for_a_network_are_refused(name, smallest):
    """Padded, each pool halves: 4 -> 2 -> 1. Unpadded: 16 -> 12 -> 6 -> 2 -> 1."""
    assert models.build(name, (1, smallest, smallest), 3)(torch.zeros(1, 1, smallest, smallest)).shape == (1, 3)
    for height, width in ((smallest - 1, smallest), (smallest, smallest - 1), (1, 1)):
        with pytest.raises(ModelError, match=f"{height}x{width} are too small"):
            models.build(name, (1, height, width), 3)


@pytest.mark.parametrize("name", ["cnn_fedntd", "cnn_fedssd", "cnn_fedka"])
def test_convolutions_refuse_what_is_no_image(name):
    with pytest.raises(ModelError, match=r"takes images \[channels, height, width\], not examples of \(64,\)"):
        models.build(name, (64,), 10)


def test_an_unknown_network_names_the_nearest():
    with pytest.raises(ModelError, match=r"unknown model 'cnn_fednt': did you mean cnn_fedntd\?"):
        models.build("cnn_fednt", COLOUR, 10)


def test_weights_depend_on_the_seed_alone():
    def weights(seed: int) -> list[torch.Tensor]:
        return list(models.build("mlp", (4,), 3, seed).parameters())

    torch.manual_seed(1)
    first = weights(5)
    torch.manual_seed(2)
    assert all(torch.equal(a, b) for a, b in zip(first, weights(5), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, weights(6), strict=True))


def test_building_leaves_torchs_random_state_as_it_was():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    models.build("mlp", (4,), 3, seed=9)
    assert torch.equal(torch.get_rng_state(), before)


# what is refused


class Counter(nn.Module):
    """Counts its training passes in a buffer: in place, or by replacing it."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.linear, self.in_place = nn.Linear(4, 3), in_place
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        if self.training and self.in_place:
            self.passes += 1
        elif self.training:
            self.passes = self.passes + 1
        return self.linear(x)


class Late(nn.Module):
    """Registers a buffer in its first pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        self.register_buffer("seen", x.detach().sum())
        return self.linear(x)


def checked(model: nn.Module, x=None, n_classes: int = 3) -> None:
    check_forward(Task(model, n_classes, 2), torch.zeros(2, 4) if x is None else x)


@pytest.mark.parametrize(
    ("norm", "name"),
    [(nn.BatchNorm1d(5), "BatchNorm1d"), (nn.LazyBatchNorm1d(), "LazyBatchNorm1d"), (nn.SyncBatchNorm(5), "SyncB")],
)
def test_batch_norm_is_refused_by_name_with_the_reason_and_the_way_out(norm, name):
    model = nn.Sequential(nn.Linear(4, 5), nn.Sequential(norm), nn.Linear(5, 3))
    with pytest.raises(ModelError, match=rf"1\.0 is {name}.*mix the examples of a batch.*nn\.GroupNorm"):
        check_model(model)
    with pytest.raises(ModelError, match="the model is BatchNorm1d"):
        check_model(nn.BatchNorm1d(3))


def test_group_norm_is_taken():
    checked(nn.Sequential(nn.Linear(4, 6), nn.GroupNorm(2, 6), nn.Linear(6, 3)))


def test_a_lazy_module_is_refused_until_it_has_seen_a_batch():
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ModelError, match=r"0\.weight is not initialised yet: run one batch"):
        check_model(model)
    model(torch.zeros(1, 4))
    checked(model)


def test_what_is_no_module_is_refused():
    with pytest.raises(ModelError, match=r"must be a torch\.nn\.Module, not function"):
        check_model(checked)


def test_a_model_with_nothing_to_train_is_refused():
    for model in (nn.Linear(4, 3).requires_grad_(False), nn.Flatten()):
        with pytest.raises(ModelError, match="no parameter that requires a gradient"):
            Task(model, 3, 2)


@pytest.mark.parametrize(
    ("model", "buffer"),
    [
        (Counter(in_place=True), "passes"),
        (Counter(in_place=False), "passes"),
        (Late(), "seen"),
        (
            nn.Sequential(
                nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten(), nn.Linear(4, 3)
            ),
            r"1\.running_mean",
        ),
    ],
    ids=["in place", "replaced", "registered late", "instance norm"],
)
def test_a_buffer_that_changes_in_training_is_refused_by_name(model, buffer):
    with pytest.raises(ModelError, match=f"the buffer {buffer} changes while training"):
        checked(model, torch.ones(2, 4))


def test_a_wrong_number_of_logits_is_refused():
    with pytest.raises(ModelError, match=r"gives \(2, 5\) for two examples; logits of shape \(2, 3\)"):
        checked(nn.Linear(4, 5))
    with pytest.raises(ModelError, match=r"gives \(2, 4, 3\) for two examples"):
        checked(nn.Linear(4, 3), torch.zeros(2, 4, 4))


def test_inputs_the_model_cannot_take_are_named():
    with pytest.raises(ModelError, match=r"cannot take the data \(inputs \(2, 7\)\)"):
        checked(nn.Linear(4, 3), torch.zeros(2, 7))
    with pytest.raises(ModelError, match=r"cannot take the data \(inputs {'ids': \(2, 7\)}\)"):
        checked(nn.Linear(4, 3), {"ids": torch.zeros(2, 7)})


def test_checking_leaves_torchs_random_state_as_it_was():
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3))
    torch.manual_seed(3)
    before = torch.get_rng_state()
    checked(model)
    assert torch.equal(torch.get_rng_state(), before)


def test_features_are_asked_for_where_a_model_has_none():
    task = Task(nn.Linear(4, 3), 3, 2)
    with pytest.raises(ModelError, match=r"Linear has no features\(x\) and head\(h\)"):
        task.outputs(task.init, torch.zeros(2, 4))
    network = Task(models.build("mlp", (4,), 3), 3, 2)
    x = torch.rand(2, 4)
    features, z = network.outputs(network.init, x)
    assert features.shape == (2, 64)
    assert torch.equal(z, network.apply(network.init, x))


# what is left alone, and what is trained

SETTINGS = {
    "rounds": 2,
    "participation": 1.0,
    "epochs": 2,
    "batch_size": 4,
    "lr": 0.1,
    "momentum": 0.9,
    "dtype": torch.float64,
    "device": "cpu",
}
CLIENTS = [[0, 1, 2, 3, 4, 5], [6, 7, 8], [9, 10, 11, 12, 13]]


def flat_data():
    rng = np.random.default_rng(0)
    y = np.arange(20) % 3
    x = rng.normal(size=(20, 4)) + np.eye(3, 4)[y]
    return fk.data.from_arrays(x[:14], y[:14], x[14:], y[14:])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_the_users_module_stays_as_it_was(engine, training):
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).train(training)
    before = copy.deepcopy(model.state_dict())
    history = fk.simulate("fedavg", model, flat_data(), CLIENTS, engine=engine, **SETTINGS)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert [m.training for m in model.modules()] == [training] * 4
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())
    assert all(p.grad is None and p.requires_grad and p.dtype == torch.float32 for p in model.parameters())
    assert not torch.equal(history.params["0.weight"], before["0.weight"].double())  # but a copy was trained


class Scaled(nn.Module):
    """A frozen layer and a constant buffer below a trained one."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.linear = nn.Linear(4, 5).requires_grad_(False), nn.Linear(5, 3)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x):
        return self.linear(torch.tanh(self.frozen(x)) * self.scale)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_frozen_parameters_and_buffers_are_constants(engine):
    """One step of all examples moves the trained layer by lr times plain autograd's gradient, and nothing else."""
    model, data = Scaled(), flat_data()
    once = {**SETTINGS, "rounds": 1, "epochs": 1, "batch_size": 99, "momentum": 0.0, "weight_decay": 0.0}
    history = fk.simulate("fedavg", model, data, [range(14)], engine=engine, **once)
    assert set(history.params) == {"linear.weight", "linear.bias"}
    assert torch.equal(history.model.frozen.weight, model.frozen.weight.double())
    assert history.model.scale.item() == 0.5
    plain = copy.deepcopy(model).double()
    nn.functional.cross_entropy(plain(data.x_train), data.y_train).backward()
    expected = {name: (p - 0.1 * p.grad).detach() for name, p in plain.named_parameters() if p.requires_grad}
    assert gap(expected, history.params) < 1e-12


class Tied(nn.Module):
    """The same square matrix twice."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.above, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.above.weight = self.below.weight

    def forward(self, x):
        return self.out(self.above(torch.tanh(self.below(x))))


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_tied_weights_are_one_weight_with_the_gradient_of_both_uses(engine):
    torch.manual_seed(0)
    model, data = Tied(), flat_data()
    once = {**SETTINGS, "rounds": 1, "epochs": 1, "batch_size": 99, "momentum": 0.0, "weight_decay": 0.0}
    history = fk.simulate("fedavg", model, data, [range(14)], engine=engine, **once)
    assert "below.weight" in history.params
    assert "above.weight" not in history.params
    trained = history.model
    assert trained.above.weight is trained.below.weight
    plain = copy.deepcopy(model).double()
    nn.functional.cross_entropy(plain(data.x_train), data.y_train).backward()
    expected = {name: (p - 0.1 * p.grad).detach() for name, p in plain.named_parameters()}
    assert gap(expected, history.params) < 1e-12


class Reader(nn.Module):
    """The mean of the embeddings of a text, padding left out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.linear = nn.Embedding(11, 6), nn.Linear(6, 3)

    def forward(self, x):
        mask = x["mask"].unsqueeze(-1).to(self.linear.weight.dtype)
        return self.linear((self.embed(x["ids"]) * mask).sum(-2) / mask.sum(-2))


def test_a_model_of_a_dict_of_inputs_runs_in_both_engines_and_they_agree():
    rng = np.random.default_rng(1)
    y = np.arange(20) % 3
    ids = rng.integers(0, 11, (20, 5))
    x = {"ids": ids, "mask": np.arange(5) < rng.integers(1, 6, (20, 1))}
    data = fk.data.from_arrays({k: v[:14] for k, v in x.items()}, y[:14], {k: v[14:] for k, v in x.items()}, y[14:])
    torch.manual_seed(0)
    model = Reader()
    loop, stacked = (
        fk.simulate("fedavg", model, data, CLIENTS, engine=engine, **SETTINGS) for engine in ("loop", "stacked")
    )
    assert gap(loop.params, stacked.params) < 1e-12
    assert gap({"w": model.linear.weight.detach().double()}, {"w": loop.params["linear.weight"]}) > 1e-3
    assert loop.class_accuracy.tolist() == stacked.class_accuracy.tolist()
    assert loop.model({k: v[14:] for k, v in data.x_train.items()}).shape == (0, 3)
