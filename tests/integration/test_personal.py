"""Personalised accuracy: values by hand, against a plain loop over clients, and everything that shows them."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.analysed import results_of, resume_analysed, run_analysed
from support.cli import fedkeep
from support.errors import raises
from support.methods import EveryHook
from support.problems import Problem, same
from torch import nn

import fedkeep as fk
from fedkeep import instruments as ins
from fedkeep import tree
from fedkeep.analysis.export import long_table
from fedkeep.analysis.personal import last_result, measured_groups, with_best
from fedkeep.analysis.run_set import read_runs
from fedkeep.errors import FedkeepError, MethodError
from fedkeep.instruments.summary import sentences
from fedkeep.method import FedAvg
from fedkeep.reproduce.against_paper import ColumnComparison, MethodRow, measured_clients
from fedkeep.reproduce.cells import Cells
from fedkeep.reproduce.measures import get_measure

LABELS = [0, 0, 0, 0, 0, 1, 1, 1, 2, 2]  # client 0: class 0; client 1: 0, 1, 1, 1; client 2: class 2
CLIENTS = [np.arange(4), np.arange(4, 8), np.arange(8, 10)]


@dataclass(frozen=True)
class Keeps(FedAvg):
    """Clients keep their local model for themselves, until they have one the global model."""

    averaged = ("params",)

    def init_client(self, task, params):
        return {"kept": params, "visits": torch.zeros(())}

    def finish(self, visit, params, measured):
        return {"params": params, "n": visit.facts["n"]}, {"kept": params, "visits": visit.client["visits"] + 1}

    def personal_params(self, visit):
        first = visit.client["visits"] == 0
        return tree.map(lambda own, w: torch.where(first, w, own), visit.client["kept"], visit.shared["params"])


def federation(clients: Any = CLIENTS, method: Any = "fedavg", **settings: Any) -> fk.Simulation:
    """Return a federation whose model copies its input, the class as a unit vector, and adds (3, 0, 0)."""
    train, test = np.array(LABELS), np.arange(30) % 3
    data = fk.data.from_arrays(np.eye(3)[train], train, np.eye(3)[test], test, n_classes=3)
    return simulation(data, clients, method, **settings)


def simulation(data: fk.data.Dataset, clients: Any, method: Any = "fedavg", **settings: Any) -> fk.Simulation:
    model = nn.Linear(3, 3)
    with torch.no_grad():
        model.weight.copy_(torch.eye(3))
        model.bias.copy_(torch.tensor([3.0, 0.0, 0.0]))
    chosen = {"dtype": "float64", "participation": 3, "batch_size": 10, "lr": 10.0, "epochs": 1, "rounds": 2}
    return fk.Simulation(method, model, data, clients, fk.Settings(**{**chosen, **settings}))


def near(*values: float) -> Any:
    return pytest.approx(list(values), abs=1e-12)


def test_an_option_decides_whether_a_method_has_a_model_of_the_clients_own(problem: Problem) -> None:
    with_heads, without = (problem.run(fk.methods.FedRoD(personal_head=own)) for own in (True, False))
    results = [ins.analyse(sim, "personal")["personal"] for sim in (with_heads, without)]
    assert [result["used"]["model"] for result in results] == ["own", "tuned"]
    assert results[0]["own"]["clients"] != results[0]["global"]["clients"]
    assert results[0]["global"] == results[1]["global"]


class ScaledHead(nn.Module):
    """A linear classifier whose logits are multiplied by a number."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale, self.classifier = scale, nn.Linear(16, 4)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1)

    def head(self, h: torch.Tensor) -> torch.Tensor:
        return self.scale * self.classifier(h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x))


def test_a_personal_head_needs_a_linear_head(problem: Problem) -> None:
    method = fk.methods.FedRoD(personal_head=True)
    dataclasses.replace(problem, model=ScaledHead(1.0)).simulation(method)
    with raises(MethodError, key="method.personal_head", mentions=["linear"]):
        dataclasses.replace(problem, model=ScaledHead(2.0)).simulation(method)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_the_global_and_the_fine_tuned_models_by_hand(engine: str) -> None:
    """Logits e_y + (3, 0, 0): always class 0, right for client 0, a quarter of client 1, none of client 2.

    One step of all examples with lr 10. Client 0 stays with class 0. Client 1: the residual of class 1, (-0.84, 0.89,
    -0.04), counts three times that of class 0, (0.04, -0.02, -0.02), so the bias becomes (-3.2, 6.6, -0.4): always
    class 1, three quarters of it. Client 2: (3 - 8.4, -0.4, 8.9): always class 2, all of it.
    """
    sim = federation(engine=engine)
    found = ins.analyse(sim, "personal")["personal"]
    assert found["data"] == "label shares"
    assert (found["clients"], found["never_took_part"], found["left_out"]) == ([0, 1, 2], [0, 1, 2], 0)
    assert "own" not in found, "FedAvg has no models of single clients"
    assert found["global"]["clients"] == near(1, 0.25, 0)
    assert found["global"]["mean"] == pytest.approx(1.25 / 3)
    assert found["global"]["weighted"] == pytest.approx((4 * 1 + 4 * 0.25) / 10)
    assert found["global"]["spread"] == pytest.approx(np.std([1, 0.25, 0]))
    assert found["global"]["worst_tenth"] == 0
    assert found["global"]["test_set"] == pytest.approx(1 / 3)
    assert np.isnan(found["global"]["took_part"])
    assert found["tuned"]["clients"] == near(1, 0.75, 1)
    assert found["tuned"]["worst_tenth"] == pytest.approx(0.75)
    assert found["tuned"]["test_set"] == pytest.approx(1 / 3)
    assert (found["used"]["model"], found["used"]["mean"]) == ("tuned", found["tuned"]["mean"])
    assert "tuned" not in ins.analyse(sim, "personal", ins.Options(tune_epochs=0))["personal"]
    assert sim.round == 0, "nothing was trained in the run"


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_the_models_that_clients_keep_by_hand(engine: str) -> None:
    """Round 1 trains client 1 (always class 1), round 2 client 2 from there (always class 2).

    Client 0 never took part: it would use the global model, which is client 2's.
    """
    sim = federation(method=Keeps(), cohorts=((1,), (2,)), engine=engine)
    sim.run()
    result = ins.analyse(sim, "personal", ins.Options(tune_epochs=0))
    found = result["personal"]
    assert found["never_took_part"] == [0]
    assert found["global"]["clients"] == near(0, 0, 1)
    assert found["own"]["clients"] == near(0, 0.75, 1)
    assert found["own"]["took_part"] == pytest.approx(0.875)
    assert found["used"]["model"] == "own"
    text = sentences(result)[1]
    assert "all 3 clients (1 of them never took part)" in text
    assert "method's own 58.3%" in text


def test_clients_are_measured_on_examples_of_their_own_where_they_have_some() -> None:
    """Two writers; in the test set the first writes class 0 and 1, the second 2, 2, 2, 0. Always class 0: 1/2, 1/4."""
    train, test = np.array([0, 1, 2, 2]), np.array([0, 1, 2, 2, 2, 0])
    owners, test_owners = np.array(["a", "a", "b", "b"]), np.array(["a", "a", "b", "b", "b", "b"])
    data = fk.data.from_arrays(np.eye(3)[train], train, np.eye(3)[test], test, ids=owners, test_ids=test_owners)
    sim = simulation(data, fk.data.partition.by_id(data.ids), participation=2)
    found = ins.analyse(sim, "personal")["personal"]
    assert found["data"] == "own test examples"
    assert found["global"]["clients"] == near(0.5, 0.25)
    assert found["tuned"]["clients"][1] == 0.75, "always class 2"
    by_labels = ins.analyse(sim, "personal", ins.Options(personal_data="labels"))["personal"]
    assert by_labels["data"] == "label shares"
    assert by_labels["global"]["clients"] == near(0.5, 0)


def test_held_out_examples_are_those_that_nobody_trains_on() -> None:
    whole = fk.data.partition.shards(np.array(LABELS * 10), n_clients=4, s=2, seed=0)
    part = whole.hold_out(0.3, seed=1)
    assert part.held is not None
    for k, own in enumerate(whole):
        assert sorted([*part[k], *part.held[k]]) == sorted(own)
        assert not set(part[k]) & set(part.held[k])
    clients = [np.arange(4), np.arange(4, 8)]
    sim = federation(fk.data.Partition.of(clients, 10).hold_out(0.5), participation=2)
    found = ins.analyse(sim, "personal")["personal"]
    assert found["data"] == "held-out examples"
    held = [np.array(LABELS)[part] for part in sim.clients.held]
    assert found["global"]["clients"] == near(*[float((y == 0).mean()) for y in held])


def test_without_examples_of_their_own_label_shares_are_used_or_the_choice_is_refused() -> None:
    three = fk.data.Partition.of(CLIENTS, 10)
    some = federation(three.hold_out(0.3))  # 1, 1 and 0 examples
    assert ins.analyse(some, "personal")["personal"]["data"] == "label shares"
    own = ins.analyse(some, "personal", ins.Options(personal_data="own"))["personal"]
    assert (own["clients"], own["left_out"], own["data"]) == ([0, 1], 1, "held-out examples")
    with raises(FedkeepError, key="personal_data", mentions=["label"]):
        ins.analyse(federation(), "personal", ins.Options(personal_data="own"))
    with raises(FedkeepError, key="personal_data", value="mine"):
        ins.Options(personal_data="mine")
    with raises(FedkeepError, key="tune_epochs", value=-1):
        ins.Options(tune_epochs=-1)


def test_a_client_whose_fine_tuning_diverges_has_accuracy_zero(caplog: pytest.LogCaptureFixture) -> None:
    sim = federation(lr=3e38, dtype="float32")
    found = ins.analyse(sim, "personal", ins.Options(tune_epochs=3))["personal"]
    assert 0 in found["tuned"]["clients"]
    assert "NaN or infinite" in caplog.text


# Against a plain loop, in runs


def test_every_client_is_measured_with_its_own_model(problem: Problem) -> None:
    """A method that uses every hook, over all clients: the same as testing `personal_params` one by one."""
    values = {}
    for engine in ("loop", "stacked"):
        sim = problem.run(EveryHook(), engine=engine)
        before = sim.server
        found = ins.analyse(sim, "personal")["personal"]
        assert same(before, sim.server)
        y = sim.y_test.numpy()
        for k, accuracy in zip(found["clients"], found["own"]["clients"], strict=True):
            right = sim.task.apply(sim.personal_params(k), sim.eval_inputs(sim.x_test)).argmax(1).numpy() == y
            counts = np.bincount(sim.data.y_train.numpy()[sim.clients[k]], minlength=sim.task.n_classes)
            by_class = [right[y == c].mean() for c in range(len(counts))]
            assert accuracy == pytest.approx(float(np.dot(by_class, counts / counts.sum())))
        values[engine] = found
    assert values["loop"]["clients"] == list(range(len(problem.clients)))
    assert set(values["loop"]["never_took_part"]) < set(values["loop"]["clients"])
    for model in ("global", "own", "tuned"):
        assert values["loop"][model]["clients"] == pytest.approx(values["stacked"][model]["clients"], abs=1e-9)


def test_fine_tuning_is_the_local_training_of_the_next_round(problem: Problem) -> None:
    """Whoever is in the next cohort has, after as many epochs, the local model that the trial round trains."""
    sim = problem.run(fk.methods.FedPAC())
    found = ins.analyse(sim, "personal,where")
    tuned = dict(zip(found["personal"]["clients"], found["personal"]["tuned"]["clients"], strict=True))
    assert [tuned[k] for k in found["clients"]] == pytest.approx(found["where"]["personalised"])


@pytest.fixture
def folder(problem: Problem, tmp_path: Path) -> Path:
    return run_analysed(problem, "fedala", 2, "personal", tmp_path / "run")


def test_a_resumed_run_records_the_same(problem: Problem, folder: Path, tmp_path: Path) -> None:
    other = resume_analysed(problem, "fedala", 2, "personal", tmp_path / "other")
    whole, resumed = results_of("personal", folder, other)
    assert whole == resumed
    assert (whole[-1]["rounds"], len(whole)) == (2, 2)


def test_analysis_tables_comparison_and_export_show_it(problem: Problem, folder: Path) -> None:
    history = fk.load_run(folder)
    number, last = last_result(history)
    assert number == 4
    parts = {"model": problem.model, "data": problem.data, "clients": problem.clients}
    analysis = ins.analyse(folder, "personal", **parts)
    assert json.loads(json.dumps(analysis["personal"])) == last
    for name in ("own.mean", "used.worst_tenth", "tuned.best", "global.test_set"):
        model, key = name.split(".")
        measure = get_measure(f"personal.{name}")
        assert measure.from_history(history, None, None) == pytest.approx(100 * last[model][key])
        assert measure.higher_is_better
    assert get_measure("personal.own.worst_tenth").head == "method's own models, own data, worst tenth of clients %"
    assert not get_measure("personal.own.spread").higher_is_better
    rows = [row for row in long_table([folder]) if row["round"] == 4]
    assert [row["value"] for row in rows if row["measure"] == "personal_own"] == last["own"]["clients"]
    assert [row["value"] for row in rows if row["measure"] == "personal_tuned_best"] == [last["tuned"]["best"]]
    [measured] = measured_groups(read_runs([folder]).groups)
    assert "after round 4 (the last), of all 6 clients" in measured.title
    assert "label shares" in measured.title
    assert [row.name for row in measured.rows][1:] == ["fedala: method's own", "fedala: fine-tuned, 2 epochs"]
    assert measured.rows[1].used
    assert measured.rows[1].mean["mean"] == last["own"]["mean"]
    row = MethodRow("fedala", "FedALA", {}, cells=Cells({0: history}))
    [text] = measured_clients(ColumnComparison("a0.1", "Digits", row, [row], ["personal.used.mean"]))
    assert measured.title in text
    assert "method's own (FedALA)" in text
    assert measured_clients(ColumnComparison("a0.1", "Digits", row, [row], ["final"])) == []
    shown = fedkeep("compare", str(folder)).stdout
    assert all(text in shown for text in ("Personalised accuracy", "worst tenth %", "best %", "test set %"))
    [compared] = json.loads(fedkeep("compare", str(folder), "--json").stdout)["problems"]
    assert compared["personal"][0]["rows"][1]["mean"]["mean"] == last["own"]["mean"]


def test_the_best_round_is_among_rounds_that_were_measured_alike() -> None:
    def line(number: int, mean: float | None, epochs: int = 2) -> dict[str, Any]:
        result = {"data": "label shares", "epochs": epochs, "global": {"mean": mean}, "tuned": {"mean": 0.5}}
        return {"after_round": number, "personal": result}

    earlier = [line(1, 0.9, epochs=1), line(2, 0.4), line(3, None), line(4, 0.6), line(9, 0.99)]
    found = with_best(line(6, 0.5), earlier, 6)["personal"]
    assert (found["global"]["best"], found["global"]["best_round"], found["rounds"]) == (0.6, 4, 4)
    assert found["used"]["model"] == "tuned"
    assert with_best({"losses": {}}, earlier, 6) == {"losses": {}}


def test_the_command_line_runs_it_and_refuses_options_without_it(tmp_path: Path) -> None:
    run = ["run", "digits", "rounds=2", "method=fedavg", "--runs", str(tmp_path), "--name", "one"]
    refused = fedkeep(*run, "--tune-epochs", "1")
    assert refused.returncode == 2
    assert "--instruments personal" in refused.stderr
    shown = fedkeep(*run, "--instruments", "personal", "--tune-epochs", "1")
    assert "Personalised accuracy after round 2 (the last)" in shown.stdout
    assert "fine-tuned, 1" in shown.stdout
    summary = json.loads(fedkeep(*run, "--instruments", "personal", "--tune-epochs", "1", "--json").stdout)
    assert len(summary["one"]["personal"]["tuned"]["clients"]) == 20
