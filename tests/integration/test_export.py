"""Export of tables, plots and TensorBoard files, and the commands that write them."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from support.cli import fedkeep
from support.errors import raises
from support.runs import group_runs
from support.synthetic import hostile_run, records, wave, write_run

import fedkeep as fk
from fedkeep import forgetting as fg
from fedkeep._util.text import printable
from fedkeep.analysis import export
from fedkeep.analysis.card import Card, write_card
from fedkeep.analysis.export import COLUMNS, long_table, wide_table
from fedkeep.analysis.run_set import read_runs
from fedkeep.cli.app import main
from fedkeep.errors import FedkeepError
from fedkeep.experiments.experiment import Experiment
from fedkeep.experiments.run import run as run_experiment
from fedkeep.plots import instruments, style
from fedkeep.plots import runs as plots
from fedkeep.runs.files import to_toml
from fedkeep.runs.label_counts import write_label_counts

SMALL = {
    "method": "fedavg",
    "model": "mlp",
    "data": "digits",
    "split": {"kind": "shards", "n_clients": 6, "s": 2},
    "train": {"rounds": 3, "participation": 2, "epochs": 1, "batch_size": 60, "lr": 0.05, "eval_local_every": 1},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("runs")
    for method in ("fedavg", "fedntd"):
        for seed in (0, 1):
            one = Experiment.from_dict({**SMALL, "method": method, "seed": seed})
            run_experiment(
                one,
                path / f"{method}-{seed}",
                [fk.instruments.Every(2, "divergence,gradients,losses,alignment,probabilities")],
            )
    return path


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """Run a command in this process, which saves the seconds a new one takes: (exit code, output, errors)."""

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["fedkeep", *args])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        code = end.value.code
        return (code if isinstance(code, int) else 0 if code is None else 1), *capsys.readouterr()

    return run


def values(rows: list[dict], measure: str, **where) -> list[float]:
    return [r["value"] for r in rows if r["measure"] == measure and all(r[k] == v for k, v in where.items())]


# Tables


def test_the_long_table_contains_every_number(folder: Path) -> None:
    path = folder / "fedavg-0"
    history, rows = fk.load_run(path), list(long_table([path]))
    assert all(set(row) == set(COLUMNS) for row in rows)
    assert values(rows, "accuracy")[1:] == pytest.approx(history.accuracy.tolist())
    assert values(rows, "class_accuracy", round=2) == pytest.approx(history.class_accuracy[1].tolist())
    assert values(rows, "round_forgetting") == pytest.approx(fg.round_forgetting(history.class_accuracy).tolist())
    assert values(rows, "consistency") == pytest.approx(fg.consistency(history.class_accuracy).tolist())
    assert values(rows, "forgetting", round=3) == pytest.approx([fg.forgetting(history.class_accuracy)])
    assert values(rows, "bytes_up") == [r["bytes_up"] for r in history.records[1:]]
    anatomy = history.anatomy(2)
    for name in ("local_forgetting", "aggregation_forgetting"):
        for k, client in enumerate(anatomy["ids"].tolist()):
            assert values(rows, name, round=2, client=client) == pytest.approx(anatomy[name][k].tolist())
    personalised = fg.personalised(history.local(1)["class_accuracy"], history.local(1)["label_counts"])
    assert values(rows, "personalised", round=1) == pytest.approx(personalised.tolist())
    assert len(values(rows, "weight_divergence", round=3)) == 2  # studied after round 2, of the round to come
    assert len(values(rows, "gradient_diversity")) == 2
    assert all(np.isfinite(row["value"]) for row in rows)


def test_the_wide_table_has_one_row_per_round(folder: Path) -> None:
    columns, rows = wide_table([folder / "fedavg-0", folder / "fedntd-1"])
    assert columns[:4] == ["run", "method", "seed", "round"]
    assert {"accuracy", "class_accuracy_9", "round_forgetting", "seconds"} <= set(columns)
    assert not [c for c in columns if c.startswith("local_")]
    assert [(row["run"], row["round"]) for row in rows if row["round"] < 4] == [
        (run, t) for run in ("fedavg-0", "fedntd-1") for t in range(4)
    ]


def test_csv_and_parquet_have_the_same_contents(folder: Path, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow", reason="Parquet needs the extra data")
    rows = list(long_table([folder / "fedavg-0"]))
    for name in ("x.csv", "x.parquet"):
        assert export.write_table(tmp_path / name, COLUMNS, iter(rows)) == len(rows)
    one, other = pandas.read_csv(tmp_path / "x.csv"), pandas.read_parquet(tmp_path / "x.parquet")
    assert list(one.columns) == list(other.columns) == list(COLUMNS)
    assert len(one) == len(other) == len(rows)
    assert np.array_equal(one["value"], other["value"])
    assert one["class"].equals(other["class"].astype(float))
    assert str(other["round"].dtype).lower() == "int64"


def test_parquet_without_its_extra_raises_with_the_install_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with raises(FedkeepError, key="pyarrow", mentions=["pip install", "pyarrow"]):
        export.write_table(tmp_path / "x.parquet", COLUMNS, [])


def test_files_that_cannot_be_written_raise(tmp_path: Path) -> None:
    excel, nowhere = tmp_path / "x.xlsx", tmp_path / "nowhere" / "x.csv"
    with raises(FedkeepError, key="output", value=str(excel), valid=[".csv", ".parquet"]):
        export.require_table_file(excel)
    with raises(FedkeepError, key="output", value=str(nowhere), mentions=[str(nowhere.parent)]):
        export.require_table_file(nowhere)


def test_the_export_command(folder: Path, tmp_path: Path, inside) -> None:
    done = fedkeep("export", str(folder), "-o", "all.csv", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["runs"] == 4
    with open(tmp_path / "all.csv", newline="") as file:
        assert len(list(csv.DictReader(file))) == summary["rows"] > 1000
    _, printed, _ = inside("export", str(folder / "fedavg-0"), "--wide")
    assert [row["round"] for row in csv.DictReader(io.StringIO(printed))][:4] == ["0", "1", "2", "3"]
    for wrong, parts in (
        (["export", str(folder), "-o", "x.cvs"], ["x.cvs", ".csv"]),
        (["export", "none"], ["none"]),
    ):
        code, _, errors = inside(*wrong)
        assert code == 2
        assert all(part in errors for part in parts)
        assert len(errors.strip().splitlines()) == 1


# Model cards


def header(readme: str) -> dict:
    start, text, _ = readme.split("---\n", 2)
    assert start == ""
    return yaml.safe_load(text)


def test_a_card_has_the_figures_of_all_seeds_and_the_weights_of_one(
    folder: Path, tmp_path: Path, inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [str(folder / f"fedntd-{seed}") for seed in (0, 1)]
    code, shown, errors = inside("export", *runs, "--card", "card", "--seed", "1", "--json")
    assert code == 0, errors
    assert json.loads(shown)["seed_of_weights"] == 1
    weights, last = load_file(tmp_path / "card" / "model.safetensors"), fk.load_run(runs[1])
    assert weights.keys() == last.params.keys()
    assert all(torch.equal(weights[name], last.params[name]) for name in weights)
    readme = (tmp_path / "card" / "README.md").read_text()
    about = header(readme)
    assert (about["library_name"], about["datasets"]) == ("fedkeep", ["digits"])
    assert about["tags"] == ["federated-learning", "fedntd", "mlp"]
    [result] = about["model-index"][0]["results"]
    values = {metric["type"]: metric["value"] for metric in result["metrics"]}
    summaries = [fk.load_run(run).summary() for run in runs]
    for kind, measure in (("accuracy", "final"), ("forgetting", "forgetting")):
        assert values[kind] == pytest.approx(np.mean([s[measure] for s in summaries]), abs=1e-6)
    for part in (
        "Lee et al.",
        "Seeds: 0 and 1",
        "these weights (seed 1)",
        "| method.beta | 1.0 |",
        "6 clients",
        "shards",
    ):
        assert part in readme
    [code] = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    names: dict = {}
    monkeypatch.chdir(tmp_path / "card")
    exec(code, names)  # as a reader of the card would, in its folder
    assert torch.equal(names["model"].state_dict()["classifier.bias"], weights["classifier.bias"])


def test_the_card_of_a_normalised_table_is_all_that_its_user_needs(tmp_path: Path, monkeypatch) -> None:
    """The examples are those of the test set, as they are in the table; the accuracy must be that of the run."""
    rng = np.random.default_rng(0)
    columns = {"age": rng.normal(50, 10, 90), "glucose": rng.normal(5000, 900, 90), "label": ["b", "a", "c"] * 30}
    columns["glucose"] = columns["glucose"] + 1500 * (np.array(columns["label"]) == "a")
    pandas = pytest.importorskip("pandas")
    data = fk.data.load(pandas.DataFrame(columns), normalise="standard")
    clients = fk.data.partition.iid(data.y_train, 3)
    history = fk.simulate("fedavg", "mlp", data, clients, rounds=4, lr=0.1, run_dir=tmp_path / "run")
    readme = write_card([tmp_path / "run"], tmp_path / "card").readme()
    inputs = json.loads((tmp_path / "card" / "inputs.json").read_text())
    assert (inputs["features"], inputs["classes"]) == (["age", "glucose"], ["a", "b", "c"])
    [code] = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    names: dict = {"examples": data.x_test}
    monkeypatch.chdir(tmp_path / "card")
    exec(code.replace("torch.zeros(1, *inputs['input_shape'])", "examples"), names)
    accuracy = np.mean(np.array(names["predicted"]) == data.y_test.numpy())
    assert accuracy == pytest.approx(history.accuracy[-1])
    assert accuracy > 0.5, "more than by chance, so that the order of classes and features matters"


def test_cards_of_several_experiments_or_of_no_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    with raises(FedkeepError, key="run", valid=["fedavg", "fedntd"]):
        write_card([folder], tmp_path / "card")
    with raises(FedkeepError, key="seed", value=7, valid=[0, 1]):
        write_card([folder / "fedntd-0", folder / "fedntd-1"], tmp_path / "card", seed=7)
    with raises(FedkeepError, key="run", mentions=["no weights"]):
        write_card([write_run(tmp_path / "run", records(wave(0)))], tmp_path / "card")
    unfinished = write_run(tmp_path / "unfinished", records(wave(0)), rounds=9)
    with raises(FedkeepError, key="run", mentions=["finished"]):
        write_card([unfinished], tmp_path / "card")
    assert not (tmp_path / "card").exists()


def test_a_card_replaces_a_card_and_no_other_readme(folder: Path, tmp_path: Path) -> None:
    for seed in (0, 1):
        write_card([folder / f"fedntd-{seed}"], tmp_path / "card")
    assert "seed 1" in (tmp_path / "card" / "README.md").read_text()
    (tmp_path / "README.md").write_text("# My project")
    with raises(FedkeepError, key="--card", value=str(tmp_path)):
        write_card([folder / "fedntd-0"], tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["README.md"]


def test_names_in_a_card_are_text_and_nothing_else(tmp_path: Path) -> None:
    """Names from a run folder can neither add keys to the header nor markup to the page."""
    evil = '"\n- x: 1\nlicense: mit\n---\n# Title | `a` <script>alert(1)</script> \x85 \u2028 \U0001f600'
    run = hostile_run(tmp_path)
    about = tomllib.loads((run / "experiment.toml").read_text())
    about |= {"label": evil, "method": {"name": evil, evil: evil}, "data": {"source": evil}, "model": {"name": evil}}
    (run / "experiment.toml").write_text(to_toml(about).decode())
    found = read_runs([run])
    [group] = found.groups
    readme = Card(group, group.runs[0], {"w": torch.zeros(1)}, found.problems[0].title).readme()
    top = header(readme)
    assert top.keys() == {"library_name", "tags", "datasets", "metrics", "model-index"}
    assert top["tags"][1] == printable(evil)
    assert top["model-index"][0]["name"] == printable(evil)
    body = readme.split("---\n", 2)[2]
    assert "<script" not in body
    assert [line for line in body.splitlines() if line.startswith("# ")][1:] == []
    table = body.partition("| key | value |")[2].partition("\n\n")[0].strip().splitlines()
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in table} == {3}


# Plots


def test_every_plot_is_drawn_and_identical_each_time(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plotting needs the extra plots")
    import matplotlib

    before = dict(matplotlib.rcParams)
    drawn = plots.plot([folder], tmp_path / "one", "png,pdf")
    assert {p.name for p in drawn} == {f"{name}.{kind}" for name in plots.PLOTS for kind in ("png", "pdf")}
    for path in drawn:
        assert path.read_bytes()[:5] in (b"\x89PNG\r", b"%PDF-")
    again = plots.plot([folder], tmp_path / "two", "png,pdf", only=["classes"])
    assert [p.name for p in again] == ["classes.png", "classes.pdf"]
    assert again[1].read_bytes() == (tmp_path / "one" / "classes.pdf").read_bytes()
    assert dict(matplotlib.rcParams) == before
    again[0].unlink()
    again[0].symlink_to(tmp_path / "one" / "split.png")
    with raises(FedkeepError, key="classes.png", mentions=["a symbolic link"]):
        plots.plot([folder], tmp_path / "two", "png", only=["classes"])


def test_plots_show_what_was_measured(folder: Path) -> None:
    pytest.importorskip("matplotlib", reason="plotting needs the extra plots")
    groups = group_runs([folder])
    with style.plot_style():
        [axes] = plots.accuracy(groups).axes
        heat = plots.classes(groups).axes[0]
        where = plots.where(groups).axes[0]
    seeds = np.stack([run.accuracy for run in groups[0].runs])
    assert axes.lines[0].get_ydata() == pytest.approx(100 * seeds.mean(0))
    shown = heat.images[0].get_array()
    assert np.allclose(shown, np.mean([run.class_accuracy for run in groups[0].runs], axis=0).T)
    rounds = [fk.load_run(folder / f"fedavg-{seed}").anatomy(t) for seed in (0, 1) for t in (2, 3)]
    for bars, name in zip(where.containers, ("local_forgetting", "aggregation_forgetting"), strict=True):
        expected = np.mean([anatomy[name].mean(0) for anatomy in rounds], axis=0)
        assert [bar.get_height() for bar in bars] == pytest.approx(expected.tolist())


def test_plots_of_many_methods_stay_readable(tmp_path: Path) -> None:
    """Seventeen methods, of which the k-th ends at an accuracy of about 0.9 - 0.05 k; 4 classes, the last row of 2."""
    pytest.importorskip("matplotlib", reason="plotting needs the extra plots")
    names = list(fk.methods.REGISTRY)[:17]
    for k, name in enumerate(names):
        accuracy = wave(k, classes=4)
        write_run(tmp_path / name, records(accuracy, np.full((4, 2, 4), 0.5)), method=name)
    [problem] = plots._chosen(plots.read_runs([tmp_path]).problems, [])
    assert [g.label for g in problem.groups] == names, "the most accurate first"
    with style.plot_style():
        figure, where = plots.accuracy(problem.groups), plots.where(problem.groups)
    figure.draw_without_rendering()
    [axes], [key] = figure.axes, figure.legends
    width, height = figure.get_size_inches() * figure.dpi
    around, drawn = key.get_window_extent(), axes.get_window_extent()
    assert (drawn.width > 0.5 * width, drawn.height > 0.7 * height) == (True, True)
    assert around.x0 >= drawn.x1, "the legend is outside the axes"
    assert around.y0 >= 0, "all of it is within the picture"
    styles = {(line.get_color(), line.get_linestyle()) for line in axes.lines}
    assert len(styles) == 17
    labels = [axes.xaxis.get_ticklabels()[0].get_visible() for axes in where.axes[:17]]
    assert labels == [True] * 17


def test_chosen_methods_are_drawn_in_their_order(folder: Path, tmp_path: Path, inside) -> None:
    pytest.importorskip("matplotlib", reason="plotting needs the extra plots")
    runs = plots.read_runs([folder]).problems
    for names in (["fedntd", "fedavg"], ["fedavg"]):
        [problem] = plots._chosen(runs, names)
        assert [g.label for g in problem.groups] == names
    code, shown, _ = inside("plot", str(folder), "--methods", "fedntd", "--only", "accuracy", "--format", "svg")
    assert (code, shown.strip()) == (0, str(Path("plots") / "accuracy.svg"))
    code, _, errors = inside("plot", str(folder), "--methods", "fedntf")
    assert code == 2
    assert "'fedntf': did you mean fedntd?" in errors


def test_plots_of_local_models_show_what_was_measured(folder: Path) -> None:
    pytest.importorskip("matplotlib", reason="plotting needs the extra plots")
    groups = group_runs([folder])
    with style.plot_style():
        everywhere, inside, outside = plots.PLOTS["local"](groups).axes
        models = plots.PLOTS["anatomy"](groups).axes[0].images[0].get_array()
        [similar] = plots.PLOTS["consistency"](groups).axes
    rounds = [[fk.load_run(folder / f"fedavg-{seed}").anatomy(t) for seed in (0, 1)] for t in (1, 2, 3)]
    for axes, measure in ((inside, fk.forgetting.in_local), (outside, fk.forgetting.out_local)):
        expected = [100 * np.mean([measure(a["clients"], a["label_counts"]).mean() for a in both]) for both in rounds]
        assert axes.lines[0].get_ydata() == pytest.approx(expected)
    expected = [100 * np.mean([a["clients"].mean() for a in both]) for both in rounds]
    assert everywhere.lines[0].get_ydata() == pytest.approx(expected)
    middle = rounds[1][0]
    assert np.allclose(models, np.vstack([middle["before"], middle["clients"], middle["after"]]))
    cosine = np.mean([fk.forgetting.consistency(run.class_accuracy) for run in groups[0].runs], axis=0)
    assert similar.lines[0].get_ydata() == pytest.approx(cosine)


def test_plots_of_one_client_show_what_was_measured(folder: Path) -> None:
    pytest.importorskip("matplotlib", reason="plotting needs the extra plots")
    groups = group_runs([folder])
    with style.plot_style():
        accuracy, counts = plots.ALL_PLOTS["visits"](groups[:1]).axes[:2]
        degree = plots.ALL_PLOTS["degree"](groups[:1]).axes[0]
        share_lost, local = plots.ALL_PLOTS["minor_class"]([replace(groups[0], runs=groups[0].runs[1:])]).axes

    def visits(seed: int, client: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Label counts, class accuracies of the local models, and forgetting degrees, in the client's rounds."""
        rounds = [fk.load_run(folder / f"fedavg-{seed}").anatomy(t) for t in (1, 2, 3)]
        found = [(a, a["ids"].tolist().index(client)) for a in rounds if client in a["ids"]]
        assert len(found) == np.bincount(np.concatenate([a["ids"] for a in rounds])).max(), "the most visits"
        lost = [fk.forgetting.forgetting_degree(a["before"], a["clients"][k]) for a, k in found]
        return found[0][0]["label_counts"][found[0][1]], np.array([a["clients"][k] for a, k in found]), np.array(lost)

    own, accuracies, lost = visits(0, int(accuracy.get_title(loc="left").split()[-1]))
    assert np.allclose(accuracy.images[0].get_array(), accuracies.T)
    assert [bar.get_width() for bar in counts.patches] == own.tolist()
    assert np.allclose(degree.images[0].get_array(), lost.T[np.argsort(-own, kind="stable")])
    _, c, _, _, client, *_ = share_lost.get_title(loc="left").replace(":", "").split()  # class 1 of client 3: ...
    own, accuracies, lost = visits(1, int(client))
    assert 0 < own[int(c)] < 0.05 * own.sum()
    assert share_lost.lines[0].get_ydata() == pytest.approx(lost[:, int(c)])
    assert local.lines[0].get_ydata() == pytest.approx(100 * accuracies[:, int(c)])


def test_plots_of_instruments_show_what_was_recorded(folder: Path) -> None:
    pytest.importorskip("matplotlib", reason="plotting needs the extra plots")
    groups = group_runs([folder])
    with style.plot_style():
        losses = plots.ALL_PLOTS["losses"](groups).axes[0]
        points = plots.ALL_PLOTS["probabilities"](groups).axes[0].collections[0].get_offsets()
        assert "(--instruments tsne --every 10)" in plots.ALL_PLOTS["tsne"](groups), "it was not recorded"
    recorded = [fk.load_run(folder / f"fedavg-{seed}").instruments for seed in (0, 1)]
    assert losses.lines[1].get_ydata().tolist() == [one["losses"]["mean_of_clients"] for one in recorded[0]]
    assert losses.lines[0].get_xdata()[:3].tolist() == [2.0, 2.5, 3.0]
    expected = [p for run in recorded for one in run for p in np.ravel(one["probabilities"]["clients"])]
    assert points[:, 1].tolist() == pytest.approx(expected)
    assert 0 <= points[:, 0].min() <= points[:, 0].max() <= 1


def test_the_split_plot_shows_the_ids_of_the_clients(tmp_path: Path) -> None:
    """Of 500 clients split.json holds 200, at even distances: the axis names these, not 0 to 199."""
    pytest.importorskip("matplotlib", reason="plotting needs the extra plots")
    run = write_run(tmp_path / "run", records(wave(0)))
    y = np.arange(1500) % 3
    write_label_counts(run, fk.data.partition.iid(y, 500), fk.data.from_arrays(y, y, y, y, n_classes=3))
    ids = json.loads((run / "split.json").read_text())["ids"]
    assert ids[-1] == 499
    with style.plot_style():
        fig = plots.split(group_runs([run]))
        axes = fig.axes[0]
        fig.canvas.draw()
    ticks = {
        round(tick): label.get_text() for tick, label in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)
    }
    shown = {k: text for k, text in ticks.items() if 0 <= k < len(ids)}
    assert len(shown) > 2
    assert shown == {k: str(ids[k]) for k in shown}
    assert "200 of 500" in axes.get_title(loc="left")


def test_a_plot_without_data_is_skipped_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("matplotlib", reason="plotting needs the extra plots")
    train = {**SMALL["train"], "eval_every": 2, "eval_local_every": 0}
    run_experiment(Experiment.from_dict({**SMALL, "train": train}), tmp_path / "sparse")
    drawn = plots.plot([tmp_path / "sparse"], tmp_path / "plots", "svg")
    assert {"accuracy.svg", "split.svg"} <= {p.name for p in drawn}
    skipped = [record for record in caplog.records if "eval_local_every=1" in record.getMessage()]
    assert [record.args[0] for record in skipped] == ["where", "local", "anatomy"]
    caplog.clear()
    nothing = tmp_path / "nothing"
    mentions = ["losses: ", "--instruments losses", "tsne: ", "accuracy, classes"]
    with raises(FedkeepError, key="only", value=["losses", "tsne"], mentions=mentions) as error:
        plots.plot([tmp_path / "sparse"], nothing, only=["losses", "tsne"])
    assert {"accuracy", "split"} <= set(error.value.valid)
    assert not {"losses", "tsne", "where"} & set(error.value.valid)
    assert not nothing.exists()
    assert not caplog.records


def test_invalid_plot_options_raise(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plotting needs the extra plots")
    with raises(FedkeepError, key="only", value="acuracy", valid=plots.ALL_PLOTS):
        plots.plot([folder], tmp_path, only=["acuracy"])
    with raises(FedkeepError, key="format", value="jpeg", valid=["pdf", "png", "svg"]):
        plots.plot([folder], tmp_path, "jpeg")
    with raises(FedkeepError, key="format", value=" ,"):
        plots.plot([folder], tmp_path, " ,")
    (tmp_path / "file").write_text("")
    inside_a_file = tmp_path / "file" / "x"
    with raises(FedkeepError, key="output", value=str(inside_a_file)):
        plots.plot([folder], inside_a_file, "png")


def test_plotting_without_its_extra_raises_with_the_install_command(
    monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with raises(FedkeepError, key="matplotlib", mentions=["pip install", "matplotlib"]):
        plots.plot([folder], tmp_path)


def test_the_plot_and_analyse_commands(folder: Path, tmp_path: Path, inside) -> None:
    pytest.importorskip("matplotlib", reason="plotting needs the extra plots")
    _, shown, _ = inside("plot", str(folder), "-o", "p", "--format", "png", "--only", "accuracy", "--json")
    assert json.loads(shown) == [str(Path("p") / "accuracy.png")]
    code, shown, errors = inside("plot", str(folder), "-o", "none", "--only", "reduced")
    assert (code, shown) == (2, "")
    assert "reduced" in errors
    one = str(folder / "fedntd-1")
    done = fedkeep("analyse", one, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "4" in done.stdout.splitlines()[0], "the trial round after three rounds"
    for study in ("where", "divergence", "alignment", "gradients"):
        assert f"{study}:" in done.stdout.lower()
    small = ["--samples", "20", "--steps", "3", "-o", "a", "--format", "png", "--json"]
    results = json.loads(inside("analyse", one, "--what", "all", *small)[1])
    assert set(fk.instruments.STUDIES) <= set(results)
    assert sorted(p.stem for p in (tmp_path / "a").iterdir()) == sorted(instruments.PLOTS)
    for wrong, parts in (
        (["analyse", one, "--what", "divergenc"], ["'divergenc'", "divergence"]),
        (["analyse", str(folder)], [str(folder)]),
        (["analyse", one, "--what", "surface", "--client", "77"], ["77"]),
        (["run", "digits", "--instruments", "wher"], ["'wher'", "where"]),
    ):
        code, _, errors = inside(*wrong)
        assert code == 2
        assert all(part in errors for part in parts)
        assert len(errors.strip().splitlines()) == 1


# TensorBoard


def read_events(folder: Path) -> dict[str, dict[int, float]]:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs the extra tensorboard"
    )
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def test_tensorboard_files_contain_the_history(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
    history = run_experiment(Experiment.from_dict(SMALL), tmp_path / "run", [fk.tensorboard.TensorBoard()])
    events = read_events(tmp_path / "run" / "tensorboard")
    assert list(events["test/accuracy"]) == [0, 1, 2, 3]
    assert [events["test/accuracy"][t] for t in (1, 2, 3)] == pytest.approx(history.accuracy.tolist())
    assert [events[f"class_accuracy/{c}"][3] for c in range(10)] == pytest.approx(history.class_accuracy[-1].tolist())
    assert list(events["forgetting/round"].values()) == pytest.approx(
        fg.round_forgetting(history.class_accuracy).tolist()
    )
    assert events["forgetting/so_far"][3] == pytest.approx(fg.forgetting(history.class_accuracy))
    assert events["round/lr"][2] == pytest.approx(history.records[2]["lr"])


def test_a_resumed_run_shows_every_round_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
    path = tmp_path / "run"

    def stop(simulation, record) -> None:
        if record["round"] == 2:
            simulation.stop()

    run_experiment(Experiment.from_dict(SMALL), path, [fk.tensorboard.TensorBoard(), stop])
    fk.resume(path, callbacks=[fk.tensorboard.TensorBoard()])
    events = read_events(path / "tensorboard")
    assert list(events["test/accuracy"]) == [0, 1, 2, 3]
    assert list(events["forgetting/round"]) == [2, 3]


def test_tensorboard_needs_a_folder_and_its_package(problem, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
    simulation = problem.simulation(fk.methods.FedAvg())
    simulation.callbacks = (fk.tensorboard.TensorBoard(),)
    with raises(FedkeepError, mentions=["log_dir", "run_dir"]):
        simulation.step()
    simulation = problem.simulation(fk.methods.FedAvg())
    simulation.callbacks = (fk.tensorboard.TensorBoard(tmp_path / "log"),)
    simulation.run()
    assert len(read_events(tmp_path / "log")["test/accuracy"]) == 4
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with raises(FedkeepError, key="tensorboard", mentions=["pip install", "tensorboard"]):
        fk.tensorboard.TensorBoard()


def test_parallel_runs_write_event_files_and_studies(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
    args = ["run", "digits", "rounds=2", "epochs=1", "batch_size=60", "--sweep", "seed=0,1", "--jobs", "2"]
    done = fedkeep(*args, "--tensorboard", "--instruments", "losses", "--every", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for run in (tmp_path / "runs").iterdir():
        assert list(read_events(run / "tensorboard")["test/accuracy"]) == [0, 1, 2]
        assert len((run / "instruments.jsonl").read_text().splitlines()) == 1
