"""A user's own data: objects of other libraries, columns of tables, categories and names of classes."""

from __future__ import annotations

import gzip
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.errors import raises
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import fedkeep as fk
from fedkeep.data import load
from fedkeep.data.sources import choice, cifar, named
from fedkeep.errors import ConfigError, DataError
from fedkeep.experiments.experiment import Experiment
from fedkeep.experiments.run import run as run_experiment

datasets = pytest.importorskip("datasets", reason="the extra data is not installed")
pandas = pytest.importorskip("pandas", reason="pandas is not installed")
image = pytest.importorskip("PIL.Image", reason="the extra data is not installed")

ROWS = 40


def columns(n: int = ROWS) -> dict[str, Any]:
    """The columns of a table of patients; the class is the sign of age - 60."""
    age = np.random.default_rng(0).normal(60, 10, n).astype("float32")
    return {
        "patient_id": np.arange(n) * 7 + 1000,
        "age": age,
        "sex": np.array(["m", "f"] * (n // 2)),
        "hospital": np.array(["Bonn", "Aachen", "Bonn", "Ulm"] * (n // 4)),
        "diagnosis": np.where(age > 60, "malignant", "benign"),
    }


class Items(Dataset):
    """Items that a function returns."""

    def __init__(self, item: Any, n: int = 10, classes: Any = None) -> None:
        self.item, self.n = item, n
        if classes is not None:
            self.classes = classes

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        return self.item(i)


def picture(i: int) -> tuple[Any, int]:
    return image.fromarray(np.full((6, 4, 3), i, np.uint8)), i % 2


# objects of other libraries


def frames(kind: str) -> Any:
    if kind == "polars":
        return pytest.importorskip("polars", reason="polars is not installed").DataFrame(columns())
    if kind == "datasets":
        return datasets.Dataset.from_dict(columns())
    frame = pandas.DataFrame(columns())
    if kind == "categories":
        frame["sex"] = frame["sex"].astype("category")
    return frame


@pytest.mark.parametrize("kind", ["pandas", "categories", "polars", "datasets"])
def test_an_object_is_read_as_the_csv_file_of_it(tmp_path: Path, kind: str) -> None:
    frame = frames(kind)
    pandas.DataFrame(columns()).to_csv(tmp_path / "a.csv", index=False)
    options: dict[str, Any] = {"y": "diagnosis", "ids": "hospital"}
    for source, file in ((frame, tmp_path / "a.csv"), ((frame, frame), (tmp_path / "a.csv",) * 2)):
        data, expected = load(source, **options), load(file, **options)
        assert torch.equal(data.x_train, expected.x_train)
        assert torch.equal(data.x_test, expected.x_test)
        assert data.y_train.tolist() == expected.y_train.tolist()
        assert data.ids.tolist() == expected.ids.tolist()
        assert data.class_names == ("benign", "malignant")
        assert data.feature_names == ("age", "sex=f", "sex=m")
    assert len(load(frame, test=0.5, **options).y_test) == ROWS // 2


@pytest.mark.parametrize("kind", ["frames", "csv", "parquet"])
def test_the_owners_of_test_examples_are_those_of_the_test_table(tmp_path: Path, kind: str) -> None:
    def pair(**of_test: Any) -> tuple[Any, Any]:
        tables = [pandas.DataFrame(columns()), pandas.DataFrame({**columns(), **of_test})]
        if kind == "frames":
            return tables[0], tables[1].dropna(axis=1)
        paths = [tmp_path / f"{name}.{kind}" for name in ("a", "b")]
        for table, path in zip(tables, paths, strict=True):
            shown = table.dropna(axis=1)
            shown.to_csv(path, index=False) if kind == "csv" else shown.to_parquet(path)
        return paths[0], paths[1]

    options: dict[str, Any] = {"y": "diagnosis", "ids": "hospital", "x": ["age", "sex"]}
    own = ["Zell", *["Ulm"] * (ROWS - 1)]
    data = load(pair(hospital=own), **options)
    assert data.test_ids.tolist() == own
    assert data.ids.tolist() == columns()["hospital"].tolist()
    assert load(pair(hospital=None), **options).test_ids is None, "they are not demanded"
    assert load(pair(hospital=own), **options, min_per_id=2).test_ids.tolist() == own[1:]
    with raises(DataError, "ids", "hospital"):
        load(pair(hospital=range(ROWS)), **options)


def test_class_labels_and_splits_of_hugging_face_are_used() -> None:
    features = datasets.Features(
        {"x": datasets.Sequence(datasets.Value("float32")), "label": datasets.ClassLabel(names=["neg", "pos"])}
    )
    one = datasets.Dataset.from_dict({"x": [[1.0, 2.0]] * 10, "label": [0, 1] * 5}, features=features)
    data = load(datasets.DatasetDict(train=one, validation=one.select(range(4))))
    assert (len(data.y_train), len(data.y_test), data.class_names) == (10, 4, ("neg", "pos"))
    assert len(load(datasets.DatasetDict(a=one, b=one), splits=("b", "a")).y_test) == 10
    assert len(load(one.select(range(4)), test=0.5).y_train) == 2
    with raises(DataError, "classes", ["pos", "neg"], valid=["neg", "pos"]):
        load(one, classes=["pos", "neg"])


def test_a_torch_data_set_is_read_item_by_item() -> None:
    x, y = torch.randn(10, 3), torch.arange(10) % 2
    data = load((TensorDataset(x, y), TensorDataset(x[:4], y[:4])))
    assert torch.equal(data.x_train, x)
    assert data.y_test.tolist() == [0, 1, 0, 1]
    pictures = load(Subset(Items(picture, classes=["cat", "dog"]), range(8)), test=0.5)
    assert (pictures.input_shape, pictures.x_train.dtype) == ((3, 6, 4), torch.uint8)
    assert pictures.class_names == ("cat", "dog")
    assert load(Items(picture), size=(2, 3)).input_shape == (3, 2, 3)
    texts = load(Items(lambda i: ("word " * (i + 1), "ab"[i % 2])))
    assert texts.class_names == ("a", "b")
    assert texts.input_shape.max_length == 128


def test_a_torch_data_set_may_have_dicts_as_items() -> None:
    item = {"ids": torch.ones(3), "mask": 1, "site": "Bonn", "label": 1}
    data = load(Items(lambda i: {**item, "label": i % 2}), ids="site")
    assert {key: tuple(value.shape) for key, value in data.x_train.items()} == {"ids": (8, 3), "mask": (8,)}
    assert set(data.ids) == {"Bonn"}
    data = load(Items(lambda i: {**item, "stars": i % 2}), x="ids", y="stars")
    assert data.x_train.shape == (8, 3)
    with raises(DataError, "y", "star", valid=["stars"], mentions=["did you mean stars?"]):
        load(Items(lambda i: {**item, "stars": i % 2}), x="ids", y="star")


def frame_of(*names: str) -> Any:
    return pandas.DataFrame(columns())[list(names)]


@pytest.mark.parametrize(
    ("source", "options", "key", "mentions"),
    [
        (lambda: DataLoader(Items(picture)), {}, "source", ["loader.dataset"]),
        (lambda: frame_of("age")["age"], {}, "source", ["Series"]),
        (lambda: datasets.Dataset.from_dict({"x": [1]}).to_iterable_dataset(), {}, "source", ["streaming=True"]),
        (lambda: (frame_of("age"), "a.csv"), {}, "source", ["str (test)"]),
        (lambda: (frame_of("age"),), {}, "source", ["DataFrame"]),
        (lambda: {"train": frame_of("age"), "valid": frame_of("age")}, {}, "source", ["valid"]),
        (lambda: (frame_of("age"), Items(picture)), {}, "source", ["Items"]),
        (
            lambda: frame_of("age", "diagnosis"),
            {"y": "diagnosys"},
            "y",
            ["no column 'diagnosys' for the classes", "did you mean diagnosis?"],
        ),
        (lambda: frame_of("age", "age", "diagnosis"), {"y": "diagnosis"}, "source", []),
        (lambda: frame_of("age", "diagnosis"), {"y": "diagnosis", "splits": "train"}, "splits", []),
        (lambda: datasets.DatasetDict(a=datasets.Dataset.from_dict({"x": [1]})), {}, "splits", ["valid: a"]),
        (lambda: Items(lambda i: 1), {}, "source", ["int"]),
        (lambda: Items(lambda i: {"a": 1}), {}, "y", ["y="]),
        (lambda: Items(lambda i: (torch.ones(i + 1), 0)), {}, "source", ["(2,)", "(1,)"]),
        (lambda: Items(lambda i: ({"a" * (i + 1): 1}, 0)), {}, "source", ["example 1"]),
        (lambda: Items(lambda i: (torch.ones(3), [0, 1, 1])), {}, "y", ["(10, 3)"]),
        (lambda: Items(lambda i: 1 // 0), {}, "source", ["ZeroDivisionError"]),
        (lambda: Items(lambda i: (object(), 0)), {}, "source", []),
        (lambda: Items(picture), {"y": "label"}, "y", []),
        (lambda: Items(picture, n=0), {}, "source", []),
        (lambda: Items(picture), {"max_gb": 1e-9}, "max_gb", []),
    ],
)
def test_objects_that_cannot_be_read_are_refused_in_one_line(source, options, key, mentions) -> None:
    with raises(DataError, key, mentions=mentions):
        load(source(), **options)


def test_simulate_takes_a_pair_of_frames() -> None:
    frame = pandas.DataFrame(columns()).rename(columns={"diagnosis": "label"})
    run = fk.simulate("fedavg", "mlp", (frame, frame), [range(20), range(20, 40)], rounds=1, participation=1.0, lr=1e-4)
    assert run.class_name(1) == "malignant"
    with raises(DataError, "data", mentions=["DataFrame"]):
        fk.simulate("fedavg", "mlp", frame, [range(20)], rounds=1)


# columns of tables


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_columns_that_are_no_features_are_left_out_and_named(caplog: pytest.LogCaptureFixture) -> None:
    frame = pandas.DataFrame(columns())
    frame["visitId"] = 1.5
    frame["row"] = np.random.default_rng(1).permutation(ROWS)
    frame["name"] = [f"patient {i}" for i in range(ROWS)]
    frame["day"] = pandas.Timestamp("2020-01-01")
    frame["income"] = np.random.default_rng(1).choice(100_000, ROWS, replace=False)  # differs in every row by chance
    frame["humid"] = 0.5  # ends in id
    with caplog.at_level(logging.INFO, logger="fedkeep"):
        data = load(frame, y="diagnosis")
    assert data.feature_names == (
        "age", "sex=f", "sex=m", "hospital=Aachen", "hospital=Bonn", "hospital=Ulm", "income", "humid",
    )  # fmt: skip
    [line] = [record for record in caplog.records if record.levelno == logging.WARNING]
    for name in ("patient_id", "visitId", "row", "name", "day"):
        assert f"{name} (" in line.getMessage()
    assert load(frame, y="diagnosis", x=["age", "patient_id"]).feature_names == ("age", "patient_id")


def test_columns_that_are_used_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="fedkeep"):
        load(frame_of("age", "sex", "hospital", "diagnosis"), y="diagnosis", ids="hospital")
    assert "age, sex" in caplog.text
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


def test_words_of_the_test_table_that_training_does_not_have_are_zero(caplog: pytest.LogCaptureFixture) -> None:
    train, test = frame_of("age", "sex", "diagnosis"), frame_of("age", "sex", "diagnosis")
    test.loc[3, "sex"] = "x"
    data = load((train, test), y="diagnosis")
    assert data.x_test[2, 1:].tolist() == [0, 1]
    assert data.x_test[3, 1:].tolist() == [0, 0]
    assert "in 1 rows, sex" in caplog.text


def test_too_many_words_are_refused_where_the_column_is_named_and_left_out_otherwise() -> None:
    frame = pandas.DataFrame({**columns(400), "city": [f"city {i % 200}" for i in range(400)]})
    with raises(DataError, "x", "city", mentions=["200", "100", "text="]):
        load(frame, y="diagnosis", x=["age", "city"])
    assert "city=city 1" not in load(frame, y="diagnosis").feature_names


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "age;bmi;label\n1,5;2,25;a\n2;3;b\n1;1;a\n"),
        ("a.csv", "age;bmi;label\n1.5;2.25;a\n2;3;b\n1;1;a\n"),
        ("a.csv", "age;bmi;label\n1.5;2,25;a\n2;3;b\n1.0;1;a\n"),
        ("a.csv", "age\tbmi\tlabel\n1.5\t2.25\ta\n2\t3\tb\n1\t1\ta\n"),
        ("a.tsv", "age\tbmi\tlabel\n1.5\t2.25\ta\n2\t3\tb\n1\t1\ta\n"),
    ],
)
def test_semicolons_and_tabs_separate_columns(tmp_path: Path, name: str, text: str) -> None:
    path = write(tmp_path / name, text)
    assert load((path, path)).x_train.tolist() == [[1.5, 2.25], [2, 3], [1, 1]]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("encoding", "warned"), [("windows-1252", True), ("utf-16", False), ("utf-8-sig", False)])
def test_other_encodings_are_decoded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, encoding: str, warned: bool, packed: bool
) -> None:
    path = tmp_path / ("a.csv.gz" if packed else "a.csv")
    content = "größe;ward;who;label\n1,5;Küche;Köln;süß\n2;€;Bonn;b\n1;€;Köln;b\n".encode(encoding)
    path.write_bytes(gzip.compress(content) if packed else content)
    data = load((path, path), ids="who")
    assert data.feature_names == ("größe", "ward=Küche", "ward=€")
    assert data.class_names == ("b", "süß")
    assert data.ids is not None
    assert data.ids.tolist() == ["Köln", "Bonn", "Köln"]
    assert data.x_train[:, 0].tolist() == [1.5, 2, 1]
    assert any("windows-1252" in message for message in caplog.messages) == warned


def test_a_message_about_empty_cells_has_the_line_of_the_file_and_what_to_do(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 'age,ward,label\n1,"a\nb",0\n2,c,1\n,c,1\n,c,0\n')
    with raises(DataError, "age", 2, mentions=["2 empty cells", "line 5", "x="]):
        load(path)
    path = write(tmp_path / "a.jsonl", '{"age": 1, "label": 0}\n{"label": 1}\n')
    with raises(DataError, "age", 1, mentions=["1 empty cell,", "line 2"]):
        load(path)


def test_a_misspelt_column_of_classes_is_named_first(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "age,city,cover\n1,x,0\n2,y,1\n")
    with raises(DataError, "y", "covr", mentions=["no column 'covr' for the classes", "did you mean cover?"]):
        load(path, y="covr")


@pytest.mark.parametrize(("labels", "names"), [(("0.0", "1.0"), None), (("true", "false"), ("False", "True"))])
def test_labels_of_tables_may_be_booleans_or_whole_floats(tmp_path: Path, labels, names) -> None:
    path = write(tmp_path / "a.csv", "f,label\n" + "".join(f"1.5,{label}\n" for label in labels * 3))
    data = load((path, path))
    assert sorted(set(data.y_train.tolist())) == [0, 1]
    assert data.class_names == names
    assert load((path, path), classes=["no", "yes"]).class_names == ("no", "yes")


@pytest.mark.parametrize(
    ("name", "is_id"),
    [("id", True), ("Patient_ID", True), ("patientId", True), ("uuid", True), ("study.id", True), ("acid", False),
     ("humid", False), ("idle", False), ("grid", False)],
)  # fmt: skip
def test_names_of_ids(name: str, is_id: bool) -> None:
    assert bool(choice._ID.fullmatch(name)) == is_id


# names of classes


def test_named_data_sets_have_class_names() -> None:
    assert load("wards").class_names == ("cardiology", "neurology", "orthopaedics", "respiratory")
    assert load("generated:cifar10:100").class_names[3] == "cat"
    assert load("generated:femnist:1000").class_names[10:12] == ("A", "B")
    assert load("generated:ag_news:100").class_names[1] == "Sports"
    assert load("digits").class_names is None


def test_class_names_are_read_from_the_files_of_cifar_and_wordnet(tmp_path: Path) -> None:
    path = write(tmp_path / "fine_label_names.txt", "apple\nbear\n\n")
    assert cifar._read_class_names(path, 2) == ["apple", "bear"]
    assert cifar._read_class_names(path, 3) is None
    assert cifar._read_class_names(tmp_path / "nowhere.txt", 2) is None
    words = write(tmp_path / "words.txt", "n01\tgoldfish, Carassius\nn02\tbullfrog\nn03\tbullfrog\n")
    assert named._read_words(words, ["n02", "n01"]) == ["bullfrog", "goldfish"]
    assert named._read_words(words, ["n02", "n03"]) == ["n02", "n03"]  # not different
    assert named._read_words(tmp_path / "nowhere.txt", ["n02"]) == ["n02"]


def test_folders_of_images_and_arrays_have_class_names(tmp_path: Path) -> None:
    for part in ("train", "test"):
        for name in ("robin", "wren"):
            (tmp_path / part / name).mkdir(parents=True)
            image.new("L", (4, 4)).save(tmp_path / part / name / "1.png")
    assert load(tmp_path).class_names == ("robin", "wren")
    x, y = np.zeros((4, 2), "float32"), np.array(["no", "yes"] * 2)
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    assert load(tmp_path / "a.npz").class_names == ("no", "yes")
    y = np.arange(4) % 2
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x, y_test=y, class_names=["no", "yes"])
    assert load(tmp_path / "a.npz").class_names == ("no", "yes")
    assert load(tmp_path / "a.npz", classes=["nein", "ja"]).class_names == ("nein", "ja")


# normalisation


def test_standardised_features_have_mean_0_and_deviation_1() -> None:
    frame = pandas.DataFrame({**columns(), "area": np.linspace(1000, 3000, ROWS), "same": np.full(ROWS, 7.5)})
    data = load((frame, frame), y="diagnosis", x=["age", "area", "same"], normalise="standard")
    x = fk.data.InputPipeline(torch.float64, data.mean, data.std)(data.x_train)
    assert x.mean(0).tolist() == pytest.approx([0, 0, 0], abs=1e-6)
    assert x.std(0, unbiased=False).tolist() == pytest.approx([1, 1, 0], abs=1e-6)
    assert data.std.tolist()[2] == 1
    assert data.normalise == "standard"


def test_the_sums_of_clients_give_the_mean_and_deviation_of_all() -> None:
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (12, 3, 4, 5), dtype=np.uint8))
    for x in (pixels, pixels.flatten(1)[:, :7].double() * 1e3):
        mean, std = fk.data.mean_and_std([fk.data.feature_sums(part) for part in (x[:2], x[2:3], x[3:])])
        values = x.double() / 255 if x.dtype == torch.uint8 else x
        over = (0, 2, 3) if x.ndim == 4 else (0,)
        assert torch.allclose(mean, values.mean(over))
        assert torch.allclose(std, values.std(over, unbiased=False))


def test_images_whole_numbers_and_public_sets_are_standardised() -> None:
    digits = load("digits", normalise="standard")
    assert digits.mean.shape == (1, 1, 1)
    x = np.random.default_rng(0).integers(0, 50, (20, 3))
    data = fk.data.from_arrays(x, np.arange(20) % 2, x, np.arange(20) % 2).with_public(0.2).standardised()
    assert torch.equal(data.mean, data.x_train.double().mean(0))
    assert data.public.x.is_floating_point()
    assert data.x_test.is_floating_point()


@pytest.mark.parametrize(
    ("source", "options", "mentions"),
    [
        ("digits", {"normalise": "standart"}, ["did you mean standard?"]),
        ("digits", {"normalise": "standard", "mean": 0.5, "std": 0.5}, ["mean"]),
        ("wards", {"normalise": "standard"}, ["texts"]),
    ],
)
def test_a_normalisation_that_is_not_possible_is_refused(source: str, options: dict, mentions: list) -> None:
    with raises(DataError, "normalise", mentions=mentions):
        load(source, **options)


def test_an_experiment_file_checks_and_uses_the_normalisation(tmp_path: Path) -> None:
    pandas.DataFrame(columns()).to_csv(tmp_path / "a.csv", index=False)
    table = {"method": "fedavg", "model": "mlp", "split": "by_id", "train": {"rounds": 1, "participation": 1.0}}
    source = {"source": str(tmp_path / "a.csv"), "y": "diagnosis", "ids": "hospital"}
    for wrong in ({"normalise": "standart"}, {"normalise": "standard", "std": 1.0}):
        with raises(ConfigError, "data.normalise", wrong["normalise"]):
            Experiment.from_dict({**table, "data": {**source, **wrong}})
    experiment = Experiment.from_dict({**table, "data": {**source, "normalise": "standard"}})
    history = run_experiment(experiment, tmp_path / "run")
    assert (history.class_name(0), history.client_name(1)) == ("benign", "Bonn")
    assert fk.load_run(tmp_path / "run").about["data"]["normalise"] == "standard"


def features(scale: float) -> fk.data.Dataset:
    x = np.random.default_rng(0).normal(size=(40, 2)).astype("float32") * [1, scale]
    return fk.data.from_arrays(x.astype("float32"), np.arange(40) % 2, x[:4].astype("float32"), np.arange(4) % 2)


def test_features_of_very_different_scales_are_named(caplog: pytest.LogCaptureFixture) -> None:
    settings: dict[str, Any] = {"rounds": 1, "participation": 1.0, "lr": 1e-9}
    fk.simulate("fedavg", "mlp", features(30), [range(40)], **settings)
    fk.simulate("fedavg", "mlp", features(3000).standardised(), [range(40)], **settings)
    assert not caplog.records
    fk.simulate("fedavg", "mlp", features(3000), [range(40)], **settings)
    assert "feature 1 is up to" in caplog.text
    assert 'normalise="standard"' in caplog.text


def test_divergence_names_a_large_input() -> None:
    settings: dict[str, Any] = {"rounds": 3, "participation": 1.0, "lr": 1e12}
    with pytest.raises(fk.errors.Diverged, match=r'largest input is \S+: normalise="standard"'):
        fk.simulate("fedavg", "mlp", features(3000), [range(40)], **settings)
    with pytest.raises(fk.errors.Diverged, match="a smaller lr or a clip_norm") as error:
        fk.simulate("fedavg", "mlp", features(1), [range(40)], **settings)
    assert "largest input" not in str(error.value)


def test_the_normalisation_is_recorded_with_the_run(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"rounds": 1, "participation": 1.0}
    fk.simulate("fedavg", "mlp", features(3000).standardised(), [range(40)], run_dir=tmp_path / "a", **settings)
    assert fk.load_run(tmp_path / "a").about["data"] == {"source": "arrays", "normalise": "standard"}


def test_simulate_resumes_a_run_on_frames(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": np.arange(40.0) % 7, "label": ["ill", "well"] * 20})
    pair = frame[:30], frame[30:]
    clients = [np.arange(15), np.arange(15, 30)]
    options = {"rounds": 2, "participation": 1.0, "run_dir": tmp_path / "run"}
    first, again = (fk.simulate("fedavg", "mlp", pair, clients, resume=resume, **options) for resume in (False, True))
    assert again.accuracy.tolist() == first.accuracy.tolist()
    assert isinstance(fk.load_run(tmp_path / "run").model, torch.nn.Module)


def test_a_misspelt_option_of_load_is_suggested() -> None:
    with raises(DataError, "normalize", mentions=["did you mean normalise?"]):
        load("digits", normalize="standard")
