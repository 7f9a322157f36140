"""Several processes share a run: real ones, on loopback; where their start and end matter, started by torchrun."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support.cli import fedkeep, run_ranks
from support.problems import gap, make_problem, with_dropout

import fedkeep as fk
from fedkeep import tree
from fedkeep.engine.distributed import Ranks, _header, _payload, _tree_from
from fedkeep.runs.reading import load_run, saved_round
from fedkeep.runs.trees import read_tree

SCRIPT = """
import sys, torch
sys.path[:0] = [{tests!r}]
torch.set_num_threads(1)
from pathlib import Path
from support.problems import make_problem, with_dropout
import fedkeep as fk
from fedkeep.runs.trees import write_tree
out = sys.argv[1]
names = sys.argv[2:]
for name in names:
    problem = make_problem(eval_local_every=1, rounds=2)
    if name == "dropout":
        sim = with_dropout(problem).simulation(fk.methods.FedAvg(), engine="stacked")
    else:
        sim = problem.simulation(fk.methods.get(name)())
    history = sim.run()
    if sim.ranks.first:
        write_tree(Path(out) / name, sim.server, {{"records": history.records}})
    else:
        assert history.records[-1]["round"] == sim.settings.rounds
"""


def torchrun(ranks: int, *args: str, **kwargs) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *args]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}  # a crash shows where it was
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **kwargs
    )


def alone_run(*args: str) -> None:
    done = fedkeep(*args)
    assert done.returncode == 0, done.stderr


def finished(process: subprocess.Popen) -> str:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


@pytest.fixture(scope="module")
def shared_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every method, two rounds of the contract suite's problem, shared by three processes."""
    folder = tmp_path_factory.mktemp("shared")
    script = folder / "script.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parents[1])))
    run_ranks(3, script, str(folder), *fk.methods.REGISTRY, "dropout")
    return folder


@pytest.mark.parametrize("name", fk.methods.REGISTRY)
def test_three_processes_equal_the_loop(shared_runs: Path, name: str) -> None:
    server, about = read_tree(shared_runs / name)
    alone = make_problem(eval_local_every=1, rounds=2).run(fk.methods.get(name)())
    assert gap(alone.server, server) < 1e-12
    for mine, theirs in zip(alone.history.records, about["records"], strict=True):
        assert theirs["confusion"] == mine["confusion"]
        assert theirs["auc"] == mine["auc"]
        assert theirs["ece"] == pytest.approx(mine["ece"], abs=1e-9)
        assert theirs.get("cohort") == mine.get("cohort")
        assert theirs.get("bytes_up") == mine.get("bytes_up")
        assert theirs.get("local") == mine.get("local")
        assert theirs.get("train_loss", 0) == pytest.approx(mine.get("train_loss", 0), rel=1e-12)


def test_three_processes_draw_the_same_dropout(shared_runs: Path) -> None:
    server, _ = read_tree(shared_runs / "dropout")
    problem = with_dropout(make_problem(eval_local_every=1, rounds=2))
    assert gap(problem.run(fk.methods.FedAvg()).server, server) < 1e-12


ARGS = ["-m", "fedkeep", "run", "digits", "rounds=6", "seed=1", "epochs=1", "checkpoint_every=2"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    alone_run(*ARGS[2:], "--runs", str(folder), "--name", "one", "method=scaffold")
    return folder / "one"


def test_the_command_line_under_torchrun(tmp_path: Path, alone: Path) -> None:
    args = [*ARGS[:-1], "method=scaffold", "--runs", str(tmp_path), "--name", "two"]  # checkpoints by their cost
    output = finished(torchrun(2, *args))
    assert output.count("class 0") == 1, "one rank prints"
    one, two = load_run(alone), load_run(tmp_path / "two")
    assert two.about["made_by"]["ranks"] == 2
    assert gap(one.params, two.params) < 1e-4
    assert "Traceback" not in run_ranks(2, None, *args[2:]), "a finished run is loaded"


def test_a_rank_that_dies_ends_the_run_and_it_resumes_with_another_number(tmp_path: Path, alone: Path) -> None:
    script = tmp_path / "die.py"
    script.write_text(
        "import os, signal, sys\n"
        "from fedkeep.engine.round_trainer import RoundTrainer\n"
        "old = RoundTrainer.train\n"
        "def train(self, server, states, number, keep_models=False):\n"
        "    if number == 4 and self.ranks.rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return old(self, server, states, number, keep_models)\n"
        "RoundTrainer.train = train\n"
        "from fedkeep.cli import main\n"
        "main()\n"
    )
    args = [*ARGS[2:], "method=scaffold", "--runs", str(tmp_path), "--name", "two"]
    process = torchrun(2, str(script), *args)
    output, _ = process.communicate(timeout=300)
    assert process.returncode != 0
    assert "fedkeep resume" in output, output
    assert saved_round(tmp_path / "two") == 2
    alone_run("resume", str(tmp_path / "two"))
    assert gap(load_run(alone).params, load_run(tmp_path / "two").params) < 1e-4


def test_an_error_on_one_rank_is_printed_once_on_one_line(tmp_path: Path) -> None:
    args = [*ARGS, "lr=1e30", "--runs", str(tmp_path), "--name", "bad"]
    process = torchrun(2, *args)
    output, _ = process.communicate(timeout=300)
    assert process.returncode != 0
    assert output.count("bad: ") == 1, output
    assert "fedkeep/engine" not in output, "torchrun prints a traceback of its own, fedkeep none"


FAILING = """
import dataclasses, os, sys
sys.path[:0] = [{tests!r}]
from support.problems import make_problem
import fedkeep as fk
from fedkeep import tree
from fedkeep.engine.distributed import current_ranks

@dataclasses.dataclass(frozen=True)
class Server(fk.methods.FedAvg):
    def aggregate(self, task, server, uploads, cohort):
        return tree.map(lambda t: t / 0, super().aggregate(task, server, uploads, cohort))

@dataclasses.dataclass(frozen=True)
class Client(fk.methods.FedAvg):
    def loss(self, visit, params, batch):
        if current_ranks().rank == 1:
            raise RuntimeError("the shapes do not fit: gr\u00f6\u00dfe " * 60)
        return super().loss(visit, params, batch)

def write_line(*args):  # at once, so that the other process cannot write in between
    os.write(1, (" ".join(map(str, args)) + "\\n").encode())

for method in (Server(), Client(), fk.methods.FedAvg()):
    try:
        sim = make_problem(participation=1.0).simulation(method)
        sim.run()
        write_line("done", sim.ranks.rank)
    except Exception as error:
        write_line(type(error).__name__, getattr(error, "round", "-"), str(error)[:60])
"""


def test_an_error_on_any_rank_ends_the_run_on_all_and_the_next_one_works(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING.format(tests=str(Path(__file__).parents[1])))
    output = run_ranks(2, tmp_path / "failing.py")
    assert output.count("Diverged 1 ") == 2, output
    assert output.count("RuntimeError - the shapes do not fit") == 1, output
    assert len(re.findall(r"EngineError - .*\b1\b.*RuntimeError", output)) == 1, output
    assert "done 0" in output, output
    assert "done 1" in output, output


def test_work_is_divided_evenly_and_completely() -> None:
    rng = np.random.default_rng(0)
    for size in (1, 2, 5):
        work = rng.integers(1, 100, 40).tolist()
        shares = Ranks(0, size).divide(work)
        assert sorted(place for share in shares for place in share) == list(range(40))
        loads = [sum(work[place] for place in share) for share in shares]
        assert max(loads) - min(loads) <= max(work)


def test_trees_sent_between_ranks_stay_the_same() -> None:
    sent = {
        "a": torch.arange(3, dtype=torch.int64),
        "b": {"half": torch.randn(5).bfloat16(), "flag": torch.tensor([True, False, True]), "none": {}},
        "c": torch.tensor(2.5, dtype=torch.float64),
        "d": torch.zeros(0, 4),
    }
    found = _tree_from(json.loads(_header(sent)), _payload(sent, torch.device("cpu")))
    assert gap(tree.to(sent, torch.float64), tree.to(found, torch.float64)) == 0
    assert [(p, t.dtype, t.shape) for p, t in tree.items(found)] == [(p, t.dtype, t.shape) for p, t in tree.items(sent)]
