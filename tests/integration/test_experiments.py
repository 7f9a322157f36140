"""Experiments: files, overrides, sweeps and their errors."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cli import fedkeep
from support.errors import raises
from support.runs import group_runs

import fedkeep as fk
from fedkeep.cli import heatmap
from fedkeep.data import load
from fedkeep.errors import ConfigError, FedkeepError, RunError, UnsupportedMethod
from fedkeep.experiments.experiment import Experiment
from fedkeep.experiments.overrides import KEYS, expand_sweep, override
from fedkeep.experiments.run import run as run_experiment
from fedkeep.runs import reading
from fedkeep.runs.files import to_toml

GIVEN = {
    "method": {"name": "fedntd", "beta": 0.5},
    "model": "mlp",
    "data": "digits",
    "split": {"kind": "shards", "n_clients": 6, "s": 2},
    "train": {"rounds": 2, "participation": 2, "epochs": 1, "batch_size": 60},
}
TEXT = to_toml(GIVEN).decode()


def made(*overrides: str) -> Experiment:
    return Experiment.from_dict(override(GIVEN, overrides))


def test_every_default_is_written_out_and_read_back_the_same() -> None:
    complete = made("augment={crop=1,flip=true}", "data.public=0.1").to_dict()
    assert complete["method"] == {"name": "fedntd", **fk.methods.FedNTD.defaults(), "beta": 0.5}
    assert complete["split"] == {"seed": 0, "kind": "shards", "n_clients": 6, "s": 2}
    assert complete["data"]["seed"] == 0
    assert complete["train"]["augment"] == {"crop": 1, "flip": True, "cutout": 0, "padding": "zeros"}
    again = Experiment.from_dict(tomllib.loads(to_toml(complete).decode()))
    assert again.to_dict() == complete


def test_the_seed_decides_split_cohorts_and_weights_unless_they_have_their_own() -> None:
    assert made("seed=3").to_dict()["split"]["seed"] == 3
    assert made("seed=3", "split.seed=1").to_dict()["split"]["seed"] == 1
    assert made("seed=3").train.seed == 3


@pytest.mark.parametrize(
    ("overrides", "key", "value", "valid"),
    [
        (["train.lrr=1"], "train.lrr", 1, ["lr"]),
        (["lrr=1"], "lrr", None, ["lr"]),
        (["sede=1"], "sede", None, ["seed"]),
        (["trian.lr=1"], "trian.lr", None, ["train.lr"]),
        (["method.betta=1"], "method.betta", 1, ["beta"]),
        (["method=fedavg", "method.beta=1"], "method.beta", 1, []),
        (["model.widht=3"], "model.widht", 3, []),
        (["split=shard"], "split.kind", "shard", ["shards"]),
        (["split.n_client=3"], "split.n_client", 3, ["n_clients"]),
        (["data.sauce=1"], "data.sauce", 1, ["source"]),
        (["data.public=1", "data.public_ids=[1]"], "data.public_ids", [1], []),
        (["data.public=1.5"], "data.public", 1.5, []),
        (["data.public_alpha=0.1"], "data.public_alpha", 0.1, []),
        (["data.public=3", "data.public_alpha=0.1"], "data.public_alpha", 0.1, []),
        (["data.public_only=true"], "data.public_only", True, []),
        (["data.public=0.1", "data.public_only=1"], "data.public_only", 1, []),
        (["lr=fast"], "train.lr", "fast", []),
        (["lr=true"], "train.lr", True, []),
        (["rounds=2.5"], "train.rounds", 2.5, []),
        (["augment={flop=true}"], "train.augment.flop", True, ["flip"]),
        (["checkpoint_every=0"], "checkpoint_every", 0, []),
        (["lr"], "override", "lr", []),
        (["seed.x=3"], "seed", {"x": 3}, []),
        (["method.name.x=3"], "method.name.x", 3, []),
        (["split=iid"], "split.n_clients", None, []),
        (["split=dirichlet", "split.n_clients=3"], "split.alpha", None, []),
        (["method.beta=-1"], "method.beta", -1, []),
        (["lr=-1"], "train.lr", -1, []),
        (["optimizer=sdg"], "train.optimizer", "sdg", ["sgd"]),
        (["engine=stackd"], "train.engine", "stackd", ["stacked"]),
        (["dtype=float23"], "train.dtype", "float23", ["float32"]),
        (["seed=-1"], "seed", -1, []),
        (["seed=99999999999999999999"], "seed", "99999999999999999999", []),
    ],
)
def test_an_invalid_key_or_value_is_named(overrides: list[str], key: str, value: Any, valid: list[str]) -> None:
    with raises(ConfigError, key=key, value=value, valid=valid, mentions=[key.rpartition(".")[2]]):
        made(*overrides)


@pytest.mark.parametrize(
    ("key", "place"),
    [("held_out", "data.held_out"), ("head", "model.head"), ("alpha", "split.alpha"), ("beta", "method.beta")],
)
def test_an_option_without_its_section_is_told_where_it_belongs(key: str, place: str) -> None:
    with raises(ConfigError, key=key, mentions=[place]):
        made(f"{key}=1")


@pytest.mark.parametrize(("option", "place"), [("held_out", "data.load"), ("head", "models.build")])
def test_an_option_of_something_else_is_no_setting(option: str, place: str) -> None:
    data = load("digits")
    with raises(FedkeepError, key=option, mentions=[place]):
        fk.simulate("fedavg", "mlp", data, [range(10)], **{option: 1})


def test_booleans_may_be_written_as_in_python() -> None:
    assert made("method=fedkeep", "method.rows=False").method["rows"] is False
    assert made("deterministic=True").train.deterministic is True
    assert override({}, ["label=True story"]) == {"label": "True story"}


def test_an_unknown_method_or_model_is_named_with_the_closest() -> None:
    with raises(ConfigError, key="method.name", value="fedntf", valid=["fedntd"], mentions=["fedntf", "fedntd?"]):
        made("method=fedntf")
    with raises(ConfigError, mentions=["mpl", "mlp?"]):
        made("model=mpl")


def test_the_seed_counts_without_a_train_table() -> None:
    bare = {k: v for k, v in GIVEN.items() if k != "train"}
    assert Experiment.from_dict({**bare, "seed": 5}).train.seed == 5


def test_a_missing_key_is_named() -> None:
    with raises(ConfigError, key="split"):
        Experiment.from_dict({k: v for k, v in GIVEN.items() if k != "split"})
    with raises(ConfigError, key="split.kind"):
        Experiment.from_dict({**GIVEN, "split": {"n_clients": 3}})


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with raises(ConfigError, key="file", value=str(tmp_path / "no.toml"), valid=["digits"], mentions=["no.toml"]):
        Experiment.load(tmp_path / "no.toml")
    (tmp_path / "bad.toml").write_text("method = \n")
    with raises(ConfigError, key="file", value=str(tmp_path / "bad.toml"), mentions=["bad.toml", "line 1"]):
        Experiment.load(tmp_path / "bad.toml")
    (tmp_path / "new.toml").write_text("format = 9\n")
    with raises(ConfigError, key="format", value=9, valid=[1], mentions=["new.toml", "9"]):
        Experiment.load(tmp_path / "new.toml")


def test_overrides_know_the_keys_of_an_experiment() -> None:
    assert list(Experiment.model_fields) == KEYS


def test_overrides_reach_into_tables_and_drop_the_old_methods_settings() -> None:
    assert override(GIVEN, ["method=fedprox", "method.mu=1"])["method"] == {"name": "fedprox", "mu": 1}
    assert override(GIVEN, ["method.name=fedntd", "method.tau=2"])["method"]["beta"] == 0.5
    assert override(GIVEN, ["data.public=0.1"])["data"] == {"source": "digits", "public": 0.1}
    assert override({}, ["train.augment.crop=4"]) == {"train": {"augment": {"crop": 4}}}
    assert GIVEN["method"] == {"name": "fedntd", "beta": 0.5}


def test_none_removes_a_setting_that_is_off_by_default() -> None:
    tables = {"train": {"clip_norm": 10, "lr": 0.1}}
    assert override(tables, ["clip_norm=none"]) == {"train": {"lr": 0.1}}
    assert override(tables, ["clip_norm=None"]) == {"train": {"lr": 0.1}}
    assert override({}, ["train.augment=none"]) == {"train": {}}
    assert Experiment.from_dict(override({**GIVEN, **tables}, ["clip_norm=none"])).train.clip_norm is None
    with raises(ConfigError, key="train.lr"):
        Experiment.from_dict(override(GIVEN, ["lr=none"]))


def test_overrides_leave_the_original_as_it_is() -> None:
    tables = {"train": {"augment": {"crop": 1}}}
    assert override(tables, ["train.augment.crop=4"]) == {"train": {"augment": {"crop": 4}}}
    assert tables == {"train": {"augment": {"crop": 1}}}


def test_a_sweep_is_the_product_of_its_axes() -> None:
    assert expand_sweep([]) == [[]]
    assert len(expand_sweep(["seed=0,1,2", "method=fedavg,fedntd"])) == 6
    assert expand_sweep(["model.hidden=[64,32],[32]"]) == [["model.hidden=[64,32]"], ["model.hidden=[32]"]]
    assert len(expand_sweep(["method=all"])) == len(fk.methods.REGISTRY)
    with raises(ConfigError, key="sweep", value="seed", mentions=["key=a,b,c"]):
        expand_sweep(["seed"])
    with raises(ConfigError, key="train.lr", value="lr=0.3"):
        expand_sweep(["train.lr=0.1,0.2", "lr=0.3"])
    with raises(ConfigError, key="seed"):
        expand_sweep(["seed=0,1"], ["seed=3"])


plain = st.one_of(
    st.booleans(), st.integers(-(2**53), 2**53), st.floats(allow_nan=False), st.text(st.characters(codec="utf-8")),
    st.lists(st.integers(), max_size=3),
)  # fmt: skip
tables = st.recursive(
    st.dictionaries(st.text(min_size=1, max_size=8), plain, max_size=4),
    lambda inner: st.dictionaries(st.text(min_size=1, max_size=8), st.one_of(plain, inner), max_size=4),
    max_leaves=8,
)


@given(tables)
@settings(max_examples=100, derandomize=True, deadline=None)
def test_toml_is_read_back_as_it_was_written(table: dict) -> None:
    assert tomllib.loads(to_toml(table).decode()) == table


# The commands


def test_run_sweep_compare_and_partition(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(TEXT)
    done = fedkeep("run", "x.toml", "--sweep", "method=fedavg,fedntd", "--sweep", "seed=0,1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == [
        f"x-method={m}-seed={s}" for m in ("fedavg", "fedntd") for s in (0, 1)
    ]
    assert all(name in done.stdout for name in ("fedavg", "fedntd"))
    [found] = json.loads(fedkeep("compare", "runs", "--json", cwd=tmp_path).stdout)["problems"]
    assert {len(test["seeds"]) for test in found["tests"]} == {2}, "too few seeds for a test"
    assert not any(test["significant"] for test in found["tests"])
    rows = found["groups"]
    assert [(row["label"], row["seeds"]) for row in rows] == [("fedavg", [0, 1]), ("fedntd (beta=0.5)", [0, 1])]
    finals = [fk.load_run(tmp_path / "runs" / f"x-method=fedavg-seed={s}").summary()["final"] for s in (0, 1)]
    assert rows[0]["mean"]["final"] == pytest.approx(sum(finals) / 2)
    assert rows[0]["spread"]["final"] == pytest.approx(abs(finals[0] - finals[1]) / 2**0.5)
    split = fedkeep("partition", "x.toml", "split.s=1", "-o", "split.svg", cwd=tmp_path)
    assert "6 clients" in split.stdout
    picture = ElementTree.parse(tmp_path / "split.svg").getroot()
    drawn = [text.replace("\xa0", " ") for text in picture.itertext()]
    assert picture.tag.endswith("svg")
    assert all(any(f"class {c}" in text for text in drawn) for c in range(10))
    assert any(set(heatmap.BLOCKS[1:]) & set(text) for text in drawn)
    assert any("digits" in text and "shards" in text for text in drawn)
    counts = json.loads(fedkeep("partition", "x.toml", "--json", cwd=tmp_path).stdout)
    sparse = fedkeep("run", "x.toml", "eval_every=2", "--name", "sparse", "--json", cwd=tmp_path).stdout
    assert json.loads(sparse, parse_constant=pytest.fail)["sparse"]["round_forgetting"] is None
    assert sum(counts["sizes"]) == sum(map(sum, counts["label_counts"])) == 1438


def test_invalid_input_ends_in_one_line_and_code_2(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(TEXT)
    wrong = {
        "y.toml": ["run", "y.toml"],
        "digits": ["run", "digit"],
        "lrr": ["run", "x.toml", "lrr=1"],
        "nowhere": ["compare", "nowhere"],
        "no": ["resume", "no"],
        "x.toml": ["run", "x.toml", "y.toml"],
        "x-lr=0.1": ["run", "x.toml", "--sweep", "lr=0.1,0.1"],
        "lr=0.3": ["run", "x.toml", "lr=0.3", "--sweep", "lr=0.1,0.2"],
        "FILE.toml": ["run"],
        "nowhere/split.svg": ["partition", "x.toml", "-o", "nowhere/split.svg"],
    }
    for mention, args in wrong.items():
        done = fedkeep(*args, cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr.startswith("fedkeep: ")
        assert mention in done.stderr
        assert done.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()


UNSUPPORTED = {  # overrides, the key of the error, and an override that makes it work
    "accumulate": (["method=feddistill", "accumulate=2"], "train.accumulate", "method.teacher=uniform"),
    "tokens": (["method=fedreg", "model=bag"], "model.name", "model=mlp"),
    "fixed classifier": (["method=fedkeep", "model.head=etf"], "model.head", "method.rows=false"),
    "optimiser": (["method=fedreg", "optimizer=adam"], "train.optimizer", "optimizer=sgd"),
    "aggregation": (["method=fedkeep", "aggregation=median"], "train.aggregation", "method.rows=false"),
    "privacy": (["method=fedkeep", "dp_clip=1.0", "dp_noise=1.0"], "train.dp_noise", "method.rows=false"),
}


@pytest.mark.parametrize("what", UNSUPPORTED)
def test_a_method_that_cannot_be_trained_like_this_is_refused(what: str) -> None:
    overrides, key, remedy = UNSUPPORTED[what]
    with raises(UnsupportedMethod, key=key, mentions=[overrides[0].removeprefix("method=")]):
        made(*overrides)
    assert made(*overrides, remedy)
    recorded = {**override(GIVEN, overrides), "made_by": {}}
    assert Experiment.from_dict(recorded), "a run of an earlier version is read as it is"


def test_it_is_refused_before_any_run_and_left_out_of_all_methods(tmp_path: Path) -> None:
    given = ["digits", "rounds=1", "accumulate=2"]
    for command in (
        ["run", *given, "method=feddistill"],
        ["run", *given, "--sweep", "method=fedavg,feddistill"],
        ["tune", *given, "--methods", "fedavg,feddistill"],
    ):
        done = fedkeep(*command, cwd=tmp_path)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert "feddistill adds up sums over batches" in done.stderr
    all_methods = fedkeep("run", *given, "--sweep", "method=all", "--profile", cwd=tmp_path)
    *left_out, last = all_methods.stderr.splitlines()
    assert "--profile" in last, "it is refused after this, which saves running them all"
    assert [line.partition(" is left out: ")[0] for line in left_out] == [
        "fedkeep: digits-rounds=1-accumulate=2-method=feddistill"
    ]
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_diverges_ends_with_code_1(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(TEXT)
    done = fedkeep("run", "x.toml", "lr=1e30", cwd=tmp_path)
    assert done.returncode == 1
    assert "round 1, client" in done.stderr
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


# Groups and heat maps


def test_groups_are_labelled_by_what_differs(tmp_path: Path) -> None:
    for name, overrides in {
        "a": [], "b": ["seed=1"], "c": ["lr=0.5"], "d": ["method=fedavg"], "e": ["method.tau=3"],
    }.items():  # fmt: skip
        run_experiment(made(*overrides), tmp_path / name)
    groups = {g.label: g.seeds for g in group_runs([tmp_path])}
    assert groups == {
        "fedntd (beta=0.5, lr=0.01)": [0, 1],
        "fedntd (beta=0.5, lr=0.5)": [0],
        "fedavg (lr=0.01)": [0],
        "fedntd (beta=0.5, tau=3, lr=0.01)": [0],
    }
    with raises(RunError, key="run", value=str(tmp_path / "a" / "clients")):
        reading.find_runs([tmp_path / "a" / "clients"])


def test_labels_do_not_collide_and_runs_count_once(tmp_path: Path) -> None:
    """feddf has a batch_size of its own; a copied run and one without a round are left out."""
    for name, overrides in {"a": ["batch_size=60"], "b": ["batch_size=30"], "c": ["batch_size=60"]}.items():
        run_experiment(made("method=feddf", "method.max_steps=2", "data.public=4", *overrides), tmp_path / name)
    with pytest.raises(fk.errors.Diverged):
        run_experiment(made("lr=1e30"), tmp_path / "d")
    groups = group_runs([tmp_path])
    assert [(g.label, g.seeds) for g in groups] == [("feddf (batch_size=60)", [0]), ("feddf (batch_size=30)", [0])]


def test_a_failed_run_does_not_stop_the_others(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(TEXT)
    done = fedkeep(
        "run",
        "x.toml",
        "--sweep",
        "data=nope.npz,digits",
        "--sweep",
        "lr=0.1,1e30",
        "--jobs",
        "2",
        "--json",
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert list(json.loads(done.stdout)) == ["x-data=digits-lr=0.1"]
    failures = [line for line in done.stderr.splitlines() if line.startswith("fedkeep: ")]
    assert sorted(line.split(": ")[1] for line in failures) == [
        "x-data=digits-lr=1e30",
        "x-data=nope.npz-lr=0.1",
        "x-data=nope.npz-lr=1e30",
    ]
    assert all("nope.npz" in line or "round 1" in line for line in failures)
    again = fedkeep("run", "runs/x-data=digits-lr=0.1/experiment.toml", "--name", "again", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    for name in (".", ".."):
        assert fedkeep("run", "x.toml", "--name", name, cwd=tmp_path).returncode == 2


def test_the_heat_map_of_a_split() -> None:
    import numpy as np

    counts = np.array([[8, 0], [0, 4], [2, 2]])
    drawn = heatmap.label_count_map(counts, width=80).plain.splitlines()
    assert drawn == ["class 0    █ ▂", "class 1     ▄▂"]
    *_, note = heatmap.label_count_map(np.ones((20, 2), dtype=int), width=20).plain.splitlines()
    assert re.findall(r"\d+", note) == ["8", "20"]


def test_importing_fedkeep_does_not_import_pydantic_or_rich() -> None:
    script = "import sys, fedkeep; print('pydantic' in sys.modules, 'rich' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_files_are_relative_to_the_experiment_file_and_found_again_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    project.mkdir()
    elsewhere.mkdir()
    x, y = np.random.default_rng(0).normal(size=(60, 4)).astype("float32"), np.arange(60) % 3
    np.savez(project / "own.npz", x_train=x[:45], y_train=y[:45], x_test=x[45:], y_test=y[45:])
    fk.save_federation(project / "split.json", [[*range(20)], [*range(20, 45)]], [[0], [1]])
    tables = {**GIVEN, "data": "own.npz", "split": {"file": "split.json"}, "train": {"rounds": 2, "epochs": 1}}
    tables["train"]["cohorts"] = "split.json"
    (project / "my.toml").write_bytes(to_toml(tables))
    monkeypatch.chdir(tmp_path)
    made = Experiment.load("project/my.toml")
    assert made.data["source"] == str(project / "own.npz")
    assert made.train.cohorts == made.split["file"] == str(project / "split.json")
    run_experiment(made, "run")
    from_override = Experiment.load("project/my.toml", ["data=project/own.npz", "split.file=project/split.json"])
    assert from_override.to_dict() == made.to_dict()
    monkeypatch.chdir(elsewhere)
    (project / "split.json").unlink()  # the run folder has a copy
    assert fk.resume(tmp_path / "run", from_round=0).finished
    assert fk.instruments.analyse(tmp_path / "run", "divergence")["round"] == 3


def test_a_file_in_the_working_directory_is_found_too_and_a_missing_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.toml").write_bytes(to_toml({**GIVEN, "data": "own.npz"}))
    monkeypatch.chdir(tmp_path)
    assert Experiment.load("a/x.toml").data["source"] == str(tmp_path / "a" / "own.npz")
    (tmp_path / "own.npz").touch()
    assert Experiment.load("a/x.toml").data["source"] == str(tmp_path / "own.npz")
    assert Experiment.load("a/x.toml", ["data=digtis"]).data["source"] == "digtis"


def test_everything_that_is_missing_is_named_at_once(tmp_path: Path) -> None:
    with raises(ConfigError, "method", valid=["method", "model", "data", "split"]):
        Experiment.from_dict({"seed": 1})
    with raises(ConfigError, "split"):
        Experiment.from_dict({key: value for key, value in GIVEN.items() if key != "split"})


def test_a_setting_outside_of_its_table_is_referred_to_it() -> None:
    with raises(ConfigError, "rounds", mentions=["[train]"]):
        Experiment.from_dict({**GIVEN, "rounds": 3})


def test_the_names_of_methods_are_taken_in_any_case() -> None:
    assert made("method=FedNTD").method["name"] == "fedntd"
    assert made("method=FedAvg-Finetune").method["name"] == "fedavg_finetune"
