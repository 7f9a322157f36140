"""Comparisons: who is best, is it chance, and a table that cuts no number."""

from __future__ import annotations

import io
import itertools
import math

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from fedkeep.analysis import compare, significance
from fedkeep.analysis.compare import comparison_as_data, comparison_as_markdown
from fedkeep.analysis.groups import UNFINISHED, Group, rounds_to
from fedkeep.cli import tables
from fedkeep.errors import FedkeepError
from fedkeep.runs.history import History


def history(seed: int, accuracies: list[float], low: float = 0.0) -> History:
    """Two classes of 1000 test examples; the first has the given accuracies, the second is always right."""
    records = [{"round": 0, "confusion": [[0, 1000], [1000, 0]]}]
    for t, a in enumerate(accuracies, start=1):
        hits = round(a * 1000)
        confusion = [[hits, 1000 - hits], [0, 1000]]
        records.append({"round": t, "confusion": confusion, "bytes_down": 500_000, "bytes_up": 500_000, "seconds": 1.0})
    return History("m", {}, records, about={"seed": seed})


def group(label: str, finals: list[float], seeds: list[int] | None = None, **setting) -> Group:
    seeds = list(range(len(finals))) if seeds is None else seeds
    runs = [history(s, [0.9, final]) for s, final in zip(seeds, finals, strict=True)]
    return Group(label, {"method": {"name": label}, **setting}, runs)


# The tests


def test_the_paired_t_test_is_scipys():
    rng = np.random.default_rng(0)
    for n in (3, 5, 12):
        a, b = rng.normal(size=n), rng.normal(size=n) + 0.3
        assert significance.paired_t(a - b) == pytest.approx(stats.ttest_rel(a, b).pvalue)


def test_the_paired_t_test_by_hand():
    """d = (1, 2, 3): mean 2, sd 1, t = 2 sqrt(3); at 2 degrees of freedom p = 1 - t / sqrt(2 + t^2) = 1 - sqrt(6/7)."""
    assert significance.paired_t([1, 2, 3]) == pytest.approx(1 - math.sqrt(6 / 7))


def test_equal_differences_have_no_t_test_and_fall_back_on_the_sign_flip():
    """All +0.1: only the 2 of 2^4 patterns with equal signs reach the sum. No difference at all: every pattern does."""
    assert significance.paired_t([0.1, 0.1, 0.1, 0.1]) == 2 / 16
    assert significance.paired_t([0.0, 0.0, 0.0]) == 1
    assert significance.paired_t([0.3, 0.1 + 0.2, 0.3]) == 2 / 8


def test_the_sign_flip_test_tries_every_pattern():
    """d = (3, 1, -1): |sum| = 3; of the 8 patterns of +-3 +-1 +-1, the sums are +-(5, 3, 3, 1): 6 reach 3."""
    assert significance.sign_flip([3, 1, -1]) == 6 / 8
    d = np.random.default_rng(1).normal(size=7) + 0.5
    sums = [abs(sum(s * x for s, x in zip(signs, d, strict=True))) for signs in itertools.product((1, -1), repeat=7)]
    assert significance.sign_flip(d) == np.mean([s >= abs(d.sum()) - 1e-12 for s in sums])


def test_with_many_differences_the_sign_flip_test_draws_patterns_and_repeats_itself():
    d = np.random.default_rng(2).normal(size=20) + 0.4
    found = significance.sign_flip(d)
    assert found == significance.sign_flip(d)
    assert found == pytest.approx(significance.paired_t(d), abs=0.02)
    assert significance.sign_flip(np.ones(20)) > 0


def test_fewer_than_three_differences_cannot_be_tested():
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


# Words


def test_a_clear_difference_is_told_apart_and_said():
    """Forgetting is (0.9 - final)/2: less by 0.15, 0.155, 0.145: t = 0.15 / (0.005/sqrt 3) = 52."""
    groups = [group("a", [0.5, 0.49, 0.51]), group("b", [0.8, 0.8, 0.8])]
    accuracy, forgetting, about = compare.sentences(groups)
    assert accuracy.startswith("Final accuracy: b is best (90.0%), a second (75.0%). The difference between them, 15.0")
    assert "is more than chance (3 seeds, p = " in accuracy
    assert "sign-flip test p = 0.25" in accuracy
    assert forgetting.startswith("Least forgetting: b is best (0.050), a second (0.200).")
    assert "corrected for 1 comparison" in about
    assert "below p = 0.25 with 3 seeds" in about


def test_noise_is_called_chance():
    groups = [group("a", [0.5, 0.6, 0.7]), group("b", [0.7, 0.6, 0.52]), group("c", [0.1, 0.11, 0.1])]
    said = " ".join(compare.sentences(groups))
    assert "cannot be told from chance" in said
    assert "is told apart from c." in said
    assert "corrected for 3 comparisons a measure (Holm)" in said


def test_two_common_seeds_cannot_be_tested_and_it_says_so():
    groups = [group("a", [0.5, 0.6, 0.7], seeds=[0, 1, 2]), group("b", [0.7, 0.6, 0.5], seeds=[1, 2, 3])]
    [accuracy, _] = compare.sentences(groups)
    assert accuracy.endswith("They have 2 seeds in common: with fewer than 3 nothing can be tested.")
    assert "one seed" in compare.sentences([group("a", [0.5]), group("b", [0.7])])[0]
    assert "no seed" in compare.sentences([group("a", [0.5], [3]), group("b", [0.7])])[0]


def test_pairing_goes_by_seed_not_by_order():
    one, other = group("a", [0.5, 0.6, 0.7], seeds=[0, 1, 2]), group("b", [0.72, 0.51, 0.6], seeds=[2, 0, 1])
    [found] = compare.differences([one, other], "final")
    assert found.one == "b"
    assert found.seeds == (0, 1, 2)
    assert found.mean == pytest.approx((0.005 + 0 + 0.01) / 3)


def test_each_against_one_is_corrected_for_fewer_comparisons():
    groups = [group(n, [x, x + 0.01, x - 0.02]) for n, x in (("a", 0.4), ("b", 0.5), ("c", 0.61))]
    groups[1].histories = [history(s, [0.9, x]) for s, x in enumerate((0.5, 0.53, 0.5))]
    all_pairs = compare.differences(groups, "final")
    against = compare.differences(groups, "final", against="a")
    assert len(all_pairs) == 3
    assert [(t.one, t.other) for t in against] == [("c", "a"), ("b", "a")]
    matching = next(t for t in all_pairs if (t.one, t.other) == ("b", "a"))
    assert against[1].p == matching.p
    assert against[1].p_corrected <= matching.p_corrected
    said = compare.sentences(groups, "a")[0]
    assert said.startswith("Final accuracy, against a (")
    assert "b +" in said
    with pytest.raises(FedkeepError, match="no group is labelled 'x'"):
        compare.sentences(groups, "x")


def test_a_run_that_is_not_at_its_end_is_neither_ranked_nor_tested():
    groups = [group("a", [0.5] * 3), group("b", [0.8] * 3), group("late", [0.99] * 3, **{UNFINISHED: 7})]
    said = compare.sentences(groups)
    assert said[0] == "Left out of what follows, because not at its end: late."
    assert "b is best" in said[1]
    assert "late" not in comparison_as_data(groups)["ranks"]["final"]
    assert compare.sentences(groups[1:])[-1] == "There is one setting only: nothing to compare."


def test_equals_share_their_place():
    assert compare.ranks({"a": 0.5, "b": 0.5, "c": 0.1}, higher=True) == {"a": 1, "b": 1}
    assert compare.ranks({"a": 0.5}, higher=True) == {}
    assert compare.ranks({"a": float("nan"), "b": 1.0}, higher=True) == {}
    assert "a and b are best, both at" in compare.sentences([group("a", [0.5] * 3), group("b", [0.5] * 3)])[0]


def test_markdown_marks_best_and_second():
    text = comparison_as_markdown([group("a", [0.5, 0.6]), group("b", [0.8, 0.8]), group("c", [0.2, 0.2])])
    lines = {line.split("|")[1].strip(): line for line in text.splitlines()}
    assert "**90.0±0.0**" in lines["b"]
    assert "<u>77.5±3.5</u>" in lines["a"]
    assert "**" not in lines["c"].replace("**95.0±0.0**", "")  # all have the same best round


def test_rounds_to_shares_of_a_target():
    """Accuracies of both classes together: 0.6, 0.7, 0.9 over three rounds; A = 0.8: 0.4, 0.6 and 0.76."""
    g = Group("a", {}, [history(0, [0.2, 0.4, 0.8]), history(1, [0.2, 0.3, 0.3])])
    assert rounds_to(g, 0.8) == {0.5: [1, 1], 0.75: [1, 1], 0.95: [3, None]}
    assert comparison_as_data([g, group("b", [0.1])], target=0.8)["groups"][0]["rounds_to"]["0.95"] == [3, None]


# The table


@pytest.mark.parametrize("width", [26, 40, 60, 69, 75, 79, 80, 81, 120])
@pytest.mark.parametrize("seconds", [1.0, 12345.6])
def test_no_number_is_cut_however_narrow_the_terminal(width: int, seconds: float):
    groups = [group("fedavg", [0.5, 0.61, 0.7]), group("a method with a long name", [0.1, 0.8, 0.8])]
    for g in groups:
        for h in g.histories:
            h.records[-1]["seconds"] = seconds
    shown = io.StringIO()
    console = Console(file=shown, width=width)
    console.print(tables.comparison("Title", {g.label: g.histories for g in groups}))
    text = shown.getvalue()
    for number in ("80.2±5.0", "95.0±0.0", "0.15±0.05", "0.17±0.20", f"{1 + seconds:.1f}"):
        assert number in text
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width


def test_best_and_second_are_marked_without_colour():
    groups = {"a": group("a", [0.5]).histories, "b": group("b", [0.8]).histories, "c": group("c", [0.7]).histories}
    shown = io.StringIO()
    Console(file=shown, width=100).print(tables.comparison("", groups))
    rows = {line.split()[0]: line for line in shown.getvalue().splitlines() if line.strip()}
    assert "90.0¹" in rows["b"]
    assert "85.0²" in rows["c"]
    assert "75.0 " in rows["a"]
    assert rows["a"].index("75.0") == rows["b"].index("90.0")


def test_a_single_run_is_not_marked():
    shown = io.StringIO()
    Console(file=shown, width=100).print(tables.comparison("", {"a": group("a", [0.5]).histories}))
    assert "¹" not in shown.getvalue()
