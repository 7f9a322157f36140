"""Data sets from arrays, public sets, augmentation and client plans."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.errors import ANY, raises

from fedkeep.data import Augment, Dataset, InputPipeline, from_arrays, load, make_plan, sample_cohort, seeds
from fedkeep.data import plan as plans
from fedkeep.errors import DataError

PROFILE = settings(derandomize=True, deadline=None, max_examples=50)


def arrays(**changes: Any) -> dict[str, Any]:
    """Six training and three test images of 2x2 pixels; classes 0, 1, 2; all training pixels differ."""
    defaults = {
        "x_train": np.arange(24, dtype=np.float32).reshape(6, 1, 2, 2),
        "y_train": np.array([0, 1, 2, 0, 1, 2]),
        "x_test": np.zeros((3, 1, 2, 2), dtype=np.float32),
        "y_test": np.array([0, 1, 2]),
    }
    return {**defaults, **changes}


def numbered(n_per_class: int = 20, n_classes: int = 4) -> Dataset:
    """A data set whose example i is the number i, of class i mod n_classes."""
    n = n_per_class * n_classes
    return from_arrays(np.arange(n)[:, None], np.arange(n) % n_classes, np.zeros((n_classes, 1), int), range(n_classes))


# sources


def test_digits_never_change() -> None:
    """Of the 1,797 images, round(n_c / 5) of each class are the test set: 36 36 35 37 36 36 36 36 35 36."""
    data = load("digits")
    assert data.x_train.shape == (1438, 1, 8, 8)
    assert data.x_test.shape == (359, 1, 8, 8)
    assert data.n_classes == 10
    assert data.image == (8, 8)
    assert data.public is None
    assert data.y_test.bincount().tolist() == [36, 36, 35, 37, 36, 36, 36, 36, 35, 36]
    assert (data.x_train.min(), data.x_train.max()) == (0, 1)
    fingerprint = [hashlib.sha256(y.numpy().tobytes()).hexdigest()[:16] for y in (data.y_train, data.y_test)]
    assert fingerprint == ["8caacd2b183b56b0", "e1110b56a00cf691"]
    pixels = (data.x_test * 16).to(torch.uint8).numpy().tobytes()
    assert hashlib.sha256(pixels).hexdigest()[:16] == DIGITS_TEST_PIXELS


DIGITS_TEST_PIXELS = "97bb5a1a0df11f4b"


def test_an_unknown_data_set_raises_with_a_suggestion() -> None:
    with raises(DataError, "source", "digit", valid=["digits", "mnist"], mentions=["digits?"]):
        load("digit")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_npz_file_is_read_as_it_was_saved(tmp_path: Path, save) -> None:
    stored = arrays(x_train=np.arange(24, dtype=np.uint8).reshape(6, 1, 2, 2), x_test=np.zeros((3, 1, 2, 2), np.uint8))
    save(tmp_path / "mine.npz", **stored, mean=[0.5], std=[0.25], n_classes=7)
    data = load(tmp_path / "mine.npz")
    assert data.name == "mine"
    assert data.n_classes == 7
    assert data.x_train.dtype == torch.uint8
    for name in ("x_train", "y_train", "x_test", "y_test"):
        assert np.array_equal(getattr(data, name).numpy(), stored[name])
    assert data.mean.tolist() == [[[0.5]]]
    assert data.std.tolist() == [[[0.25]]]
    part = load(str(tmp_path / "mine.npz"), public=0.5).public  # 3 are drawn, round(3 / 4) = 1 for validation
    assert (len(part.y), len(part.y_val)) == (2, 1)


def test_an_npz_file_with_pickled_objects_raises_and_runs_no_code(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "sprung"), "w"))

    np.savez(tmp_path / "evil.npz", **arrays(x_test=np.array([Trap()], dtype=object)))
    with raises(DataError, str(tmp_path / "evil.npz"), mentions=["allow_pickle"]):
        load(tmp_path / "evil.npz")
    assert not (tmp_path / "sprung").exists()


def test_a_missing_or_incomplete_npz_file_raises(tmp_path: Path) -> None:
    with raises(DataError, str(tmp_path / "none.npz"), mentions=[str(tmp_path / "none.npz")]):
        load(tmp_path / "none.npz")
    np.savez(tmp_path / "part.npz", x_train=np.zeros(3), y_train=np.zeros(3, int), extra=np.zeros(1))
    path = str(tmp_path / "part.npz")
    with raises(DataError, path, ["x_train", "y_train", "extra"], mentions=[path, "x_test, y_test"]):
        load(tmp_path / "part.npz")
    np.savez(tmp_path / "classes.npz", **arrays(), n_classes=[3, 4])
    with raises(DataError, "n_classes", [3, 4]):
        load(tmp_path / "classes.npz")


@pytest.mark.parametrize("content", [b"", b"not a zip file", b"PK\x03\x04", b"\x80\x04K\x01."])
def test_an_npz_file_that_is_no_archive_raises(tmp_path: Path, content) -> None:
    (tmp_path / "bad.npz").write_bytes(content)
    with raises(DataError, str(tmp_path / "bad.npz"), mentions=["bad.npz"]):
        load(tmp_path / "bad.npz")


def test_an_npy_file_named_npz_raises(tmp_path: Path) -> None:
    with (tmp_path / "bad.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    with raises(DataError, str(tmp_path / "bad.npz"), mentions=["bad.npz"]):
        load(tmp_path / "bad.npz")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_damaged_npz_file_raises_or_gives_the_same_arrays(tmp_path: Path, save) -> None:
    """A truncated file always raises. With one byte changed it raises, or the byte was a date or padding."""
    stored = arrays()
    path = tmp_path / "a.npz"
    save(path, **stored)
    whole = path.read_bytes()
    raised = 0
    for place in range(0, len(whole), 37):
        path.write_bytes(whole[:place])
        with raises(DataError):
            load(path)
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        try:
            data = load(path)
        except DataError:
            raised += 1
        else:
            assert np.array_equal(data.x_train.numpy(), stored["x_train"])
    assert raised > 10


# arrays


@pytest.mark.parametrize(
    ("changes", "key", "value"),
    [
        ({"x_train": np.zeros((5, 1, 2, 2))}, "x_train", 5),
        ({"x_test": np.zeros((2, 1, 2, 2))}, "x_test", 2),
        ({"x_test": np.zeros((3, 1, 3, 3))}, "x_test", [("", (1, 3, 3))]),
        ({"x_train": {"a": np.zeros(6)}, "x_test": {"b": np.zeros(3)}}, "x_test", [("b", ())]),
        ({"x_train": {"a": np.zeros(6), "b": np.zeros(5)}}, "x_train['b']", 5),
        ({"x_train": {}}, "x_train", {}),
        ({"x_train": 3.0}, "x_train", 3.0),
        ({"x_train": torch.tensor(3.0)}, "x_train", 3.0),
        ({"x_train": [[1, 2], [3]]}, "x_train", [[1, 2], [3]]),
        ({"x_train": ["a"] * 6}, "x_train", "<U1"),
        ({"x_train": np.array([None] * 6)}, "x_train", "object"),
        ({"x_train": np.zeros((6, 1), np.longdouble)}, "x_train", str(np.dtype(np.longdouble))),
        ({"x_train": np.full((6, 1, 2, 2), np.nan)}, "x_train", 0),  # the first example that is not finite
        ({"x_train": np.array([0, 1, 2, np.inf, 4, 5])}, "x_train", 3),
        ({"x_test": {"a": np.array([0.0, np.nan, 1.0])}}, "x_test['a']", 1),
        ({"y_train": np.array([0.0, 1, 2, 0.5, 1, 2])}, "y_train", 0.5),
        ({"y_train": np.array([0.0, 1, 2, np.nan, 1, 2])}, "y_train", ANY),
        ({"y_train": np.eye(6, 3)}, "y_train", (6, 3)),  # multi-label
        ({"y_train": ["a", "b", None, "a", "b", "c"]}, "y_train", None),
        ({"y_train": ["a"] * 6, "y_test": ["a"] * 3}, "y_train", ["a"]),  # a single class
        ({"y_train": ["a", "b", "", "a", "b", "c"], "y_test": ["a"] * 3}, "y_train", 2),
        ({"y_train": list("abcabc"), "y_test": list("abd")}, "y_test", "d"),
        ({"y_train": list("abcabc"), "y_test": list("abc"), "class_names": ["a", "b"]}, "y_train", "c"),
        ({"x_train": np.zeros((6, 8, 8, 3)), "x_test": np.zeros((3, 8, 8, 3))}, "x_train", (6, 8, 8, 3)),
        ({"x_train": torch.zeros(6, 8, 8, 1), "x_test": torch.zeros(3, 8, 8, 1)}, "x_train", (6, 8, 8, 1)),
        ({"y_test": np.array([0, -2, 1])}, "y_test", -2),
        ({"y_train": np.array(["a"] * 6)}, "y_test", "int64"),
        ({"y_train": np.zeros(0, int)}, "y_train", 0),  # no labels
        ({"y_test": np.zeros(0, int)}, "y_test", 0),
        ({"n_classes": 2}, "n_classes", 2),
        ({"n_classes": 1}, "n_classes", 1),
        ({"n_classes": 3.0}, "n_classes", 3.0),
        ({"y_train": np.zeros(6, int), "y_test": np.zeros(3, int)}, "y_train", 0),  # a single class
        ({"mean": [0.5]}, "std", None),
        ({"std": [0.5]}, "mean", None),
        ({"mean": [0.5, 0.5], "std": [1.0]}, "mean", [0.5, 0.5]),
        ({"mean": [0.5], "std": [0.0]}, "std", [0.0]),
        ({"mean": ["a"], "std": [1.0]}, "mean", "<U1"),
    ],
)
def test_invalid_arrays_raise(changes: dict[str, Any], key: str, value: Any) -> None:
    with raises(DataError, key, value, mentions=[key]):
        from_arrays(**arrays(**changes))


@pytest.mark.parametrize(
    ("y_train", "y_test", "numbers", "names"),
    [
        (["dog", "ant", "cat"] * 2, np.array(["cat"] * 3), [2, 0, 1] * 2, ("ant", "cat", "dog")),
        (np.array([True, False] * 3), torch.tensor([True] * 3), [1, 0] * 3, ("False", "True")),
        (np.array([True, False] * 3, object), [True] * 3, [1, 0] * 3, ("False", "True")),
        (np.array([0.0, 1.0, 2.0] * 2), torch.zeros(3, dtype=torch.bfloat16), [0, 1, 2] * 2, None),
        (np.array([1, 0] * 3, object), np.array([[1], [0], [1]]), [1, 0] * 3, None),
    ],
    ids=["texts", "booleans", "boolean objects", "floats", "objects and a column"],
)
def test_labels_are_numbered_in_sorted_order_and_keep_their_names(y_train, y_test, numbers, names) -> None:
    data = from_arrays(**arrays(y_train=y_train, y_test=y_test, n_classes=None))
    assert (data.y_train.tolist(), data.class_names) == (numbers, names)
    assert data.y_test.dtype == torch.long


def test_class_names_decide_the_numbers_of_text_labels() -> None:
    names = ["dog", "bee", "cat"]
    given = arrays(y_train=["dog", "cat"] * 3, y_test=["bee"] * 3, n_classes=None)
    data = from_arrays(**given, class_names=names)
    assert (data.y_train.tolist(), data.y_test.tolist(), data.n_classes) == ([0, 2] * 3, [1] * 3, 3)
    assert data.class_names == tuple(names)


def test_a_dict_of_inputs_cannot_be_normalised() -> None:
    inputs = {"x_train": {"a": np.zeros((6, 2))}, "x_test": {"a": np.zeros((3, 2))}}
    assert from_arrays(**arrays(**inputs)).input_shape == ()
    with raises(DataError, "mean", 0.0):
        from_arrays(**arrays(**inputs), mean=0.0, std=1.0)


@pytest.mark.parametrize("dtype", [">f4", "<f8", ">i2", "u1", "?"])
def test_arrays_of_any_byte_order_are_accepted(dtype) -> None:
    x = (np.arange(24) % 2).astype(dtype).reshape(6, 1, 2, 2)
    data = from_arrays(**arrays(x_train=x, y_train=np.array([0, 1, 2, 0, 1, 2], dtype=">i4")))
    assert np.array_equal(data.x_train.numpy(), x)
    assert data.y_train.tolist() == [0, 1, 2, 0, 1, 2]


@pytest.mark.filterwarnings("error")
def test_read_only_and_strided_arrays_are_accepted() -> None:
    x = np.broadcast_to(np.float32([1, 2]), (6, 1, 2, 2))
    assert from_arrays(**arrays(x_train=x)).x_train.sum() == 36
    assert from_arrays(**arrays(x_train=arrays()["x_train"][::-1])).x_train[0, 0, 0, 0] == 20


def test_flat_examples_are_normalised_per_feature() -> None:
    x = np.array([[1.0, 10.0]] * 6)
    data = from_arrays(**arrays(x_train=x, x_test=x[:3]), mean=[1, 4], std=[1, 2])
    assert InputPipeline(torch.float64, data.mean, data.std)(data.x_train).tolist() == [[0, 3]] * 6


# public sets


def test_a_public_fraction_is_taken_from_the_training_examples() -> None:
    """A tenth of 80 is 8; a quarter of them, 2, are for validation."""
    data = numbered()
    split = data.with_public(0.1, seed=3)
    parts = [split.x_train, split.public.x, split.public.x_val]
    assert [len(x) for x in parts] == [72, 6, 2]
    assert sorted(torch.cat(parts).flatten().tolist()) == list(range(80))
    for x, y in zip(parts, [split.y_train, split.public.y, split.public.y_val], strict=True):
        assert torch.equal(x.flatten() % 4, y)
    assert torch.equal(split.x_test, data.x_test)
    assert len(data.y_train) == 80
    assert data.public is None


def test_a_public_whole_number_counts_examples_per_class() -> None:
    """Three of each of 4 classes. Half of them, rounded up, are for validation: two per class, and one for training."""
    split = numbered().with_public(3, validation=0.5)
    assert split.public.y.bincount().tolist() == [1, 1, 1, 1]
    assert split.public.y_val.bincount().tolist() == [2, 2, 2, 2]
    assert split.y_train.bincount().tolist() == [17, 17, 17, 17]


@pytest.mark.parametrize("public", [0.25, 4])
def test_the_public_examples_depend_only_on_the_seed(public) -> None:
    def chosen(seed: int, validation: float = 0.25) -> list[int]:
        part = numbered().with_public(public, validation, seed).public
        return sorted(torch.cat([part.x, part.x_val]).flatten().tolist())

    torch.manual_seed(0)
    first = chosen(1)
    torch.manual_seed(1)
    assert chosen(1) == first
    assert chosen(1, validation=0.5) == first
    assert len({tuple(chosen(seed)) for seed in range(5)}) == 5


def test_a_public_set_can_lack_validation_but_not_training_examples() -> None:
    assert len(numbered().with_public(0.5, validation=0.0).public.y_val) == 0
    part = numbered().with_public(2, validation=0.99).public
    assert part.y.bincount().tolist() == part.y_val.bincount().tolist() == [1, 1, 1, 1]
    one = numbered().with_public(1).public
    assert (one.y.bincount().tolist(), len(one.y_val)) == ([1, 1, 1, 1], 0)
    share = numbered().with_public(0.1, validation=0.99).public  # round(0.99 * 8) = 8 would leave none
    assert (len(share.y), len(share.y_val)) == (1, 7)


@pytest.mark.parametrize(
    ("public", "validation", "key", "mentions"),
    [
        (0.0, 0.25, "public", []),
        (1.0, 0.25, "public", []),
        (0, 0.25, "public", []),
        (-3, 0.25, "public", []),
        (True, 0.25, "public", []),
        ("0.1", 0.25, "public", []),
        (float("nan"), 0.25, "public", []),
        (21, 0.25, "public", ["class 0", "20"]),  # a class has 20 training examples
        (20, 0.25, "public", ["80"]),  # all training examples
        (0.999, 0.25, "public", ["80"]),
        (0.1, 1.0, "validation", []),
        (0.1, -0.1, "validation", []),
    ],
)
def test_an_invalid_public_set_raises(public: Any, validation: float, key: str, mentions: list[str]) -> None:
    with raises(DataError, key, mentions=mentions) as caught:
        numbered().with_public(public, validation)
    assert caught.value.value is {"public": public, "validation": validation}[key]


def test_a_second_public_set_raises() -> None:
    with raises(DataError, "public", 1):
        numbered().with_public(1).with_public(1)


def test_the_classes_of_a_public_set_can_be_unbalanced() -> None:
    """Of 4 classes with 200 examples each, 80 are public: 20 of each if alpha is large, almost all of one if small."""
    y = np.arange(800) % 4
    data = from_arrays(np.arange(800)[:, None], y, y[:, None], y)
    for alpha, largest in ((1e9, (20, 32)), (0.01, (70, 80))):
        split = data.with_public(0.1, seed=1, alpha=alpha)
        parts = [split.x_train, split.public.x, split.public.x_val]
        assert [len(x) for x in parts] == [720, 60, 20]
        assert sorted(torch.cat(parts).flatten().tolist()) == list(range(800))
        classes = torch.cat([split.public.y, split.public.y_val])
        assert largest[0] <= classes.bincount().max() <= largest[1]
        assert split.public.y_val.bincount().argmax() == split.public.y.bincount().argmax() or alpha > 1
    used_up = data.with_public(0.5, validation=0.0, alpha=1e-3).public.y.bincount(minlength=4)
    assert (used_up.max(), used_up.sum()) == (200, 400)


def test_clients_can_have_the_public_set_alone() -> None:
    split = numbered().with_public(0.1, seed=3)
    only = split.only_public()
    assert torch.equal(only.x_train, split.public.x)
    assert torch.equal(only.y_train, split.public.y)
    assert only.public is split.public
    assert load("digits", public=2, validation=0.5, public_only=True).y_train.bincount().tolist() == [1] * 10


@pytest.mark.parametrize(
    ("options", "key", "value"),
    [
        ({"public_alpha": 0.5}, "public_alpha", 0.5),
        ({"public": 3, "public_alpha": 0.5}, "public_alpha", 0.5),
        ({"public": 0.1, "public_alpha": 0.0}, "public_alpha", 0.0),
        ({"public_only": True}, "public_only", True),
        ({"public": 0.1, "public_only": 1}, "public_only", 1),
    ],
)
def test_options_of_a_public_set_that_cannot_be_used_raise(options: Any, key: str, value: object) -> None:
    with raises(DataError, key, value):
        load("digits", **options)


def test_a_dict_of_inputs_is_split_like_an_array() -> None:
    n = np.arange(12)
    data = from_arrays({"a": n, "b": n[:, None] * 10}, n % 3, {"a": n, "b": n[:, None]}, n % 3).with_public(1)
    assert torch.equal(data.public.x["a"] * 10, data.public.x["b"].flatten())
    assert torch.equal(data.x_train["a"] % 3, data.y_train)
    assert len(data.y_train) == 9


# augmentation


def augment_by_pixel(
    x: np.ndarray, augment: Augment, drawn: dict[str, Any], mean: np.ndarray, std: np.ndarray
) -> np.ndarray:
    """Crop, flip, convert, normalise and cut out, one image and one pixel at a time."""
    out = []
    for n, image in enumerate(x):
        _, h, w = image.shape
        if augment.crop:
            p = augment.crop
            padded = np.pad(image, ((0, 0), (p, p), (p, p)), "constant" if augment.padding == "zeros" else "reflect")
            top, left = drawn["top"][n], drawn["left"][n]
            image = padded[:, top : top + h, left : left + w]
        if augment.flip and drawn["flip"][n]:
            image = image[:, :, ::-1]
        image = image / 255 if image.dtype == np.uint8 else image.astype(float)
        image = (image - mean) / std
        if augment.cutout:
            for i in range(h):
                for j in range(w):
                    low_i = drawn["row"][n] - augment.cutout // 2
                    low_j = drawn["column"][n] - augment.cutout // 2
                    if low_i <= i < low_i + augment.cutout and low_j <= j < low_j + augment.cutout:
                        image[:, i, j] = 0
        out.append(image)
    return np.stack(out)


@PROFILE
@given(
    st.integers(0, 3),
    st.booleans(),
    st.integers(0, 9),
    st.integers(1, 3),
    st.integers(1, 6),
    st.integers(1, 6),
    st.booleans(),
    st.booleans(),
    st.integers(0, 1000),
)
def test_augmentation_equals_a_loop_over_pixels(
    crop, flip, cutout, channels, height, width, as_bytes, reflect, seed
) -> None:
    rng = np.random.default_rng(seed)
    crop = min(crop, height - 1, width - 1) if reflect else crop
    augment = Augment(crop, flip, cutout, "reflect" if reflect and crop else "zeros")
    x = rng.integers(0, 256, (5, channels, height, width)).astype(np.uint8)
    x = x if as_bytes else x / 255
    drawn = {key: value[0] for key, value in augment.draw(rng, 1, 5, (height, width)).items()}
    mean, std = rng.normal(size=(channels, 1, 1)), rng.uniform(0.5, 2, (channels, 1, 1))
    inputs = InputPipeline(torch.float64, torch.from_numpy(mean), torch.from_numpy(std), augment)
    fast = inputs(torch.from_numpy(x), {key: torch.from_numpy(value) for key, value in drawn.items()})
    np.testing.assert_allclose(fast.numpy(), augment_by_pixel(x, augment, drawn, mean, std), rtol=1e-12, atol=1e-12)


def test_crop_moves_the_image_and_fills_with_black() -> None:
    """Padded by 1, the crop at (0, 0) moves the image one pixel down and to the right; (1, 1) does not move it."""
    x = torch.tensor([[[[1, 2], [3, 4]]]] * 2, dtype=torch.uint8)
    moved = Augment(crop=1).crop_and_flip(x, {"top": torch.tensor([0, 1]), "left": torch.tensor([0, 1])})
    assert moved.tolist() == [[[[0, 0], [0, 1]]], [[[1, 2], [3, 4]]]]
    assert moved.dtype == torch.uint8


def test_reflected_padding_mirrors_the_image_at_its_border() -> None:
    """The row 1 2 3, padded by 2: 3 2 1 2 3 2 1. Crops at 0, 2 and 4, then a flip of the first."""
    x = torch.tensor([[[[1, 2, 3]] * 3]] * 3, dtype=torch.uint8)
    drawn = {"top": torch.tensor([2, 2, 2]), "left": torch.tensor([0, 2, 4])}
    augment = Augment(crop=2, padding="reflect")
    moved = augment.crop_and_flip(x, drawn)
    assert moved[:, 0, 0].tolist() == [[3, 2, 1], [1, 2, 3], [3, 2, 1]]
    assert moved.dtype == torch.uint8
    flipped = Augment(crop=2, flip=True, padding="reflect").crop_and_flip(x, {**drawn, "flip": torch.tensor([1, 0, 0])})
    assert flipped[:, 0, 0].tolist() == [[1, 2, 3], [1, 2, 3], [3, 2, 1]]
    assert augment.largest_crop((3, 3)) == 2
    assert Augment(crop=2).largest_crop((3, 3)) == 3


def test_flip_mirrors_only_the_drawn_images() -> None:
    x = torch.tensor([[[[1, 2, 3]]]] * 2, dtype=torch.uint8)
    moved = Augment(flip=True).crop_and_flip(x, {"flip": torch.tensor([1, 0])})
    assert moved.tolist() == [[[[3, 2, 1]]], [[[1, 2, 3]]]]
    assert moved.dtype == torch.uint8


def test_cutout_is_clipped_at_the_border() -> None:
    """A 2x2 square centred at (0, 0) covers rows and columns -1 and 0: one pixel of the image."""
    cut = Augment(cutout=2).cut_out(torch.ones(1, 1, 3, 3), {"row": torch.tensor([0]), "column": torch.tensor([0])})
    assert cut.tolist() == [[[[0, 1, 1], [1, 1, 1], [1, 1, 1]]]]


@PROFILE
@given(st.integers(1, 4), st.booleans(), st.integers(1, 5))
def test_random_parameters_take_every_value_of_their_range(crop, flip, cutout) -> None:
    drawn = Augment(crop, flip, cutout).draw(np.random.default_rng(0), 40, 50, (4, 3))
    expected = {"top": 2 * crop + 1, "left": 2 * crop + 1, "row": 4, "column": 3} | ({"flip": 2} if flip else {})
    assert {key: len(np.unique(value)) for key, value in drawn.items()} == expected
    assert all(value.shape == (40, 50) for value in drawn.values())
    assert {key: (value.min(), value.max()) for key, value in drawn.items()} == {
        key: (0, size - 1) for key, size in expected.items()
    }


def test_an_augment_without_options_changes_nothing() -> None:
    off = Augment()
    x = torch.rand(2, 1, 3, 3)
    assert not off
    assert off.draw(np.random.default_rng(0), 1, 2, (3, 3)) == {}
    assert off.crop_and_flip(x, {}) is x
    assert off.cut_out(x, {}) is x
    assert all([Augment(crop=1), Augment(flip=True), Augment(cutout=1)])


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("crop", -1),
        ("crop", 1.5),
        ("crop", True),
        ("cutout", -1),
        ("cutout", "2"),
        ("flip", 1),
        ("padding", "edge"),
        ("padding", "reflect"),
    ],  # without a crop
)
def test_invalid_augmentation_raises(option: str, value: Any) -> None:
    with raises(DataError, f"augment.{option}", value):
        Augment(**{option: value})


def test_inputs_scale_bytes_to_0_and_1_and_normalise() -> None:
    """(255/255 - 1/2) / (1/4) = 2 and (0 - 1/2) / (1/4) = -2."""
    x = torch.tensor([[[[0, 255]]]], dtype=torch.uint8)
    assert InputPipeline(torch.float64)(x).tolist() == [[[[0, 1]]]]
    assert InputPipeline(torch.float16)(x).dtype == torch.float16
    half, quarter = torch.tensor([[[0.5]]]), torch.tensor([[[0.25]]])
    assert InputPipeline(torch.float64, half, quarter)(x).tolist() == [[[[-2, 2]]]]
    assert InputPipeline(torch.float64)(x.double() * 2).tolist() == [[[[0, 510]]]]  # only bytes are scaled


def test_inputs_without_random_parameters_are_not_augmented() -> None:
    x = torch.arange(9.0).reshape(1, 1, 3, 3)
    inputs = InputPipeline(augment=Augment(1, True, 3))
    assert torch.equal(inputs(x), x)
    assert torch.equal(inputs(x, {}), x)


def test_inputs_do_not_convert_whole_numbers_in_a_dict() -> None:
    x = {"ids": torch.tensor([[3]]), "image": torch.tensor([[51]], dtype=torch.uint8), "f": torch.ones(1, 1)}
    out = InputPipeline(torch.float64)(x)
    assert (out["ids"].dtype, out["ids"].item()) == (torch.int64, 3)
    assert (out["image"].dtype, out["image"].item()) == (torch.float64, 0.2)
    assert out["f"].dtype == torch.float64


# plans


@PROFILE
@given(st.integers(1, 40), st.integers(1, 3), st.integers(1, 12), st.integers(0, 100), st.integers(0, 100))
def test_a_plan_uses_every_example_exactly_once_per_epoch(n, epochs, batch_size, round, client) -> None:
    plan = make_plan(7, round, client, n, epochs, batch_size)
    assert plan.per_epoch == -(-n // batch_size)
    assert plan.steps == epochs * plan.per_epoch
    assert plan.index.shape == plan.mask.shape == (plan.steps, min(n, batch_size))
    assert np.array_equal(plan.mask.sum(1), plan.size)
    assert (plan.mask[:, :-1] >= plan.mask[:, 1:]).all()  # padding comes last
    for epoch in range(epochs):
        part = slice(epoch * plan.per_epoch, (epoch + 1) * plan.per_epoch)
        assert sorted(plan.index[part][plan.mask[part]]) == list(range(n))
    assert plan.noise.shape == (n,)
    assert ((plan.noise >= 0) & (plan.noise < 1)).all()


@PROFILE
@given(st.integers(1, 40), st.integers(1, 3), st.integers(1, 12), st.integers(0, 100))
def test_a_plan_without_the_last_batch_has_only_full_ones(n, epochs, batch_size, round) -> None:
    """Unless there is only one batch. What the first epoch leaves out completes a pass over all examples."""
    plan, whole = (make_plan(7, round, 3, n, epochs, batch_size, AUGMENT, (5, 5), drop) for drop in (True, False))
    assert plan.per_epoch == max(1, n // batch_size)
    assert plan.size.tolist() == [min(n, batch_size)] * (epochs * plan.per_epoch)
    kept = np.arange(whole.steps) % whole.per_epoch < plan.per_epoch
    assert np.array_equal(plan.index, whole.index[kept])
    assert all(value.shape == plan.index.shape for value in plan.augment.values())
    assert len(plan.dropped) == (n % batch_size if n > batch_size else 0)
    for one, other in zip(plan.one_pass, whole.one_pass, strict=True):
        assert np.array_equal(one, other)
    assert sorted(np.concatenate(plan.one_pass)) == list(range(n))
    assert not len(whole.dropped)


def equal_plans(a: plans.ClientPlan, b: plans.ClientPlan) -> bool:
    return (
        np.array_equal(a.index, b.index)
        and np.array_equal(a.size, b.size)
        and np.array_equal(a.noise, b.noise)
        and a.augment.keys() == b.augment.keys()
        and all(np.array_equal(a.augment[key], b.augment[key]) for key in a.augment)
        and a.seed == b.seed
    )


AUGMENT = Augment(crop=2, flip=True, cutout=3)


def test_a_plan_depends_only_on_seed_round_and_client() -> None:
    def plan(*key: int) -> plans.ClientPlan:
        return make_plan(*key, 30, 2, 8, AUGMENT, (8, 8))

    np.random.seed(0)  # noqa: NPY002 (the global state must not matter)
    first = plan(1, 2, 3)
    np.random.seed(1)  # noqa: NPY002
    assert equal_plans(first, plan(1, 2, 3))
    keys = [(1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4), (1, 3, 2), (0, 2, 3), (1, 2, 0), (1, 0, 2)]
    made = [plan(*key) for key in keys]
    assert len({p.index.tobytes() for p in made}) == len(keys)
    assert len({p.noise.tobytes() for p in made}) == len(keys)
    assert len({p.augment["top"].tobytes() for p in made}) == len(keys)
    assert len({p.seed for p in made}) == len(keys)


def test_epochs_of_a_plan_differ_and_a_longer_plan_starts_with_the_shorter_one() -> None:
    short, long = make_plan(0, 1, 2, 30, 1, 8), make_plan(0, 1, 2, 30, 3, 8)
    assert np.array_equal(long.index[:4], short.index)
    assert not np.array_equal(long.index[4:8], short.index)


def test_augmentation_does_not_change_the_order_of_examples() -> None:
    without = make_plan(0, 1, 2, 30, 2, 8)
    augmented = make_plan(0, 1, 2, 30, 2, 8, AUGMENT, (8, 8))
    assert without.augment == {}
    assert set(augmented.augment) == {"top", "left", "flip", "row", "column"}
    assert np.array_equal(without.index, augmented.index)
    assert np.array_equal(without.noise, augmented.noise)
    assert without.seed == augmented.seed


@PROFILE
@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 60), st.data())
def test_a_cohort_is_sorted_and_unique_and_depends_on_seed_and_round(seed, round, n_clients, data) -> None:
    size = data.draw(st.integers(1, n_clients))
    cohort = sample_cohort(seed, round, n_clients, size)
    assert len(cohort) == size
    assert (np.diff(cohort) > 0).all()
    assert cohort[0] >= 0
    assert cohort[-1] < n_clients
    assert np.array_equal(cohort, sample_cohort(seed, round, n_clients, size))


def test_cohorts_differ_between_rounds_and_seeds_and_reach_all_clients() -> None:
    cohorts = [sample_cohort(seed, round, 100, 10) for seed in range(5) for round in range(1, 21)]
    assert len({cohort.tobytes() for cohort in cohorts}) == 100
    assert set(np.concatenate(cohorts)) == set(range(100))
    assert sample_cohort(0, 1, 4, 4).tolist() == [0, 1, 2, 3]


def test_cohort_sampling_and_client_0_use_different_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy treats the entropies [1, 2] and [1, 2, 0] as the same, so the spawn key must separate the streams."""
    states = [np.random.SeedSequence(key).generate_state(4).tolist() for key in ([1, 2], [1, 2, 0])]
    assert states[0] == states[1]
    states = []
    stream = seeds.seed_stream

    def record(purpose: int, *key: int) -> np.random.SeedSequence:
        states.append(stream(purpose, *key).generate_state(4).tobytes())
        return stream(purpose, *key)

    monkeypatch.setattr(seeds, "seed_stream", record)
    monkeypatch.setattr(plans, "seed_stream", record)
    sample_cohort(1, 2, 100, 10)
    seeds.server_seed(1, 2)
    plan = make_plan(1, 2, 0, 30, 1, 8, AUGMENT, (8, 8))
    assert len(plan.noise) == 30
    assert plan.seed >= 0
    assert len(states) == 6  # sampling, server; order, augmentation, noise, module
    assert len(set(states)) == 6


def owned() -> Dataset:
    """Five owners with 2, 4, 6, 8 and 10 examples."""
    ids = np.repeat(list("abcde"), [2, 4, 6, 8, 10])
    n = torch.arange(30)
    return from_arrays(n[:, None], n % 3, n[:3, None], n[:3] % 3, ids=ids)


def test_small_owners_are_left_out() -> None:
    left = owned().drop_small_owners(6)
    assert sorted(set(left.ids)) == ["c", "d", "e"]
    assert left.x_train[:, 0].tolist() == list(range(6, 30))
    for bad in (0, True, 2.5):
        with raises(DataError, "min_per_id", bad):
            owned().drop_small_owners(bad)
    with raises(DataError, "min_per_id", 11, mentions=["10"]):
        owned().drop_small_owners(11)


def test_a_public_set_of_all_examples_of_some_owners() -> None:
    data = owned()
    split = data.with_public(2, validation=0.25, seed=1, by_id=True)
    left = set(split.ids)
    assert len(left) == 3
    taken = sorted(torch.cat([split.public.x, split.public.x_val])[:, 0].tolist())
    assert taken == [i for i in range(30) if data.ids[i] not in left]
    assert len(split.public.y_val) == round(0.25 * len(taken))
    with raises(DataError, "public_ids", 5):
        data.with_public(5, by_id=True)
    with raises(DataError, "public_ids", "arrays"):
        numbered().with_public(1, by_id=True)
    with raises(DataError, "public_ids", 0.5):
        data.with_public(0.5, by_id=True)


def test_load_checks_the_options_for_owners() -> None:
    with raises(DataError, "public_ids", 2):
        load("digits", public=1, public_ids=2)
    with raises(DataError, "public_ids", "digits"):
        load("digits", public_ids=1)
    with raises(DataError, "min_per_id", "digits"):
        load("digits", min_per_id=2)


def test_small_owners_are_counted_in_and_removed_from_training_and_test() -> None:
    """Owner a has 2 + 3 examples, b 4 + 1, c 6 + 0, d 0 + 2."""
    n, m = torch.arange(12), torch.arange(100, 106)
    data = from_arrays(n[:, None], n % 3, m[:, None], m % 3, ids=list("aabbbbcccccc"), test_ids=list("aaabdd"))
    five = data.drop_small_owners(5)
    assert sorted(set(five.ids)) == ["a", "b", "c"]
    assert list(five.test_ids) == list("aaab"), "d has only two examples"
    six = data.drop_small_owners(2).with_public(2, validation=0.0, by_id=True, seed=3)
    gone = set("abc") - set(six.ids)
    assert len(gone) == 2
    owner_of = dict(zip([*n.tolist(), *m.tolist()], "aabbbbccccccaaabdd", strict=True))
    assert {owner_of[i] for i in six.public.x[:, 0].tolist()} == gone
    assert len(six.public.y) == sum(owner in gone for owner in owner_of.values())
    assert {owner_of[i] for i in six.x_test[:, 0].tolist()} == set("abd") - gone, (
        "an owner with test examples only stays"
    )
    with raises(DataError, "test_ids", 2):
        from_arrays(n[:, None], n % 3, m[:, None], m % 3, test_ids=[1, 2])


def test_held_out_training_examples_take_the_place_of_the_test_set() -> None:
    data = owned()
    tuning = data.with_held_out_test(0.2)
    shown = [part[:, 0].tolist() for part in (tuning.x_train, tuning.x_test)]
    assert sorted(shown[0] + shown[1]) == sorted(data.x_train[:, 0].tolist())
    for part, rows, ids in ((tuning.y_train, shown[0], tuning.ids), (tuning.y_test, shown[1], tuning.test_ids)):
        index = [data.x_train[:, 0].tolist().index(row) for row in rows]
        assert part.tolist() == data.y_train[index].tolist()
        assert list(ids) == list(data.ids[index])
    counts = np.bincount(data.y_train)
    assert np.bincount(tuning.y_test).tolist() == [round(0.2 * n) for n in counts], "a fifth of each class"
    assert torch.equal(data.with_held_out_test(0.2).x_test, tuning.x_test), "always the same examples"
    for share in (0, 1, 0.001):
        with raises(DataError, "held_out", share):
            data.with_held_out_test(share)


def test_load_holds_out_before_it_makes_the_public_set() -> None:
    data = load("digits", held_out=0.1, public=4)
    assert torch.equal(data.x_test, load("digits", held_out=0.1).x_test), "whatever the seed of the public set"
    assert len(data.y_train) + len(data.y_test) + 40 == len(load("digits").y_train)
