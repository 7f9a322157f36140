"""Models: the papers' networks, models that raise an error, and what training leaves unchanged."""

from __future__ import annotations

import copy
import dataclasses
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.errors import raises
from support.problems import Problem, gap
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import fedkeep as fk
from fedkeep import models, tree
from fedkeep.data.augment import InputPipeline
from fedkeep.engine.local import LocalTraining
from fedkeep.engine.mapping import map_clients
from fedkeep.engine.trial_step import why_not_stackable
from fedkeep.errors import MethodError, ModelError
from fedkeep.methods._classifier import classifier
from fedkeep.task import Task, check_forward, check_model

COLOUR, GREY = (3, 32, 32), (1, 28, 28)
IMAGE_MODELS = [
    name for name in models.REGISTRY if name not in models.TEXT_MODELS
]  # test_text_models.py has the others

# Weights and biases of each layer, starting at the input.
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
def test_networks_have_the_size_of_the_paper_and_return_logits(case, total) -> None:
    name, shape = case
    model = models.build(name, shape, 10)
    assert sum(p.numel() for p in model.parameters()) == COUNTS[case] == total
    x = torch.zeros(2, *shape)
    assert model(x).shape == (2, 10)
    assert model.features(x).shape == (2, WIDTHS[name])
    assert torch.equal(model.head(model.features(x)), model(x))


def basic(fan_in: int, width: int) -> int:
    """Two 3x3 convolutions and their norms; where the width changes, also a 1x1 convolution and a norm."""
    shortcut = fan_in * width + 2 * width if fan_in != width else 0
    return 9 * fan_in * width + 9 * width * width + 2 * 2 * width + shortcut


def bottleneck(fan_in: int, width: int) -> int:
    """1x1 down, 3x3, 1x1 up to 4 * width, with norms; the shortcut as above."""
    shortcut = fan_in * 4 * width + 2 * 4 * width if fan_in != 4 * width else 0
    return fan_in * width + 9 * width * width + width * 4 * width + 2 * width + 2 * width + 2 * 4 * width + shortcut


TENS = basic(64, 64) + basic(64, 128) + basic(128, 256) + basic(256, 512)
EIGHTEENS = TENS + basic(64, 64) + basic(128, 128) + basic(256, 256) + basic(512, 512)
FIFTIES = (
    *(bottleneck(64, 64) + 2 * bottleneck(256, 64), bottleneck(256, 128) + 3 * bottleneck(512, 128)),
    *(bottleneck(512, 256) + 5 * bottleneck(1024, 256), bottleneck(1024, 512) + 2 * bottleneck(2048, 512)),
)
FIFTY_SIXES = (
    *(bottleneck(16, 16) + 5 * bottleneck(64, 16), bottleneck(64, 32) + 5 * bottleneck(128, 32)),
    *(bottleneck(128, 64) + 5 * bottleneck(256, 64),),
)
SMALL, LARGE = 3 * 9 * 64 + 2 * 64, 3 * 49 * 64 + 2 * 64  # the 3x3 and the 7x7 stem, with their norm

# name, channels, side, classes: stem, stages, classifier; the total; the width of the features. The totals of the 7x7
# stem are those of the same networks with BatchNorm in torchvision: both norms have a scale and a shift per channel.
RESNETS = {
    ("resnet8", 3, 32, 10): (
        *(3 * 9 * 16 + 2 * 16 + basic(16, 16) + basic(16, 32) + basic(32, 64) + 64 * 10 + 10, 78_042, 64),
    ),
    ("resnet8", 1, 96, 10): (
        *(1 * 9 * 16 + 2 * 16 + basic(16, 16) + basic(16, 32) + basic(32, 64) + 64 * 10 + 10, 77_754, 64),
    ),
    ("resnet10", 3, 32, 10): (SMALL + TENS + 512 * 10 + 10, 4_903_242, 512),
    ("resnet18", 3, 32, 10): (SMALL + EIGHTEENS + 512 * 10 + 10, 11_173_962, 512),
    ("resnet18", 3, 224, 1000): (LARGE + EIGHTEENS + 512 * 1000 + 1000, 11_689_512, 512),
    ("resnet50", 3, 64, 200): (SMALL + sum(FIFTIES) + 2048 * 200 + 200, 23_910_152, 2048),
    ("resnet50", 3, 65, 1000): (LARGE + sum(FIFTIES) + 2048 * 1000 + 1000, 25_557_032, 2048),
    ("resnet56", 3, 32, 10): (3 * 9 * 16 + 2 * 16 + sum(FIFTY_SIXES) + 256 * 10 + 10, 591_322, 256),
}


@pytest.mark.parametrize("case", RESNETS, ids=str)
def test_residual_networks_have_the_size_of_the_paper(case) -> None:
    (name, channels, side, n_classes), (count, total, width) = case, RESNETS[case]
    with torch.device("meta"):  # shapes and counts only
        model = models.build(name, (channels, side, side), n_classes)
        x = torch.zeros(2, channels, side, side)
        assert sum(p.numel() for p in model.parameters()) == count == total
        assert model(x).shape == (2, n_classes)
        assert model.features(x).shape == (2, width)


def test_the_stem_keeps_the_size_of_small_images_and_quarters_large_ones() -> None:
    with torch.device("meta"):
        for name, side, after in (("resnet10", 64, 64), ("resnet10", 68, 17), ("resnet8", 68, 68)):
            stem = models.build(name, (3, 8, side), 10).body.stem  # the longer side decides
            assert stem(torch.zeros(1, 3, side, side)).shape[-2:] == (after, after)


def test_residual_networks_normalise_groups_of_16_channels() -> None:
    def norms(**options: int) -> set[tuple[int, int]]:
        model = models.build("resnet8", (1, 8, 8), 3, **options)
        return {(m.num_groups, m.num_channels) for m in model.modules() if isinstance(m, nn.GroupNorm)}

    assert norms() == {(1, 16), (2, 32), (4, 64)}
    assert norms(channels_per_group=8) == {(2, 16), (4, 32), (8, 64)}
    assert norms(width=24) == {(1, 24), (3, 48), (6, 96)}


def test_convolutions_have_he_initialisation() -> None:
    """Standard deviation sqrt(2 / (9 * 512)), estimated from 512 * 512 * 9 weights with an error of 0.1%."""
    conv = models.build("resnet10", (1, 8, 8), 3).body.stage4[0].branch[3]
    assert conv.weight.shape == (512, 512, 3, 3)
    assert conv.weight.std().item() == pytest.approx((2 / (9 * 512)) ** 0.5, rel=5e-3)


def test_a_residual_block_is_its_branch_plus_its_input() -> None:
    """With the branch's last scale and shift at 0, a block that keeps the shape is ReLU of its input."""
    block = models.build("resnet8", (1, 8, 8), 3).body.stage1[0]
    nn.init.zeros_(block.branch[4].weight)
    x = torch.randn(2, 16, 4, 4)
    assert torch.equal(block(x), x.relu())


def test_the_size_of_every_registered_network_is_tested() -> None:
    assert {case[0] for case in (*COUNTS, *RESNETS)} == set(IMAGE_MODELS)


@pytest.mark.parametrize(("name", "smallest"), [("cnn_fedntd", 4), ("cnn_fedssd", 16), ("cnn_fedka", 16)])
def test_images_that_are_too_small_raise(name, smallest) -> None:
    """With padding, each pool halves the size: 4 -> 2 -> 1. Without: 16 -> 12 -> 6 -> 2 -> 1."""
    assert models.build(name, (1, smallest, smallest), 3)(torch.zeros(1, 1, smallest, smallest)).shape == (1, 3)
    for height, width in ((smallest - 1, smallest), (smallest, smallest - 1), (1, 1)):
        with raises(ModelError, "input_shape", (1, height, width), mentions=[f"{height}x{width}"]):
            models.build(name, (1, height, width), 3)


@pytest.mark.parametrize("name", sorted(set(models.REGISTRY) - {"mlp"}))
def test_convolutional_networks_raise_for_examples_that_are_not_images(name) -> None:
    with raises(ModelError, "input_shape", (64,), mentions=["(64,)"]):
        models.build(name, (64,), 10)


def test_an_unknown_network_raises_with_a_suggestion() -> None:
    with raises(ModelError, "model", "cnn_fednt", valid=models.REGISTRY, mentions=["cnn_fedntd?"]):
        models.build("cnn_fednt", COLOUR, 10)


def test_weights_depend_only_on_the_seed() -> None:
    def weights(seed: int) -> list[torch.Tensor]:
        return list(models.build("mlp", (4,), 3, seed).parameters())

    torch.manual_seed(1)
    first = weights(5)
    torch.manual_seed(2)
    assert all(torch.equal(a, b) for a, b in zip(first, weights(5), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, weights(6), strict=True))


def test_building_does_not_change_the_random_state_of_torch() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    models.build("mlp", (4,), 3, seed=9)
    assert torch.equal(torch.get_rng_state(), before)


# options


@pytest.mark.parametrize("name", IMAGE_MODELS)
@pytest.mark.parametrize("projection", [None, 7])
def test_every_network_can_have_a_fixed_equiangular_classifier(name: str, projection: int | None) -> None:
    narrow = {"width": 4, "channels_per_group": 2} if name.startswith("resnet") else {}
    trained, fixed = (
        models.build(name, (1, 16, 16), 5, seed=3, projection=projection, head=head, **narrow)
        for head in ("linear", "etf")
    )
    rows = fixed.classifier.weight
    cosines = torch.nn.functional.cosine_similarity(rows[:, None], rows[None], dim=-1)
    assert torch.allclose(cosines, torch.full((5, 5), -1 / 4) + 1.25 * torch.eye(5), atol=1e-5)
    assert torch.allclose(rows.norm(dim=1), torch.ones(5), atol=1e-6)
    assert fixed.classifier.bias is None
    assert {n for n, p in fixed.named_parameters() if not p.requires_grad} == {"classifier.weight"}
    body = {n: p for n, p in fixed.named_parameters() if n != "classifier.weight"}
    assert all(torch.equal(p, dict(trained.named_parameters())[n]) for n, p in body.items())
    other = models.build(name, (1, 16, 16), 5, seed=4, projection=projection, head="etf", **narrow)
    assert not torch.allclose(other.classifier.weight, rows)


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_equiangular_rows_fit_into_one_feature_less_than_classes(classes: int) -> None:
    rows = models.build("mlp", (4,), classes, hidden=[classes - 1], head="etf").classifier.weight
    expected = torch.eye(classes) * classes / (classes - 1) - 1 / (classes - 1)
    assert torch.allclose(rows @ rows.T, expected, atol=1e-5)


@pytest.mark.parametrize(("classes", "width"), [(1, 4), (10, 8), (3, 1)])
def test_too_few_features_or_classes_for_equiangular_rows_raise(classes: int, width: int) -> None:
    with raises(ModelError, "head", "etf", valid=["linear"]):
        models.build("mlp", (4,), classes, hidden=[width], head="etf")


def test_an_unknown_head_raises() -> None:
    with raises(ModelError, "head", "eft", valid=["linear", "etf"]):
        models.build("mlp", (4,), 3, head="eft")


@pytest.mark.parametrize("method", ["fedavg", "fedcurv", "moon", "scaffold"])
def test_a_fixed_classifier_is_never_trained_or_sent(problem: Problem, method: str) -> None:
    model = models.build("mlp", (1, 4, 4), 4, seed=3, head="etf")
    fixed = dataclasses.replace(problem, model=model)
    loop, stacked = (fixed.run(fk.methods.get(method)(), engine=engine) for engine in ("loop", "stacked"))
    assert gap(loop.server, stacked.server) < 1e-10
    assert "classifier.weight" not in loop.params
    assert torch.equal(loop.history.model.classifier.weight.float(), model.classifier.weight)
    assert gap(loop.task.init, loop.params) > 1e-6


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_every_network_can_have_a_projection_head(name) -> None:
    """Linear(w, w), ReLU, Linear(w, 7) below a classifier of 7 features; the body does not change."""
    narrow = {"width": 4} if "width" in models.options(name) else {}
    without = models.build(name, (1, 16, 16), 3, **narrow)
    model = models.build(name, (1, 16, 16), 3, projection=7, **narrow)
    w = without.classifier.in_features
    added = (w * w + w) + (w * 7 + 7) + (7 * 3 + 3) - (w * 3 + 3)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in without.parameters()) + added
    x = torch.rand(2, 1, 16, 16)
    assert torch.equal(model.body(x), without.features(x))
    first, last = model.projection[0], model.projection[2]
    assert torch.equal(model.features(x), last(first(without.features(x)).relu()))
    assert torch.equal(model(x), model.classifier(model.features(x)))
    assert not any("projection" in key for key in without.state_dict())


def test_options_change_the_network() -> None:
    assert models.options("cnn_fedssd") == {"hidden": (120, 84), "projection": None, "head": "linear"}
    assert models.build("mlp", (4,), 3, hidden=[5, 6]).classifier.in_features == 6
    assert models.build("mlp", (4,), 3, hidden=[]).classifier.in_features == 4
    assert models.build("cnn_fedntd", GREY, 3, hidden=[np.int64(9)]).classifier.in_features == 9
    assert models.build("resnet50", GREY, 3, width=2).classifier.in_features == 2 * 8 * 4


@pytest.mark.parametrize("name", models.REGISTRY)
def test_an_unknown_option_raises_with_a_suggestion(name) -> None:
    with raises(ModelError, "projektion", 256, valid=models.options(name), mentions=[name, "projection?"]):
        models.build(name, COLOUR, 10, projektion=256)


@pytest.mark.parametrize(
    ("name", "option", "value", "wrong"),
    [
        ("mlp", "projection", 0, 0),
        ("resnet8", "projection", True, True),
        ("resnet8", "width", "16", "16"),
        ("resnet8", "channels_per_group", 0, 0),
        ("mlp", "hidden", 64, 64),
        ("cnn_fedka", "hidden", [512, 0.5], 0.5),
    ],
)
def test_invalid_options_raise(name: str, option: str, value: Any, wrong: Any) -> None:
    with raises(ModelError, option, wrong, mentions=[option]):
        models.build(name, GREY, 10, **{option: value})


# BatchNorm to GroupNorm


class Twice(nn.Module):
    """One BatchNorm under three names, in two modules, and two BatchNorms that share a scale."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(32)
        self.a, self.b, self.c = norm, norm, nn.Sequential(nn.Linear(32, 32), norm)
        self.d, self.e = nn.BatchNorm1d(32), nn.BatchNorm1d(32)
        self.e.weight = self.d.weight


@pytest.mark.parametrize(
    ("norm", "shape", "n_groups"),
    [
        (nn.BatchNorm1d(32), (4, 32), 2),
        (nn.BatchNorm1d(48), (4, 48, 5), 3),
        (nn.BatchNorm2d(8), (4, 8, 3, 3), 1),
        (nn.BatchNorm2d(40, eps=0.1), (4, 40, 3, 3), 2),
        (nn.BatchNorm2d(37), (4, 37, 3, 3), 1),
        (nn.BatchNorm3d(64), (4, 64, 2, 2, 2), 4),
        (nn.SyncBatchNorm(100), (4, 100, 3), 5),
    ],
    ids=str,
)
def test_batch_norm_becomes_group_norm_with_its_scale_and_shift(norm, shape, n_groups) -> None:
    """40 channels have at most 40 / 16 groups: 2. 37 is prime: 1. 100 have at most 6, and the largest divisor is 5."""
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    before = copy.deepcopy(norm.state_dict())
    inside = models.to_group_norm(nn.Sequential(nn.Sequential(norm)))[0][0]
    for new in (inside, models.to_group_norm(norm)):
        assert type(new) is nn.GroupNorm
        x = torch.randn(shape)
        expected = nn.functional.group_norm(x, n_groups, norm.weight, norm.bias, norm.eps)
        assert torch.equal(new(x), expected)
        assert new.weight is not norm.weight
        assert set(new.state_dict()) == {"weight", "bias"}
    assert all(torch.equal(before[key], value) for key, value in norm.state_dict().items())


def test_conversion_keeps_dtype_mode_and_frozen_parameters() -> None:
    model = nn.Sequential(nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False, track_running_stats=False)).double()
    model[0].eval().weight.requires_grad_(False)
    new = models.to_group_norm(model)
    assert [m.training for m in new.modules()] == [True, False, True]
    assert (new[0].weight.dtype, new[0].weight.requires_grad, new[0].bias.requires_grad) == (torch.float64, False, True)
    assert (new[0].affine, new[1].affine, new[1].weight, new[1].bias) == (True, False, None, None)
    assert models.to_group_norm(nn.BatchNorm2d(4, device="meta")).weight.device.type == "meta"
    assert [type(m) for m in model] == [nn.BatchNorm2d] * 2


def test_conversion_keeps_shared_parameters_shared() -> None:
    model = Twice()
    new = models.to_group_norm(model, channels_per_group=8)
    assert new.a is new.b is new.c[1]
    assert new.a.num_groups == 4
    assert new.e.weight is new.d.weight
    assert new.e.bias is not new.d.bias
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in new.modules())
    assert model.a is model.b is model.c[1]
    assert isinstance(model.a, nn.BatchNorm1d)


def test_conversion_does_not_change_other_layers() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Dropout(0.3))
    new = models.to_group_norm(model)
    assert str(new) == str(model)
    assert all(torch.equal(a, b) for a, b in zip(new.parameters(), model.parameters(), strict=True))


class Activated(nn.BatchNorm2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).relu()


def test_conversion_raises_where_it_would_be_wrong() -> None:
    with raises(ModelError, "0", "Activated"):
        models.to_group_norm(nn.Sequential(Activated(4)))
    with raises(ModelError, "0", "LazyBatchNorm2d"):
        models.to_group_norm(nn.Sequential(nn.LazyBatchNorm2d()))
    with raises(ModelError, "channels_per_group", 0):
        models.to_group_norm(nn.BatchNorm2d(4), channels_per_group=0)


def test_conversion_warns_of_a_norm_that_would_erase_its_input(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="fedkeep"):
        models.to_group_norm(nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm2d(1)))
        assert caplog.records == []
        new = models.to_group_norm(nn.Sequential(nn.BatchNorm1d(1)))
    assert [(record.name, record.args) for record in caplog.records] == [("fedkeep.models.norm", ("layer 0",))]
    assert new(torch.randn(3, 1)).abs().max() < 1e-3  # only rounding errors remain


# models that raise an error


class Counter(nn.Module):
    """Counts its training passes in a buffer: in place, or by replacing it."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.linear, self.in_place = nn.Linear(4, 3), in_place
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: Any) -> torch.Tensor:
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

    def forward(self, x: Any) -> torch.Tensor:
        self.register_buffer("seen", x.detach().sum())
        return self.linear(x)


def check(model: nn.Module, x: Any = None, n_classes: int = 3) -> None:
    check_forward(Task(model, n_classes, 2), torch.zeros(2, 4) if x is None else x)


@pytest.mark.parametrize(
    ("norm", "name"),
    [
        (nn.BatchNorm1d(5), "BatchNorm1d"),
        (nn.LazyBatchNorm1d(), "LazyBatchNorm1d"),
        (nn.SyncBatchNorm(5), "SyncBatchNorm"),
    ],
)
def test_batch_norm_raises_and_names_the_layer_and_group_norm(norm, name) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Sequential(norm), nn.Linear(5, 3))
    with raises(ModelError, "1.0", name, mentions=["layer 1.0", "nn.GroupNorm"]):
        check_model(model)
    with raises(ModelError, "model", "BatchNorm1d"):
        check_model(nn.BatchNorm1d(3))


def test_group_norm_is_accepted() -> None:
    check(nn.Sequential(nn.Linear(4, 6), nn.GroupNorm(2, 6), nn.Linear(6, 3)))


def test_a_lazy_module_raises_until_it_is_initialised() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with raises(ModelError, "0.weight"):
        check_model(model)
    model(torch.zeros(1, 4))
    check(model)


def test_a_function_instead_of_a_module_raises() -> None:
    with raises(ModelError, "model", "function"):
        check_model(check)


def test_a_model_without_trainable_parameters_raises() -> None:
    for model in (nn.Linear(4, 3).requires_grad_(False), nn.Flatten()):
        with raises(ModelError, "model"):
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
            "1.running_mean",
        ),
    ],
    ids=["in place", "replaced", "registered late", "instance norm"],
)
def test_a_buffer_that_changes_in_training_raises(model, buffer) -> None:
    with raises(ModelError, buffer):
        check(model, torch.ones(2, 4))


def test_a_wrong_shape_of_logits_raises() -> None:
    with raises(ModelError, "model", (2, 5), mentions=["(2, 3)"]):
        check(nn.Linear(4, 5))
    with raises(ModelError, "model", (2, 4, 3)):
        check(nn.Linear(4, 3), torch.zeros(2, 4, 4))


def test_inputs_that_do_not_fit_the_model_raise() -> None:
    with raises(ModelError, "model", mentions=["(2, 7)"]):
        check(nn.Linear(4, 3), torch.zeros(2, 7))
    with raises(ModelError, "model", mentions=["{'ids': (2, 7)}"]):
        check(nn.Linear(4, 3), {"ids": torch.zeros(2, 7)})


def test_checking_does_not_change_the_random_state_of_torch() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3))
    torch.manual_seed(3)
    before = torch.get_rng_state()
    check(model)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_without_features_raises_where_they_are_needed() -> None:
    task = Task(nn.Sequential(nn.Linear(4, 3), nn.Tanh()), 3, 2)
    check_forward(task, torch.rand(2, 4))
    with raises(ModelError, "model.features", mentions=["Sequential", "linear layer", "features(x)", "head(h)"]):
        task.outputs(task.init, torch.zeros(2, 4))
    network = Task(models.build("mlp", (4,), 3), 3, 2)
    x = torch.rand(2, 4)
    features, z = network.outputs(network.init, x)
    assert features.shape == (2, 64)
    assert torch.equal(z, network.apply(network.init, x))


class Unusual(nn.Module):
    """The layer that makes the logits is neither the last one declared nor the only one with as many outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.side, self.body = nn.Linear(6, 3), nn.Linear(4, 3), nn.Linear(4, 6)

    def forward(self, x):
        return self.out(self.body(x).relu() + self.side(x).sum(1, keepdim=True))


def test_the_features_of_a_model_without_any_are_the_inputs_of_its_last_linear_layer() -> None:
    model, x = Unusual(), torch.rand(5, 4)
    task = Task(model, 3, 2)
    check_forward(task, x[:2])
    params = tree.map(lambda w: w + 0.1, task.init)
    features, z = task.outputs(params, x)
    assert torch.equal(z, task.apply(params, x))
    assert torch.equal(task.head(params, features), z)
    assert features.shape == (5, task.n_features) == (5, 6)
    per_model = torch.vmap(lambda p: task.outputs(p, x)[0])(tree.map(lambda w: torch.stack([w, w + 1]), params))
    assert torch.allclose(per_model[0], features)
    assert not model.out._forward_pre_hooks
    assert classifier(task, "fedkeep") == ["out.weight", "out.bias"]


def test_the_classifier_is_the_layer_that_makes_the_logits_and_never_a_guess() -> None:
    with raises(MethodError, "method.rows", mentions=["out.weight, side.weight", "test data", "rows=False"]):
        classifier(Task(Unusual(), 3, 2), "fedkeep", "rows", "False")  # nobody has looked
    frozen = Unusual()
    frozen.out.requires_grad_(False)
    task = Task(frozen, 3, 2)
    with raises(MethodError, "method.rows", mentions=["side.weight, out.weight", "test data"]):
        classifier(task, "fedkeep", "rows", "False")
    check_forward(task, torch.rand(2, 4))
    with raises(MethodError, "method.rows", mentions=["'out'", "frozen: train it, or set rows=False"]):
        classifier(task, "fedkeep", "rows", "False")
    scaled = Task(fk.models.two_logits(nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1))), 2, 2)
    check_forward(scaled, torch.rand(2, 4))
    with raises(MethodError, "method.rows", mentions=["no linear layer makes the logits", "rows=False"]):
        classifier(scaled, "fedkeep", "rows", "False")


def test_both_parts_of_a_normalised_classifier_are_rows() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), weight_norm(nn.Linear(3, 3)))
    task = Task(model, 3, 2)
    check_forward(task, torch.rand(2, 4))
    weight = "2.parametrizations.weight"
    assert classifier(task, "fedkeep") == [f"{weight}.original1", "2.bias", f"{weight}.original0"]


def test_a_tied_classifier_has_the_name_of_its_first_place() -> None:
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 4, bias=False), nn.Linear(4, 3))
    model[2].weight = model[0].weight
    task = Task(model, 3, 2)
    check_forward(task, torch.rand(2, 4))
    assert classifier(task, "fedkeep") == ["0.weight", "2.bias"]


class Pooled(nn.Sequential):
    """Has features and a head, but pools between them."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.head = nn.Conv2d(1, 6, 1), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(input=self.features(x).mean((2, 3)))


def test_features_that_do_not_fit_the_head_are_not_used(caplog: pytest.LogCaptureFixture) -> None:
    task, x = Task(Pooled(), 3, 2), torch.rand(5, 1, 4, 4)
    check_forward(task, x[:2])
    assert not caplog.text  # most methods read no features
    features, z = task.outputs(task.init, x)
    assert "head(features(x)) is not its output" in caplog.text
    assert features.shape == (5, 6)
    assert torch.equal(z, task.apply(task.init, x))


class CalledAgain(nn.Sequential):
    """Its last layer is called again in training, after it has made the logits."""

    def forward(self, x):
        z = self[1](self[0](x))
        if self.training:
            self[1](torch.zeros_like(x))
        return z


def test_features_are_the_inputs_of_the_call_that_makes_the_logits() -> None:
    model, x = CalledAgain(nn.Linear(4, 4), nn.Linear(4, 3)), torch.rand(5, 4)
    task = Task(model, 3, 2)
    check_forward(task, x)
    assert torch.equal(task.classifier_inputs(task.init, x, train=True)[0], model[0](x))


class Auxiliary(nn.Sequential):
    """A second layer, called last, has the same outputs as the one that makes the logits: zero."""

    def forward(self, x):
        z = self[0](x)
        self[1](x)
        return z


@pytest.mark.parametrize(
    ("model", "layer"),
    [
        (nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True)), None),
        (nn.Sequential(nn.Linear(4, 3), nn.Hardtanh(-99, 99)), None),
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3), nn.Identity()), "1"),
        (nn.Sequential(nn.Linear(4, 3), nn.Unflatten(1, (3, 1)), nn.Flatten()), "0"),
        (nn.Sequential(nn.Linear(4, 3), nn.Unflatten(1, (3, 1)), nn.ReLU(inplace=True), nn.Flatten()), None),
        (Auxiliary(nn.Linear(4, 3), nn.Linear(4, 3)), "0"),
        (Auxiliary(*[nn.Sequential(nn.Linear(4, 3), nn.Hardtanh(inplace=True)) for _ in range(2)]), None),
    ],
)
def test_only_a_layer_whose_output_is_the_logits_is_found(model: nn.Module, layer: str | None) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    task = Task(model, 3, 2)
    check_forward(task, torch.rand(2, 4))
    assert task.last_linear == layer


def test_a_classifier_with_adapters_has_no_features_of_its_own() -> None:
    """The adapter starts at zero, so the frozen layer inside has the same outputs as the whole."""
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    task = Task(models.add_lora(model, {"rank": 2, "targets": ["2"]}), 3, 2)
    check_forward(task, torch.rand(2, 4))
    assert task.last_linear is None


# what training changes, and what it does not

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


def flat_data() -> fk.data.Dataset:
    rng = np.random.default_rng(0)
    y = np.arange(20) % 3
    x = rng.normal(size=(20, 4)) + np.eye(3, 4)[y]
    return fk.data.from_arrays(x[:14], y[:14], x[14:], y[14:])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_training_does_not_change_the_module_of_the_user(engine, training) -> None:
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

    def forward(self, x: Any) -> torch.Tensor:
        return self.linear(torch.tanh(self.frozen(x)) * self.scale)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_frozen_parameters_and_buffers_are_constants(engine) -> None:
    """One step on all examples moves the trained layer by lr times the gradient of autograd, and nothing else."""
    model, data = Scaled(), flat_data()
    once = {**SETTINGS, "rounds": 1, "epochs": 1, "batch_size": 99, "momentum": 0.0, "weight_decay": 0.0}
    history = fk.simulate("fedavg", model, data, [range(14)], engine=engine, **once)
    assert set(history.params) == {"linear.weight", "linear.bias"}
    assert torch.equal(history.model.frozen.weight, model.frozen.weight.double())
    assert history.model.scale.item() == 0.5
    reference = copy.deepcopy(model).double()
    nn.functional.cross_entropy(reference(data.x_train), data.y_train).backward()
    expected = {name: (p - 0.1 * p.grad).detach() for name, p in reference.named_parameters() if p.requires_grad}
    assert gap(expected, history.params) < 1e-12


class Tied(nn.Module):
    """The same square matrix twice."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.above, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.above.weight = self.below.weight

    def forward(self, x: Any) -> torch.Tensor:
        return self.out(self.above(torch.tanh(self.below(x))))


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_tied_weights_are_one_weight_with_the_sum_of_both_gradients(engine) -> None:
    torch.manual_seed(0)
    model, data = Tied(), flat_data()
    once = {**SETTINGS, "rounds": 1, "epochs": 1, "batch_size": 99, "momentum": 0.0, "weight_decay": 0.0}
    history = fk.simulate("fedavg", model, data, [range(14)], engine=engine, **once)
    assert "below.weight" in history.params
    assert "above.weight" not in history.params
    trained = history.model
    assert trained.above.weight is trained.below.weight
    reference = copy.deepcopy(model).double()
    nn.functional.cross_entropy(reference(data.x_train), data.y_train).backward()
    expected = {name: (p - 0.1 * p.grad).detach() for name, p in reference.named_parameters()}
    assert gap(expected, history.params) < 1e-12


class Reader(nn.Module):
    """The mean of the embeddings of a text, without padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.linear = nn.Embedding(11, 6), nn.Linear(6, 3)

    def forward(self, x: Any) -> torch.Tensor:
        mask = x["mask"].unsqueeze(-1).to(self.linear.weight.dtype)
        return self.linear((self.embed(x["ids"]) * mask).sum(-2) / mask.sum(-2))


def test_both_engines_agree_on_a_model_with_a_dict_of_inputs() -> None:
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


def images(side: int = 8) -> fk.data.Dataset:
    rng = np.random.default_rng(2)
    y = np.arange(12) % 3
    x = rng.normal(size=(12, 2, side, side)) + y[:, None, None, None]
    return fk.data.from_arrays(x[:9], y[:9], x[9:], y[9:])


IMAGE_CLIENTS = [[0, 1, 2, 3], [4, 5, 6], [7, 8]]


@pytest.mark.parametrize(
    ("name", "options"),
    [("resnet8", {}), ("resnet10", {"width": 16}), ("resnet18", {"width": 4}), ("resnet50", {"width": 4})],
)
def test_both_engines_agree_on_residual_networks(name, options) -> None:
    model = models.build(name, (2, 8, 8), 3, projection=5, **options)
    settings = {**SETTINGS, "rounds": 1, "epochs": 1, "batch_size": 2, "lr": 0.02}
    loop, stacked = (
        fk.simulate("fedavg", model, images(), IMAGE_CLIENTS, engine=engine, **settings)
        for engine in ("loop", "stacked")
    )
    assert gap(loop.params, stacked.params) < 1e-12
    start = {key: p.detach().double() for key, p in model.named_parameters()}
    assert all(gap({"w": start[key]}, {"w": w}) > 0 for key, w in loop.params.items())  # every layer is trained


def test_the_large_stem_can_be_stacked() -> None:
    model = models.build("resnet10", (2, 68, 68), 3, width=2, projection=4)
    local = LocalTraining(fk.methods.FedAvg(), Task(model, 3, 2), InputPipeline())
    x, y = torch.rand(2, 2, 68, 68), torch.tensor([0, 2])
    assert why_not_stackable(local, x, y, {"params": local.task.init}, map_clients) is None


def test_both_engines_agree_on_a_converted_module() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(2, 32, 3, stride=2), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(32 * 9, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3)),
    )
    with raises(ModelError, "1", "BatchNorm2d"):
        fk.simulate("fedavg", model, images(), IMAGE_CLIENTS, **SETTINGS)
    loop, stacked = (
        fk.simulate("fedavg", models.to_group_norm(model), images(), IMAGE_CLIENTS, engine=engine, **SETTINGS)
        for engine in ("loop", "stacked")
    )
    assert gap(loop.params, stacked.params) < 1e-12
    assert set(loop.params) == {key for key, _ in model.named_parameters()}


def test_the_code_of_docs_models_runs_and_its_table_is_correct() -> None:
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(block, names)
    rows = re.findall(r"^\| `(\w+)` \|.*\| (\d+), (\d+)x\d+, (\d+) classes: ([\d,]+) \|", text, flags=re.MULTILINE)
    assert [row[0] for row in rows] == IMAGE_MODELS
    for name, channels, side, n_classes, total in rows:
        with torch.device("meta"):
            model = models.build(name, (int(channels), int(side), int(side)), int(n_classes))
        assert sum(p.numel() for p in model.parameters()) == int(total.replace(",", "")), name


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("wrap", [torch.jit.script, torch.nn.DataParallel])
def test_a_module_whose_parameters_cannot_be_replaced_raises(wrap: Callable[[nn.Module], nn.Module]) -> None:
    with raises(ModelError, "model"):
        Task(wrap(torch.nn.Linear(4, 3)), 3, 1)


def test_substituted_parameters_are_used_only_during_the_call() -> None:
    """An LSTM stores weights in two places, and the embedding shares one with the output. A failing call restores the
    original parameters too."""

    class Reader(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = torch.nn.Embedding(7, 5)
            self.reader = torch.nn.LSTM(5, 5, batch_first=True)
            self.out = torch.nn.Linear(5, 7)
            self.out.weight = self.words.weight

        def forward(self, x: Any) -> torch.Tensor:
            return self.out(self.reader(self.words(x))[0][:, -1])

    task, x = Task(Reader(), 7, 1), torch.arange(6).reshape(2, 3)
    assert "out.weight" not in task.init
    before = task.apply(task.init, x)
    other = {name: torch.randn_like(w) for name, w in task.init.items()}
    expected = Reader()
    expected.load_state_dict({**other, "out.weight": other["words.weight"]})
    assert torch.equal(task.apply(other, x), expected(x))
    with pytest.raises(IndexError):
        task.apply(other, x + 7)
    assert torch.equal(task.apply(task.init, x), before)
    assert torch.equal(task._eval.out.weight, task.init["words.weight"])
