"""How objects are shown: short texts everywhere, small pictures in a notebook, and `History.plot`."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from support.problems import Problem
from support.texts import make_text_problem

import fedkeep as fk
from fedkeep._util import html
from fedkeep.engine.federation import Federation
from fedkeep.runs.round_logger import RoundFigures

WARDS = ["Aachen", "Bonn", "<script>x</script>", "Ulm & Co"]


def make_wards() -> fk.data.Dataset:
    """Two classes and four owners with names that HTML must not take for markup."""
    y, rng = np.arange(80) % 2, np.random.default_rng(0)
    x, ids = rng.normal(size=(80, 3)), [WARDS[k] for k in rng.integers(0, 4, 80)]
    return fk.data.from_arrays(x, y, x, y, ids=ids, class_names=["ill <b>", "well"], name="wards")


def make_history(rounds: int = 5, classes: int = 3, **changes: Any) -> fk.History:
    """Class 0 is never in the test set, and class 1 is lost at the end."""
    total = np.array([0, *[10] * (classes - 1)])
    records = [{"round": 0, "hits": 0 * total, "total": total}]
    for r in range(1, rounds + 1):
        hits = np.minimum(total, 2 * r)
        hits[1] = 0 if r == rounds else hits[1]
        costs = {"bytes_up": 500_000, "bytes_down": 500_000, "seconds": 1.0}
        records.append({"round": r, "hits": hits, "total": total, **costs})
    return fk.History("fedavg", {"rounds": rounds}, records, **changes)


def parse(text: str) -> ElementTree.Element:
    """Return the HTML as a tree: it is well-formed, and loads nothing."""
    assert not re.search(r"<script|<style|<link|src=|href=|url\(", text)
    return ElementTree.fromstring(text)


def texts_in(text: str) -> list[str]:
    return [part.strip() for part in parse(text).itertext() if part.strip()]


def test_texts_of_objects_are_short(problem: Problem) -> None:
    data = make_wards()
    clients = fk.data.partition.by_id(data.ids)
    simulation = problem.run(fk.methods.FedAvg())
    federation = Federation(simulation.method, problem.model, problem.data, simulation.clients, simulation.settings)
    texts = make_text_problem().data
    objects = [data, clients, clients.hold_out(0.1), problem.data, problem.data.public, simulation, federation]
    objects += [simulation.history, simulation.settings, texts, texts.x_train, make_history().heat_map()]
    for one in objects:
        assert len(repr(one)) <= 320, repr(one)
        assert "\n" not in repr(one)
    assert "80 training and 80 test" in repr(data)
    assert "ill <b>, well" in repr(data)
    assert "Aachen" in repr(clients)
    assert f"{len(clients)} clients" in repr(clients)
    assert "forgetting" in repr(simulation.history)
    many = fk.data.partition.by_id([f"ward {k:04}" for k in range(5000)])
    assert len(repr(many)) < 320


def test_settings_are_written_as_what_was_changed() -> None:
    settings = fk.Settings(lr=0.5, augment=fk.data.Augment(flip=True))
    assert repr(settings).startswith("Settings(lr=0.5, augment=Augment(")
    assert eval(repr(settings), {"Settings": fk.Settings, "Augment": fk.data.Augment}) == settings


def test_names_that_a_terminal_would_obey_are_escaped() -> None:
    data = make_wards()
    hostile = fk.data.from_arrays(data.x_train, data.y_train, data.x_test, data.y_test, name="\x1b[31mred")
    assert "\x1b" not in repr(hostile) + hostile._repr_html_()


def test_a_partition_is_a_heat_map_of_clients_and_classes() -> None:
    y = np.repeat(np.arange(4), 25)
    clients = fk.data.partition.shards(y, n_clients=5, s=2, seed=0)
    shown = texts_in(clients._repr_html_())
    counts = clients.label_counts(y)
    numbers = [text for text in shown if text.isdigit()]
    assert numbers == [*(str(n) for n in counts[counts > 0]), "0", "1", "2", "3"]  # the cells, then the classes
    assert [text for text in shown if text.startswith("client ")] == [f"client {k}" for k in range(5)]


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "dirichlet even", "dirichlet grouped", "label_quantity", "held"])
def test_every_random_split_knows_its_labels(kind: str) -> None:
    y, make = torch.arange(200) % 4, fk.data.partition
    clients = {
        "iid": lambda: make.iid(y, 4),
        "dirichlet": lambda: make.dirichlet(y, 4, alpha=1.0),
        "dirichlet even": lambda: make.dirichlet(y, 4, alpha=1.0, even=True),
        "dirichlet grouped": lambda: make.dirichlet(y, 4, alpha=1.0, group=2),
        "label_quantity": lambda: make.label_quantity(y, 4, k=2),
        "held": lambda: make.iid(y, 4).hold_out(0.2),
    }[kind]()
    assert np.array_equal(clients.labels, y)
    assert "svg" in clients._repr_html_()


def test_owners_and_classes_have_their_names_escaped() -> None:
    data = make_wards()
    clients = fk.data.partition.by_id(data.ids)
    assert "svg" not in clients._repr_html_()  # nobody told it the labels
    shown = texts_in(clients.heat_map(data)._repr_html_())
    assert set(WARDS) <= set(shown)
    assert {"ill <b>", "well"} <= set(shown)
    assert {"ill <b>", "well"} <= set(texts_in(data._repr_html_()))
    assert texts_in(clients.heat_map(data.y_train)._repr_html_())


def test_data_sets_of_any_form_are_shown(problem: Problem) -> None:
    for data in (problem.data, make_text_problem().data):
        assert str(len(data.y_train)) in " ".join(texts_in(data._repr_html_()))
    x = {"a": torch.zeros(4, 2), "b": torch.zeros(4)}
    assert "a, b" in repr(fk.data.from_arrays(x, [0, 1, 0, 1], x, [0, 1, 0, 1]))


def test_a_history_is_its_figures_and_a_heat_map() -> None:
    history = make_history(class_names=("none", "<i>lost</i>", "kept"))
    shown = texts_in(history._repr_html_())
    assert {"<i>lost</i>", "kept", "forgetting", "50.0"} <= set(shown)
    cells = parse(str(history.heat_map()))
    drawn = {path.get("fill"): path.get("d", "").count("M") for path in cells.iter("path")}
    assert sum(drawn.values()) == 2 * 5  # not the class without test examples
    assert drawn[html.COLOURS[0]] == 1  # class 1 in the last round
    assert drawn[html.COLOURS[-1]] == 1  # class 2 in the last round


def test_unfinished_and_empty_histories_say_so() -> None:
    history = make_history()
    history.settings = {"rounds": 9}
    assert "unfinished: 5 of 9 rounds" in texts_in(history._repr_html_())
    assert "diverged: too large" in texts_in(make_history(diverged="too large")._repr_html_())
    assert "no round has been evaluated yet" in texts_in(fk.History("fedavg", {"rounds": 9})._repr_html_())


def test_pictures_of_large_things_stay_small() -> None:
    history = make_history(rounds=400, classes=300)
    large = history._repr_html_()
    assert len(large) < 100_000
    assert "50 of 300 rows shown" in large
    assert "100 of 400 columns shown" in large
    clients = fk.data.partition.iid(np.arange(100_000) % 100, 2000)
    assert len(clients._repr_html_()) < 200_000


def test_figures_of_a_history_of_hits_are_those_of_its_summary() -> None:
    history, figures = make_history(), RoundFigures()
    last = [figures.add(record) for record in history.records][-1]
    assert last["forgetting/so_far"] == pytest.approx(history.summary()["forgetting"])
    assert "class_accuracy/0" not in last


def test_plot_returns_a_figure_that_a_notebook_shows() -> None:
    pytest.importorskip("matplotlib", reason="needs the extra plots")
    fig = make_history(class_names=("none", "$lost$", "kept")).plot()
    accuracy, classes, _ = fig.axes
    assert accuracy.lines[0].get_ydata().tolist() == [20, 40, 60, 80, 50]
    assert classes.images[0].get_array().shape == (3, 5)
    assert [label.get_text() for label in classes.get_yticklabels()] == ["none", "$lost$", "kept"]
    assert fig._repr_png_().startswith(b"\x89PNG")
