"""Texts in every runtime: both engines, run folders, experiment files and Flower; with adapters too."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cli import fedkeep
from support.errors import raises
from support.problems import Problem, gap, same
from support.texts import make_sentences, make_text_data, make_text_problem, write_tiny_bert

import fedkeep as fk
from fedkeep import models
from fedkeep.data.sources.wards import WARDS
from fedkeep.data.texts import Texts
from fedkeep.engine.batch_parts import weighted_parts
from fedkeep.engine.stacked import Stacked
from fedkeep.errors import FedkeepError, MethodError, ModelError, RunError
from fedkeep.runs.experiment_file import read_experiment
from fedkeep.testing.fixtures import SurplusClients

SMALL = {"width": 8, "heads": 2, "layers": 1, "dropout": 0.0}


@pytest.fixture(scope="module")
def texts() -> Problem:
    return make_text_problem()


@pytest.fixture(scope="module")
def adapters() -> Problem:
    data = make_text_data()
    model = models.build("small_transformer", data.input_shape, 3, seed=3, **SMALL)
    return make_text_problem(models.add_lora(model, 2), data)


@pytest.mark.parametrize("name", ["fedavg", "fedntd", "moon", "fedka", "flashback", "sam"])
def test_both_engines_agree_on_texts(texts: Problem, name: str) -> None:
    """Batches of different clients have different widths, and so have selected examples and the public set."""
    method = fk.methods.FedSAM() if name == "sam" else fk.methods.get(name)()
    loop, stacked = (texts.run(method, engine=engine) for engine in ("loop", "stacked"))
    assert isinstance(stacked.engine, Stacked)
    assert gap(loop.server, stacked.server) < 1e-11
    like_graphs = texts.simulation(method, engine="stacked")
    like_graphs.engine.graphs = SurplusClients(like_graphs.engine)
    like_graphs.run()
    assert gap(loop.server, like_graphs.server) < 1e-11
    wire = texts.simulation(method, wire=True)
    wire.run()
    assert same(loop.server, wire.server)


@pytest.mark.parametrize("name", ["fedntd", "flashback"])
def test_few_texts_at_a_time_in_the_order_of_length_change_nothing(
    texts: Problem, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Notes of a client's texts and logits of the test set return to the order of the data."""
    method = fk.methods.get(name)()
    with monkeypatch.context() as patch:
        patch.setattr(Texts, "batches", lambda self, size: iter([torch.arange(len(self))]))
        at_once = texts.run(method)
    monkeypatch.setattr("fedkeep.data.texts._TOKENS_ON_CPU", 40)
    few = texts.run(method)
    assert few.x_test.at_a_time < 8
    assert gap(at_once.server, few.server) < 1e-11
    assert (at_once.history.confusion == few.history.confusion).all()
    assert [row["test_loss"] for row in at_once.history.records] == pytest.approx(
        [row["test_loss"] for row in few.history.records], rel=1e-12
    )


def test_measurements_of_texts_agree(texts: Problem) -> None:
    """FedCurv's Fisher information; the gradient of a key's bias is 0 but for rounding, so weights are compared."""
    loop, stacked = (texts.run(fk.methods.FedCurv(), engine=engine) for engine in ("loop", "stacked"))
    assert gap(loop.params, stacked.params) < 1e-8


@pytest.mark.parametrize("name", ["fedavg", "fedntd", "feddecorr", "scaffold", "fedsam"])
def test_parts_of_batches_are_the_same_in_both_engines(problem: Problem, name: str) -> None:
    """And the same as whole batches, unless a loss is one of the whole batch, as FedDecorr's is."""
    method = fk.methods.get(name)()
    whole = problem.run(method)
    loop, stacked = (problem.run(method, accumulate=3, engine=engine) for engine in ("loop", "stacked"))
    assert gap(loop.server, stacked.server) < 1e-11
    assert (gap(loop.server, whole.server) < 1e-11) == (name != "feddecorr")


def test_parts_of_batches_have_their_own_examples_weights_and_keys() -> None:
    mask = torch.tensor([[True, True, True], [True, False, False]])
    batch = {"x": torch.arange(6).reshape(2, 3), "mask": mask, "dropout_key": torch.tensor([7, 9])}
    parts = list(weighted_parts(batch, axis=1, size=2, dtype=torch.float64))
    assert [part["x"].tolist() for part, _ in parts] == [[[0, 1], [3, 4]], [[2], [5]]]
    assert [part["mask"].tolist() for part, _ in parts] == [[[True, True], [True, False]], [[True], [True]]]
    assert [weight.tolist() for _, weight in parts] == [[2 / 3, 1.0], [1 / 3, 0.0]]
    assert [part["dropout_key"].tolist() for part, _ in parts] == [[7, 9], [9, 11]]


def test_parts_of_batches_take_less_memory(texts: Problem) -> None:
    sizes = []
    plain = texts.simulation(fk.methods.FedAvg(), accumulate=4)
    inner = plain.local.method.loss
    object.__setattr__(plain.local.method, "loss", lambda v, w, b: sizes.append(len(b["y"])) or inner(v, w, b))
    plain.step()
    assert set(sizes) == {1}
    with raises(MethodError, "accumulate"):
        norm = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.BatchNorm1d(16, track_running_stats=False), torch.nn.Linear(16, 4)
        )
        dataclasses.replace(fk.testing.small_problem(), model=norm).simulation(fk.methods.FedAvg(), accumulate=2)


def test_a_run_of_texts_resumes_bit_for_bit_and_knows_its_tokenizer(texts: Problem, tmp_path: Path) -> None:
    data, clients = texts.data, texts.clients

    def stop(simulation, record) -> None:
        if record["round"] == 1:
            raise KeyboardInterrupt

    whole = fk.simulate("fedntd", texts.model, data, clients, **texts.settings)
    with pytest.raises(KeyboardInterrupt):
        fk.simulate("fedntd", texts.model, data, clients, **texts.settings, run_dir=tmp_path / "a", callbacks=[stop])
    assert read_experiment(tmp_path / "a")["made_by"]["tokenizer"] == "words:60"
    other = dataclasses.replace(data, x_train=make_text_data("words:61").x_train)
    with raises(RunError, "data"):
        fk.resume(tmp_path / "a", model=models.build("bag", other.input_shape, 3), data=other, clients=clients)
    resumed = fk.resume(tmp_path / "a", model=texts.model, data=data, clients=clients)
    assert same(whole.params, resumed.params)


# adapters


def test_a_federation_of_adapters_costs_what_the_adapters_weigh(adapters: Problem, tmp_path: Path) -> None:
    loop = fk.simulate("fedavg", adapters.model, adapters.data, adapters.clients, **adapters.settings, run_dir=tmp_path)
    trained = {name for name, p in adapters.model.named_parameters() if p.requires_grad}
    n = sum(p.numel() for p in adapters.model.parameters() if p.requires_grad)
    assert loop.params.keys() == trained
    assert n == 2 * (2 * 8 + 8 * 2) + 8 * 3 + 3
    assert loop.records[1]["bytes_down"] == 4 * n * 8
    assert loop.records[1]["bytes_up"] == 4 * (n + 1) * 8
    checkpoints = list(tmp_path.rglob("*.safetensors"))
    assert checkpoints
    assert all(file.stat().st_size < n * 8 + 4096 for file in checkpoints)
    before, after = adapters.model.state_dict(), loop.model.state_dict()
    assert all(torch.equal(after[name].float(), before[name]) for name in before.keys() - trained)
    stacked = adapters.run(fk.methods.FedAvg(), engine="stacked")
    assert gap(loop.params, stacked.params) < 1e-11
    assert gap(loop.params, {name: before[name] for name in trained}) > 1e-3


def test_a_run_of_adapters_is_resumed_with_its_base_model_only(adapters: Problem, tmp_path: Path) -> None:
    fk.simulate("fedavg", adapters.model, adapters.data, adapters.clients, **adapters.settings, run_dir=tmp_path)
    other = models.build("small_transformer", adapters.data.input_shape, 3, seed=4, **SMALL)
    with raises(RunError, "base_model", mentions=["base model"]):
        fk.resume(tmp_path, model=models.add_lora(other, 2), data=adapters.data, clients=adapters.clients)


# experiment files


def write_csv(path: Path) -> Path:
    texts, y = make_sentences(60)
    path.write_text("note,ward\n" + "".join(f"{text},{'abc'[label]}\n" for text, label in zip(texts, y, strict=True)))
    return path


EXPERIMENT = """
method = "fedntd"
model = {{ name = "{model}", {options} }}

[data]
source = "{source}"
text = "note"
label = "ward"
tokenizer = "{tokenizer}"
max_length = 24

[split]
kind = "dirichlet"
n_clients = 3
alpha = 1.0
min_size = 3

[train]
rounds = 2
participation = 3
epochs = 1
batch_size = 8
optimizer = "adam"
lr = 0.01
accumulate = 2
"""


def test_an_experiment_file_defines_a_run_of_texts(tmp_path: Path) -> None:
    source = write_csv(tmp_path / "notes.csv")
    options = "width = 8, heads = 2, layers = 1, dropout = 0.0"
    text = EXPERIMENT.format(model="small_transformer", options=options, source=source, tokenizer="words:200")
    (tmp_path / "a.toml").write_text(text)
    done = fedkeep("run", str(tmp_path / "a.toml"), "--runs", str(tmp_path / "runs"))
    assert done.returncode == 0, done.stderr
    [run] = (tmp_path / "runs").iterdir()
    about = read_experiment(run)
    assert about["data"]["tokenizer"] == "words:200"
    assert about["train"]["accumulate"] == 2
    wrong = fedkeep("run", str(tmp_path / "a.toml"), "--runs", str(tmp_path / "runs"), "data.label=wart")
    assert wrong.returncode == 2
    assert "'wart'" in wrong.stderr
    assert "Traceback" not in wrong.stderr


def test_a_pre_trained_model_is_fine_tuned_from_an_experiment_file(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[text]'")
    bert = write_tiny_bert(tmp_path / "bert")
    source = write_csv(tmp_path / "notes.csv")
    from fedkeep.experiments.experiment import Experiment
    from fedkeep.experiments.run import run

    for name, options in (("adapters", ", lora = 2"), ("full", ", dropout = 0.0")):
        options = f'path = "{bert}"' + options
        text = EXPERIMENT.format(model="transformer", options=options, source=source, tokenizer=bert)
        (tmp_path / "a.toml").write_text(text)
        history = run(Experiment.load(tmp_path / "a.toml"), tmp_path / name)
        made_by = read_experiment(tmp_path / name)["made_by"]
        assert history.records[-1]["round"] == 2
        assert made_by["tokenizer"].startswith("BertTokenizer")
        assert made_by["engine"] == "stacked" or name == "adapters"
        again = fk.load_run(tmp_path / name)
        assert again.params.keys() == history.params.keys()
    hashes = {read_experiment(tmp_path / name)["made_by"]["pretrained"] for name in ("adapters", "full")}
    assert len(hashes) == 1
    sizes = [fk.load_run(tmp_path / name).records[1]["bytes_down"] for name in ("adapters", "full")]
    assert sizes[1] > 5 * sizes[0]


# Flower


@pytest.mark.parametrize("problem_name", ["texts", "adapters"])
def test_a_federation_on_flower_equals_the_loop(problem_name: str, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")
    from support.flower_grid import grid_of, strategy_of

    problem = request.getfixturevalue(problem_name)
    method = fk.methods.FedNTD()
    problem = dataclasses.replace(problem, settings={**problem.settings, "accumulate": 2})
    alone = problem.run(method)
    strategy = strategy_of(problem, method)
    strategy.start(grid_of(problem, method))
    assert same(alone.server, strategy.federation.state.server)
    assert strategy.federation.state.history.records[1]["bytes_up"] == alone.history.records[1]["bytes_up"]


@pytest.mark.parametrize("words", [61, 600])
def test_a_node_with_another_tokenizer_is_told_so(texts: Problem, words: int) -> None:
    """With 600 words its texts have ids that the server's model does not have."""
    pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")
    from support.flower_grid import grid_of, strategy_of

    method = fk.methods.FedAvg()
    grid = grid_of(texts, method)
    other = make_text_problem(data=make_text_data(f"words:{words}"))
    odd, unlike = grid.node_of(1), grid.node_of(2)
    odd.app = grid_of(other, method).node_of(1).app  # model and texts of another tokenizer
    part = dataclasses.replace(texts, data=other.data)  # texts of another tokenizer than its model's
    unlike.app = grid_of(part, method).node_of(2).app
    strategy = strategy_of(
        dataclasses.replace(texts, settings={**texts.settings, "rounds": 1, "participation": 6}), method
    )
    strategy.start(grid)
    for node, key in ((odd, "model_fn"), (unlike, "tokenizer")):
        [first, *_] = node.errors
        assert isinstance(first, ModelError)
        assert first.key == key
        assert "tokenizer" in str(first)


# the page


PAGE = Path(__file__).parents[2] / "docs" / "text.md"


def python_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


def rows_of(texts: Texts) -> list[tuple[int, ...]]:
    return [tuple(ids.tolist()) for ids in (texts[i] for i in range(len(texts)))]


def test_the_page_runs_from_a_csv_to_a_flower_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its federation of three files gives what the simulation of one file gives."""
    pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")
    from flwr.app import Context, RecordDict
    from support.flower_grid import MemoryGrid, SuperNode

    monkeypatch.chdir(tmp_path)
    names: dict = {}
    blocks = python_blocks()
    assert sum(len(block.splitlines()) for block in blocks[1:3]) <= 40
    for block in blocks:
        exec(block, names)
    assert fk.load_run(tmp_path / "runs" / "notes").accuracy[-1] > 0.7
    data, hospitals = names["data"], names["hospitals"]
    config = {"run-dir": str(tmp_path / "federation")}
    nodes = [SuperNode(names["nodes"], {"client-id": k, "file": f"hospital-{k}.csv"}) for k in range(3)]
    tested, trained = rows_of(names["test_notes"]().x_test), rows_of(data.x_train)
    for k, mine in enumerate(hospitals):
        own = names["own_notes"](Context(1, 1, {"file": f"hospital-{k}.csv"}, RecordDict(), {})).x_train
        assert rows_of(own) == [trained[i] for i in mine]
        assert not set(tested) & set(rows_of(own)), "a hospital trains on a note that the server tests on"
    names["server"](MemoryGrid(nodes, config), Context(1, 1, {}, RecordDict(), config))
    simulated, federated = (fk.load_run(tmp_path / name) for name in ("runs/notes", "federation"))
    assert federated.records[1]["cohort"] == [0, 1, 2]
    loop = fk.simulate("fedkeep", names["model"](), data, hospitals, **names["TRAINING"], engine="loop")
    assert same(loop.params, federated.params)
    assert simulated.accuracy[-1] == pytest.approx(federated.accuracy[-1], abs=0.05)


def test_the_experiment_of_the_page_runs_and_its_models_exist(tmp_path: Path) -> None:
    from fedkeep.experiments.experiment import Experiment
    from fedkeep.experiments.run import run

    text = PAGE.read_text()
    [block] = re.findall(r"```toml\n(.*?)```", text, flags=re.DOTALL)
    (tmp_path / "a.toml").write_text(block)
    history = run(Experiment.load(tmp_path / "a.toml"), tmp_path / "run")
    assert history.records[-1]["round"] == 2
    rows = re.findall(r"^\| `(\w+)` \| [^|]* \| (.*) \|$", text.partition("## Models")[2], flags=re.MULTILINE)
    for name, options in rows[:3]:
        own = set(models.options(name)) - {"projection", "head"}
        assert set(re.findall(r"`(\w+)`", options)) - {"eager"} == own
    assert [name for name, _ in rows[:3]] == list(models.TEXT_MODELS)


def refusals() -> dict[str, str]:
    """Return the page's messages, as regular expressions in which `...` is anything, by the input that is refused."""
    rows = re.findall(r"^\| ([^|]*) \| `(.*)` \|$", PAGE.read_text().partition("## What is refused")[2], re.MULTILINE)
    return {name: ".*".join(re.escape(part) for part in message.split("...")) for name, message in rows}


def write_notes() -> None:
    """Write the page's notes.csv into the present folder, as its first block does."""
    exec(python_blocks()[0], {})


def train(method: str, **options: Any) -> None:
    data = fk.data.load("notes.csv", **{"text": "note", "label": "ward", **options})
    fk.simulate(method, models.build("bag", data.input_shape, 4), data, fk.data.partition.iid(data.y_train, 3))


def test_the_page_quotes_what_tables_and_methods_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_notes()
    expected = refusals()
    attempts = {
        "a column that is not there": lambda: train("fedavg", label="wart"),
        "the classes as text": lambda: train("fedavg", text="ward"),
        "text and label interchanged": lambda: train("fedavg", text="ward", label="note"),
        "a label that is not one of `classes`": lambda: train("fedavg", classes=list(WARDS)[:3]),
        "FedReg": lambda: train("fedreg"),
        "FedAlign": lambda: train("fedalign"),
    }
    for name, attempt in attempts.items():
        with pytest.raises(FedkeepError, match=f"^{expected.pop(name)}$"):
            attempt()
    lines = Path("notes.csv").read_text().splitlines()
    for number, empty in ((17, "  "), (19, "")):
        lines[number - 1] = empty + lines[number - 1][lines[number - 1].index(",") :]
    Path("notes.csv").write_text("\n".join(lines))
    with pytest.raises(FedkeepError, match=f"^{expected.pop('empty texts')}$"):
        train("fedavg")
    assert len(expected) == 4, "of pre-trained models: the next test"


def test_the_page_quotes_what_pre_trained_models_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[text]'")
    monkeypatch.chdir(tmp_path)
    write_notes()
    expected = refusals()
    for name, positions in (("bert", 512), ("pickled", 512)):
        write_tiny_bert(tmp_path / name, positions=positions)
    (tmp_path / "pickled" / "model.safetensors").rename(tmp_path / "pickled" / "pytorch_model.bin")

    def build(path: str, **options: Any) -> None:
        data = fk.data.load("notes.csv", text="note", label="ward", **options)
        models.build("transformer", data.input_shape, 4, path=path)

    attempts = {
        "another tokenizer than the model's": lambda: build("bert"),
        "more tokens than positions": lambda: build("bert", tokenizer="bert", max_length=600),
        "too few tokens": lambda: build("bert", tokenizer="bert", max_length=2),
        "weights that are not safetensors": lambda: build("pickled", tokenizer="bert"),
    }
    for name, attempt in attempts.items():
        with pytest.raises(FedkeepError, match=f"^{expected.pop(name)}$"):
            attempt()
