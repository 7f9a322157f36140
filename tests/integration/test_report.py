"""The report: what it says and shows, from run folders with known contents."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.synthetic import HOSTILE, experiment, hostile_run, records, wave, write_pair, write_run

import fedkeep as fk
from fedkeep.analysis import groups
from fedkeep.analysis.anatomy import anatomies, where
from fedkeep.analysis.measured import Measured, measure
from fedkeep.reports import page_data, render, verdict, write
from fedkeep.reports.data import ANATOMY_BYTES, HEAT_BYTES, pack
from fedkeep.reports.page import STATIC
from fedkeep.runs import label_counts
from fedkeep.runs.history import History


def history(accuracy: Any, local: Any = None, **about: Any) -> History:
    lines = records(accuracy, local)
    said = experiment(**{"rounds": len(lines) - 1, **about})
    return History(said["method"]["name"], {}, lines, about=said)


def group(label: str, *histories: History, **changes: Any) -> groups.Group:
    setting = {"method": {"name": label}, **changes}
    return groups.Group(label, setting, list(histories))


def measured(label: str, *accuracies: Any, **changes: Any) -> Measured:
    runs = [history(a, method=label, seed=s) for s, a in enumerate(accuracies)]
    return measure(group(label, *runs, **changes))


START = [0.0, 0.0]
KEEPS, LOSES, MIDDLING = ([START, [0.8, 0.8], [x, 0.8]] for x in (0.8, 0.0, 0.4))


# one round, taken apart


def test_a_class_that_vanishes_in_training_and_one_that_vanishes_in_aggregation() -> None:
    """Two clients; the global model knows class 0 by 0.8 and both lose it; class 1 both learn, and averaging loses it.

    Lost locally: class 0 by 0.8, class 1 nothing (it was not known). In aggregation: class 0 nothing is left to lose,
    class 1 1.0 - 0.2 = 0.8. The mean over two classes is 0.4 each.
    """
    run = history([START, [0.8, 0.0], [0.0, 0.2]], [[[0.8, 0.0]], [[0.0, 1.0], [0.0, 1.0]]])
    [_, second] = anatomies(run)
    assert second.round == 2
    assert second.lost_locally.tolist() == [0.8, 0.0]
    assert second.lost_in_aggregation.tolist() == [0.0, 0.8]
    assert where([second]) == {"local": pytest.approx(0.4), "aggregation": pytest.approx(0.4)}


def test_a_round_without_an_evaluation_before_it_is_not_taken_apart() -> None:
    run = history([START, KEEPS[1], KEEPS[2]], [[[0.5, 0.5]], [[0.5, 0.5]]])
    del run.records[1]["confusion"]
    assert anatomies(run) == []
    assert where([]) is None


# the verdict


def test_the_verdict_names_who_forgets_least_and_what_the_reference_forgets() -> None:
    said = verdict([measured("fedavg", LOSES, LOSES), measured("fedntd", KEEPS, MIDDLING)])
    assert said.headline == (
        "fedntd forgets least: its classes end 10 points below their best (fedavg: 40) on each of 2 seeds, and it ends "
        "most accurate too (70.0±14.1%); fedavg forgets class 0 most."
    )
    assert "eval_local_every=1" in " ".join(said.details)


def test_the_verdict_says_in_which_phase_it_happens() -> None:
    clients = [[[0.8, 0.8]], [[0.0, 0.8]]]
    run = history(LOSES, clients)
    assert verdict([measure(group("fedavg", run))]).headline.endswith(
        "forgets class 0 most, chiefly in local training."
    )
    kept = history(LOSES, [[[0.8, 0.8]], [[0.8, 0.8]]])
    assert "when clients' models are aggregated" in verdict([measure(group("fedavg", kept))]).headline


def test_the_verdict_is_careful_with_one_seed() -> None:
    said = verdict([measured("fedavg", LOSES), measured("fedntd", KEEPS)])
    assert "with a single seed, which may be chance" in said.headline
    assert any(line.startswith("One seed each") for line in said.details)


def test_the_verdict_counts_the_seeds_that_say_otherwise() -> None:
    said = verdict([measured("fedavg", LOSES, KEEPS), measured("fedntd", KEEPS, MIDDLING)])
    assert ", though on 1 of 2 seeds only" in said.headline


def test_the_verdict_says_who_is_ahead_in_accuracy_where_that_is_another() -> None:
    low = [START, [0.2, 0.2], [0.2, 0.2]]
    said = verdict([measured("fedavg", MIDDLING), measured("frozen", low)])
    assert "but fedavg ends more accurate (60.0% against 20.0%)" in said.headline


def test_a_runner_up_within_the_spread_is_a_tie() -> None:
    groups = [measured("fedavg", LOSES, LOSES), measured("a", KEEPS, MIDDLING), measured("b", KEEPS, LOSES)]
    assert "call it a tie" in verdict(groups).details[0]


def test_where_fedavg_itself_forgets_least_it_is_compared_with_the_worst() -> None:
    assert "(fedntd: 40)" in verdict([measured("fedavg", KEEPS), measured("fedntd", LOSES)]).headline


def test_the_verdict_warns_of_runs_that_differ_in_more_than_the_method_or_are_not_done() -> None:
    one = measured("fedavg", LOSES, KEEPS, split={"kind": "iid"})
    other = measured("fedntd", KEEPS, KEEPS, split={"kind": "shards"}, **{"unfinished at round": 2})
    details = " ".join(verdict([one, other]).details)
    assert "differ in split:" in details
    assert "Not at its end yet: fedntd." in details


def test_a_method_at_its_best_in_the_end_has_forgotten_nothing() -> None:
    rising = [START, [0.2, 0.2], [0.4, 0.4]]
    assert verdict([measured("fedavg", rising)]).headline.endswith(
        "its classes at their best on average; it forgets no class."
    )


def test_nothing_is_said_of_forgetting_after_one_round() -> None:
    assert verdict([measured("fedavg", KEEPS[:2])]).headline.startswith("Too early to say")


# the numbers


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("runs"))


def test_the_data_of_a_page(pair: Path) -> None:
    data = page_data(groups.group([pair]))
    assert [g["label"] for g in data["groups"]] == ["fedavg", "fedntd"]
    fedavg = data["groups"][0]
    run = fedavg["runs"][0]
    assert (run["seed"], run["folder"], run["reached"], run["planned"]) == (0, "fedavg-0", 6, 6)
    exact = fk.load_run(pair / "fedavg-0").class_accuracy
    coded = np.frombuffer(base64.b64decode(run["class_accuracy"]), dtype=np.uint8).reshape(6, 3)
    np.testing.assert_allclose(coded / 200, exact, atol=0.0025)
    mean = np.mean([fk.load_run(pair / f"fedavg-{s}").accuracy for s in (0, 1)], axis=0)
    np.testing.assert_allclose(fedavg["curve"]["mean"], mean, atol=1e-4)
    assert sum(fedavg["drops"]["counts"]) == fedavg["drops"]["number"] == 10  # 2 seeds, 5 steps each
    assert run["anatomy"]["rounds"] == [1, 2, 3, 4, 5, 6]
    assert len(base64.b64decode(run["anatomy"]["models"][0])) == (1 + 3 + 1) * 3
    assert data["splits"][run["split"]]["counts"][1] == [0, 30, 0]
    assert data["shared"]["data.source"] == "digits"
    assert "method.name" not in data["shared"]
    json.dumps(data, allow_nan=False)


def test_methods_on_one_seed_share_their_split(pair: Path) -> None:
    data = page_data(groups.group([pair]))
    assert [[run["split"] for run in g["runs"]] for g in data["groups"]] == [[0, 1], [0, 1]]


def test_absent_classes_unequal_lengths_and_one_evaluated_round(tmp_path: Path) -> None:
    lines = records(wave(0))
    for line in lines:
        line["confusion"][2] = [0, 0, 0]  # the test set has no class 2
    write_run(tmp_path / "absent", lines, method="fedprox")
    write_run(tmp_path / "short", records(wave(0))[:2], method="fedavg", rounds=4)
    data = page_data(groups.group([tmp_path]))
    absent, short = data["groups"]
    assert base64.b64decode(absent["runs"][0]["class_accuracy"])[2] == 255
    assert absent["class_forgetting"][2] is None
    assert short["mean"]["forgetting"] is None
    assert short["drops"]["quartiles"] == [None] * 3
    assert render(data)


def test_bytes_are_steps_of_half_a_percent() -> None:
    values = np.array([[0.0, 0.123], [0.999, np.nan]])
    assert list(base64.b64decode(pack(values))) == [0, 25, 200, 255]


@pytest.mark.parametrize(("classes", "clients"), [(10, 10), (100, 20)])
def test_ten_runs_of_200_rounds_stay_under_5_megabytes(classes: int, clients: int) -> None:
    rng = np.random.default_rng(0)
    diagonal = [{"confusion": np.diag(rng.integers(1, 50, classes)), "test_loss": 1.0} for _ in range(3)]
    local = {
        "hits": rng.integers(0, 50, (clients, classes)),
        "total": [50] * classes,
        "label_counts": rng.integers(0, 9, (clients, classes)),
    }
    facts = {"cohort": list(range(clients)), "bytes_up": 1, "bytes_down": 1, "seconds": 0.1, "local": local}
    rounds = (
        200 if classes < 1000 else 20
    )  # confusion matrices of a thousand classes fill the memory of a small machine
    lines = [{"round": t, **(facts if t else {}), **diagonal[t % 3]} for t in range(rounds + 1)]
    runs = [History("fedavg", {}, lines, about=experiment(seed=s, rounds=rounds)) for s in range(10)]
    page = render(page_data([group("fedavg", *runs[:5]), group("fedntd", *runs[5:])]))
    assert len(page.encode()) < 5e6


def test_long_runs_are_thinned_to_what_a_screen_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    run = history(wave(0, rounds=900), np.zeros((900, 2, 3)))
    [one] = page_data([group("fedavg", run)])["groups"]
    assert len(one["curve"]["rounds"]) == len(one["runs"][0]["rounds"]) == 400
    assert one["runs"][0]["rounds"][0] == 1
    assert one["runs"][0]["rounds"][-1] == 900
    assert len(one["runs"][0]["anatomy"]["rounds"]) == 400
    assert (HEAT_BYTES + ANATOMY_BYTES) * 4 / 3 <= 4e6  # in base64; the rest of the page has a megabyte


# the page


class Tags(HTMLParser):
    """Every tag with its attributes, and the text inside the JSON element."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.json = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, text: str) -> None:
        if self.tags and self.tags[-1] == ("script", {"id": "data", "type": "application/json"}):
            self.json += text


def test_text_from_run_folders_is_text_and_nothing_else(tmp_path: Path) -> None:
    data = write([hostile_run(tmp_path)], tmp_path / "page.html")
    page = Tags((tmp_path / "page.html").read_text())
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert "img" not in [tag for tag, _ in page.tags]
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert json.loads(page.json) == {**data, "live": False}
    assert json.loads(page.json)["groups"][0]["method"] == HOSTILE


def test_the_page_asks_nobody_for_anything(pair: Path) -> None:
    page = render(page_data(groups.group([pair])))
    tags = Tags(page).tags
    assert {a.get("href") for t, a in tags if t == "link"} == {"data:,"}
    assert not [a for _, a in tags if a.get("src")]
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", page)
    policy = next(a["content"] for t, a in tags if a.get("http-equiv"))
    assert "default-src 'none'" in policy
    assert "connect-src 'none'" in policy
    assert "unsafe" not in policy
    live = Tags(render(page_data(groups.group([pair])), live=True)).tags
    assert "connect-src 'self'" in next(a["content"] for t, a in live if a.get("http-equiv"))


def test_the_verdict_can_be_read_without_javascript(pair: Path) -> None:
    page = render(page_data(groups.group([pair])))
    assert '<h1 id="headline">fedntd forgets least' in page
    assert "<noscript>" in page


def test_scripts_hold_no_end_of_script() -> None:
    for file in STATIC.glob("*.js"):
        assert "</script" not in file.read_text()
        assert "innerHTML" not in file.read_text()


# who holds what


def test_a_run_keeps_its_split(tmp_path: Path) -> None:
    plain = {
        "method": "fedavg",
        "model": "mlp",
        "data": "digits",
        "split": {"kind": "shards", "n_clients": 6, "s": 2},
        "train": {"rounds": 1, "participation": 2, "epochs": 1},
    }
    one = experiment.Experiment.from_dict(plain)
    one.run(tmp_path / "run")
    found = label_counts.label_counts_of(fk.load_run(tmp_path / "run"))
    data, clients = one.data_and_clients()
    assert found is not None
    assert found["clients"] == 6
    assert found["counts"] == clients.label_counts(data.y_train, 10).tolist()


def test_of_many_clients_some_are_kept() -> None:
    y = np.arange(1000) % 5
    kept = label_counts.count_labels(fk.data.partition.iid(y, 500), y, 5)
    assert (kept["clients"], len(kept["ids"]), len(kept["counts"])) == (500, 200, 200)
    assert kept["ids"][-1] == 499


def test_without_a_kept_split_the_rounds_tell_of_those_that_took_part(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", records(wave(0), np.zeros((4, 2, 3))))
    assert label_counts.label_counts_of(fk.load_run(path)) == {
        "clients": 2,
        "ids": [0, 1],
        "counts": [[30, 0, 0], [0, 30, 0]],
    }
    (path / "split.json").write_text('{"clients": 9, "ids": [0], "counts": [[1, 2], [3, 4]]}')  # damaged
    assert label_counts.label_counts_of(fk.load_run(path))["clients"] == 2
    (path / "split.json").write_text('{"clients": 1, "ids": [0], "counts": [[0, 0, 0]]}')
    assert page_data(groups.group([path]))["splits"] == []
    plain = write_run(tmp_path / "plain", records(wave(0)))
    assert label_counts.label_counts_of(fk.load_run(plain)) is None


def test_a_run_is_read_without_its_weights(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", records(wave(0)))
    assert fk.load_run(path, weights=False).folder == path
    assert dataclasses.asdict(fk.load_run(path))["params"] == {}
