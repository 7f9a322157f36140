"""The report: its data, its verdict and its page, from run folders with known contents.

Sentences of the verdict are checked for labels and numbers, not for wording.
"""

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
from fedkeep._util.text import printable
from fedkeep.analysis.anatomy import anatomies, loss_by_class, loss_by_phase
from fedkeep.analysis.compare import differences
from fedkeep.analysis.groups import Group, Problem, Run
from fedkeep.analysis.run_set import RunSet, read_runs
from fedkeep.analysis.sentences import sentences
from fedkeep.experiments.build import load_data_and_clients
from fedkeep.experiments.experiment import Experiment
from fedkeep.experiments.run import run as run_experiment
from fedkeep.reports.data import ANATOMY_BYTES, HEAT_BYTES, pack, page_data
from fedkeep.reports.page import STATIC, render, write
from fedkeep.reports.verdict import verdict
from fedkeep.runs import label_counts
from fedkeep.runs.files import to_toml
from fedkeep.runs.history import History


def history(accuracy: Any, local: Any = None, **about: Any) -> History:
    lines = records(accuracy, local)
    settings = experiment(**{"rounds": len(lines) - 1, **about})
    return History(settings["method"]["name"], {}, lines, about=settings)


def group(label: str, *histories: History, status: Any = "finished", **setting: Any) -> Group:
    return Group(label, {"method": {"name": label}, **setting}, [Run(h) for h in histories], status)


def with_accuracies(label: str, *accuracies: Any, **kwargs: Any) -> Group:
    """A group with one run per seed, with these class accuracies."""
    return group(label, *(history(a, method=label, seed=s) for s, a in enumerate(accuracies)), **kwargs)


def one_problem(*groups: Group) -> RunSet:
    return RunSet([Problem("the problem", {}, list(groups))])


START = [0.0, 0.0]
KEEPS, LOSES, MIDDLING = ([START, [0.8, 0.8], [x, 0.8]] for x in (0.8, 0.0, 0.4))


# the anatomy of a round


def test_a_class_lost_in_training_and_one_lost_in_aggregation() -> None:
    """Two clients; the global model knows class 0 by 0.8 and both lose it; class 1 both learn, and averaging loses it.

    Lost locally: class 0 by 0.8, class 1 nothing (it was not known). In aggregation: class 0 nothing is left to lose,
    class 1 1.0 - 0.2 = 0.8. The mean over two classes is 0.4 each.
    """
    run = history([START, [0.8, 0.0], [0.0, 0.2]], [[[0.8, 0.0]], [[0.0, 1.0], [0.0, 1.0]]])
    [_, second] = anatomies(run)
    assert second.round == 2
    assert second.lost_locally.tolist() == [0.8, 0.0]
    assert second.lost_in_aggregation.tolist() == [0.0, 0.8]
    assert [lost.tolist() for lost in loss_by_class([second])] == [[0.8, 0.0], [0.0, 0.8]]
    assert loss_by_phase([second]) == {"local": pytest.approx(0.4), "aggregation": pytest.approx(0.4)}


def test_the_loss_of_what_an_untrained_model_got_right_is_no_forgetting() -> None:
    """The untrained model gets all of class 1 right by chance, and no later model any; round 2 loses nothing."""
    run = history([[0.0, 1.0], [0.8, 0.0], [0.8, 0.0]], [[[0.8, 0.0]], [[0.8, 0.0]]])
    first, second = anatomies(run)
    assert first.lost_locally.tolist() == [0.0, 1.0]
    assert [lost.tolist() for lost in loss_by_class([first, second])] == [[0.0, 0.0], [0.0, 0.0]]
    assert loss_by_phase([first, second]) == {"local": 0.0, "aggregation": 0.0}
    assert loss_by_phase([first]) == {"local": 0.5, "aggregation": 0.0}, "there is no other round"


def test_a_round_without_an_evaluation_before_it_has_no_anatomy() -> None:
    run = history([START, KEEPS[1], KEEPS[2]], [[[0.5, 0.5]], [[0.5, 0.5]]])
    del run.records[1]["confusion"]
    assert run.anatomy_rounds == []
    assert anatomies(run) == []
    assert loss_by_phase([]) is None


# the verdict


def test_the_verdict_names_the_method_that_forgets_least_and_what_the_reference_forgets() -> None:
    result = verdict([with_accuracies("fedavg", LOSES, LOSES), with_accuracies("fedntd", KEEPS, MIDDLING)])
    assert result.headline == "FedNTD forgets 10 points, FedAvg 40"
    details = " ".join(result.details)
    for part in ("2 of 2 seeds", "70.0±14.1%", "FedAvg ", "class 0 ", "eval_local_every=1"):
        assert part in details


def test_the_headline_is_one_clause() -> None:
    """`KEEPS`, `MIDDLING` and `LOSES` forget 0, 20 and 40 points."""
    cases = {
        "FedNTD forgets nothing, FedAvg 40 points": [("fedavg", LOSES), ("fedntd", KEEPS)],
        "FedNTD and MOON forget 20 points, FedAvg 40": [("fedavg", LOSES), ("fedntd", MIDDLING), ("moon", MIDDLING)],
        "SCAFFOLD ends at 60.0% and forgets 20 points": [("scaffold", MIDDLING)],
        "Both forget 20 points": [("fedavg", MIDDLING), ("scaffold", MIDDLING)],
    }
    for headline, groups in cases.items():
        assert verdict([with_accuracies(name, accuracy) for name, accuracy in groups]).headline == headline


def test_equal_roundings_have_another_digit_in_the_headline() -> None:
    """Six seeds forget 20 points, or five of them 20 and one 22.5: 20.4 on average."""
    more = [START, [0.8, 0.8], [0.35, 0.8]]
    groups = [with_accuracies("fedavg", *[MIDDLING] * 5, more), with_accuracies("fedntd", *[MIDDLING] * 6)]
    headline = verdict(groups).headline
    assert headline == "FedNTD forgets 20.0 points, FedAvg 20.4"


def test_the_verdict_has_the_p_value_of_the_difference() -> None:
    """Three seeds; the differences in forgetting are 0.2, 0.2 and 0.4."""
    groups = [with_accuracies("fedavg", LOSES, LOSES, LOSES), with_accuracies("fedntd", MIDDLING, MIDDLING, KEEPS)]
    tests = differences(groups, "forgetting")
    [line] = [line for line in verdict(groups, tests).details if "p = " in line]
    assert f"p = {tests[0].p_corrected:.2g}" in line
    assert "not statistically significant" in line


def test_methods_are_called_as_in_their_papers() -> None:
    titles = {name: cls.title for name, cls in fk.methods.REGISTRY.items()}
    assert len(set(titles.values())) == len(titles)
    assert (titles["scaffold"], titles["gcfed"], titles["fedntd"]) == ("SCAFFOLD", "GC-Fed", "FedNTD")
    chosen = Group("fedavg", {"method": {"name": "fedavg"}, "label": "fedavg"}, [Run(history(KEEPS))])
    assert chosen.title == "fedavg", "a label that the user gave stays"


def test_classes_have_their_names() -> None:
    run = history(LOSES)
    run.class_names = ("benign", "a <b>\x1b[31m" + "x" * 80)
    [line] = [line for line in verdict([group("fedavg", run)]).details if "most" in line]
    assert "benign" in line
    [data] = page_data(one_problem(group("fedavg", run)))["problems"]
    assert data["class_names"][0] == "benign"
    assert data["class_names"][1].startswith("a <b>\\x1b[31mxx")
    assert len(data["class_names"][1]) == 40


def test_a_class_that_no_run_ever_recognised_is_named() -> None:
    """Class 2 is right only before training, which does not count; in the third case one run of three knows it."""
    known = [0.8, 0.8, 0.0]
    never, once = [[0.0, 0.0, 1.0], known, known], [[0.0, 0.0, 1.0], [0.8, 0.8, 0.2], known]
    for groups, named in (
        ([with_accuracies("fedavg", never)], True),
        ([with_accuracies("fedavg", never), with_accuracies("fedntd", never)], True),
        ([with_accuracies("fedavg", never), with_accuracies("fedntd", never, once)], False),
        ([with_accuracies("fedavg", never, status="unfinished")], False),
    ):
        for lines in (verdict(groups).details, sentences(groups)):
            found = [line for line in lines if "0% in every round" in line]
            assert len(found) == named
            assert all("class 2" in line and "class 0" not in line for line in found)


@pytest.mark.parametrize(
    ("last_client", "phase", "other"), [(0.0, "local training", "aggregation"), (0.8, "aggregation", "local training")]
)
def test_the_verdict_names_the_phase_that_loses_most(last_client: float, phase: str, other: str) -> None:
    """Class 0 falls from 0.8 to 0: its client has lost it already, or still knows it before aggregation."""
    run = history(LOSES, [[[0.8, 0.8]], [[last_client, 0.8]]])
    [losses] = [group("fedavg", run).loss_by_phase]
    assert losses is not None
    assert max(losses, key=losses.__getitem__) == phase.split()[0]
    forgotten = next(line for line in verdict([group("fedavg", run)]).details if "class 0" in line)
    assert phase in forgotten
    assert other not in forgotten


def test_the_verdict_warns_about_a_single_seed() -> None:
    result = verdict([with_accuracies("fedavg", LOSES), with_accuracies("fedntd", KEEPS)])
    assert any("--sweep seed=0,1,2" in line for line in result.details)
    several = verdict([with_accuracies("fedavg", LOSES, LOSES), with_accuracies("fedntd", KEEPS, KEEPS)])
    assert not any("--sweep" in line for line in several.details)


def test_the_verdict_counts_the_seeds_with_less_forgetting() -> None:
    result = verdict([with_accuracies("fedavg", LOSES, KEEPS), with_accuracies("fedntd", KEEPS, MIDDLING)])
    assert "1 of 2 seeds" in result.details[0]


def test_the_verdict_names_the_most_accurate_method_if_it_is_another_one() -> None:
    low = [START, [0.55, 0.55], [0.55, 0.55]]
    result = verdict([with_accuracies("fedavg", MIDDLING), with_accuracies("frozen", low)])
    assert any(re.search(r"FedAvg .* 60\.0%, frozen 55\.0%", line) for line in result.details)


def test_a_runner_up_within_the_spread_is_marked() -> None:
    """Forgetting is 0.1±0.14 of a, 0.2±0.28 of b: the gap of 10 points is within the spread of 28."""
    groups = [
        with_accuracies("fedavg", LOSES, LOSES),
        with_accuracies("a", KEEPS, MIDDLING),
        with_accuracies("b", KEEPS, LOSES),
    ]
    [runner_up] = [line for line in verdict(groups).details if "second" in line]
    for part in ("b ", "(20 points)", "(28 points)"):
        assert part in runner_up


def test_if_fedavg_forgets_least_it_is_compared_with_the_worst() -> None:
    result = verdict([with_accuracies("fedavg", KEEPS), with_accuracies("fedntd", LOSES)])
    assert result.headline == "FedAvg forgets nothing, FedNTD 40 points"


@pytest.mark.parametrize("status", ["unfinished", "diverged"])
def test_a_group_that_is_not_finished_is_named_and_left_out_of_the_verdict(status: str) -> None:
    """The unfinished group forgets least and is most accurate, and yet it is not the one that forgets least."""
    finished = [with_accuracies("fedavg", LOSES, LOSES), with_accuracies("fedntd", MIDDLING, MIDDLING)]
    result = verdict([*finished, with_accuracies("late", KEEPS, KEEPS, status=status)])
    assert result.headline == verdict(finished).headline
    assert result.headline.startswith("FedNTD ")
    assert any(line.endswith(": late.") for line in result.details)
    alone = verdict([with_accuracies("late (unfinished at round 2)", KEEPS, status=status)])
    assert alone.headline.startswith("late (unfinished at round 2) ")
    assert "80.0%" in alone.headline


def test_the_verdict_warns_about_different_settings() -> None:
    one = with_accuracies("fedavg", LOSES, KEEPS, train={"lr": 0.1})
    other = with_accuracies("fedntd", KEEPS, KEEPS, train={"lr": 0.2})
    same = with_accuracies("fedntd", KEEPS, KEEPS, train={"lr": 0.1})
    assert verdict([one, other]).details[-1].endswith(": train.")
    assert len(verdict([one, same]).details) == len(verdict([one, other]).details) - 1


def test_equal_groups_have_no_winner() -> None:
    equal = [with_accuracies(name, LOSES) for name in ("fedavg", "fedprox", "fedntd")]
    headline = verdict(equal).headline
    assert "3 groups" in headline
    assert "fedprox" not in headline
    two = verdict([*equal[1:], with_accuracies("fedavg", [START, [0.8, 0.8], [0.0, 0.0]])]).headline
    assert "FedProx and FedNTD " in two


def test_where_no_model_learned_the_verdict_says_so() -> None:
    flat = [START, [1.0, 0.0], [1.0, 0.0]]
    result = verdict([with_accuracies("fedavg", flat), with_accuracies("fedntd", flat)])
    assert "class 0" in result.headline
    assert "fedavg" not in result.headline
    some = verdict([with_accuracies("fedavg", flat), with_accuracies("fedntd", LOSES), with_accuracies("m", KEEPS)])
    assert some.headline.startswith("m forgets")
    assert any(line.endswith(": FedAvg.") for line in some.details)


def test_a_method_that_ends_at_its_best_has_forgotten_nothing() -> None:
    rising = [START, [0.6, 0.6], [0.8, 0.8]]
    result = verdict([with_accuracies("fedavg", rising)])
    assert "points" not in result.headline
    assert any("no class" in line for line in result.details)


def test_there_is_no_verdict_after_one_round() -> None:
    headline = verdict([with_accuracies("fedavg", KEEPS[:2])]).headline
    assert "fedavg" not in headline


# the data


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("runs"))


def test_the_data_of_a_page(pair: Path) -> None:
    page = page_data(read_runs([pair]))
    [data] = page["problems"]
    assert page["verdict"]["headline"] == data["verdict"]["headline"]
    assert [(g["label"], g["title"]) for g in data["groups"]] == [("fedntd", "FedNTD"), ("fedavg", "FedAvg")], "by rank"
    assert data["facts"][:3] == ["digits, 3 classes", "shards (s 2)", "4 clients"]
    assert data["facts"][-3:] == ["6 rounds", "mlp", "2 seeds"]
    fedavg = data["groups"][data["reference"]]
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
    json.dumps(page, allow_nan=False)


def test_heat_maps_have_the_mean_over_seeds_and_a_typical_seed(pair: Path) -> None:
    [data] = page_data(read_runs([pair]))["problems"]
    one = data["groups"][0]
    mean = np.mean([fk.load_run(pair / f"fedntd-{s}").class_accuracy for s in (0, 1)], axis=0)
    coded = np.frombuffer(base64.b64decode(one["mean_map"]["class_accuracy"]), dtype=np.uint8).reshape(6, 3)
    np.testing.assert_allclose(coded / 200, mean, atol=0.0026)
    accuracies = [LOSES, KEEPS, MIDDLING]  # forgetting 0.4, 0 and 0.2: the third is the mean
    [data] = page_data(one_problem(with_accuracies("fedavg", *accuracies)))["problems"]
    assert data["seed"] == 2


def test_the_table_has_p_values_bytes_to_the_reference_and_measures_of_all_groups() -> None:
    groups = [with_accuracies("fedavg", LOSES, MIDDLING, LOSES), with_accuracies("fedntd", MIDDLING, KEEPS, KEEPS)]
    for g in groups:
        g.mean["macro_f1"], g.spread["macro_f1"] = 0.5, 0.1
        g.mean["my_metric"], g.spread["my_metric"] = 2.5, 0.5
        g.mean["ece"] = g.spread["ece"] = float("nan")
    groups[0].mean["only_here"] = 1.0
    [data] = page_data(one_problem(*groups))["problems"]
    columns = {column["key"]: column for column in data["columns"]}
    assert columns.keys().isdisjoint(["only_here", "ece", "balanced_accuracy"])  # of one group, not known, as final
    assert [cell["text"] for cell in columns["macro_f1"]["cells"]] == ["50.0±10.0"] * 2
    assert columns["macro_f1"]["head"] == "macro F1 %"
    assert [cell["text"] for cell in columns["my_metric"]["cells"]] == ["2.500±0.500"] * 2
    assert columns["my_metric"]["head"] == "my metric"
    p = {t.measure: t.p_corrected for m in ("final", "forgetting") for t in differences(groups, m)}
    assert [cell["value"] for cell in columns["p_final"]["cells"]] == [p["final"], None]
    assert [cell["value"] for cell in columns["p_forgetting"]["cells"]] == [p["forgetting"], None]
    assert columns["bytes_to"]["head"] == "MB to 46.7%"
    assert [cell["value"] for cell in columns["bytes_to"]["cells"]] == [2000, 2000]
    assert [cell["best"] for cell in columns["final"]["cells"]] == [True, False]
    [data] = page_data(one_problem(*groups), target=0.9)["problems"]
    [bytes_to] = [column for column in data["columns"] if column["key"] == "bytes_to"]
    assert bytes_to["head"] == "MB to 90.0%"
    assert [cell["text"] for cell in bytes_to["cells"]] == ["\N{EN DASH}"] * 2


def test_clients_have_their_names_and_splits_their_heterogeneity(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", records(wave(0)))
    table = {"clients": 2, "ids": [0, 1], "counts": [[3, 0, 0], [0, 3, 0]], "client_names": ["Aachen", "B" * 90]}
    (path / "split.json").write_text(json.dumps(table))
    [split] = page_data(read_runs([path]))["problems"][0]["splits"]
    assert split["names"][0] == "Aachen"
    assert len(split["names"][1]) == 40
    assert split["summary"].startswith("2 clients with 3 examples each and 1 class each;")
    assert split["heterogeneity"]["effective_classes"] == pytest.approx(1)


def test_methods_on_one_seed_share_their_split(pair: Path) -> None:
    [data] = page_data(read_runs([pair]))["problems"]
    assert [[run["split"] for run in g["runs"]] for g in data["groups"]] == [[0, 1], [0, 1]]


def test_absent_classes_unequal_lengths_and_a_single_evaluated_round(tmp_path: Path) -> None:
    lines = records(wave(0))
    for line in lines:
        line["confusion"][2] = [0, 0, 0]  # the test set has no class 2
    write_run(tmp_path / "absent", lines, method="fedprox")
    write_run(tmp_path / "short", records(wave(0))[:2], method="fedavg", rounds=4)
    data = page_data(read_runs([tmp_path]))
    absent, short = data["problems"][0]["groups"]
    assert base64.b64decode(absent["runs"][0]["class_accuracy"])[2] == 255
    assert absent["class_forgetting"][2] is None
    assert short["mean"]["forgetting"] is None
    assert short["drops"]["quartiles"] == [None] * 3
    assert render(data)


def test_problems_have_their_own_part_of_the_page(tmp_path: Path) -> None:
    """FedNTD wins one problem, FedAvg the other; nobody wins both."""
    for rounds, order in ((4, ("fedavg", "fedntd")), (6, ("fedntd", "fedavg"))):
        for method, depth in zip(order, (0.6, 0.2), strict=True):
            write_run(tmp_path / f"{method}-{rounds}", records(wave(0, rounds=rounds, depth=depth)), method=method)
    data = write([tmp_path], tmp_path / "page.html")
    assert [p["title"].split(", ")[-1] for p in data["problems"]] == ["4 rounds", "6 rounds"]
    assert [p["verdict"]["headline"].split()[0] for p in data["problems"]] == ["FedNTD", "FedAvg"]
    assert "2 " in data["verdict"]["headline"]
    assert "fedavg" not in data["verdict"]["headline"]
    listed = (tmp_path / "page.html").read_text().split('<ol id="problems">')[1].split("</ol>")[0]
    for problem in data["problems"]:
        assert problem["title"] in listed
        assert problem["verdict"]["headline"] in listed, "it can be read without JavaScript"


def test_the_page_of_1000_classes_is_small(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    matrices = [np.diag(rng.integers(1, 10, 1000)) + rng.integers(0, 2, (1000, 1000)) for _ in range(3)]
    local = {
        "total": [9] * 1000,
        "label_counts": rng.integers(0, 2, (10, 1000)),
        "hits": rng.integers(0, 5, (10, 1000)),
    }
    facts = {"cohort": list(range(10)), "bytes_up": 1, "bytes_down": 1, "seconds": 0.1, "local": local}
    lines = [{"round": t, "confusion": matrices[t % 3], **(facts if t else {})} for t in range(61)]
    runs = [History("fedavg", {}, lines, about=experiment(seed=s, rounds=60), folder=tmp_path) for s in range(2)]
    table = {"clients": 200, "ids": list(range(200)), "counts": rng.integers(0, 9, (200, 1000)).tolist()}
    (tmp_path / "split.json").write_text(json.dumps(table))
    (tmp_path / "experiment.toml").write_bytes(to_toml({"format": 1, **experiment(seed=0, rounds=60)}))
    page = render(page_data(one_problem(group("fedavg", *runs))))
    assert len(page.encode()) < 5e6


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
    rounds = 200
    lines = [{"round": t, **(facts if t else {}), **diagonal[t % 3]} for t in range(rounds + 1)]
    runs = [History("fedavg", {}, lines, about=experiment(seed=s, rounds=rounds)) for s in range(10)]
    page = render(page_data(one_problem(group("fedavg", *runs[:5]), group("fedntd", *runs[5:]))))
    assert len(page.encode()) < 5e6


def test_long_runs_are_thinned_to_400_columns() -> None:
    run = history(wave(0, rounds=900), np.zeros((900, 2, 3)))
    [one] = page_data(one_problem(group("fedavg", run)))["problems"][0]["groups"]
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


def test_text_from_run_folders_is_escaped(tmp_path: Path) -> None:
    data = write([hostile_run(tmp_path)], tmp_path / "page.html")
    page = Tags((tmp_path / "page.html").read_text())
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert "img" not in [tag for tag, _ in page.tags]
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert json.loads(page.json) == {**data, "live": False}
    assert json.loads(page.json)["problems"][0]["groups"][0]["method"] == printable(HOSTILE)


def test_the_page_makes_no_request(pair: Path) -> None:
    page = render(page_data(read_runs([pair])))
    tags = Tags(page).tags
    assert {a.get("href") for t, a in tags if t == "link"} == {"data:,"}
    assert not [a for _, a in tags if a.get("src")]
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", page)
    policy = next(a["content"] for t, a in tags if a.get("http-equiv"))
    assert "default-src 'none'" in policy
    assert "connect-src 'none'" in policy
    assert "unsafe" not in policy
    live = Tags(render(page_data(read_runs([pair])), live=True)).tags
    assert "connect-src 'self'" in next(a["content"] for t, a in live if a.get("http-equiv"))


def test_the_verdict_can_be_read_without_javascript(pair: Path) -> None:
    page = render(page_data(read_runs([pair])))
    assert '<h1 id="headline">FedNTD ' in page
    assert '<p id="facts">digits, 3 classes · ' in page
    assert re.search("<title>FedNTD forgets [^<]* · digits, [^<]*4 clients, [^<]*6 rounds · fedkeep</title>", page)
    assert "<noscript>" in page


def test_scripts_contain_no_end_of_script() -> None:
    for file in STATIC.glob("*.js"):
        assert "</script" not in file.read_text()
        assert "innerHTML" not in file.read_text()


# label counts


def test_a_run_writes_its_label_counts(tmp_path: Path) -> None:
    settings = {
        "method": "fedavg",
        "model": "mlp",
        "data": "digits",
        "split": {"kind": "shards", "n_clients": 6, "s": 2},
        "train": {"rounds": 1, "participation": 2, "epochs": 1},
    }
    one = Experiment.from_dict(settings)
    run_experiment(one, tmp_path / "run")
    table = label_counts.label_counts_of(fk.load_run(tmp_path / "run"))
    data, clients = load_data_and_clients(one)
    assert table is not None
    assert table["clients"] == 6
    assert table["counts"] == clients.label_counts(data.y_train, 10).tolist()


def test_of_many_clients_evenly_spaced_ones_are_written() -> None:
    y = np.arange(1000) % 5
    table = label_counts.count_labels(fk.data.partition.iid(y, 500), y, 5)
    assert (table["clients"], len(table["ids"]), len(table["counts"])) == (500, 200, 200)
    assert table["ids"][-1] == 499


def test_without_split_json_the_label_counts_come_from_the_records(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", records(wave(0), np.zeros((4, 2, 3))))
    assert label_counts.label_counts_of(fk.load_run(path)) == {
        "clients": 2,
        "ids": [0, 1],
        "counts": [[30, 0, 0], [0, 30, 0]],
    }
    (path / "split.json").write_text('{"clients": 9, "ids": [0], "counts": [[1, 2], [3, 4]]}')  # damaged
    assert label_counts.label_counts_of(fk.load_run(path))["clients"] == 2
    (path / "split.json").write_text('{"clients": 1, "ids": [0], "counts": [[0, 0, 0]]}')
    assert page_data(read_runs([path]))["problems"][0]["splits"] == []
    unrecorded = write_run(tmp_path / "unrecorded", records(wave(0)))
    assert label_counts.label_counts_of(fk.load_run(unrecorded)) is None


def test_a_run_can_be_read_without_its_weights(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", records(wave(0)))
    assert fk.load_run(path, weights=False).folder == path
    assert dataclasses.asdict(fk.load_run(path))["params"] == {}
