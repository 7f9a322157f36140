"""Code and commands in the pages and examples about federations, executed."""

from __future__ import annotations

import json
import random
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import fedkeep as fk
from fedkeep.engine import footprint

pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")

from flwr.app import Context, RecordDict
from support.errors import raises
from support.flower_grid import MemoryGrid, SuperNode
from support.problems import same
from typer.testing import CliRunner

from fedkeep.cli.app import app as command_line
from fedkeep.errors import ConfigError, FedkeepError
from fedkeep.flower import new_app
from fedkeep.flower.dry_run import MEANINGS, load_app, parse_config

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "flower.md").read_text()


@pytest.fixture
def fresh_imports(monkeypatch: pytest.MonkeyPatch):
    """Import an app from a folder, and not what another test or pytest's collection imported under its name."""

    def forget() -> None:
        for name in list(sys.modules):
            if name.split(".")[0] in ("existing", "shapes_federation", "digits_federation", "ward_7", "make_images"):
                del sys.modules[name]

    def add(folder: Path) -> None:
        monkeypatch.syspath_prepend(str(folder))

    forget()
    yield add
    forget()


def apply_diffs(app: Path, heading: str) -> int:
    """Apply the diffs of a section of the page to an app, and return how many lines they add or replace."""
    count, section = 0, PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    for name, diff in re.findall(r"`(\w+\.py)`:\n\n```diff\n(.*?)```", section, flags=re.DOTALL):
        file, at = app / "existing" / name, 0
        lines = file.read_text().splitlines()
        for sign, line in ((line[0], line[1:]) for line in diff.splitlines()):
            if sign == "+":
                lines.insert(at, line)
                count, at = count + 1, at + 1
            elif sign == "-":
                at = lines.index(line)
                del lines[at]
            else:
                at = lines.index(line) + 1
        file.write_text("\n".join(lines) + "\n")
    return count


def run_existing(folder: Path):
    from existing import client_app, server_app

    config = {"num-server-rounds": 3, "lr": 0.05, "local-epochs": 1}
    nodes = [SuperNode(client_app.app, {"partition-id": k, "num-partitions": 3}) for k in range(3)]
    random.seed(0)  # Flower samples nodes with it
    torch.manual_seed(0)
    server_app.app(MemoryGrid(nodes, config), Context(1, 1, {}, RecordDict(), config))
    return server_app.results[-1]


def test_existing_flower_app_runs_before_the_change(tmp_path: Path, fresh_imports) -> None:
    fresh_imports(ROOT / "tests" / "support" / "existing_app")
    assert "eval_acc" in run_existing(tmp_path).evaluate_metrics_clientapp[3]


def test_existing_flower_app_becomes_fedntd_with_at_most_five_lines(tmp_path: Path, fresh_imports) -> None:
    shutil.copytree(ROOT / "tests" / "support" / "existing_app", tmp_path / "app")
    assert 0 < apply_diffs(tmp_path / "app", "An existing Flower app") <= 5
    fresh_imports(tmp_path / "app")
    result = run_existing(tmp_path)
    assert Path(sys.modules["existing"].__file__).is_relative_to(tmp_path), "the changed app is the one that ran"
    assert result.evaluate_metrics_clientapp[3]["eval_acc"] > 0.2, "the app's own evaluation is still used"
    from existing.task import Net, load_data

    torch.manual_seed(0)
    model = Net()
    parts = [load_data(k, 3)[0].dataset.tensors for k in range(3)]
    x, y = torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
    clients = np.split(np.arange(len(y)), np.cumsum([len(p[1]) for p in parts])[:-1])
    data = fk.data.from_arrays(x, y, x[:50], y[:50], n_classes=10)
    alone = fk.simulate("fedntd", model, data, clients, participation=1.0, rounds=3, lr=0.05, engine="loop")
    assert same(alone.params, dict(result.arrays.to_torch_state_dict())), "it is the simulation's FedNTD"


def test_two_lines_show_what_an_existing_flower_app_forgets(tmp_path: Path, fresh_imports, monkeypatch) -> None:
    fresh_imports(ROOT / "tests" / "support" / "existing_app")
    before = run_existing(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "existing"]:
        del sys.modules[name]
    shutil.copytree(ROOT / "tests" / "support" / "existing_app", tmp_path / "app")
    assert apply_diffs(tmp_path / "app", "See what your own app forgets") == 2
    fresh_imports(tmp_path / "app")
    monkeypatch.chdir(tmp_path)
    after = run_existing(tmp_path)
    assert Path(sys.modules["existing"].__file__).is_relative_to(tmp_path), "the changed app is the one that ran"
    assert same(dict(before.arrays.to_torch_state_dict()), dict(after.arrays.to_torch_state_dict()))
    assert str(before.evaluate_metrics_serverapp) == str(after.evaluate_metrics_serverapp)
    history = fk.load_run("runs/my-app")
    measured = [after.evaluate_metrics_serverapp[number]["accuracy"] for number in (1, 2, 3)]
    assert history.accuracy.tolist() == pytest.approx(measured), "as the app itself measures it"
    assert CliRunner().invoke(command_line, ["compare", "runs"]).exit_code == 0
    assert CliRunner().invoke(command_line, ["report", "runs"]).exit_code == 0


def test_python_of_the_page_runs(tmp_path: Path) -> None:
    names: dict = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL):
        exec(block, names)
    config = {"run-dir": str(tmp_path / "run"), "train.rounds": 1}
    grid = MemoryGrid([SuperNode(names["nodes"], {"client-id": k}) for k in range(3)], config)
    names["server"](grid, Context(1, 1, {}, RecordDict(), config))
    assert fk.load_run(tmp_path / "run").records[1]["cohort"] == [0, 1, 2]


def test_example_is_what_flower_new_writes(tmp_path: Path) -> None:
    made = new_app.write("digits-federation", tmp_path)
    for path in new_app.files("digits-federation"):
        assert (made / path).read_text() == (ROOT / "examples" / "flower" / path).read_text(), path
    with raises(ConfigError, key="name", value="digits-federation", mentions=[str(made)]):
        new_app.write("digits-federation", tmp_path)
    with raises(ConfigError, key="name", value="Ward 7"):
        new_app.write("Ward 7", tmp_path)


def test_new_app_runs(tmp_path: Path, fresh_imports) -> None:
    folder = new_app.write("ward-7", tmp_path)
    fresh_imports(folder)
    from ward_7 import client_app, server_app

    config = {**load_app(folder)[1], "run-dir": str(tmp_path / "run"), "train.rounds": 1}
    grid = MemoryGrid([SuperNode(client_app.app, {"client-id": k}) for k in range(2)], config)
    server_app.app(grid, Context(1, 1, {}, RecordDict(), config))
    assert fk.load_run(tmp_path / "run").about["method"]["name"] == "fedkeep"


def test_image_example_runs(tmp_path: Path, fresh_imports) -> None:
    pytest.importorskip("PIL")
    fresh_imports(ROOT / "examples" / "flower-images")
    from make_images import main
    from shapes_federation import client_app, server_app

    main(tmp_path)
    _, config = load_app(ROOT / "examples" / "flower-images")
    config = {**config, "run-dir": str(tmp_path / "run"), "test-data": str(tmp_path / "server")}
    nodes = [SuperNode(client_app.app, {"client-id": k, "data": str(tmp_path / f"node-{k}")}) for k in range(2)]
    server_app.app(MemoryGrid(nodes, config), Context(1, 1, {}, RecordDict(), config))
    assert fk.load_run(tmp_path / "run").summary()["best"] > 0.45


@pytest.mark.parametrize("name", fk.methods.REGISTRY)
def test_dry_run_shows_what_a_method_uploads(name: str, fresh_imports) -> None:
    args = ["flower", "dry-run", str(ROOT / "examples" / "flower"), "--run-config", f"method.name='{name}'"]
    done = CliRunner().invoke(command_line, args)
    assert done.exit_code == 0, done.output
    for upload in footprint.footprint(fk.methods.get(name)()).uploads:
        assert f"  {upload}: {MEANINGS[upload]}" in done.output.splitlines(), (
            "every upload of the registry is explained"
        )
    fresh_imports(ROOT / "examples" / "flower")
    data = json.loads(CliRunner().invoke(command_line, [*args, "--json"]).output)
    assert f"{data['nbytes']:,}" in done.output
    for leaf in data["upload"]:
        assert leaf["name"] in done.output


def test_node_on_a_dry_run_sends_nothing(tmp_path: Path, fresh_imports, caplog) -> None:
    fresh_imports(ROOT / "examples" / "flower")
    from digits_federation import client_app, server_app

    config = {**load_app(ROOT / "examples" / "flower")[1], "run-dir": str(tmp_path / "run"), "train.rounds": 1}
    config["patience"] = 0.05
    nodes = [SuperNode(client_app.app, {"client-id": 0}), SuperNode(client_app.app, {"client-id": 1, "dry-run": True})]
    server_app.app(MemoryGrid(nodes, config), Context(1, 1, {}, RecordDict(), config))
    assert fk.load_run(tmp_path / "run").records[1]["cohort"] == [0]
    assert "params/classifier.weight" in caplog.text


def test_page_lists_what_the_server_sees_of_each_method() -> None:
    text = (ROOT / "docs" / "deploy.md").read_text()
    for name, cls in fk.methods.REGISTRY.items():
        row = re.search(rf"^\| `{name}` \| (.*?) \((\d+) models?\) \| (\w+) \|$", text, flags=re.MULTILINE)
        size = footprint.footprint(cls())
        assert row, name
        assert set(re.findall(r"`(\w+)`", row[1])) == set(size.uploads), name
        assert int(row[2]) == round(size.up), name
        assert row[3] == size.public, name


EXAMPLE = str(ROOT / "examples" / "flower")


@pytest.mark.parametrize(
    ("args", "key", "value"),
    [
        (["dry-run", "nowhere"], "app", "nowhere"),
        (["dry-run", EXAMPLE, "--node-config", "client-id=x"], "--node-config", "client-id=x"),
        (["dry-run", EXAMPLE, "--node-config", "client-id 0"], "--node-config", "client-id 0"),
        (["dry-run", EXAMPLE, "--node-config", "client-id='0"], "--node-config", "client-id='0"),
        (["dry-run", EXAMPLE, "--node-config", "client-id=-1"], "client-id", -1),
        (["dry-run", EXAMPLE, "--run-config", "nowhere.toml"], "--run-config", "nowhere.toml"),
        (["dry-run", EXAMPLE, "--run-config", "train.rounds=[1]"], "--run-config", "train.rounds=[1]"),
        (["dry-run", str(ROOT / "examples" / "flower-images")], "data_fn", "KeyError"),
        (["new", "No Name"], "name", "No Name"),
    ],
)
def test_bad_input_is_one_line_with_the_key(args: list[str], key: str, value: object, fresh_imports) -> None:
    with raises(ConfigError, key=key, value=value):
        CliRunner().invoke(command_line, ["flower", *args], catch_exceptions=False)


def test_unknown_method_of_a_dry_run_lists_the_valid_ones(fresh_imports) -> None:
    args = ["flower", "dry-run", EXAMPLE, "--run-config", "method.name='fedntf'"]
    with raises(FedkeepError, mentions=["fedntf", "fedntd"]):
        CliRunner().invoke(command_line, args, catch_exceptions=False)


def test_config_is_parsed_as_flower_does(tmp_path: Path) -> None:
    text = "client-id=0 train.lr=0.1 state-dir='/var/lib/a b' device=\"cpu\" dry-run=true"
    expected = {"client-id": 0, "train.lr": 0.1, "state-dir": "/var/lib/a b", "device": "cpu", "dry-run": True}
    assert parse_config("--node-config", text) == expected
    assert parse_config("--run-config", "") == {}
    (tmp_path / "config.toml").write_text("seed = 3\n[train]\nlr = 0.1\n")
    assert parse_config("--run-config", str(tmp_path / "config.toml")) == {"seed": 3, "train.lr": 0.1}
