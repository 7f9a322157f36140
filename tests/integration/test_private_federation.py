"""Robust averaging and differential privacy in a federation: with real apps and messages, in one process."""

from __future__ import annotations

import json

import pytest
from support.errors import raises
from support.problems import Problem, gap

import fedkeep as fk
from fedkeep.data.seeds import sample_cohort
from fedkeep.engine import privacy
from fedkeep.errors import ConfigError, FedkeepError, MethodError, RunError
from fedkeep.runs.checkpoints import find_checkpoints
from fedkeep.runs.releases import RELEASES, Releases

pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")
pytest.importorskip("opacus", reason="the accountant is not installed: pip install '.[privacy]'")

from support.flower_grid import MemoryGrid, node, strategy_of

from fedkeep import tree
from fedkeep.flower import Strategy
from fedkeep.flower import records as flower_records

DP = {"dp_clip": 0.5, "dp_noise": 1.5}


def grid_of(problem: Problem, method) -> MemoryGrid:
    return MemoryGrid([node(problem, method, k) for k in range(len(problem.clients))])


def run(problem: Problem, method, **options) -> Strategy:
    strategy = strategy_of(problem, method, **options)
    strategy.start(grid_of(problem, method))
    return strategy


@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
@pytest.mark.parametrize("kind", ["median", "trimmed_mean", "clip"])
def test_robust_averaging_is_that_of_the_simulation(three: Problem, name: str, kind: str) -> None:
    method = fk.methods.get(name)()
    simulated = three.run(method, aggregation=kind)
    assert gap(simulated.server, run(three, method, aggregation=kind).federation.state.server) == 0
    assert gap(simulated.server, three.run(method).server) > 1e-9


def test_a_round_with_too_few_replies_for_robust_averaging_is_not_aggregated(three: Problem) -> None:
    grid = grid_of(three, fk.methods.FedAvg())
    grid.node_of(1).fault = lambda message, work: None
    strategy = strategy_of(three, fk.methods.FedAvg(), aggregation="median", attempts=1, min_replies=1, timeout=0.1)
    with raises(RunError, key="round", value=1):
        strategy.start(grid)


def test_with_the_same_noise_a_federation_equals_the_simulation(three: Problem, monkeypatch) -> None:
    settings = fk.Settings(**{**three.settings, **DP})
    rounds = iter(range(1, 99))

    def seeded(method, server, uploads, cohort, given, size, source, own=privacy.privatise):
        assert source is privacy.system_bytes
        return own(method, server, uploads, cohort, given, size, privacy.seeded_bytes(settings.seed, next(rounds)))

    simulated = three.run(fk.methods.Scaffold(), **DP)
    monkeypatch.setattr(privacy, "privatise", seeded)
    strategy = run(three, fk.methods.Scaffold(), **DP)
    assert gap(simulated.server, strategy.federation.state.server) == 0
    epsilons = [record.get("epsilon") for record in strategy.federation.state.history.records]
    assert epsilons == [record.get("epsilon") for record in simulated.history.records]


def test_the_noise_of_a_federation_is_new_every_time(three: Problem) -> None:
    first, second = (run(three, fk.methods.FedAvg(), **DP, rounds=1).federation.state.params for _ in range(2))
    assert gap(first, second) > 1e-3


def test_records_tell_nothing_of_single_clients(three: Problem, tmp_path) -> None:
    grid = grid_of(three, fk.methods.FedAvg())

    def far_away(message, work):
        reply = work()
        forged = tree.map(lambda t: t * 1e6, flower_records.from_records(reply.content)["params"])
        reply.content["params"] = flower_records.to_records({"params": forged})["params"]
        return reply

    grid.node_of(2).fault = far_away
    strategy_of(three, fk.methods.FedAvg(), **DP, rounds=1, run_dir=tmp_path / "run").start(grid)
    record = fk.load_run(tmp_path / "run").records[1]
    assert record["train_loss"] is None
    assert record["cohort"] == [0, 1]
    assert record["failed"] == {"2": "no usable update"}


def test_going_back_spends_privacy_again(three: Problem, tmp_path) -> None:
    """Rounds 2 and 3 were released before the server went back to round 1 and ran round 2 again."""
    path = tmp_path / "run"
    run(three, fk.methods.FedAvg(), **DP, rounds=3, run_dir=path)
    back = strategy_of(three, fk.methods.FedAvg(), **DP, rounds=2, run_dir=path, from_round=1)
    spent = privacy.compute_epsilon(1.5, 1e-5, 3)
    assert back.federation.state.history.epsilon == fk.load_run(path).epsilon == spent
    back.federation.state.close()
    again = run(three, fk.methods.FedAvg(), **DP, rounds=2, run_dir=path, from_round=1, keep=1)
    assert list(find_checkpoints(path)) == [2], "a new value of keep applies"
    records = again.federation.state.history.records
    assert [record["round"] for record in records] == [0, 1, 2]
    assert records[-1]["epsilon"] == privacy.compute_epsilon(1.5, 1e-5, 4)


def test_a_missing_or_damaged_list_of_releases_is_refused(three: Problem, tmp_path) -> None:
    path = tmp_path / "run"
    run(three, fk.methods.FedAvg(), **DP, rounds=2, run_dir=path)
    whole = (path / RELEASES).read_bytes()
    (path / RELEASES).write_bytes(whole.replace(b"[0, 1, 2]", b"[0, 1]", 1))
    with raises(RunError, key=RELEASES, value=1, mentions=[RELEASES]):
        strategy_of(three, fk.methods.FedAvg(), **DP, rounds=3, run_dir=path)
    (path / RELEASES).write_bytes(whole.splitlines(keepends=True)[0])
    with raises(RunError, key=RELEASES, value=2):
        strategy_of(three, fk.methods.FedAvg(), **DP, rounds=3, run_dir=path)
    with raises(RunError, key=RELEASES, value=2):
        fk.load_run(path)
    (path / RELEASES).unlink()
    with raises(RunError, key=RELEASES, value=1):
        strategy_of(three, fk.methods.FedAvg(), **DP, rounds=3, run_dir=path)


def test_a_line_cut_off_by_a_crash_is_dropped(tmp_path) -> None:
    path = tmp_path / RELEASES
    Releases(path, "run").add(1, [0, 2], 0.5)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"round": 2, "cli')
    again = Releases(path, "run")
    assert again.cohorts == [[0, 2]]
    again.add(2, [1], 0.5)
    assert Releases(path, "run").cohorts == [[0, 2], [1]]
    with raises(RunError, key=RELEASES, value=1):
        Releases(path, "another run")
    assert [json.loads(line)["round"] for line in path.read_text().splitlines()] == [1, 2]


def test_the_list_of_releases_is_a_regular_file(tmp_path) -> None:
    path = tmp_path / RELEASES
    path.mkdir()
    with raises(RunError, key=RELEASES, mentions=["a folder"]):
        Releases(path, "run")
    path.rmdir()
    path.symlink_to(tmp_path / "elsewhere")
    with raises(RunError, key=RELEASES):
        Releases(path, "run")
    (tmp_path / "elsewhere").touch()
    with raises(RunError, key=RELEASES, mentions=["a symbolic link"]):
        Releases(path, "run").add(1, [0], 0.5)
    assert not (tmp_path / "elsewhere").read_bytes()


def test_a_list_of_releases_that_shrinks_is_not_continued(tmp_path) -> None:
    releases = Releases(tmp_path / RELEASES, "run")
    releases.add(1, [0], 0.5)
    (tmp_path / RELEASES).write_bytes(b"")
    with raises(RunError, key=RELEASES, mentions=["removed"]):
        releases.add(2, [0], 0.7)


def test_what_differential_privacy_does_not_cover_is_refused(three: Problem) -> None:
    with raises(ConfigError, key="fraction_evaluate"):
        strategy_of(three, fk.methods.FedAvg(), **DP, fraction_evaluate=0.5)
    with raises(ConfigError, key="fraction_evaluate"):
        strategy_of(three, fk.methods.FedAvg(), fraction_evaluate=0.5).start(MemoryGrid([]), train_config=DP)
    with raises(MethodError, key="dp_noise", value="fednova"):
        strategy_of(three, fk.methods.FedNova(), **DP)
    with raises(FedkeepError, key="hostile"):
        strategy_of(three, fk.methods.FedAvg(), aggregation="krum")
    with raises(MethodError, key="dp_noise"):
        strategy_of(three, fk.methods.FedNova()).start(MemoryGrid([]), train_config=DP)


def test_a_server_that_dies_before_it_commits_has_spent(three: Problem, tmp_path, monkeypatch) -> None:
    path = tmp_path / "run"
    strategy = strategy_of(three, fk.methods.FedAvg(), **DP, rounds=1, run_dir=path)
    monkeypatch.setattr(strategy, "commit", lambda arrays=None: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        strategy.start(grid_of(three, fk.methods.FedAvg()))
    assert fk.load_run(path).epsilon == privacy.compute_epsilon(1.5, 1e-5, 1)
    records = run(three, fk.methods.FedAvg(), **DP, rounds=1, run_dir=path).federation.state.history.records
    assert records[-1]["epsilon"] == privacy.compute_epsilon(1.5, 1e-5, 2)


def test_a_rejected_client_is_not_replaced_and_drops_no_other(three: Problem, tmp_path) -> None:
    """Whether others take part must not depend on one client's upload: it would count for more than its clipped sum."""
    grid = grid_of(three, fk.methods.FedAvg())
    strategy = strategy_of(three, fk.methods.FedAvg(), **DP, rounds=1, participation=2, run_dir=tmp_path / "run")
    sampled = sample_cohort(strategy.federation.settings.seed, 1, 3, 2).tolist()

    def broken(message, work):
        reply = work()
        content = flower_records.from_records(reply.content)
        forged = flower_records.to_records({"params": tree.map(lambda t: t * float("nan"), content["params"])})
        reply.content["params"] = forged["params"]
        return reply

    grid.node_of(sampled[0]).fault = broken
    strategy.start(grid)
    record = fk.load_run(tmp_path / "run").records[1]
    assert record["cohort"] == sampled[1:]
    assert set(record["failed"]) == {str(sampled[0])}


def test_every_round_is_one_release_however_large_the_noise(three: Problem, tmp_path) -> None:
    strategy = run(three, fk.methods.FedAvg(), dp_clip=1.0, dp_noise=50.0, rounds=3, run_dir=tmp_path / "run")
    assert strategy.federation.state.round == 3
    assert [json.loads(line)["round"] for line in (tmp_path / "run" / RELEASES).read_text().splitlines()] == [1, 2, 3]
