"""Private interfaces of other packages, as listed in fedkeep/_util/private_apis.py, and their fallbacks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from support.problems import Problem, gap
from torch import nn
from torch.overrides import TorchFunctionMode

import fedkeep as fk
from fedkeep import optim, tree
from fedkeep._util import private_apis
from fedkeep._util.private_apis import is_batched
from fedkeep.engine import round_parts
from fedkeep.models import to_group_norm
from fedkeep.task import Task

# torch's fused optimisers


@pytest.mark.parametrize(
    "kind", [optim.SGD(0.9, 0.01), optim.Adam(weight_decay=0.01), optim.AdamW(weight_decay=0.01)], ids=str
)
def test_fused_kernel_equals_update(kind: optim.SGD | optim.Adam) -> None:
    assert kind.fused, "this torch has the kernels"
    generator = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(5, 3, generator=generator), "b": torch.randn(3, generator=generator)}
    fused, state = tree.map(torch.clone, params), kind.init(params)
    expected, expected_state = params, kind.init(params)
    for _ in range(3):
        grads = tree.map(lambda w: torch.randn(w.shape, generator=generator), params)
        kind.update_(grads, state, fused, 0.1)
        expected, expected_state = kind.update(grads, expected_state, expected, 0.1)
    assert gap(fused, expected) < 1e-5
    assert gap(state, expected_state) < 1e-5


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize(("name", "kind"), [("sgd", optim.SGD), ("adam", optim.Adam), ("adamw", optim.AdamW)])
def test_without_the_fused_kernel_training_uses_update(
    problem: Problem, monkeypatch: pytest.MonkeyPatch, name: str, kind: type, engine: str
) -> None:
    settings = {"optimizer": name, "dtype": "float32", "rounds": 1, "engine": engine}
    calls = {"update": 0, "update_": 0}
    for hook in calls:
        original = getattr(kind, hook)

        def count(self, *args, hook=hook, original=original):
            calls[hook] += 1
            return original(self, *args)

        monkeypatch.setattr(kind, hook, count)
    fused = problem.run(fk.methods.FedAvg(), **settings)
    assert calls["update_"] > 0
    assert calls["update"] == 0
    calls.update(update=0, update_=0)
    monkeypatch.setattr(optim, f"fused_{name}", None)
    assert not kind().fused
    unfused = problem.run(fk.methods.FedAvg(), **settings)
    assert calls["update_"] == 0
    assert calls["update"] > 0
    assert gap(fused.server["params"], unfused.server["params"]) < 1e-3


# torch's test for tensors inside vmap


def batched_inside_vmap() -> bool:
    """Return what `is_batched` returns inside vmap."""
    answers = []

    def inside(x):
        answers.append(is_batched(x))
        return x

    torch.vmap(inside)(torch.ones(2, 3))
    return answers[0]


def test_is_batched() -> None:
    assert hasattr(torch._C._functorch, "is_batchedtensor"), "this torch has the function"
    assert batched_inside_vmap()
    assert not is_batched(torch.ones(2, 3))


def test_is_batched_without_torchs_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_apis, "torch", SimpleNamespace(_C=SimpleNamespace()))
    assert batched_inside_vmap()
    assert not is_batched(torch.ones(2, 3))


# torch's modules


def test_module_parameters_can_be_replaced_for_a_call() -> None:
    layer = nn.Linear(3, 2, bias=False)
    assert set(layer._parameters) == {"weight", "bias"}
    assert layer._parameters["bias"] is None
    task = Task(nn.Sequential(nn.Flatten(), nn.Linear(3, 2)), 2, 1)
    x, zeros = torch.randn(4, 3), tree.map(torch.zeros_like, task.init)
    before = task.apply(task.init, x)
    assert torch.equal(task.apply(zeros, x), torch.zeros(4, 2))
    assert torch.equal(task.apply(task.init, x), before), "the module has its own weights again"


def test_module_children_include_a_layer_that_is_used_twice() -> None:
    norm = nn.BatchNorm2d(4)
    model = nn.Sequential(norm, nn.ReLU(), norm)
    assert list(model._modules) == ["0", "1", "2"]
    replaced = to_group_norm(model)
    assert isinstance(replaced[0], nn.GroupNorm)
    assert replaced[0] is replaced[2]


# torch's Python functions


def test_what_a_python_function_of_torch_calls_can_be_seen() -> None:
    seen = []

    class Looking(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    layer, x = nn.MultiheadAttention(4, 2, dropout=0.5), torch.randn(3, 2, 4)
    visible = private_apis.without_override_check(F.multi_head_attention_forward)
    args = (x, x, x, 4, 2, layer.in_proj_weight, layer.in_proj_bias, None, None, False, 0.5)
    for function in (F.multi_head_attention_forward, visible):
        with Looking():
            function(*args, layer.out_proj.weight, layer.out_proj.bias, need_weights=True)
        assert (F.dropout in seen) == (function is visible)
    assert private_apis.without_override_check(gap) is None, "it does not ask whether something replaces it"


# Flower


def test_client_app_registers_functions_by_action(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")
    from flwr.clientapp import ClientApp

    from fedkeep.flower import client_app

    flowers = ClientApp()
    flowers.train()(lambda message, context: message)
    assert "train.default" in flowers._registered_funcs
    app = client_app("fedavg", lambda: nn.Linear(1, 1), lambda context: None)
    registered = dict(app._registered_funcs)
    assert {"train.default", "query.fedkeep"} <= registered.keys()

    @app.train()
    def own(message, context):
        return message

    assert app._registered_funcs == registered, "the app's own training function is ignored"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    app.train("special")(own)
    assert "train.special" in app._registered_funcs


def test_flower_parses_and_flattens_configs() -> None:
    pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")
    from flwr.common.config import flatten_dict, parse_config_args

    assert parse_config_args(["a.b=1 c='x y' d=0.5 e=true"]) == {"a.b": 1, "c": "x y", "d": 0.5, "e": True}
    assert flatten_dict({"seed": 0, "train": {"lr": 0.1}}) == {"seed": 0, "train.lr": 0.1}
    with pytest.raises(ValueError, match="train"):
        flatten_dict({"train": [1]})


def test_flowers_code_of_an_unavailable_node() -> None:
    pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")
    from flwr.common.constant import ErrorCode

    from fedkeep.flower.nodes import NODE_UNAVAILABLE

    assert NODE_UNAVAILABLE == ErrorCode.NODE_UNAVAILABLE


def test_flower_messages_survive_serialisation() -> None:
    pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")
    from flwr.app import Message
    from support.flower_grid import through_bytes

    from fedkeep.flower import records

    content = records.to_records({"params": {"w": torch.ones(2)}, "n": torch.tensor(5.0)}, {"round": 1})
    message = through_bytes(Message(content, 7, "train"))
    assert message.metadata.dst_node_id == 7
    assert gap(records.from_records(message.content), {"params": {"w": torch.ones(2)}, "n": torch.tensor(5.0)}) == 0


# torch's profiler


def test_profiler_enabled_knows_of_a_running_profiler() -> None:
    assert not private_apis.profiler_enabled()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert private_apis.profiler_enabled()
    assert not private_apis.profiler_enabled()


def test_parts_of_a_round_are_marked_when_it_is_unknown_whether_a_profiler_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not isinstance(round_parts.round_part("plan"), torch.profiler.record_function)
    monkeypatch.setattr(round_parts, "profiler_enabled", lambda: True)
    with round_parts.round_part("plan") as marked:
        assert isinstance(marked, torch.profiler.record_function)


# torch.func's transforms, and tensors without data


def test_active_transforms_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, ...]] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(private_apis.active_transforms())
        return (x * x).sum()

    look(torch.ones(3))
    torch.vmap(look)(torch.ones(2, 3))
    torch.vmap(torch.func.grad(look))(torch.ones(2, 3))
    assert seen == [(), ("vmap",), ("vmap", "grad")]
    monkeypatch.delattr(torch._C._functorch, "get_interpreter_stack")
    assert private_apis.active_transforms() == ("unknown",)


def test_wrapper_tensors_have_a_form_and_no_data() -> None:
    class Empty(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise NotImplementedError

    empty = private_apis.wrapper_tensor(Empty, [2, 3], torch.float16, torch.device("cpu"))
    assert (type(empty), tuple(empty.shape), empty.dtype) == (Empty, (2, 3), torch.float16)
    with pytest.raises(NotImplementedError):
        empty + 1
