"""Experiments: files, overrides, sweeps, and what is said when something is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cli import fedkeep

import fedkeep as fk
from fedkeep.analysis.groups import group_runs
from fedkeep.cli import heatmap
from fedkeep.errors import ConfigError, FedkeepError, RunError
from fedkeep.experiments import experiment
from fedkeep.experiments.experiment import Experiment
from fedkeep.experiments.overrides import KEYS, expand_sweep, override
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
    assert complete["train"]["augment"] == {"crop": 1, "flip": True, "cutout": 0}
    again = Experiment.from_dict(tomllib.loads(to_toml(complete).decode()))
    assert again.to_dict() == complete


def test_the_seed_decides_split_cohorts_and_weights_unless_they_have_their_own() -> None:
    assert made("seed=3").to_dict()["split"]["seed"] == 3
    assert made("seed=3", "split.seed=1").to_dict()["split"]["seed"] == 1
    assert made("seed=3").train.seed == 3


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["train.lrr=1"], "unknown key 'train.lrr': did you mean lr?"),
        (["lrr=1"], "unknown key 'lrr': did you mean lr?"),
        (["sede=1"], "did you mean seed?"),
        (["trian.lr=1"], "did you mean train.lr?"),
        (["method=fedntf"], "unknown method 'fedntf': did you mean fedntd?"),
        (["method.betta=1"], "unknown key 'method.betta': did you mean beta?"),
        (["method.beta=-1"], "fedntd: beta must be a number of at least 0, not -1"),
        (["method=fedavg", "method.beta=1"], "unknown key 'method.beta'"),
        (["model=mpl"], "unknown model 'mpl': did you mean mlp?"),
        (["model.widht=3"], "unknown key 'model.widht'"),
        (["split=shard"], "unknown split 'shard': did you mean shards?"),
        (["split.n_client=3"], "unknown key 'split.n_client': did you mean n_clients?"),
        (["data.sauce=1"], "unknown key 'data.sauce': did you mean source?"),
        (["lr=fast"], "train.lr = 'fast'"),
        (["lr=-1"], "lr must be a number above 0, not -1"),
        (["rounds=2.5"], "train.rounds = 2.5"),
        (["optimizer=sdg"], "did you mean sgd?"),
        (["engine=stackd"], "did you mean stacked?"),
        (["dtype=float23"], "did you mean float32?"),
        (["augment={flop=true}"], "unknown key 'train.augment.flop': did you mean flip?"),
        (["seed=-1"], "seed must be a whole number of at least 0, not -1"),
        (["checkpoint_every=0"], "checkpoint_every = 0"),
        (["lr"], "write key=value"),
        (["lr=true"], "train.lr = true"),
        (["seed.x=3"], "seed = {'x': 3}"),
        (["method.name.x=3"], "there is no table method.name to set x in"),
        (["split=iid"], "split.n_clients is missing: iid needs it"),
        (["split=dirichlet", "split.n_clients=3"], "split.alpha is missing"),
        (["seed=99999999999999999999"], "seed must be below 2**63"),
    ],
)
def test_a_typo_names_the_nearest(overrides: list[str], said: str) -> None:
    with pytest.raises(FedkeepError) as caught:
        made(*overrides)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_seed_counts_without_a_train_table() -> None:
    bare = {k: v for k, v in GIVEN.items() if k != "train"}
    assert Experiment.from_dict({**bare, "seed": 5}).train.seed == 5


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match="split is missing"):
        Experiment.from_dict({k: v for k, v in GIVEN.items() if k != "split"})
    with pytest.raises(ConfigError, match=r"split.kind is missing"):
        Experiment.from_dict({**GIVEN, "split": {"n_clients": 3}})


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no file"):
        Experiment.load(tmp_path / "no.toml")
    (tmp_path / "bad.toml").write_text("method = \n")
    with pytest.raises(ConfigError, match=r"bad.toml: Invalid value \(at line 1"):
        Experiment.load(tmp_path / "bad.toml")
    (tmp_path / "new.toml").write_text("format = 9\n")
    with pytest.raises(ConfigError, match="format 9"):
        Experiment.load(tmp_path / "new.toml")


def test_overrides_know_the_keys_of_an_experiment() -> None:
    assert list(Experiment.model_fields) == KEYS


def test_overrides_reach_into_tables_and_drop_the_old_methods_settings() -> None:
    assert override(GIVEN, ["method=fedprox", "method.mu=1"])["method"] == {"name": "fedprox", "mu": 1}
    assert override(GIVEN, ["method.name=fedntd", "method.tau=2"])["method"]["beta"] == 0.5
    assert override(GIVEN, ["data.public=0.1"])["data"] == {"source": "digits", "public": 0.1}
    assert override({}, ["train.augment.crop=4"]) == {"train": {"augment": {"crop": 4}}}
    assert GIVEN["method"] == {"name": "fedntd", "beta": 0.5}


def test_a_sweep_is_the_product_of_its_axes() -> None:
    assert expand_sweep([]) == [[]]
    assert len(expand_sweep(["seed=0,1,2", "method=fedavg,fedntd"])) == 6
    assert expand_sweep(["model.hidden=[64,32],[32]"]) == [["model.hidden=[64,32]"], ["model.hidden=[32]"]]
    assert len(expand_sweep(["method=all"])) == len(fk.methods.REGISTRY)
    with pytest.raises(ConfigError, match="key=a,b,c"):
        expand_sweep(["seed"])
    with pytest.raises(ConfigError, match="swept twice"):
        expand_sweep(["train.lr=0.1,0.2", "lr=0.3"])


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
    assert "over 2 runs" in done.stdout
    found = json.loads(fedkeep("compare", "runs", "--json", cwd=tmp_path).stdout)
    assert {len(test["seeds"]) for test in found["tests"]} == {2}, "too few seeds for a test"
    assert not any(test["told_apart"] for test in found["tests"])
    rows = found["groups"]
    assert [(row["label"], row["seeds"]) for row in rows] == [("fedavg", [0, 1]), ("fedntd (beta=0.5)", [0, 1])]
    finals = [fk.load_run(tmp_path / "runs" / f"x-method=fedavg-seed={s}").summary()["final"] for s in (0, 1)]
    assert rows[0]["mean"]["final"] == pytest.approx(sum(finals) / 2)
    assert rows[0]["spread"]["final"] == pytest.approx(abs(finals[0] - finals[1]) / 2**0.5)
    split = fedkeep("partition", "x.toml", "split.s=1", "-o", "split.svg", cwd=tmp_path)
    assert "6 clients with" in split.stdout
    assert (tmp_path / "split.svg").read_text().startswith("<svg")
    counts = json.loads(fedkeep("partition", "x.toml", "--json", cwd=tmp_path).stdout)
    sparse = fedkeep("run", "x.toml", "eval_every=2", "--name", "sparse", "--json", cwd=tmp_path).stdout
    assert json.loads(sparse, parse_constant=pytest.fail)["sparse"]["round_forgetting"] is None
    assert sum(counts["sizes"]) == sum(map(sum, counts["label_counts"])) == 1438


def test_bad_input_ends_in_one_line_and_code_2(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(TEXT)
    wrong = [["run", "y.toml"], ["run", "digit"], ["run", "x.toml", "lrr=1"], ["compare", "nowhere"], ["resume", "no"]]
    for args in wrong:
        done = fedkeep(*args, cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr.startswith("fedkeep: ")
        assert done.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_a_run_that_diverges_ends_with_code_1(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(TEXT)
    done = fedkeep("run", "x.toml", "lr=1e30", cwd=tmp_path)
    assert done.returncode == 1
    assert "diverged in round 1, client" in done.stderr
    assert "Traceback" not in done.stderr


# Comparisons and pictures


def test_groups_are_labelled_by_what_differs(tmp_path: Path) -> None:
    for name, overrides in {
        "a": [], "b": ["seed=1"], "c": ["lr=0.5"], "d": ["method=fedavg"], "e": ["method.tau=3"],
    }.items():  # fmt: skip
        made(*overrides).run(tmp_path / name)
    groups = {g.label: g.seeds for g in group_runs([tmp_path])}
    assert groups == {
        "fedntd (beta=0.5, lr=0.01)": [0, 1],
        "fedntd (beta=0.5, lr=0.5)": [0],
        "fedavg (lr=0.01)": [0],
        "fedntd (beta=0.5, tau=3, lr=0.01)": [0],
    }
    with pytest.raises(RunError, match="holds none"):
        reading.find_runs([tmp_path / "a" / "clients"])


def test_labels_do_not_collide_and_runs_count_once(tmp_path: Path) -> None:
    """feddf has a batch_size of its own; a copied run and one without a round are left out."""
    for name, overrides in {"a": ["batch_size=60"], "b": ["batch_size=30"], "c": ["batch_size=60"]}.items():
        made("method=feddf", "method.max_steps=2", "data.public=4", *overrides).run(tmp_path / name)
    with pytest.raises(fk.errors.Diverged):
        made("lr=1e30").run(tmp_path / "d")
    groups = group_runs([tmp_path])
    assert [(g.label, g.seeds) for g in groups] == [("feddf (batch_size=60)", [0]), ("feddf (batch_size=30)", [0])]


def test_one_bad_run_does_not_take_the_others_along(tmp_path: Path) -> None:
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
    assert "x-data=nope.npz-lr=0.1: there is no file" in done.stderr
    assert "x-data=digits-lr=1e30: diverged" in done.stderr
    again = fedkeep("run", "runs/x-data=digits-lr=0.1/experiment.toml", "--name", "again", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    for name in (".", ".."):
        assert fedkeep("run", "x.toml", "--name", name, cwd=tmp_path).returncode == 2


def test_the_picture_of_a_split() -> None:
    import numpy as np

    counts = np.array([[8, 0], [0, 4], [2, 2]])
    drawn = heatmap.label_count_map(counts, width=80).plain.splitlines()
    assert drawn == ["class 0    █ ▂", "class 1     ▄▂"]
    svg = heatmap.as_svg(counts, "<split>")
    assert svg.count("<circle") == 4
    assert "client 0, class 0: 8 examples" in svg
    assert "&lt;split&gt;" in svg
    assert "the first 8 of 20 clients" in heatmap.label_count_map(np.ones((20, 2), dtype=int), width=20).plain


def test_config_is_not_imported_with_the_package() -> None:
    script = "import sys, fedkeep; print('pydantic' in sys.modules, 'rich' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
    assert experiment.FORMAT == 1
