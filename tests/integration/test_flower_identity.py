"""Identity of nodes in a federation on Flower: a client id belongs to the key that claimed it first."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from support.errors import raises
from support.flower_keys import make_key
from support.problems import Problem

import fedkeep as fk

pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")

from support.flower_grid import MemoryGrid, grid_of, node, strategy_of
from support.hostile import filled, with_upload

from fedkeep.errors import ConfigError, RunError
from fedkeep.flower.client_keys import FILE, key_fingerprint, read_key_file

METHOD = fk.methods.FedAvg()
KEYS = [make_key(k) for k in range(5)]  # (PEM as the SuperLink stores it, the line of a .pub file)


def grid_with_keys(problem: Problem) -> MemoryGrid:
    """Return a grid whose nodes 0 to 2 have the keys 0 to 2."""
    grid = grid_of(problem, METHOD)
    for client in range(3):
        grid.node_of(client).public_key = KEYS[client][0]
    return grid


def add_impostor(grid: MemoryGrid, problem: Problem, client: int, number: int) -> None:
    """Add a node that claims to be a client of another node; the lower its number, the earlier it is asked."""
    impostor = node(problem, METHOD, client)
    impostor.public_key, impostor.fault = KEYS[4][0], with_upload(filled("n", 999.0))
    grid.nodes[number] = impostor


def records_of(strategy) -> list[dict]:
    return strategy.federation.state.history.records[1:]


def fingerprints() -> dict[str, str]:
    return {str(k): key_fingerprint(KEYS[k][0], 0) for k in range(3)}


def test_binding_is_kept_in_the_run_folder_and_an_impostor_cannot_come_first(three: Problem, tmp_path: Path) -> None:
    grid = grid_with_keys(three)
    strategy_of(three, METHOD, rounds=1, run_dir=tmp_path / "run").start(grid)
    assert json.loads((tmp_path / "run" / FILE).read_text()) == fingerprints()
    add_impostor(grid, three, client=1, number=3)  # asked before all others when the server starts again
    again = strategy_of(three, METHOD, rounds=3, run_dir=tmp_path / "run")
    again.start(grid)
    assert again.nodes.of_client[1] != 3
    assert [r["cohort"] for r in records_of(again)] == [[0, 1, 2]] * 3
    assert not [m for m in grid.nodes[3].received if m.metadata.message_type == "train"], "it was never asked"
    assert any("node 3" in text for r in records_of(again) for text in r.get("security", []))


@pytest.mark.parametrize("rule", ["connected", "first"])
def test_node_with_another_key_may_stand_in_only_if_the_rule_allows_it(three: Problem, rule: str) -> None:
    grid = grid_with_keys(three)
    gone = next(number for number, one in grid.nodes.items() if one.config["client-id"] == 1)
    real = grid.nodes[gone]
    strategy = strategy_of(three, METHOD, rounds=4, client_keys=rule)
    commit = strategy.commit

    def step(*args):
        record = commit(*args)
        if record["round"] == 1:
            del grid.nodes[gone]
            add_impostor(grid, three, client=1, number=900)
        if record["round"] == 2:
            grid.nodes[gone] = real
        return record

    strategy.commit = step
    strategy.start(grid)
    stood_in = rule == "connected"
    rounds = records_of(strategy)
    assert rounds[1]["cohort"] == ([0, 1, 2] if stood_in else [0, 2])
    assert any("900" in text for text in rounds[1]["security"]), "logged and kept"
    assert rounds[3]["cohort"] == [0, 1, 2]
    assert strategy.nodes.of_client[1] == gone, "the owner of the id has it back"


def test_file_says_who_may_be_which_client(three: Problem, tmp_path: Path) -> None:
    listing = tmp_path / "keys.txt"
    listing.write_text(f"# clients\n\n0 {KEYS[0][1]}\n1 {key_fingerprint(KEYS[1][0], 0)}\n2 {KEYS[3][1]} comment\n")
    grid = grid_with_keys(three)
    add_impostor(grid, three, client=0, number=3)
    strategy = strategy_of(three, METHOD, rounds=1, client_keys=str(listing), min_replies=1)
    strategy.start(grid)
    [record] = records_of(strategy)
    assert record["cohort"] == [0, 1], "client 2 has another key than the listed one"
    assert strategy.nodes.of_client[0] != 3
    assert {text.split(":")[0] for text in record["security"]} == {
        "node 3 claims to be client 0",
        f"node {next(n for n, one in grid.nodes.items() if one.config['client-id'] == 2)} claims to be client 2",
    }


@pytest.mark.parametrize(
    "text",
    ["0\n", "zero SHA256:" + "a" * 43, "7 SHA256:" + "a" * 43, "-1 SHA256:" + "a" * 43, "0 SHA256:short", "0 rsa AAAA",
     "0 ecdsa-sha2-nistp384 not+base64!", "0 SHA256:" + "a" * 43 + "\n0 SHA256:" + "b" * 43],
)  # fmt: skip
def test_wrong_key_file_raises(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.txt"
    path.write_text(text)
    with raises(ConfigError, key="client-keys", mentions=["keys.txt"]):
        read_key_file(path, 3)
    with raises(ConfigError, key="client-keys", mentions=["missing.txt"]):
        read_key_file(tmp_path / "missing.txt", 3)


def test_damaged_binding_is_named_and_not_replaced(three: Problem, tmp_path: Path) -> None:
    strategy_of(three, METHOD, rounds=1, run_dir=tmp_path / "run").start(grid_with_keys(three))
    (tmp_path / "run" / FILE).write_text("{")
    with raises(RunError, key=FILE, mentions=[FILE]):
        strategy_of(three, METHOD, rounds=2, run_dir=tmp_path / "run")
    assert (tmp_path / "run" / FILE).read_text() == "{"


def test_entry_that_is_removed_releases_a_client(three: Problem, tmp_path: Path) -> None:
    grid = grid_with_keys(three)
    options = {"run_dir": tmp_path / "run", "client_keys": "first"}
    strategy_of(three, METHOD, rounds=1, **options).start(grid)
    grid.node_of(1).public_key = KEYS[3][0]  # a new key, as after a rotation
    refused = strategy_of(three, METHOD, rounds=2, **options)
    refused.start(grid)
    assert records_of(refused)[1]["cohort"] == [0, 2]
    entries = json.loads((tmp_path / "run" / FILE).read_text())
    del entries["1"]
    (tmp_path / "run" / FILE).write_text(json.dumps(entries))
    again = strategy_of(three, METHOD, rounds=3, **options)
    again.start(grid)
    assert records_of(again)[2]["cohort"] == [0, 1, 2]


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")
def test_fingerprint_is_that_of_ssh_keygen(tmp_path: Path) -> None:
    pem, line = KEYS[0]
    (tmp_path / "key.pub").write_text(line + "\n")
    shown = subprocess.run(["ssh-keygen", "-lf", str(tmp_path / "key.pub")], capture_output=True, text=True, check=True)
    assert key_fingerprint(pem, 5) == shown.stdout.split()[1]


def test_node_without_a_key_is_known_by_its_id() -> None:
    assert key_fingerprint(b"", 5) == "node:5"
    assert key_fingerprint(b"\xff" * 50, 5) == "node:5"
