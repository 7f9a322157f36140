"""Requests of a hostile server at a node: wrong fields are rejected before anything is read, trained or written."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from support.errors import raises
from support.problems import Problem

import fedkeep as fk

pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from support.flower_grid import grid_of, strategy_of

from fedkeep.errors import FedkeepError
from fedkeep.flower import client_app

NAN, INFINITE = float("nan"), float("inf")
WRONG_FIELDS = {
    "round": [0, -1, 1.0, "1", True, [1], 2**31, 10**30, b"1", NAN],
    "client": [-1, 1.0, "1", True, 2**31],
    "state": [-1, 1, "../../other-run/client-0/2", "1", 0.0, True, [0], b"0"],
    "lr": [0.0, -1.0, NAN, INFINITE, "0.1", [0.1], 1e300, True],
    "n-clients": [0, -3, "3", 3.0, 2**40, 1],
    "n-classes": [0, -1, "4", 4.0, 10**12],
    "run": ["../../../etc", "", "0" * 65, "0" * 7, 5, b"0" * 32, "G" * 32, "0" * 31 + "/"],
    "constants": [5, "x/y", "0" * 500],
    "method": [5, "", b"fedntd", "x" * 100_000],
    "settings": [5, "", "x" * 100_000],
}
WRONG_SETTINGS = {
    "epochs": [0, -1, 10**9, 1001, "5", 2.5, True, None, [1]],
    "batch_size": [0, -1, 2**40, "5", 2.5, None],
    "momentum": [-1, 1.5, "x", NAN, None],
    "weight_decay": [-1, NAN, INFINITE, "x"],
    "clip_norm": [0, -1, NAN, "x"],
    "optimizer": ["lbfgs", 5, None],
    "augment": [[], 5, "flip", {"zoom": 3}, {"crop": -1}, {"crop": 10**9}, {"padding": "x"}],
    "drop_last": [1, "yes", None],
    "seed": [-1, 2**64, "x", 1.5, None],
    "dtype": ["float8", 5, None],
    "threads": [0, -1, 10**9, "x"],
    "device": ["cuda:7"],
    "run_dir": ["/tmp"],
}


@pytest.fixture
def request_of(three: Problem):
    """Return a function that sends a changed request to a node, and the node."""
    method = fk.methods.get("scaffold")()
    grid = grid_of(three, method)
    strategy_of(three, method, rounds=1).start(grid)
    one = grid.node_of(1)
    message = next(m for m in one.received if m.metadata.message_type == "train")

    def send(content: dict | None = None, node_config: dict | None = None, **changes) -> Message:
        changed = copy.deepcopy(message)
        changed.content["fedkeep"] = ConfigRecord({**message.content["fedkeep"], **changes})
        for name, record in (content or {}).items():
            changed.content[name] = record
        return one.app(changed, Context(1, 101, {**one.config, **(node_config or {})}, RecordDict(), {}))

    send.settings = json.loads(message.content["fedkeep"]["settings"])
    send.params = message.content["params"]
    return send


def test_request_with_a_wrong_field_is_rejected(request_of) -> None:
    for key, values in WRONG_FIELDS.items():
        for value in values:
            with raises(FedkeepError) as caught:
                request_of(**{key: value})
            assert caught.value.key in (key.replace("-", "_"), "client", "client-id"), (key, value)
    with raises(FedkeepError, key="version"):
        request_of(version=True)


def test_request_with_wrong_settings_is_rejected(request_of) -> None:
    for key, values in WRONG_SETTINGS.items():
        for value in values:
            with raises(FedkeepError):
                request_of(settings=json.dumps({**request_of.settings, key: value}))
    for text in ("[]", "5", "null", "{", "[" * 10_000, '{"lr": NaN}'):
        with raises(FedkeepError):
            request_of(settings=text)


def test_node_limits_the_epochs(request_of) -> None:
    settings = json.dumps({**request_of.settings, "epochs": 3})
    assert request_of(settings=settings).has_content()
    with raises(FedkeepError, key="epochs", value=3, mentions=["max-epochs"]):
        request_of(settings=settings, node_config={"max-epochs": 2})


def test_node_rejects_weights_of_another_model_and_nan(request_of) -> None:
    arrays = {name: array.numpy() for name, array in request_of.params.items()}
    name = sorted(arrays)[0]
    for changed in (
        {},
        {**arrays, "extra": arrays[name]},
        {**arrays, name: arrays[name][:1]},
        {**arrays, name: arrays[name].astype("float32")},
        {**arrays, name: arrays[name] * NAN},
        {"a//b": arrays[name]},
    ):
        with raises(FedkeepError):
            request_of(content={"params": ArrayRecord({key: Array(value) for key, value in changed.items()})})
    with raises(FedkeepError):
        request_of(content={"params": ConfigRecord({})})


@pytest.mark.parametrize("place", ["data", "criterion", "training"])
def test_error_on_a_node_reaches_the_server_without_its_text(
    three: Problem, place: str, tmp_path: Path, caplog
) -> None:
    secret = "patient 4711"

    def data(context: Context):
        if place == "data":
            raise OSError(secret)
        return torch.full((3, 1, 4, 4), 0.5), torch.zeros(3, dtype=torch.long)

    def criterion(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if place == "criterion" or len(y) == 3:  # the criterion is tried with other numbers of examples
            raise OSError(secret)
        return torch.nn.functional.cross_entropy(z, y, reduction="none")

    method = fk.methods.FedAvg()
    grid = grid_of(three, method)
    grid.node_of(1).app = client_app(method, lambda: three.model, data, criterion=criterion)
    strategy = strategy_of(three, method, rounds=1)
    strategy.start(grid)
    reason = strategy.federation.state.history.records[1]["failed"]["1"]
    assert "OSError" in reason
    assert secret not in reason
    assert secret in caplog.text, "the node's own log has it"
