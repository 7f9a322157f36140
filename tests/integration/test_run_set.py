"""Which runs are seeds of one experiment, which solve the same problem, and what cannot be read."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.errors import raises
from support.runs import group_runs
from support.synthetic import records, wave, write_pair, write_run
from torch import nn

import fedkeep as fk
from fedkeep.analysis.compare import rank_groups
from fedkeep.analysis.export import long_table, wide_table
from fedkeep.analysis.run_set import read_runs
from fedkeep.cli import app
from fedkeep.errors import ConfigError, FedkeepError, RunError
from fedkeep.experiments.experiment import Experiment
from fedkeep.experiments.overrides import override
from fedkeep.experiments.run import run as run_experiment
from fedkeep.runs.files import to_toml

Y = np.arange(120) % 3
X = (np.random.default_rng(0).normal(size=(120, 6)) + 2 * np.eye(6)[Y]).astype("float32")
DATA = fk.data.from_arrays(X[:90], Y[:90], X[90:], Y[90:])
CLIENTS = fk.data.partition.by_id(np.arange(90) // 30)
SETTINGS: dict[str, Any] = {"rounds": 2, "participation": 1.0, "batch_size": 30}


def net(activation: type[nn.Module] = nn.ReLU, width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), activation(), nn.Linear(width, 3))


def simulate(path: Path, seed: int = 0, **changes: Any) -> None:
    parts = {"method": "fedavg", "model": net(), "data": DATA, "clients": CLIENTS, **SETTINGS, **changes}
    fk.simulate(**parts, seed=seed, run_dir=path)


def focal(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = fk.losses.cross_entropy(z, y)
    return (1 - torch.exp(-loss)) * loss


OTHERS: dict[str, dict[str, Any]] = {
    "shapes": {"model": net(width=9)},
    "activation": {"model": net(nn.Tanh)},
    "data": {"data": fk.data.from_arrays(0 * X[:90], Y[:90], 0 * X[90:], Y[90:])},
    "split": {"clients": fk.data.partition.by_id(np.arange(90) % 3)},
    "criterion": {"criterion": focal},
    "settings": {"lr": 0.5},
    "init": {"model": nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))},
}


class Command:
    """Runs `fedkeep ARGS` in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: Any, caplog: Any) -> None:
        self.monkeypatch, self.capsys, self.caplog = monkeypatch, capsys, caplog

    def __call__(self, *args: Any) -> tuple[int, str, str]:
        """Return the exit code, the output, and the messages and warnings."""
        self.monkeypatch.setattr(sys, "argv", ["fedkeep", *map(str, args)])
        self.caplog.clear()
        with pytest.raises(SystemExit) as ended:
            app.main()
        printed = self.capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err + self.caplog.text


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: Any, caplog: Any) -> Command:
    return Command(monkeypatch, capsys, caplog)


# Runs from Python


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("other", [name for name in OTHERS if name != "init"])
def test_another_experiment_is_neither_averaged_nor_left_out(tmp_path: Path, other: str, seed: int) -> None:
    """The other run differs in one thing. With the same seed it is no repeat, with another seed no second seed."""
    simulate(tmp_path / "one")
    simulate(tmp_path / "other", seed, **OTHERS[other])
    runs = read_runs([tmp_path])
    assert not runs.left_out
    assert [len(g.runs) for g in runs.groups] == [1, 1]
    labels = [(problem.title, g.label) for problem in runs.problems for g in problem.groups]
    assert len(set(labels)) == 2, "what differs is shown"


def test_the_label_shows_which_layers_differ(tmp_path: Path) -> None:
    simulate(tmp_path / "relu")
    simulate(tmp_path / "tanh", model=net(nn.Tanh))
    assert [g.label for g in group_runs([tmp_path])] == ["fedavg (ReLU)", "fedavg (Tanh)"]


def test_data_and_split_make_a_problem_and_the_model_does_not(tmp_path: Path) -> None:
    simulate(tmp_path / "a")
    for name, changes in OTHERS.items():
        simulate(tmp_path / name, **changes)
    problems = read_runs([tmp_path]).problems
    names = [[run.name for g in problem.groups for run in g.runs] for problem in problems]
    assert sorted(map(sorted, names)) == [
        ["a", "activation", "criterion", "init", "settings", "shapes"],
        ["data"],
        ["split"],
    ]
    for problem in problems:
        best = rank_groups({g.label: g for g in problem.groups})
        assert all(len(problem.groups) > 1 or not of_measure for of_measure in best.values())


def test_seeds_of_one_experiment_are_grouped(tmp_path: Path) -> None:
    for method in ("fedavg", "fedprox"):
        for seed in range(2):
            torch.manual_seed(seed)  # other initial weights too
            model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
            simulate(tmp_path / f"{method}-{seed}", seed, method=method, model=model)
    [problem] = read_runs([tmp_path]).problems
    assert [(g.label, g.seeds, g.notes) for g in problem.groups] == [("fedavg", [0, 1], []), ("fedprox", [0, 1], [])]


def test_random_splits_of_one_kind_are_seeds_and_marked(tmp_path: Path) -> None:
    """Two Dirichlet splits with little skew belong together; one with much skew is another problem."""
    for seed, alpha in ((0, 100.0), (1, 100.0), (2, 0.05)):
        clients = fk.data.partition.dirichlet(DATA.y_train, 3, alpha=alpha, seed=seed)
        simulate(tmp_path / f"{seed}", seed, clients=clients)
    problems = read_runs([tmp_path]).problems
    assert [[g.seeds for g in problem.groups] for problem in problems] == [[[0, 1]], [[2]]]
    assert problems[0].groups[0].notes


def test_the_same_run_twice_is_left_out_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a", "b"):
        simulate(tmp_path / name)
    with caplog.at_level(logging.WARNING):
        runs = read_runs([tmp_path / "a", tmp_path / "b"])
    assert list(runs.left_out) == [tmp_path / "b"]
    assert not runs.incomplete, "nothing is wrong with it"
    assert str(tmp_path / "b") in caplog.text


def test_a_method_of_the_users_own_that_was_changed_is_another_one(tmp_path: Path) -> None:
    def make(factor: float) -> fk.methods.FedAvg:
        class Mine(fk.methods.FedAvg):
            name = "mine"

            def loss(self, visit: Any, params: Any, batch: Any) -> Any:
                return factor * super().loss(visit, params, batch)

        return Mine()

    for seed, factor in ((0, 1.0), (1, 1.0), (2, 0.5)):
        simulate(tmp_path / f"{seed}", seed, method=make(factor))
    assert [g.seeds for g in group_runs([tmp_path])] == [[0, 1], [2]]


# Labels


def test_a_label_names_a_group_and_merges_nothing(tmp_path: Path) -> None:
    simulate(tmp_path / "a", label="ours")
    simulate(tmp_path / "b", 1, label="ours")
    simulate(tmp_path / "c", 2)
    assert [(g.label, g.seeds) for g in group_runs([tmp_path])] == [("ours", [0, 1]), ("fedavg", [2])]
    simulate(tmp_path / "d", 2, label="ours", lr=0.5)
    labels = {g.label: g.seeds for g in group_runs([tmp_path])}
    assert sorted(labels.values()) == [[0, 1], [2], [2]]
    assert all("lr=" in label for label in labels if label.startswith("ours"))


def test_a_label_in_an_experiment_file_and_in_a_sweep(tmp_path: Path) -> None:
    tables = {
        "method": "fedavg",
        "model": "mlp",
        "data": "digits",
        "split": {"kind": "iid", "n_clients": 4},
        "train": {"rounds": 1, "participation": 1},
    }
    labelled = Experiment.from_dict(override(tables, ["label=small steps"]))
    run_experiment(labelled, tmp_path / "run")
    assert [g.label for g in group_runs([tmp_path])] == ["small steps"]
    run_experiment(Experiment.from_dict(tables), tmp_path / "run")  # a label does not make it another experiment
    assert Experiment.from_dict(override(tables, ["label=3"])).label == "3"
    for bad in ("", "x" * 81, "\x1b[31m"):
        with raises(ConfigError, key="label", value=bad):
            Experiment.from_dict({**tables, "label": bad})
    with raises(FedkeepError, key="label"):
        fk.simulate("fedavg", net(), DATA, CLIENTS, label="a\nb", **SETTINGS)


# Runs from experiment files


def test_problems_are_significant_by_rounds_clients_and_contents(tmp_path: Path, command: Command) -> None:
    lines = records(wave(0))
    split = {"kind": "shards", "n_clients": 9, "s": 2, "seed": 0}
    write_run(tmp_path / "a", lines, method="fedavg")
    write_run(tmp_path / "b", lines, method="fedntd")
    write_run(tmp_path / "rounds", records(wave(0, rounds=6)), method="fedavg")
    write_run(tmp_path / "clients", lines, method="fedntd", split=split)
    write_run(tmp_path / "contents", lines, method="fedntd", made_by={"data": "1234abcd"})
    runs = read_runs([tmp_path])
    assert [[r.name for g in p.groups for r in g.runs] for p in runs.problems] == [
        ["a", "b"],
        ["clients"],
        ["contents"],
        ["rounds"],
    ]
    assert [g.label for g in runs.groups] == ["fedavg", "fedntd", "fedntd", "fedntd", "fedavg"]
    assert len({p.title for p in runs.problems}) == 4
    _, out, _ = command("compare", tmp_path)
    assert out.count("Problem ") == 4
    assert out.count("¹") == out.count("²") == 0, "a and b are equal; the others are alone"
    data = json.loads(command("compare", tmp_path, "--json")[1])
    assert [len(p["groups"]) for p in data["problems"]] == [2, 1, 1, 1]
    assert not any(test for p in data["problems"][1:] for test in p["tests"])


def test_the_public_part_may_depend_on_the_seed_and_the_test_set_may_not(tmp_path: Path) -> None:
    for name, seed, contents, test in (("a", 0, "1", "t"), ("b", 1, "2", "t"), ("c", 2, "3", "u")):
        data = {"source": "digits", "public": 5, "seed": seed}
        made_by = {"data": contents, "test": test, "split": contents}
        write_run(tmp_path / name, records(wave(0)), seed=seed, data=data, made_by=made_by)
    assert [g.seeds for g in group_runs([tmp_path])] == [[0, 1], [2]]


def test_a_fixed_split_seed_and_the_runs_own_are_two_problems(tmp_path: Path) -> None:
    for seed in (0, 1):
        for name, split_seed in (("own", seed), ("fixed", 7)):
            split = {"kind": "shards", "n_clients": 4, "s": 2, "seed": split_seed}
            made_by = {"data": "d", "split": f"s{split_seed}"}
            write_run(tmp_path / f"{name}-{seed}", records(wave(0)), seed=seed, split=split, made_by=made_by)
    runs = read_runs([tmp_path])
    names = [sorted(run.name for run in g.runs) for g in runs.groups]
    assert sorted(names) == [["fixed-0", "fixed-1"], ["own-0", "own-1"]]
    assert len(runs.problems) == 2


def test_a_setting_that_an_older_run_does_not_record_has_its_default(tmp_path: Path) -> None:
    write_run(tmp_path / "old", records(wave(0)), seed=0)
    write_run(tmp_path / "new", records(wave(0)), seed=1, train={"rounds": 4, "lr": 0.1, "weight_decay": 0.0})
    default = fk.engine.settings.Settings().weight_decay
    expected = [[1], [0]] if default else [[1, 0]]
    assert [g.seeds for g in group_runs([tmp_path])] == expected


# What is not finished, and what was stopped


def test_an_unfinished_run_is_marked_also_if_it_is_alone(tmp_path: Path, command: Command) -> None:
    write_run(tmp_path / "run", records(wave(0))[:3], rounds=4)
    assert "unfinished at round 2" in command("compare", tmp_path / "run")[1]
    assert "unfinished at round 2" in command("report", tmp_path / "run", "-o", tmp_path / "page.html")[1]
    assert "unfinished at round 2" in (tmp_path / "page.html").read_text().split('<h1 id="headline">')[1][:200]


def test_runs_that_a_callback_stopped_at_different_rounds_are_one_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They count as finished: the comparison and the page use the rounds that all of them have."""
    from fedkeep.analysis.sentences import remarks
    from fedkeep.reports.page import write
    from fedkeep.runs.history import History

    monkeypatch.setattr(History, "finished", True)
    for seed, last in ((0, 3), (1, 5)):
        write_run(tmp_path / f"{seed}", records(wave(seed, rounds=8))[: last + 1], seed=seed, rounds=8)
    [group] = group_runs([tmp_path])
    assert (group.label, group.finished, group.stopped_early) == ("fedavg", True, True)
    assert any("rounds 3 to 5 of 8" in line for line in remarks([group]))
    data = write([tmp_path], tmp_path / "page.html")
    assert data["problems"][0]["groups"][0]["curve"]["rounds"] == [1, 2, 3]


# Damaged folders


DAMAGES = {
    "rounds of garbage": ("rounds.jsonl", "not json\n"),
    "rounds without confusion": ("rounds.jsonl", '{"round": 0}\n{"round": 1}\n'),
    "ragged confusion": ("rounds.jsonl", '{"round": 0}\n{"round": 1, "confusion": [[1, 2], [3]], "bytes_up": 1}\n'),
    "records that are no tables": ("rounds.jsonl", "[1]\n[2]\n"),
    "empty rounds": ("rounds.jsonl", ""),
    "garbage": ("experiment.toml", "\x00\x01"),
    "no tables": ("experiment.toml", "format = 1\n"),
    "a method without a name": (
        "experiment.toml",
        to_toml({"format": 1, "seed": 0, **{k: {"name": {}} for k in ("method", "model", "data", "split")}}).decode(),
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_named_and_the_others_are_shown(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_pair(tmp_path, seeds=1)
    bad = write_run(tmp_path / "bad", records(wave(0)), seed=3)
    name, contents = DAMAGES[damage]
    (bad / name).write_text(contents)
    with caplog.at_level(logging.WARNING):
        runs = read_runs([tmp_path])
    assert list(runs.left_out) == [bad]
    assert str(bad) in caplog.text
    assert [g.label for g in runs.groups] == ["fedavg", "fedntd"]
    assert not runs.incomplete
    assert read_runs([tmp_path / "fedavg-0", bad]).incomplete, "here it was named itself"
    with raises(RunError, key="run"):
        read_runs([bad])
    left_out: dict[Path, str] = {}
    exported = {row["run"] for row in long_table([tmp_path / "fedavg-0", bad], left_out)}
    assert exported == {"fedavg-0"} or damage == "rounds without confusion"
    assert list(left_out) == [bad] or damage == "rounds without confusion", "what is there can be exported"


def test_exit_codes_tell_whether_a_named_run_was_damaged(tmp_path: Path, command: Command) -> None:
    write_pair(tmp_path, seeds=1)
    bad = write_run(tmp_path / "bad", records(wave(0)), seed=3)
    (bad / "rounds.jsonl").write_text("")
    page = ("-o", tmp_path / "page.html")
    for name, options in (("compare", ()), ("export", ("-o", tmp_path / "out.csv")), ("report", page)):
        code, _, errors = command(name, tmp_path, *options)
        assert code == 0, errors
        assert str(bad) in errors
        assert command(name, tmp_path / "fedavg-0", bad, *options)[0] == 1
        code, _, errors = command(name, bad, *options)
        assert (code, errors.count("fedkeep: ")) == (2, 1)
    assert json.loads(command("report", tmp_path, *page, "--json")[1])["left_out"][0]["run"] == str(bad)


def test_exported_runs_of_the_same_name_stay_apart(tmp_path: Path) -> None:
    for parent, seed in (("a", 0), ("b", 1)):
        write_run(tmp_path / parent / "run", records(wave(seed)))
    paths = [tmp_path / "a" / "run", tmp_path / "b" / "run"]
    assert len(wide_table(paths)[1]) == 2 * 5
    assert {row["run"] for row in long_table(paths)} == set(map(str, paths))


# Names that are hostile to a terminal


def test_names_with_escapes_and_markup_are_shown_as_text(tmp_path: Path, command: Command) -> None:
    evil = "\x1b]0;owned\x07[/b][red]$\\frac{$|\u202e"
    runs, page = tmp_path / "runs", tmp_path / "page.html"
    write_run(runs / "a\x1b[2J[bold]", records(wave(0)), method=evil, data={"source": evil}, label="x[/b]\x1b[31m|y")
    write_run(runs / "b\x1b[31m", records(wave(0))[:1], method=evil)
    for name, *options in (["compare"], ["compare", "--markdown"], ["report", "-o", page]):
        code, out, errors = command(name, runs, *options)
        assert code == 0, errors
        assert not set("\x1b\x07\u202e") & set(out + errors)
    assert "x[/b]\\x1b[31m|y" in command("compare", runs)[1].replace("\n", "")
    assert "\\|y" in command("compare", runs, "--markdown")[1]
    assert not set("\x1b\x07\u202e") & set(page.read_text())
    code, out, errors = command("plot", runs, "-o", tmp_path / "plots", "--format", "svg")
    assert code == 0, errors
    code, _, errors = command("compare", runs / "no\x1b[31m")
    assert (code, "\x1b" in errors) == (2, False)


def test_a_folder_with_markup_in_its_name_can_hold_runs(tmp_path: Path, command: Command) -> None:
    settings = ["data=digits", "split=iid", "split.n_clients=4", "rounds=1", "participation=1"]
    folder = tmp_path / "r[/b]"
    code, out, errors = command("run", "method=fedavg", "model=mlp", *settings, "--runs", folder, "--name", "x")
    assert code == 0, errors
    assert "r[/b]" in out.replace("\n", "")


def test_a_run_in_bfloat16_is_identified(tmp_path: Path) -> None:
    for seed in (0, 1):
        simulate(tmp_path / str(seed), seed, dtype="bfloat16")
    [group] = read_runs([tmp_path]).groups
    assert sorted(group.seeds) == [0, 1]


def test_settings_that_a_run_does_not_record_have_their_default(tmp_path: Path) -> None:
    """A setting that was added after a run was made is no difference between it and a newer one."""
    write_run(tmp_path / "old", records(wave(0)))
    newer = {"rounds": 4, "lr": 0.1, "aggregation": "mean", "hostile": 1, "dp_delta": 1e-5}
    write_run(tmp_path / "new", records(wave(1)), method="fedntd", train=newer)
    [problem] = read_runs([tmp_path]).problems
    assert [group.label for group in problem.groups] == ["fedntd", "fedavg"]
    assert problem.groups[0].setting["train"] == problem.groups[1].setting["train"]


def test_what_a_run_does_not_record_has_the_value_of_its_time(tmp_path: Path) -> None:
    older = fk.methods.FedSSD(M_max=0.3, form="inside")  # as it was before `form` existed
    complete = {key: value for key, value in older.to_dict().items() if key != "name"}
    augment = {"crop": 4, "flip": True, "cutout": 0}
    runs = [
        ({"M_max": 0.3}, augment),
        (complete, {**augment, "padding": "zeros"}),
        (complete, {**augment, "padding": "reflect"}),
        ({**complete, "form": "outside"}, augment),
    ]
    for seed, (hyper, drawn) in enumerate(runs):
        train = {"rounds": 4, "lr": 0.1, "augment": drawn}
        write_run(tmp_path / str(seed), records(wave(0)), method="fedssd", hyper=hyper, seed=seed, train=train)
    assert sorted(sorted(group.seeds) for group in group_runs([tmp_path])) == [[0, 1], [2], [3]]


def test_a_comparison_is_a_line_of_text_and_a_table_in_a_notebook(tmp_path: Path) -> None:
    for method in ("fedavg", "fedntd"):
        for seed in (0, 1):
            options = {"run_dir": tmp_path / f"{method}-{seed}", "label": f"<b>{method}", "seed": seed}
            fk.simulate(method, net(), DATA, CLIENTS, **options, **SETTINGS)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "experiment.toml").write_text("format = 2\n")
    runs = read_runs([tmp_path])
    assert repr(runs) == "<RunSet: 4 runs of <b>fedavg, <b>fedntd, 1 left out>"
    shown = runs._repr_html_()
    assert "<td" in shown
    assert "&lt;b&gt;fedntd" in shown
    assert "<b>fedntd" not in shown
    group = runs.groups[0]
    assert f"{100 * group.mean['final']:.1f}±{100 * group.spread['final']:.1f}" in shown
    assert "left out:" in shown
