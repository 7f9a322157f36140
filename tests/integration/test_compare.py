"""Comparison of runs: significance tests, ranks, sentences, and tables that cut no number."""

from __future__ import annotations

import io
import itertools
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from scipy import stats
from support.errors import raises
from support.runs import group_runs
from support.synthetic import records, wave, write_run

from fedkeep.analysis import compare, significance
from fedkeep.analysis.compare import comparison_as_data, comparison_as_markdown
from fedkeep.analysis.groups import Group, Run, bytes_to, rounds_to
from fedkeep.analysis.sentences import bytes_sentence, sentences
from fedkeep.cli import tables
from fedkeep.errors import FedkeepError
from fedkeep.runs.history import History


def run(seed: int, accuracies: list[float], seconds: float = 1.0) -> Run:
    """Two classes of 1000 test examples; the first has the given accuracies, the second is always right."""
    lines = [{"round": 0, "confusion": [[0, 1000], [1000, 0]]}]
    for t, a in enumerate(accuracies, start=1):
        hits = round(a * 1000)
        confusion = [[hits, 1000 - hits], [0, 1000]]
        lines.append({"round": t, "confusion": confusion, "bytes_down": 500_000, "bytes_up": 500_000, "seconds": 1.0})
    lines[-1]["seconds"] = seconds
    return Run(History("m", {}, lines, about={"seed": seed}))


def group(label: str, finals: list[float], seeds: list[int] | None = None, seconds: float = 1.0, **kwargs) -> Group:
    seeds = list(range(len(finals))) if seeds is None else seeds
    runs = [run(s, [0.9, final], seconds) for s, final in zip(seeds, finals, strict=True)]
    return Group(label, {"method": {"name": label}}, runs, **kwargs)


def differences(groups: list[Group], against: str | None = None) -> dict[tuple[str, str], compare.Difference]:
    return {(t.one, t.other): t for t in compare.differences(groups, "final", against)}


# Significance tests


def test_the_paired_t_test_equals_scipys_test_of_two_samples():
    rng = np.random.default_rng(0)
    for n in (3, 5, 12):
        a, b = rng.normal(size=n), rng.normal(size=n) + 0.3
        assert significance.paired_t(a - b) == pytest.approx(stats.ttest_rel(a, b).pvalue)


def test_the_paired_t_test_by_hand():
    """d = (1, 2, 3): mean 2, sd 1, t = 2 sqrt(3); at 2 degrees of freedom p = 1 - t / sqrt(2 + t^2) = 1 - sqrt(6/7)."""
    assert significance.paired_t([1, 2, 3]) == pytest.approx(1 - math.sqrt(6 / 7))


def test_equal_differences_have_no_t_test_and_use_the_sign_flip_test():
    """All +0.1: only the 2 of 2^4 patterns with equal signs reach the sum. No difference at all: every pattern does."""
    assert significance.paired_t([0.1, 0.1, 0.1, 0.1]) == 2 / 16
    assert significance.paired_t([0.0, 0.0, 0.0]) == 1
    assert significance.paired_t([0.3, 0.1 + 0.2, 0.3]) == 2 / 8


def test_the_sign_flip_test_enumerates_every_pattern():
    """d = (3, 1, -1): |sum| = 3; of the 8 patterns of +-3 +-1 +-1, the sums are +-(5, 3, 3, 1): 6 reach 3."""
    assert significance.sign_flip([3, 1, -1]) == 6 / 8
    for scale in (0.1, 1e-3, 1e-12):  # sums that are equal but for rounding count as equal
        assert significance.sign_flip([3 * scale, scale, -scale]) == 6 / 8
    d = np.random.default_rng(1).normal(size=7) + 0.5
    sums = [abs(sum(s * x for s, x in zip(signs, d, strict=True))) for signs in itertools.product((1, -1), repeat=7)]
    assert significance.sign_flip(d) == np.mean([s >= abs(d.sum()) - 1e-12 for s in sums])


def test_with_many_differences_the_sign_flip_test_draws_the_same_patterns_each_time():
    d = np.random.default_rng(2).normal(size=20) + 0.4
    p = significance.sign_flip(d)
    assert p == significance.sign_flip(d)
    assert p == pytest.approx(significance.paired_t(d), abs=0.02)
    assert significance.sign_flip(np.ones(20)) > 0


def test_fewer_than_three_differences_have_no_p_value():
    assert math.isnan(significance.paired_t([1.0, 2.0]))
    assert math.isnan(significance.sign_flip([1.0]))


def test_holm_by_hand():
    """(0.01, 0.02, 0.04): times 3, 2, 1: 0.03, 0.04, 0.04. The largest never falls below: (0.02, 0.03): 0.04, 0.04."""
    assert significance.holm([0.04, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])
    assert significance.holm([0.03, 0.02]) == pytest.approx([0.04, 0.04])
    assert significance.holm([0.6, 0.7]) == [1, 1]
    assert significance.holm([]) == []
    first, missing = significance.holm([0.03, float("nan")])
    assert first == 0.03
    assert math.isnan(missing)


def test_scipy_is_not_imported_before_a_test_is_computed():
    script = "import sys, fedkeep, fedkeep.cli.app, fedkeep.analysis.compare; print('scipy.stats' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


# Differences and sentences. Sentences are checked for labels and numbers, not for wording.


def test_a_clear_difference_is_significant():
    """Final accuracy is (1 + final)/2, forgetting (0.9 - final)/2: they differ by 0.15, 0.155, 0.145.

    t = 0.15 / (0.005/sqrt 3) = 52.
    """
    groups = [group("a", [0.5, 0.49, 0.51]), group("b", [0.8, 0.8, 0.8])]
    for measure, sign in (("final", 1), ("forgetting", -1)):
        [found] = compare.differences(groups, measure)
        assert (found.one, found.other, found.seeds) == ("b", "a", (0, 1, 2))
        assert found.mean == pytest.approx(sign * 0.15)
        assert found.p_corrected == found.p < 0.001
        assert found.p_sign_flip == 0.25
        assert found.significant
        assert found.as_data()["significant"]
    accuracy, forgetting, notes = sentences(groups)
    for part in ("b ", "(90.0%)", "a ", "(75.0%)", "15.0 points", "3 seeds", "p < 0.001", "p = 0.25"):
        assert part in accuracy
    for part in ("b ", "(0.050)", "a ", "(0.200)", "0.150"):
        assert part in forgetting
    assert "0.25" in notes, "the smallest p-value of the sign-flip test with three seeds"


def test_a_difference_within_the_noise_is_not_significant():
    groups = [group("a", [0.5, 0.6, 0.7]), group("b", [0.7, 0.6, 0.52]), group("c", [0.1, 0.11, 0.1])]
    found = differences(groups)
    assert not found["b", "a"].significant
    assert found["b", "c"].significant
    accuracy, _, notes = sentences(groups)
    assert "0.3 points" in accuracy, "(0.2 + 0 - 0.18) / 3 / 2"
    assert "3 comparisons" in notes


def test_two_common_seeds_cannot_be_tested():
    groups = [group("a", [0.5, 0.6, 0.7], seeds=[0, 1, 2]), group("b", [0.7, 0.6, 0.56], seeds=[1, 2, 3])]
    [found] = compare.differences(groups, "final")
    assert found.seeds == (1, 2)
    assert math.isnan(found.p)
    assert not found.tested
    assert not found.significant
    accuracy, _ = sentences(groups)  # and no note about tests
    assert "2 seeds" in accuracy
    assert "p =" not in accuracy
    assert "1 seed " in sentences([group("a", [0.5]), group("b", [0.7])])[0]
    assert "0 seeds" in sentences([group("a", [0.5], [3]), group("b", [0.7])])[0]


def test_runs_are_paired_by_seed_not_by_order():
    one, other = group("a", [0.5, 0.6, 0.7], seeds=[0, 1, 2]), group("b", [0.72, 0.51, 0.6], seeds=[2, 0, 1])
    [found] = compare.differences([one, other], "final")
    assert found.one == "b"
    assert found.seeds == (0, 1, 2)
    assert found.mean == pytest.approx((0.005 + 0 + 0.01) / 3)


def test_tests_against_one_group_are_corrected_for_fewer_comparisons():
    groups = [group("a", [0.4, 0.41, 0.38]), group("b", [0.5, 0.53, 0.5]), group("c", [0.61, 0.62, 0.59])]
    all_pairs, against_a = differences(groups), differences(groups, against="a")
    assert len(all_pairs) == 3
    assert list(against_a) == [("c", "a"), ("b", "a")]
    assert against_a["b", "a"].p == all_pairs["b", "a"].p
    assert against_a["b", "a"].p_corrected <= all_pairs["b", "a"].p_corrected
    accuracy = sentences(groups, "a")[0]
    for part in ("a (69.8%)", "c +10.5 points", "b +5.7 points"):
        assert part in accuracy
    with raises(FedkeepError, key="against", value="x", valid=["a", "b", "c"]):
        sentences(groups, "x")


def test_a_group_is_found_by_its_label_or_by_the_name_of_its_only_method():
    first, second, third = (group(name, [0.5]) for name in ("fedavg", "fedntd (tau=1)", "fedntd (tau=2)"))
    for g in (second, third):
        g.setting["method"]["name"] = "fedntd"
    groups = [first, second, third]
    assert compare.group_named(groups, "fedavg") is first
    assert compare.group_named(groups, "fedntd (tau=2)") is third
    assert compare.group_named([first, second], "fedntd") is second
    with raises(FedkeepError, key="against", value="fedntd"):
        compare.group_named(groups, "fedntd")


@pytest.mark.parametrize("status", ["unfinished", "diverged"])
def test_a_group_that_is_not_finished_is_neither_ranked_nor_tested(status: str):
    groups = [group("a", [0.5] * 3), group("b", [0.8] * 3), group("late", [0.99] * 3, status=status)]
    data = comparison_as_data(groups)
    assert data["ranks"]["final"] == {"b": 1, "a": 2}
    assert {label for t in data["tests"] for label in (t["one"], t["other"])} == {"a", "b"}
    assert [(row["finished"], row["status"]) for row in data["groups"]] == [(True, "finished")] * 2 + [(False, status)]
    excluded, *rest = sentences(groups)
    assert "late" in excluded
    assert not any("late" in sentence for sentence in rest)
    assert len(sentences(groups[1:])) == 2, "one excluded, nothing to compare"
    assert len(sentences(groups[:2], "a")) == 3
    assert len(sentences(groups, "late")) == 2, "nothing to compare with an unfinished group"


def test_runs_that_are_not_finished_form_groups_of_their_own(tmp_path: Path):
    """Their status is not part of the setting; the label contains it."""
    lines = records(wave(0, rounds=4))
    for name, last, seed in (("a", 4, 0), ("b", 4, 1), ("c", 2, 2), ("d", 2, 3), ("e", 3, 4), ("f", 2, 5)):
        write_run(tmp_path / name, lines[: last + 1], seed=seed, rounds=4)
    (tmp_path / "f" / "diverged.txt").write_text("diverged in round 3")
    groups = group_runs([tmp_path])
    assert [(g.label, g.status, g.last_round, g.seeds) for g in groups] == [
        ("fedavg", "finished", 4, [0, 1]),
        ("fedavg (unfinished at round 2)", "unfinished", 2, [2, 3]),
        ("fedavg (unfinished at round 3)", "unfinished", 3, [4]),
        ("fedavg (diverged after round 2)", "diverged", 2, [5]),
    ]
    assert all(g.setting == groups[0].setting for g in groups)


def test_the_comparison_as_data():
    data = comparison_as_data([group("a", [0.5, 0.6]), group("b", [0.8, 0.8])])
    assert set(data) == {"groups", "ranks", "against", "target", "tests", "personal"}
    assert data["personal"] == [], "not recorded"
    row = data["groups"][0]
    named = {
        "label",
        "setting",
        "seeds",
        "finished",
        "status",
        "last_round",
        "mean",
        "spread",
        "learned",
        "notes",
        "runs",
        "bytes_to",
    }
    assert set(row) == named
    assert (row["label"], row["setting"], row["seeds"], row["last_round"]) == (
        "a",
        {"method": {"name": "a"}},
        [0, 1],
        2,
    )
    assert row["mean"]["final"] == pytest.approx(0.775)
    assert row["spread"]["final"] == pytest.approx(0.05 / 2**0.5)
    assert len(data["tests"]) == len(compare.HIGHER_IS_BETTER)


def test_equal_values_share_a_rank():
    assert compare.ranks({"a": 0.5, "b": 0.5, "c": 0.1}, higher=True) == {"a": 1, "b": 1}
    assert compare.ranks({"a": 0.5}, higher=True) == {}
    assert compare.ranks({"a": float("nan"), "b": 1.0}, higher=True) == {}
    accuracy = sentences([group("a", [0.5] * 3), group("b", [0.5] * 3)])[0]
    assert accuracy.count("75.0%") == 1, "both have the same value"


def test_markdown_marks_best_and_second():
    text = comparison_as_markdown([group("a", [0.5, 0.6]), group("b", [0.8, 0.8]), group("c", [0.2, 0.2])])
    lines = {line.split("|")[1].strip(): line for line in text.splitlines()}
    assert "**90.0±0.0**" in lines["b"]
    assert "<u>77.5±3.5</u>" in lines["a"]
    assert "**" not in lines["c"].replace("**95.0±0.0**", "")  # all have the same best round


def test_rounds_to_fractions_of_a_target():
    """Accuracies of both classes together: 0.6, 0.7, 0.9 over three rounds; A = 0.8: 0.4, 0.6 and 0.76."""
    g = Group("a", {}, [run(0, [0.2, 0.4, 0.8]), run(1, [0.2, 0.3, 0.3])])
    assert rounds_to(g, 0.8) == {0.5: [1, 1], 0.75: [1, 1], 0.95: [3, None]}
    assert comparison_as_data([g, group("b", [0.1])], target=0.8)["groups"][0]["rounds_to"]["0.95"] == [3, None]


def test_bytes_to_a_target_accuracy():
    """A round sends 1 MB. Both classes together reach 0.7 in rounds 2 and 3, or never."""
    g = Group("a", {}, [run(0, [0.2, 0.4, 0.8]), run(1, [0.2, 0.3, 0.4]), run(2, [0.2, 0.3, 0.3])])
    assert bytes_to(g, 0.7) == [2e6, 3e6, None]
    sentence = bytes_sentence([g, Group("b", {}, [run(0, [0.1, 0.1])])], 0.7)
    assert "a 3 (2 of 3), not reached by most runs of b" in sentence


def test_the_default_target_is_the_final_accuracy_of_fedavg():
    groups = [group("fedavg", [0.5, 0.6]), group("b", [0.8, 0.8])]
    data = comparison_as_data(groups)
    assert data["target"] == pytest.approx(0.775)
    assert [row["bytes_to"] for row in data["groups"]] == [[1e6, 1e6], [1e6, 1e6]]
    assert comparison_as_data(groups, target=0.97)["groups"][1]["bytes_to"] == [None, None]
    assert comparison_as_data(groups[:1])["target"] is None, "nothing to compare"


# The table


def printed(width: int, title: str, *groups: Group) -> str:
    output = io.StringIO()
    Console(file=output, width=width).print(tables.comparison(title, {g.label: g for g in groups}))
    return output.getvalue()


@pytest.mark.parametrize("width", [26, 40, 60, 69, 75, 79, 80, 81, 120])
@pytest.mark.parametrize("seconds", [1.0, 12345.6])
def test_no_number_is_cut_however_narrow_the_terminal(width: int, seconds: float):
    one = group("fedavg", [0.5, 0.61, 0.7], seconds=seconds)
    other = group("a method with a long name", [0.1, 0.8, 0.8], seconds=seconds)
    text = printed(width, "Title", one, other)
    for number in ("80.2±5.0", "95.0±0.0", "0.15±0.05", "0.17±0.20", f"{1 + seconds:.1f}"):
        assert number in text
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width


def test_best_and_second_are_marked_without_colour():
    text = printed(
        100, "", group("a", [0.5]), group("b", [0.8]), group("c", [0.7]), group("d", [0.9], status="diverged")
    )
    rows = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert "90.0¹" in rows["b"]
    assert "85.0²" in rows["c"]
    assert "75.0 " in rows["a"]
    assert "95.0 " in rows["d"], "a run that diverged has no rank"
    assert rows["a"].index("75.0") == rows["b"].index("90.0")


def test_a_single_group_has_no_rank():
    assert "¹" not in printed(100, "", group("a", [0.5]))


# Ties, models that learned nothing, and many groups


def constant(label: str, predicted: int, seeds: int = 1, share: float = 0.637) -> Group:
    """A group whose models predict one class, in every round, of two classes with unequal shares."""
    counts = [round(1000 * share), 1000 - round(1000 * share)]
    confusion = [[n if c == predicted else 0 for c in range(2)] for n in counts]
    facts = {"bytes_down": 1, "bytes_up": 1, "seconds": 1.0}
    lines = [{"round": t, "confusion": confusion, **facts} for t in range(4)]
    return Group(
        label, {"method": {"name": label}}, [Run(History("m", {}, lines, about={"seed": s})) for s in range(seeds)]
    )


def test_where_no_model_learned_that_is_the_result():
    groups = [constant(f"m{k}", 0) for k in range(16)]
    assert not any(
        rank for of_measure in compare.rank_groups({g.label: g for g in groups}).values() for rank in of_measure
    )
    [line] = sentences(groups)
    assert "class 0" in line
    assert "m0" not in line
    [mixed] = sentences([constant("a", 0), constant("b", 1)])
    assert "class" in mixed
    assert "class 0" not in mixed
    text = printed(100, "", *groups[:3])
    assert "¹" not in text


def test_a_model_that_learned_and_forgot_everything_did_learn():
    forgot = group("forgot", [0.0, 0.0])
    assert forgot.learned
    assert not constant("a", 0).learned
    below = Group("b", {"method": {"name": "b"}}, [run(0, [0.0, 0.0])])  # always predicts class 1: half is right
    assert not below.learned


def test_a_group_that_learned_nothing_cannot_forget_least():
    groups = [constant("flat", 0, 3, share=0.5), group("a", [0.5] * 3), group("b", [0.8] * 3)]
    ranks = compare.rank_groups({g.label: g for g in groups})
    assert ranks["forgetting"] == {"b": 1, "a": 2}
    assert ranks["final"]["b"] == 1
    assert any("flat" in line for line in sentences(groups))
    assert not any(line.startswith("Least") and "flat" in line for line in sentences(groups))


def test_runs_on_held_out_examples_say_so():
    groups = [group("a", [0.5] * 3), group("b", [0.8] * 3)]
    assert not any("held_out" in line for line in sentences(groups))
    for one in groups:
        one.setting["data"] = {"source": "digits", "held_out": 0.25}
    assert "data.held_out = 0.25" in sentences(groups)[0]


def test_fifteen_equal_groups_are_told_as_equal():
    equal = [group(f"m{k:02}", [0.6, 0.6, 0.6]) for k in range(15)]
    lines = sentences(equal)
    assert "15 " in lines[0]
    assert "80.0%" in lines[0]
    assert not any(compare.rank_groups({g.label: g for g in equal}).values())
    one_below = [*equal, group("low", [0.5, 0.5, 0.5])]
    first = sentences(one_below)[0]
    assert "15 " in first
    assert "low" not in first.split(". ")[0]
    assert set(compare.rank_groups({g.label: g for g in one_below})["final"].values()) == {1}


def test_means_that_differ_by_rounding_are_equal():
    a, b = group("a", [0.1, 0.2, 0.3]), group("b", [0.3, 0.2, 0.1], seeds=[2, 1, 0])
    assert a.mean["final"] == pytest.approx(b.mean["final"], abs=1e-12)
    assert compare.ranks({"a": 0.1 + 0.2, "b": 0.3}, higher=True) == {}


def test_more_than_five_groups_are_tested_against_the_baseline():
    finals = {"fedprox": 0.3, "fedavg": 0.4, "m1": 0.5, "m2": 0.6, "m3": 0.7, "m4": 0.8}
    groups = [group(name, [a, a + 0.01, a + 0.03]) for name, a in finals.items()]
    assert compare.default_against(groups[:5]) is None
    data = comparison_as_data(groups)
    assert data["against"] == "fedavg"
    assert {(t["other"], t["measure"]) for t in data["tests"]} == {("fedavg", m) for m in compare.HIGHER_IS_BETTER}
    lines = sentences(groups)
    assert "fedavg" in lines[-1]
    assert "5 comparisons" in lines[-1]
    assert "m4 " in lines[0]
    without = [g for g in groups if g.label != "fedavg"]
    assert compare.default_against([*without, group("a", [0.9] * 3)]) == "a", "the choice does not depend on results"
    assert len(compare.differences(groups, "final", "m4")) == 5


def test_markdown_escapes_what_would_break_the_table():
    text = comparison_as_markdown([group("a|b\\|<img>", [0.5]), group("c", [0.6])])
    row = text.splitlines()[2]
    assert row.startswith("| a\\|b\\\\\\|&lt;img>")
    assert row.replace("\\\\", "").replace("\\|", "").count("|") == 10
