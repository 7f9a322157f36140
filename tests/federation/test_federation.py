"""Real federations, broken on purpose: `make test-federation`. Minutes, because Flower takes one to miss a node."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import fedkeep as fk

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedkeep[flower]'")

from support.federation import Federation, app_copy, free_port, simulated
from support.problems import same

pytestmark = pytest.mark.federation
ROOT = Path(__file__).parents[2]

TROUBLE = '''
import time
from pathlib import Path

from flwr.app import Array, ArrayRecord


def trouble(message, context, call_next):
    """Make what the node's config asks for: a node that is slow in a round, or one that sends NaN."""
    config = context.node_config
    number = message.content["fedkeep"]["round"]
    if config.get("slow") == number:
        Path(str(config["state-dir"]) + ".at-work").touch()
        time.sleep(300)
    reply = call_next(message, context)
    if config.get("poison") == number:
        for name, record in dict(reply.content.array_records).items():
            reply.content[name] = ArrayRecord({key: Array(a.numpy() * float("nan")) for key, a in record.items()})
    return reply


app = client_app(None, model, node_data, mods=[trouble])
'''


def app_with_trouble(folder: Path) -> Path:
    app = app_copy(folder)
    file = app / "digits_federation" / "client_app.py"
    file.write_text(file.read_text() + TROUBLE)
    return app


def test_a_node_that_sends_nan_is_refused_by_name(tmp_path: Path) -> None:
    with Federation(tmp_path) as federation:
        federation.link()
        federation.node(0)
        federation.node(1, poison=1)
        federation.run(app_with_trouble(tmp_path), **{"train.rounds": 2})
        federation.wait("the second round", lambda: len(federation.rounds()) == 3, 200)
        first, second = federation.rounds()[1:]
    assert first["cohort"] == [0]
    assert "its update was refused" in first["failed"]["1"]
    assert "not finite" in first["failed"]["1"]
    assert second["cohort"] == [0, 1]


def test_a_node_killed_in_mid_round_is_missed_and_comes_back_with_its_state(tmp_path: Path) -> None:
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
        assert "fresh" not in back, "it went on from the state in its folder"


def test_a_superlink_killed_without_a_database_the_run_goes_on_from_its_folder(tmp_path: Path) -> None:
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


def test_a_superlink_with_a_database_is_killed_and_the_run_survives(tmp_path: Path) -> None:
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


def test_tls_and_authentication_as_documented_and_an_unknown_node_is_turned_away(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("example", ["flower", "flower-images"])
def test_an_example_starts_with_the_commands_of_its_readme(tmp_path: Path, example: str) -> None:
    """As written, but for the installation and the ports, which may be taken."""
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
            said = (tmp_path / "readme.log").read_text()
        assert "what would leave this node" in said, said
        assert process.returncode == 0, said
    [run] = (app / "runs").iterdir()
    history = fk.load_run(run)
    assert len(history.records) == history.about["train"]["rounds"] + 1, said
    assert "accuracy" in said
