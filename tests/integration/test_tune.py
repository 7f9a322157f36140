"""Choosing hyperparameters: random search with successive halving, on held-out training examples."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from support.errors import ANY, raises
from support.progress import Silent
from typer.testing import CliRunner

from fedkeep import tree
from fedkeep.cli.app import app
from fedkeep.cli.progress import ProgressBar
from fedkeep.data import load
from fedkeep.errors import ConfigError, FedkeepError
from fedkeep.experiments.build import build
from fedkeep.experiments.experiment import Experiment, read
from fedkeep.experiments.run import run
from fedkeep.experiments.tune import (
    Choices,
    Range,
    draw_tries,
    most_rounds,
    parse_space,
    require_hyperparameters,
    stages,
    tune,
)
from fedkeep.runs.reading import load_run

DIGITS = read(Path("digits"))
SMALL = ["rounds=9", "epochs=1", "participation=2"]


def search(folder: Path, method: str = "fedntd", number: int = 9, extra: Any = (), **options: Any) -> Any:
    tries = draw_tries(DIGITS, [*SMALL, *extra], method, number, 1, options.pop("space", {}))
    return tune({method: tries}, 9, folder, 1, options.pop("progress", Silent()), **options)[method]


def test_the_best_continue_and_the_experiment_as_it_is_is_compared_with_them(tmp_path: Path) -> None:
    bar = ProgressBar(Console(file=io.StringIO()), most_rounds({"": draw_tries(DIGITS, SMALL, "fedntd", 9, 1, {})}, 9))
    found = search(tmp_path, progress=bar)
    rounds = {tried.try_.number: len(load_run(tmp_path / tried.try_.folder(0)).records) - 1 for tried in found}
    assert rounds[0] == 9, "the experiment as it is runs to the end"
    others = [number for name, number in rounds.items() if name != 0]
    assert sum(number == 9 for number in others) in (0, 1)
    assert sum(number >= 3 for number in others) in (2, 3)
    assert set(others) <= {1, 3, 9}
    assert [tried.round for tried in found] == sorted((tried.round for tried in found), reverse=True)
    stopped = {1: (1,), 3: (1, 3), 9: (1, 3, 9)}  # a run is counted from its start in every stage
    assert bar.progress.tasks[0].completed == sum(sum(stopped[number]) for number in rounds.values())
    assert bar.progress.tasks[0].completed <= bar.progress.tasks[0].total == 9 + 4 * 3 + 2 * 9
    last = [tried for tried in found if tried.round == 9]
    assert found[0].score == max(tried.score for tried in last)
    for tried in found:
        smoothed = load_run(tmp_path / tried.try_.folder(0)).summary()["smoothed"]
        assert tried.scores == {0: pytest.approx(smoothed)}


def test_a_search_continues_where_it_was_interrupted(tmp_path: Path) -> None:
    whole = search(tmp_path / "whole")
    search(tmp_path / "parts", number=3)
    file = tmp_path / "parts" / "fedntd" / "try-1-seed-0" / "rounds.jsonl"
    lines = file.read_text().splitlines()
    parts = search(tmp_path / "parts")
    assert file.read_text().splitlines()[: len(lines)] == lines, "its rounds were not repeated"
    assert [(tried.try_.overrides, tried.score) for tried in parts] == [
        (tried.try_.overrides, tried.score) for tried in whole
    ]


def test_a_run_that_stops_and_continues_ends_as_if_it_had_not(tmp_path: Path) -> None:
    experiment = Experiment.load("digits", [*SMALL, "method=scaffold"])
    first = run(experiment, tmp_path / "parts", until=2)
    assert (len(first.records) - 1, first.ended) == (2, "stopped")
    assert len(run(experiment, tmp_path / "parts", until=2).records) - 1 == 2, "it has been there"
    parts, whole = run(experiment, tmp_path / "parts", until=9), run(experiment, tmp_path / "whole")
    assert parts.finished
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(parts.params), tree.leaves(whole.params), strict=True))


def test_a_folder_with_another_search_is_refused_before_anything_runs(tmp_path: Path) -> None:
    search(tmp_path, "fedavg", 2)
    with raises(ConfigError, "train.rounds", mentions=["--runs"]) as caught:
        tune({"fedavg": draw_tries(DIGITS, ["rounds=18", *SMALL[1:]], "fedavg", 3, 1, {})}, 18, tmp_path, 1, Silent())
    assert "resume" not in str(caught.value)
    assert not (tmp_path / "fedavg" / "try-2-seed-0").exists()


def test_no_setting_is_tried_twice() -> None:
    def drawn(*searched: str) -> list[tuple[str, ...]]:
        tries = draw_tries(DIGITS, SMALL, "fedavg", 9, 1, parse_space(searched))
        assert [one.number for one in tries] == list(range(len(tries)))
        return [one.overrides for one in tries]

    assert drawn("lr=1") == [(), ("train.lr=1",)]
    assert drawn("lr=0.05") == [()], "the experiment's own"
    assert sorted(drawn("lr=0.05,2")) == [(), ("train.lr=2",)]
    assert sorted(drawn("lr=1,2,3")) == [(), ("train.lr=1",), ("train.lr=2",), ("train.lr=3",)]
    assert len(set(drawn())) == 9


def test_the_test_set_is_not_used() -> None:
    (first, *_) = draw_tries(DIGITS, SMALL, "fedntd", 2, 1, {})
    assert first.experiments[0].data["held_out"] == 0.1
    data, original = build(first.experiments[0]).data, load("digits")
    known = {tuple(row.flatten().tolist()) for row in original.x_train}
    assert all(tuple(row.flatten().tolist()) in known for row in data.x_test)
    (own, *_) = draw_tries(DIGITS, [*SMALL, "data.held_out=0.3"], "fedntd", 2, 1, {})
    assert own.experiments[0].data["held_out"] == 0.3


def test_every_method_is_searched_in_what_it_declares_and_the_learning_rate() -> None:
    drawn = {name: draw_tries(DIGITS, SMALL, name, 30, 1, {}) for name in ("fedavg", "fedntd", "feddf", "fedgkd")}
    assert all(len(tries) == 30 and tries[0].overrides == () for tries in drawn.values())
    rates = [one.experiments[0].train.lr for one in drawn["fedavg"][1:]]
    base = drawn["fedavg"][0].experiments[0].train.lr
    assert base / 4 <= min(rates) < base / 2
    assert 2 * base < max(rates) <= 4 * base
    assert {one.experiments[0].method["average_of"] for one in drawn["feddf"]} == {"logits", "probabilities"}
    assert {one.experiments[0].method["M"] for one in drawn["fedgkd"]} <= set(range(1, 11))
    fixed = draw_tries(DIGITS, [*SMALL, "lr=0.07", "method.beta=2"], "fedntd", 5, 1, parse_space(["momentum=0.5,0.9"]))
    assert {one.experiments[0].train.lr for one in fixed} == {0.07}
    assert {one.experiments[0].method["beta"] for one in fixed} == {2}
    assert {one.experiments[0].train.momentum for one in fixed[1:]} <= {0.5, 0.9}


def test_a_try_that_diverges_is_the_last(tmp_path: Path) -> None:
    found = search(tmp_path, "fedavg", number=3, space={"train.lr": Choices((1e30, 1e31))})
    assert found[0].try_.number == 0
    assert [tried.score for tried in found[1:]] == [-math.inf] * 2
    assert "diverged" in found[-1].failure


def test_stages_and_searches() -> None:
    assert stages(200, 27) == [(22, 27), (66, 9), (200, 3)]
    assert stages(9, 2) == [(1, 2), (3, 1), (9, 1)]
    assert parse_space(["method.M=1:10"]) == {"method.M": Range(1, 10, whole=True)}
    for text in ("lr", "lr=", "lr=0:1", "lr=2:1", "lr=a:b", "=1:2"):
        with raises(ConfigError, "search", text):
            parse_space([text])
    with raises(FedkeepError, ANY, ANY):
        draw_tries(DIGITS, SMALL, "fedntdx", 2, 1, {})


def test_what_has_no_effect_is_not_searched() -> None:
    searched = [one.overrides for one in draw_tries(DIGITS, [*SMALL, "optimizer=adam"], "fedkeep", 4, 1, {})[1:]]
    assert [[text.partition("=")[0] for text in texts] for texts in searched] == [
        ["train.lr", "method.server_momentum"]
    ] * 3
    (_, other) = draw_tries(DIGITS, SMALL, "fedkeep", 2, 1, {})
    assert "method.push" in " ".join(other.overrides)


@pytest.mark.parametrize(
    ("searched", "key", "mentions"),
    [
        ("seed=1,2", "seed", "--seeds"),
        ("rounds=10:20", "train.rounds", "rounds=..."),
        ("data.held_out=0.1:0.2", "data.held_out", "data.held_out=..."),
        ("split.s=2,3", "split.s", "split.s=..."),
        ("method=fedavg,fedntd", "method", "method=..."),
    ],
)
def test_a_key_that_makes_tries_incomparable_is_not_searched(searched: str, key: str, mentions: str) -> None:
    with raises(ConfigError, key, ANY, mentions=[mentions]):
        parse_space([searched])


def test_a_search_without_effect_is_refused() -> None:
    with raises(ConfigError, "method.bta", ANY, valid=["beta"], mentions=["fedntd", "method.beta"]):
        require_hyperparameters(["method.bta"], ["fedntd"])
    with raises(ConfigError, "method.tau", ANY, valid=["mu"], mentions=["fedavg, fedprox"]):
        require_hyperparameters(["method.tau"], ["fedavg", "fedprox"])
    with raises(ConfigError, "method.push", valid=[], mentions=["fedavg"]):
        require_hyperparameters(["method.push"], ["fedavg"])
    require_hyperparameters(["method.tau", "train.lr", "model.width"], ["fedavg", "fedntd"])
    with raises(ConfigError, "train.lr"):
        draw_tries(DIGITS, [*SMALL, "lr=0.1"], "fedavg", 2, 1, parse_space(["lr=0.01:0.1"]))
    with raises(ConfigError, "seed", ANY, mentions=["--seeds"]):
        draw_tries(DIGITS, [*SMALL, "seed=3"], "fedavg", 2, 1, {})


def test_the_command_leaves_out_what_cannot_be_trained(tmp_path: Path) -> None:
    args = ["tune", "digits", *SMALL[1:], "rounds=1", "accumulate=2", "--methods", "all", "--tries", "1", "--json"]
    done = CliRunner().invoke(app, [*args, "--runs", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "feddistill" in done.stderr
    named = json.loads(done.stdout)
    assert "feddistill" not in named
    assert {"fedavg", "fedkeep", "fedntd"} <= named.keys()


def test_the_command(tmp_path: Path) -> None:
    args = ["tune", "digits", *SMALL, "--methods", "fedavg,fedntd", "--tries", "2", "--runs", str(tmp_path)]
    done = CliRunner().invoke(app, args, env={"COLUMNS": "120"})
    assert done.exit_code == 0, done.output
    assert "fedntd" in done.stdout
    assert "as given" in done.stdout
    data = json.loads(CliRunner().invoke(app, [*args, "--json"]).stdout)
    assert list(data) == ["fedavg", "fedntd"]
    assert {one["try"] for one in data["fedntd"]} == {0, 1}
    with raises(FedkeepError, "method", ANY):
        CliRunner().invoke(app, ["tune", "seed=1"], catch_exceptions=False)


def test_a_search_in_which_all_failed_recommends_nothing(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["tune", "digits", *SMALL, "lr=1e30", "--tries", "2", "--runs", str(tmp_path)])
    assert done.exit_code == 1
    assert "failed" in done.stdout
    assert "run the best setting" not in " ".join(done.stdout.split())
