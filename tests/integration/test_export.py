"""What leaves fedkeep: tables, plots, TensorBoard's files, and the commands that write them."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from support.cli import fedkeep

import fedkeep as fk
from fedkeep import forgetting as fg
from fedkeep.analysis import export
from fedkeep.analysis.export import COLUMNS, long_table, wide_table
from fedkeep.cli.app import main
from fedkeep.errors import FedkeepError
from fedkeep.experiments.experiment import Experiment
from fedkeep.plots import instruments, style
from fedkeep.plots import runs as plots

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
            one.run(path / f"{method}-{seed}", [fk.instruments.Every(2, "divergence,gradients,losses,alignment")])
    return path


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """The same without a process of its own, which takes seconds to begin: (exit code, output, errors)."""

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


def test_the_long_table_holds_every_figure(folder: Path) -> None:
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
    mine = fg.personalised(history.local(1)["class_accuracy"], history.local(1)["label_counts"])
    assert values(rows, "personalised", round=1) == pytest.approx(mine.tolist())
    assert len(values(rows, "weight_divergence", round=3)) == 2  # studied after round 2, of the round to come
    assert len(values(rows, "gradient_diversity")) == 2
    assert all(np.isfinite(row["value"]) for row in rows)


def test_the_wide_table_has_a_row_a_round(folder: Path) -> None:
    columns, rows = wide_table([folder / "fedavg-0", folder / "fedntd-1"])
    assert columns[:4] == ["run", "method", "seed", "round"]
    assert {"accuracy", "class_accuracy_9", "round_forgetting", "seconds"} <= set(columns)
    assert not [c for c in columns if c.startswith("local_")]
    assert [(row["run"], row["round"]) for row in rows if row["round"] < 4] == [
        (run, t) for run in ("fedavg-0", "fedntd-1") for t in range(4)
    ]


def test_csv_and_parquet_say_the_same(folder: Path, tmp_path: Path) -> None:
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


def test_without_its_extra_parquet_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(
        FedkeepError, match=r"Parquet needs pyarrow, which is not installed: pip install 'fedkeep\[data\]'"
    ):
        export.write_table(tmp_path / "x.parquet", COLUMNS, [])


def test_files_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FedkeepError, match="neither CSV nor Parquet"):
        export.require_table_file(tmp_path / "x.xlsx")
    with pytest.raises(FedkeepError, match="there is no folder"):
        export.require_table_file(tmp_path / "nowhere" / "x.csv")


def test_the_export_command(folder: Path, tmp_path: Path, inside) -> None:
    done = fedkeep("export", str(folder), "-o", "all.csv", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["runs"] == 4
    with open(tmp_path / "all.csv", newline="") as file:
        assert len(list(csv.DictReader(file))) == told["rows"] > 1000
    _, printed, _ = inside("export", str(folder / "fedavg-0"), "--wide")
    assert [row["round"] for row in csv.DictReader(io.StringIO(printed))][:4] == ["0", "1", "2", "3"]
    for bad, said in (
        (["export", str(folder), "-o", "x.cvs"], "did you mean .csv"),
        (["export", "none"], "not a run folder"),
    ):
        code, _, errors = inside(*bad)
        assert code == 2
        assert said in errors
        assert len(errors.strip().splitlines()) == 1


# Plots


def test_every_plot_is_drawn_and_the_same_each_time(folder: Path, tmp_path: Path) -> None:
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


def test_plots_show_what_was_measured(folder: Path) -> None:
    pytest.importorskip("matplotlib", reason="plotting needs the extra plots")
    from fedkeep.analysis.groups import group

    groups = group([folder])
    with style.styled():
        [axes] = plots.accuracy(groups, [folder]).axes
        heat = plots.classes(groups, [folder]).axes[0]
    seeds = np.stack([h.accuracy for h in groups[0].histories])
    assert axes.lines[0].get_ydata() == pytest.approx(100 * seeds.mean(0))
    shown = heat.images[0].get_array()
    assert np.allclose(shown, np.mean([h.class_accuracy for h in groups[0].histories], axis=0).T)


def test_a_plot_without_figures_is_left_out_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("matplotlib", reason="plotting needs the extra plots")
    train = {**SMALL["train"], "eval_every": 2, "eval_local_every": 0}
    Experiment.from_dict({**SMALL, "train": train}).run(tmp_path / "sparse")
    drawn = plots.plot([tmp_path / "sparse"], tmp_path / "plots", "svg")
    assert {"accuracy.svg", "split.svg"} <= {p.name for p in drawn}
    assert "where is left out" in caplog.text


def test_bad_plots_and_formats_are_refused(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plotting needs the extra plots")
    with pytest.raises(FedkeepError, match="did you mean accuracy"):
        plots.plot([folder], tmp_path, only=["acuracy"])
    with pytest.raises(FedkeepError, match="unknown format 'jpeg'"):
        plots.plot([folder], tmp_path, "jpeg")
    (tmp_path / "file").write_text("")
    with pytest.raises(FedkeepError, match="cannot be made"):
        plots.plot([folder], tmp_path / "file" / "x", "png")


def test_without_its_extra_plotting_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(FedkeepError, match=r"plotting needs matplotlib, .*fedkeep\[plots\]"):
        plots.plot([folder], tmp_path)


def test_the_plot_and_analyse_commands(folder: Path, tmp_path: Path, inside) -> None:
    pytest.importorskip("matplotlib", reason="plotting needs the extra plots")
    _, shown, _ = inside("plot", str(folder), "-o", "p", "--format", "png", "--only", "accuracy", "--json")
    assert json.loads(shown) == [str(Path("p") / "accuracy.png")]
    one = str(folder / "fedntd-1")
    done = fedkeep("analyse", one, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for part in ("Round 4, trained aside", "Where: local training loses", "Divergence:", "Alignment:", "Gradients:"):
        assert part in done.stdout
    small = ["--samples", "20", "--steps", "3", "-o", "a", "--format", "png", "--json"]
    found = json.loads(inside("analyse", one, "--what", "all", *small)[1])
    assert set(fk.instruments.STUDIES) <= set(found)
    assert sorted(p.stem for p in (tmp_path / "a").iterdir()) == sorted(instruments.PLOTS)
    for bad, said in (
        (["analyse", one, "--what", "divergenc"], "did you mean divergence"),
        (["analyse", str(folder)], "is not a run folder"),
        (["analyse", one, "--what", "surface", "--client", "77"], "client 77 does not take part"),
        (["run", "digits", "--instruments", "wher"], "did you mean where"),
    ):
        code, _, errors = inside(*bad)
        assert code == 2
        assert said in errors


# TensorBoard


def read_events(folder: Path) -> dict[str, dict[int, float]]:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs the extra tensorboard"
    )
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def test_tensorboards_files_hold_the_history(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
    history = Experiment.from_dict(SMALL).run(tmp_path / "run", [fk.tensorboard.TensorBoard()])
    found = read_events(tmp_path / "run" / "tensorboard")
    assert list(found["test/accuracy"]) == [0, 1, 2, 3]
    assert [found["test/accuracy"][t] for t in (1, 2, 3)] == pytest.approx(history.accuracy.tolist())
    assert [found[f"class_accuracy/{c}"][3] for c in range(10)] == pytest.approx(history.class_accuracy[-1].tolist())
    assert list(found["forgetting/round"].values()) == pytest.approx(
        fg.round_forgetting(history.class_accuracy).tolist()
    )
    assert found["forgetting/so_far"][3] == pytest.approx(fg.forgetting(history.class_accuracy))
    assert found["round/lr"][2] == pytest.approx(history.records[2]["lr"])


def test_a_resumed_run_shows_every_round_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
    path = tmp_path / "run"

    def stop(simulation, record) -> None:
        if record["round"] == 2:
            simulation.stop()

    Experiment.from_dict(SMALL).run(path, [fk.tensorboard.TensorBoard(), stop])
    fk.resume(path, callbacks=[fk.tensorboard.TensorBoard()])
    found = read_events(path / "tensorboard")
    assert list(found["test/accuracy"]) == [0, 1, 2, 3]
    assert list(found["forgetting/round"]) == [2, 3]


def test_tensorboard_says_what_it_needs(problem, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
    simulation = problem.simulation(fk.methods.FedAvg())
    simulation.callbacks = (fk.tensorboard.TensorBoard(),)
    with pytest.raises(FedkeepError, match="give it log_dir, or the run a run_dir"):
        simulation.step()
    simulation = problem.simulation(fk.methods.FedAvg())
    simulation.callbacks = (fk.tensorboard.TensorBoard(tmp_path / "log"),)
    simulation.run()
    assert len(read_events(tmp_path / "log")["test/accuracy"]) == 4
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(FedkeepError, match=r"needs tensorboard, .*fedkeep\[tensorboard\]"):
        fk.tensorboard.TensorBoard()


def test_the_run_command_writes_event_files_and_studies_in_other_processes_too(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
    words = ["run", "digits", "rounds=2", "epochs=1", "batch_size=60", "--sweep", "seed=0,1", "--jobs", "2"]
    done = fedkeep(*words, "--tensorboard", "--instruments", "losses", "--every", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for run in (tmp_path / "runs").iterdir():
        assert list(read_events(run / "tensorboard")["test/accuracy"]) == [0, 1, 2]
        assert len((run / "instruments.jsonl").read_text().splitlines()) == 1
