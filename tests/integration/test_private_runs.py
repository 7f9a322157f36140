"""Robust averaging and differential privacy from the command line to the report, and with several processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.cli import fedkeep, run_ranks
from support.problems import gap, make_problem

import fedkeep as fk
from fedkeep.engine import privacy
from fedkeep.runs.trees import read_tree

pytest.importorskip("opacus", reason="the accountant is not installed: pip install '.[privacy]'")

SMALL = ("run", "digits", "rounds=2", "participation=5", "epochs=1", "batch_size=50")
DP = ("dp_clip=1", "dp_noise=2", "dp_delta=1e-3")


def test_epsilon_is_printed_recorded_and_reported(tmp_path: Path) -> None:
    done = fedkeep(*SMALL, *DP, "--name", "private", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    history = fk.load_run(tmp_path / "runs" / "private")
    taken = privacy.most_rounds(record["cohort"] for record in history.records[1:])
    assert history.epsilon == privacy.compute_epsilon(2.0, 1e-3, taken)
    printed = f"epsilon {history.epsilon:.2f}"
    assert printed in done.stderr
    assert fedkeep("report", "runs", "-o", "report.html", cwd=tmp_path).returncode == 0
    assert f"{printed} at delta 0.001" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("overrides", "named"),
    [(("dp_clip=1",), "dp_noise"), (("aggregation=krum", "hostile=2"), "hostile"), (("aggregation=mode",), "median")],
)
def test_wrong_settings_are_one_line(tmp_path: Path, overrides: tuple[str, ...], named: str) -> None:
    done = fedkeep(*SMALL, *overrides, cwd=tmp_path)
    assert done.returncode != 0
    assert named in done.stderr
    assert "Traceback" not in done.stderr


SCRIPT = """
import sys, torch
sys.path[:0] = [{tests!r}]
torch.set_num_threads(1)
from pathlib import Path
from support.problems import make_problem
import fedkeep as fk
from fedkeep.runs.trees import write_tree
for number, settings in enumerate({cases!r}):
    sim = make_problem(participation=6).simulation(fk.methods.Scaffold(), **settings)
    history = sim.run()
    if sim.ranks.first:
        write_tree(Path(sys.argv[1]) / str(number), sim.server, {{"epsilon": history.epsilon}})
"""
CASES = [{"dp_clip": 0.5, "dp_noise": 1.5}, {"aggregation": "median"}, {"aggregation": "multi_krum"}]


def test_several_processes_equal_one(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parents[1]), cases=CASES))
    run_ranks(2, script, str(tmp_path))
    for number, settings in enumerate(CASES):
        server, about = read_tree(tmp_path / str(number))
        alone = make_problem(participation=6).run(fk.methods.Scaffold(), **settings)
        assert gap(alone.server, server) < 1e-12
        assert about["epsilon"] == alone.history.epsilon
