"""Faults in real federations: `make test-federation`. Slow, because Flower takes a minute to notice a lost node."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import fedkeep as fk

pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")

from support.federation import Federation, app_copy, free_port, simulated
from support.problems import same

from fedkeep.flower.dry_run import MEANINGS

pytestmark = pytest.mark.federation
ROOT = Path(__file__).parents[2]

TROUBLE = '''
import time
from pathlib import Path

import safetensors.torch
import torch
from flwr.app import Array, ArrayRecord


def trouble(message, context, call_next):
    """Cause the fault in the node's config: a node that is slow in a round, sends NaN, or is hostile."""
    config = context.node_config
    number = message.content["fedkeep"]["round"]
    if config.get("slow") == number:
        Path(str(config["state-dir"]) + ".at-work").touch()
        time.sleep(300)
    reply = call_next(message, context)
    if config.get("poison") == number:
        for name, record in dict(reply.content.array_records).items():
            reply.content[name] = ArrayRecord({key: Array(a.numpy() * float("nan")) for key, a in record.items()})
    if config.get("hostile"):
        attack(reply, number)
    return reply


def attack(reply, number):
    """Send another attack in each of the first rounds."""
    if number == 1:  # no number of examples
        reply.content["fedkeep"]["leaves"] = safetensors.torch.save({"n": torch.zeros(0)})
    if number == 2:  # a control variate that would spoil the run for good
        old = reply.content["dc"]
        reply.content["dc"] = ArrayRecord({key: Array(a.numpy() * 0 + 1000) for key, a in old.items()})
    if number == 3:  # bytes that are no message
        deflate = Array.deflate
        Array.deflate = lambda self: deflate(self).replace(b"numpy.ndarray", b'numpy",,,,,,,')


app = client_app(None, model, node_data, mods=[trouble])
'''


def app_with_trouble(folder: Path) -> Path:
    """Copy the example, with nodes whose config can cause faults."""
    app = app_copy(folder)
    file = app / "digits_federation" / "client_app.py"
    file.write_text(file.read_text() + TROUBLE)
    return app


def test_update_with_nan_is_rejected(tmp_path: Path) -> None:
    with Federation(tmp_path) as federation:
        federation.link()
        federation.node(0)
        federation.node(1, poison=1)
        federation.run(app_with_trouble(tmp_path), **{"train.rounds": 2})
        federation.wait("the second round", lambda: len(federation.rounds()) == 3, 200)
        first, second = federation.rounds()[1:]
    assert first["cohort"] == [0]
    assert "params/" in first["failed"]["1"]
    assert "NaN" in first["failed"]["1"]
    assert second["cohort"] == [0, 1]


def test_hostile_node_can_neither_end_nor_spoil_a_run(tmp_path: Path) -> None:
    with Federation(tmp_path) as federation:
        federation.link()
        for client in range(3):
            federation.node(client, hostile=client == 2)
        run = federation.run(
            app_with_trouble(tmp_path), **{"train.rounds": 4, "method.name": "scaffold", "num-clients": 3}
        )
        federation.wait("the last round", lambda: len(federation.rounds()) == 5, 400)
        federation.wait("the run's end", lambda: "finished" in federation.status(run), 90)
        assert federation.status(run) == "finished:completed", federation.logs()
        rounds = federation.rounds()[1:]
    assert [r["cohort"] for r in rounds] == [[0, 1], [0, 1], [0, 1], [0, 1, 2]]
    assert [list(r.get("failed", {})) for r in rounds] == [["2"], ["2"], ["2"], []]
    for record, part in zip(rounds, ("n ", "dc ", "cannot be read"), strict=False):
        assert part in record["failed"]["2"], record
    keys = json.loads((tmp_path / "run" / "client_keys.json").read_text())
    assert sorted(keys) == ["0", "1", "2"]
    assert all(key.startswith("SHA256:") for key in keys.values()), "the SuperLink tells every node's key"


def test_node_killed_during_a_round_returns_with_its_state(tmp_path: Path) -> None:
    with Federation(tmp_path) as federation:
        federation.link()
        federation.node(0)
        federation.node(1, slow=2)
        federation.run(app_with_trouble(tmp_path), **{"train.rounds": 8, "method.name": "scaffold"})
        mark = tmp_path / "state-1.at-work"
        federation.wait("the slow node's second round", mark.exists, 200)
        federation.kill("node-1")
        federation.wait("the second round, without it", lambda: len(federation.rounds()) >= 3, 200)
        second = federation.rounds()[2]
        assert second["cohort"] == [0]
        assert "1" in second["failed"]
        federation.node(1, name="node-1-again")
        federation.wait("a round with both again", lambda: federation.rounds()[-1].get("cohort") == [0, 1], 200)
        back = federation.rounds()[-1]
        assert back["round"] > 2
        assert "fresh" not in back, "it continued from the state in its folder"


def test_run_resumes_after_a_superlink_without_a_database_is_killed(tmp_path: Path) -> None:
    with Federation(tmp_path) as federation:
        app = app_copy(tmp_path)
        federation.link()
        for client in range(2):
            federation.node(client)
        federation.run(app, **{"train.rounds": 3, "method.name": "scaffold"})
        federation.wait("the first round", lambda: len(federation.rounds()) >= 2, 200)
        for name in ("link", "node-0", "node-1"):
            federation.kill(name)
        reached = federation.rounds()[-1]["round"]
        assert reached < 3
        federation.link()
        for client in range(2):
            federation.node(client, name=f"node-{client}-again")
        federation.run(app, **{"train.rounds": 3, "method.name": "scaffold"})
        federation.wait("the last round", lambda: len(federation.rounds()) == 4, 200)
    history = fk.load_run(tmp_path / "run")
    assert not any("fresh" in record for record in history.records)
    assert same(simulated(rounds=3, method="scaffold").params, history.params), "as if nothing had happened"


def test_run_survives_a_killed_superlink_with_a_database(tmp_path: Path) -> None:
    with Federation(tmp_path) as federation:
        more = ("--database", str(tmp_path / "state.db"), "--isolation", "process")
        federation.link(*more)
        federation.start(
            "exec", "flower-superexec", "--insecure", "--runtime-api-address", f"127.0.0.1:{federation.port}"
        )
        for client in range(2):
            federation.node(client)
        run = federation.run(app_copy(tmp_path), **{"train.rounds": 3})
        federation.wait("the first round", lambda: len(federation.rounds()) >= 2, 200)
        federation.kill("link")
        federation.link(*more)
        federation.wait("the last round", lambda: len(federation.rounds()) == 4, 300)
        federation.wait("the run's end", lambda: "finished" in federation.status(run), 60)
    assert same(simulated(rounds=3).params, fk.load_run(tmp_path / "run").params)


def test_tls_and_authentication_as_documented_reject_an_unknown_node(tmp_path: Path) -> None:
    keys = re.search(r"```sh\n(# certificates.*?)```", (ROOT / "docs" / "deploy.md").read_text(), flags=re.DOTALL)
    assert keys
    subprocess.run(["bash", "-euc", keys[1]], cwd=tmp_path, check=True, capture_output=True)
    with Federation(tmp_path, insecure=False) as federation:
        ca, own = str(tmp_path / "ca.crt"), str(tmp_path / "server")
        federation.security = {
            "link": ["--ssl-ca-certfile", ca, "--ssl-certfile", f"{own}.pem", "--ssl-keyfile", f"{own}.key"],
            "node": ["--root-certificates", ca],
            "exec": ["--root-certificates", ca],
        }
        federation.connection = {"address": f"127.0.0.1:{federation.port}", "root-certificates": ca}
        federation.connect()
        federation.link("--enable-supernode-auth")
        for name in ("node-0", "node-1", "stranger"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", str(tmp_path / name)], check=True
            )
        for name in ("node-0", "node-1"):
            federation.flwr("supernode", "register", str(tmp_path / f"{name}.pub"), "here")
        for client in range(2):
            federation.node(client, more=("--auth-supernode-private-key", str(tmp_path / f"node-{client}")))
        federation.node(1, name="stranger", more=("--auth-supernode-private-key", str(tmp_path / "stranger")))
        federation.run(app_copy(tmp_path), **{"train.rounds": 1})
        federation.wait("the first round", lambda: len(federation.rounds()) == 2, 200)
        federation.wait("the stranger's end", lambda: federation.processes["stranger"].poll() is not None, 90)
        assert federation.rounds()[1]["cohort"] == [0, 1]


OWN_APP = """
[project]
name = "existing"
version = "1.0.0"
description = "A Flower app as users have them"
license = "Apache-2.0"
dependencies = []

[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[tool.flwr.app]
publisher = "existing"

[tool.flwr.app.components]
serverapp = "existing.server_app:app"
clientapp = "existing.client_app:app"

[tool.flwr.app.config]
run-dir = ""
num-server-rounds = 2
lr = 0.05
local-epochs = 1
"""


def test_an_app_of_the_users_own_is_observed(tmp_path: Path) -> None:
    app = tmp_path / "app"
    shutil.copytree(ROOT / "tests" / "support" / "existing_app", app, ignore=shutil.ignore_patterns("__pycache__"))
    (app / "pyproject.toml").write_text(OWN_APP)
    file = app / "existing" / "server_app.py"
    arguments = 'Net, load_data(0, 1)[1], run_dir=context.run_config["run-dir"], local_every=1'
    code = file.read_text().replace(
        "    result = strategy.start(",
        f"    strategy = forgetting(strategy, {arguments})\n    result = strategy.start(",
    )
    file.write_text(f"from fedkeep.flower import forgetting\n{code}")
    with Federation(tmp_path) as federation:
        for client in range(2):
            federation.node(client, **{"partition-id": client, "num-partitions": 2})
        federation.link()
        run = federation.run(app)
        federation.wait("the run's end", lambda: "finished" in federation.status(run), 300)
        assert federation.status(run) == "finished:completed", federation.logs()
        log = federation.flwr("log", run, "here", "--show")
    history = fk.load_run(tmp_path / "run")
    assert history.verified
    assert history.ended == "finished"
    assert [record["cohort"] for record in history.records[1:]] == [[0, 1], [0, 1]]
    assert len(history.records[1]["nodes"]) == 2
    assert history.anatomy_rounds == [1, 2]
    assert f"{history.accuracy[-1]:.3f}" in log, "the app's log shows it"


@pytest.mark.parametrize("example", ["flower", "flower-images"])
def test_readme_commands_of_an_example_run(tmp_path: Path, example: str) -> None:
    """The commands as written, except for the installation and the ports, which may be in use."""
    app = app_copy(tmp_path, example)
    blocks = re.findall(r"```sh\n(.*?)```", (app / "README.md").read_text(), flags=re.DOTALL)
    script = "\n".join(line for line in "\n".join(blocks).splitlines() if not line.startswith("pip install"))
    for port in ("9100", "9101", "9102"):
        script = script.replace(port, str(free_port()))
    with Federation(tmp_path / "own") as federation:
        environment = {**federation.env, "PIP_NO_INDEX": "1"}
        with open(tmp_path / "readme.log", "w") as log:
            process = subprocess.Popen(
                ["bash", "-c", script], cwd=app, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        federation.processes["readme"] = process
        try:
            process.wait(timeout=400)
        finally:
            output = (tmp_path / "readme.log").read_text()
        assert process.returncode == 0, output
        assert all(f"  {name}: {MEANINGS[name]}" in output for name in ("params", "n")), output  # of the dry run
    [run] = (app / "runs").iterdir()
    history = fk.load_run(run)
    assert len(history.records) == history.about["train"]["rounds"] + 1, output
    assert f"{history.accuracy[-1]:.3f}" in output, "the log shows the last accuracy"
