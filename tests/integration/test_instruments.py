"""The instruments: formulas compared with numbers computed by hand, and runs where the answer is known."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from support.errors import raises
from support.problems import Problem, same

import fedkeep as fk
from fedkeep import forgetting as fg
from fedkeep import instruments as ins
from fedkeep import tree
from fedkeep.errors import ConfigError, FedkeepError, RunError
from fedkeep.instruments import local_training
from fedkeep.instruments.every import append_result
from fedkeep.instruments.headings import HEADINGS
from fedkeep.instruments.next_round import with_split
from fedkeep.reproduce.recorded import find_value
from fedkeep.runs.reading import read_instruments

NAN = float("nan")
MISSING_CLASS = 7


def close(actual, expected) -> bool:
    return np.allclose(actual, expected, rtol=1e-9, atol=1e-9, equal_nan=True)


# Formulas on class accuracies


def test_local_forgetting_by_client_and_class():
    """Before (0.5, 0.8, 0.2): client 0 loses 0.5 of the first and gains elsewhere, client 1 loses 0.8 of the second."""
    lost = fg.local_forgetting([0.5, 0.8, 0.2], [[0.0, 0.9, 0.2], [0.6, 0.0, 0.3]])
    assert close(lost, [[0.5, 0, 0], [0, 0.8, 0]])
    assert close(lost.mean(0), [0.25, 0.4, 0])


def test_aggregation_forgetting_by_client_and_class():
    """Clients (1, 0) and (0.2, 0.9), after (0.5, 0.6): client 0 loses 0.5 of class 0, client 1 loses 0.3 of class 1."""
    assert close(fg.aggregation_forgetting([[1.0, 0.0], [0.2, 0.9]], [0.5, 0.6]), [[0.5, 0], [0, 0.3]])


def test_untested_classes_are_nan_in_local_and_aggregation_forgetting():
    assert close(fg.local_forgetting([0.5, NAN], [[0.2, NAN]]), [[0.3, NAN]])
    assert close(fg.aggregation_forgetting([[0.5, NAN]], [0.2, NAN]), [[0.3, NAN]])


@pytest.mark.parametrize("call", [fg.local_forgetting, lambda a, b: fg.aggregation_forgetting(b, a)])
def test_accuracies_of_the_wrong_shape_raise(call):
    with pytest.raises(ValueError, match=r"\(2,\)"):
        call([0.5, 0.5], [0.5, 0.5])
    with pytest.raises(ValueError, match=r"\(1, 3\)"):
        call([0.5, 0.5], [[0.5, 0.5, 0.5]])


def test_personalised_weights_class_accuracies_by_the_clients_labels():
    """Client 0: p = (1/4, 3/4), accuracies (0.4, 0.8): 0.1 + 0.6. Client 1: p = (1, 0): 0.3. Untested: renormalised."""
    assert close(fg.personalised([[0.4, 0.8], [0.3, 0.9]], [[1, 3], [2, 0]]), [0.7, 0.3])
    assert close(fg.personalised([[0.4, NAN]], [[1, 3]]), [0.4])
    with pytest.raises(ValueError, match=r"\(2,\)"):
        fg.personalised([0.4, 0.8], [1, 3])


def test_consistency_is_the_cosine_with_the_round_before():
    """(3, 4) to (4, 3): (12 + 12) / 25 = 0.96; to (0, 1): 3/5; then a model with accuracy 0: NaN twice."""
    cosines = fg.consistency([[0.3, 0.4], [0.4, 0.3], [0.0, 1.0], [0.0, 0.0], [1.0, 1.0]])
    assert close(cosines, [0.96, 0.6, NAN, NAN])
    assert close(fg.consistency([[0.3, NAN, 0.4], [0.4, NAN, 0.3]]), [0.96])
    assert fg.consistency([[0.3, 0.4]]).shape == (0,)


def test_underlying_distribution_sums_to_one():
    """(0.2, 0.6) / 0.8 = (1/4, 3/4); an untested class counts as 0; with accuracy 0 everywhere it is NaN."""
    assert close(fg.underlying_distribution([[0.2, 0.6], [0.0, 0.0]]), [[0.25, 0.75], [NAN, NAN]])
    assert close(fg.underlying_distribution([0.2, NAN, 0.6]), [0.25, 0, 0.75])


def test_distribution_distance_is_l1_between_accuracies_and_labels():
    """A_G = (1/4, 3/4); p = (1/2, 1/2): 1/4 + 1/4; p = (1, 0): 3/4 + 3/4; in L2 sqrt(2)/4 and 3 sqrt(2)/4."""
    assert close(fg.distribution_distance([0.2, 0.6], [[5, 5], [3, 0]]), [0.5, 1.5])
    assert close(fg.distribution_distance([0.2, 0.6], [[5, 5], [3, 0]], order=2), [0.125**0.5, 1.125**0.5])


def test_rounds_to_fractions_of_a_target():
    """A = 0.8: 0.4 in round 2, 0.6 in round 4, 0.76 never; with every fifth round evaluated, rounds 10 and 20."""
    accuracy = [0.1, 0.4, 0.3, 0.7]
    assert fg.rounds_to_fractions(accuracy, 0.8) == {0.5: 2, 0.75: 4, 0.95: None}
    assert fg.rounds_to_fractions(accuracy, 0.8, (0.5, 0.75), [5, 10, 15, 20]) == {0.5: 10, 0.75: 20}


# Formulas on weights, activations and losses


def test_weight_divergence_includes_all_leaves():
    """From (0, 0 | 1): client 0 at (3, 0 | 5): 3 + 4 = 7, in L2 sqrt(9 + 16) = 5; client 1 did not move."""
    before = {"a": torch.zeros(2), "b": torch.ones(1, 1)}
    clients = {"a": torch.tensor([[3.0, 0.0], [0.0, 0.0]]), "b": torch.tensor([[[5.0]], [[1.0]]])}
    assert close(ins.weight_divergence(before, clients), [7, 0])
    assert close(ins.weight_divergence(before, clients, order=2), [5, 0])


def test_relation_is_pearsons_r_and_the_least_squares_line():
    """x = (0, 1, 2), y = (0, 2, 1): dx = (-1, 0, 1), dy = (-1, 1, 0): r = 1/2, slope 1/2, intercept 1 - 1/2."""
    assert ins.relation([0, 1, 2], [0, 2, 1]) == pytest.approx({"pearson": 0.5, "slope": 0.5, "intercept": 0.5})
    assert math.isnan(ins.relation([1, 1], [0, 2])["slope"])
    assert math.isnan(ins.relation([], [])["pearson"])
    flat = ins.relation([0, 1], [2, 2])
    assert math.isnan(flat["pearson"])
    assert flat["slope"] == 0
    with pytest.raises(ValueError, match=r"\b2 and 1\b"):
        ins.relation([0, 1], [2])


def test_gradient_diversity_of_eq_8():
    """(3, 0) and (0, 4): (9 + 16)/2 over |(1.5, 2)|^2 = 6.25: 2. K equal ones: 1. Opposite ones: infinite."""
    assert ins.gradient_diversity([[3.0, 0.0], [0.0, 4.0]]) == 2
    assert ins.gradient_diversity({"w": torch.ones(5, 3)}) == 1
    assert ins.gradient_diversity([[1.0], [-1.0]]) == math.inf
    assert math.isnan(ins.gradient_diversity([[0.0], [0.0]]))


def test_gradient_diversity_agrees_with_proposition_1():
    """FedNTD eq. 20 (with the 1/K of eq. 8 in the mean): p^1 = (1, 0), p^2 = (1/2, 1/2) and g = identity.

    (1 + 1/2)/2 = 3/4 over |(3/4, 1/4)|^2 = 10/16: 1.2. Adding beta = 1 times the out-local (0, 1) and (1/2, 1/2):
    (1, 1) and (1, 1): 1, so that preserving knowledge aligns the gradients, as the proposition says.
    """
    p = np.array([[1.0, 0.0], [0.5, 0.5]])
    out = 1 - p
    assert ins.gradient_diversity(p) == pytest.approx(1.2)
    assert ins.gradient_diversity(p + out) == pytest.approx(1.0)


def test_class_preference_is_the_class_of_the_largest_mean_activation():
    """Neuron 0: means 2 and 3; neuron 1: 1.5 and 1. By sums neuron 0 would prefer class 0, 4 > 3."""
    activations, y = [[1.0, 1.0], [3.0, 2.0], [3.0, 1.0]], [0, 0, 2]
    assert ins.class_preference(activations, y, n_classes=4).tolist() == [2, 0]


def test_an_absent_class_is_never_preferred():
    """All activations are negative: class 1, which has no examples, must not win with a mean of 0."""
    assert ins.class_preference([[-1.0], [-2.0]], [0, 2], n_classes=3).tolist() == [0]


def test_alignment_is_the_share_of_matching_preferences():
    assert ins.alignment([0, 1, 2, 3], [0, 2, 2, 0]) == 0.5
    with pytest.raises(ValueError, match=r"\(2,\) and \(1,\)"):
        ins.alignment([0, 1], [0])


def test_loss_transition_interleaves_local_and_global_losses():
    """Round 1: clients (1, 3), mean 2, then global 1; round 2: clients (2, 2), mean 2, then global 0.5."""
    assert close(ins.loss_transition([[1, 3], [2, 2]], [1, 0.5]), [2, 1, 2, 0.5])
    with pytest.raises(ValueError, match=r"\(2,\) and \(2,\)"):
        ins.loss_transition([1, 2], [1, 0.5])


def test_tsne_separates_distant_groups_and_is_deterministic():
    """Two groups 100 standard deviations apart: every point is closer to its own group's centre than to the other's."""
    rng = np.random.default_rng(0)
    groups = np.arange(30) % 2
    features = np.stack([rng.normal(size=(30, 6)) + 100 * groups[:, None] for _ in range(2)])
    points = ins.tsne(features, seed=3)
    assert points.shape == (2, 30, 2)
    flat, group = points.reshape(-1, 2), np.tile(groups, 2)
    centres = np.stack([flat[group == g].mean(0) for g in (0, 1)])
    assert (np.linalg.norm(flat[:, None] - centres, axis=-1).argmin(1) == group).all()
    assert np.array_equal(points, ins.tsne(features, seed=3))


def test_separation_distinguishes_clusters_by_class_and_by_model():
    """One feature: 0 or 10 by class in the first case, by model in the second, plus 0.1 by the other."""
    y = np.arange(8) % 2
    by_class = np.stack([10.0 * y + 0.1 * m for m in range(2)])[..., None]
    by_model = np.stack([10.0 * m + 0.1 * y for m in range(2)])[..., None]
    assert ins.separation(by_class, y)["by_class"] > 0.95 > 0 > ins.separation(by_class, y)["by_model"]
    assert ins.separation(by_model, y)["by_model"] > 0.95 > 0 > ins.separation(by_model, y)["by_class"]


def test_loss_surface_of_a_quadratic():
    """L = 2 x^2 + y at (1, 3), along (1, 0) and (0, 2) with steps -1, 0, 1: 2 (1 + a)^2 + 3 + 2 b."""
    start = {"x": torch.tensor(1.0), "y": torch.tensor(3.0)}
    one, zero = torch.tensor(1.0), torch.tensor(0.0)
    axis, losses = ins.loss_surface(
        lambda w: 2 * w["x"] ** 2 + w["y"], start, ({"x": one, "y": zero}, {"x": zero, "y": 2 * one}), 1.0, 3
    )
    assert close(axis, [-1, 0, 1])
    assert close(losses, [[1, 3, 5], [3, 5, 7], [9, 11, 13]])


def test_hessian_directions_are_the_leading_eigenvectors():
    """L = 1/2 w' H w with H = Q diag(5, 3, 1, 0.1) Q': the first two columns of Q, up to their signs."""
    q = np.linalg.qr(np.random.default_rng(0).normal(size=(4, 4)))[0]
    h = torch.from_numpy(q @ np.diag([5.0, 3.0, 1.0, 0.1]) @ q.T)
    params = {"w": torch.zeros(2, 2, dtype=torch.float64)}
    values, directions = ins.hessian_directions(lambda w: w["w"].reshape(-1) @ h @ w["w"].reshape(-1) / 2, params)
    assert close(values, [5, 3])
    for column, direction in zip(q.T, directions, strict=False):
        assert abs(float(torch.from_numpy(column) @ direction["w"].reshape(-1))) == pytest.approx(1, abs=1e-6)


def test_loss_under_noise_of_a_linear_loss_is_the_loss_of_the_mean_draw():
    """L = sum(w): sigma times the sum of the mean draw, so proportional to sigma; at 0 the loss itself."""
    losses = ins.loss_under_noise(lambda w: w["w"].sum(), {"w": torch.ones(4)}, [0.0, 0.5, 1.0])
    assert losses[0] == 4
    assert (losses[2] - 4) == pytest.approx(2 * (losses[1] - 4), rel=1e-5)


def test_random_directions_have_the_norms_of_the_filters():
    weights = {"conv": torch.randn(3, 2, 2, 2, generator=torch.Generator().manual_seed(0)), "bias": torch.ones(3)}
    for direction in ins.random_directions(weights, seed=1):
        drawn, expected = (w["conv"].flatten(1).norm(dim=1) for w in (direction, weights))
        assert torch.allclose(drawn, expected)
        assert direction["bias"].abs().sum() == 0


# Runs where the answer is known


@pytest.fixture(scope="module")
def trained() -> tuple[fk.data.Dataset, torch.nn.Module]:
    """Digits, and a model trained on all ten classes."""
    data = fk.data.load("digits")
    clients = fk.data.partition.iid(data.y_train, n_clients=4, seed=0)
    history = fk.simulate(
        "fedavg", "mlp", data, clients, rounds=6, participation=1.0, batch_size=20, lr=0.1, momentum=0.0
    )
    assert history.class_accuracy[-1].min() > 0.8
    return data, history.model


@pytest.fixture(scope="module")
def incomplete(trained) -> list[np.ndarray]:
    """Three clients of equal distribution, none of which has examples of the missing class."""
    data, _ = trained
    rest = np.flatnonzero(data.y_train.numpy() != MISSING_CLASS)
    return list(np.array_split(np.random.default_rng(0).permutation(rest), 3))


SETTINGS = {
    "participation": 1.0,
    "epochs": 15,
    "batch_size": 10,
    "lr": 0.1,
    "momentum": 0.0,
    "eval_local_every": 1,
}


def test_every_client_forgets_a_class_that_the_cohort_does_not_have(trained, incomplete) -> None:
    data, model = trained
    history = fk.simulate("fedavg", model, data, incomplete, rounds=2, **SETTINGS)
    lost = history.anatomy(1)["local_forgetting"]
    assert (lost.argmax(1) == MISSING_CLASS).all()
    assert (lost[:, MISSING_CLASS] > 0.3).all()
    assert np.delete(lost, MISSING_CLASS, 1).max() < 0.1
    degree = fg.forgetting_degree(history.initial_class_accuracy, history.local(1)["class_accuracy"])
    assert (np.nan_to_num(degree).argmax(1) == MISSING_CLASS).all()
    assert history.anatomy(2)["before"].tolist() == history.class_accuracy[0].tolist()


def test_analyse_of_a_simulation_reports_the_missing_class(trained, incomplete) -> None:
    data, model = trained
    simulation = fk.Simulation("fedavg", model, data, incomplete, fk.Settings(rounds=2, **SETTINGS))
    before = tree.map(torch.clone, simulation.server)
    analysis = ins.analyse(simulation)
    assert analysis["round"] == 1
    assert analysis["clients"] == [0, 1, 2]
    assert analysis["where"]["most_forgotten_locally"] == MISSING_CLASS
    assert min(analysis["where"]["personalised"]) > 0.9
    for client in analysis["where"]["label_counts"]:
        assert client[MISSING_CLASS] == 0
    in_local, out_local = analysis["where"]["in_local"], analysis["where"]["out_local"]
    assert np.mean(out_local["clients"]) < out_local["before"]
    assert np.mean(in_local["clients"]) > in_local["before"] - 0.01
    assert analysis["losses"]["mean_of_clients"] > analysis["losses"]["before"]  # tested on the missing class too
    assert analysis["gradients"]["diversity"] >= 1
    assert len(analysis["divergence"]["weight_divergence"]) == 3
    assert simulation.round == 0
    assert same(before, simulation.server)


def test_mean_probabilities_are_those_of_the_local_models_on_the_public_set(trained, incomplete) -> None:
    data, model = trained
    settings = fk.Settings(rounds=1, **SETTINGS)
    for given in (data, data.with_public(2, validation=0.0)):
        clients = incomplete if given is data else fk.data.partition.iid(given.y_train, 3)
        simulation = fk.Simulation("fedavg", model, given, clients, settings)
        result = ins.analyse(simulation, "probabilities")["probabilities"]
        trial = ins.train_next_round(simulation)
        x = trial.test_examples(len(given.y_test))[0] if given.public is None else simulation.task.public.x
        z = torch.stack([simulation.task.apply(one, x) for one in trial.models[1:-1]])
        assert np.allclose(result["clients"], z.softmax(-1).mean(1).detach())
        assert result["label_counts"] == trial.label_counts.tolist()
        assert result["largest"] == trial.label_counts.max(0).tolist(), "all clients take part"


def test_averaging_permuted_copies_of_a_model_is_aggregation_forgetting(trained) -> None:
    """Eight models with the same function and their hidden neurons in different orders: each knows all classes, their
    average does not, and the preferences of their neurons differ from those of the first."""
    data, model = trained
    task = fk.Simulation("fedavg", model, data, [np.arange(9)], fk.Settings()).task
    weights = task.init
    hidden, bias, out = "body.1.weight", "body.1.bias", "classifier.weight"
    generator = torch.Generator().manual_seed(0)
    copies = [weights]
    for _ in range(7):
        order = torch.randperm(64, generator=generator)
        copies.append(
            {**weights, hidden: weights[hidden][order], bias: weights[bias][order], out: weights[out][:, order]}
        )
    simulation = fk.Simulation("fedavg", model, data, [np.arange(9)] * 8, fk.Settings())
    stacked = tree.stack(copies)
    trial = ins.NextRound(simulation, 1, list(range(8)), weights, stacked, tree.mean(stacked))
    where = ins.STUDIES["where"](trial, ins.Options())
    assert max(where["local_forgetting"]) == 0
    assert np.mean(where["aggregation_forgetting"]) > 0.2
    [layer] = ins.STUDIES["alignment"](trial, ins.Options())["layers"].values()
    assert layer["clients"][0] == 1
    assert max(layer["clients"][1:]) < 0.5
    assert layer["neurons"] == 64


def test_labels_of_one_class_are_far_from_a_model_of_all_classes(trained) -> None:
    """FedNTD figure 8's distance: small for a client with the labels of the whole data set, about 2 (1 - 1/10) for a
    client of one class. The gradients of single classes differ strongly."""
    data, model = trained
    y = data.y_train.numpy()
    rng = np.random.default_rng(0)
    clients = [rng.permutation(len(y))[:100], *(np.flatnonzero(y == c)[:100] for c in range(5))]
    simulation = fk.Simulation("fedavg", model, data, clients, fk.Settings(**SETTINGS))
    analysis = ins.analyse(simulation, "divergence,gradients")
    near, *far = analysis["divergence"]["distribution_distance"]
    assert near < 0.5
    assert far == pytest.approx([1.8] * 5, abs=0.05)
    assert (np.array(analysis["divergence"]["weight_divergence"]) > 0).all()
    assert analysis["gradients"]["diversity"] > 2


def test_gradients_of_iid_clients_agree_more_than_those_of_one_class_clients(trained) -> None:
    data, _ = trained
    y = data.y_train.numpy()

    def diversity(clients) -> float:
        simulation = fk.Simulation("fedavg", "mlp", data, clients, fk.Settings(**SETTINGS))
        return ins.analyse(simulation, "gradients")["gradients"]["diversity"]

    iid = diversity(fk.data.partition.iid(y, 5, seed=0))
    one_class = diversity([np.flatnonzero(y == c) for c in range(5)])
    assert 1 <= iid < 1.5 < 2 < one_class


# The trial round is identical to the run's next round


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "flashback"])
@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_the_trial_round_is_identical_to_the_next_round(problem: Problem, method: str, engine: str) -> None:
    simulation = problem.simulation(fk.methods.get(method)(), engine=engine)
    simulation.step()
    trial = ins.train_next_round(simulation)
    assert simulation.round == 1
    record = simulation.step()
    assert trial.ids == record["cohort"]
    assert trial.round == 2
    assert same(trial.after, simulation.params)


def test_the_callback_does_not_change_the_run_and_stores_its_values(problem: Problem) -> None:
    callback = ins.Every(2, "divergence,losses")
    without = problem.run(fk.methods.Scaffold())
    analysed = problem.simulation(fk.methods.Scaffold())
    analysed.callbacks = (callback,)
    analysed.run()
    assert same(without.server, analysed.server)
    assert [v["after_round"] for v in callback.values] == [2, 3]
    assert callback.values[0]["round"] == 3
    assert callback.values[0]["losses"]["before"] == pytest.approx(analysed.history.records[2]["test_loss"])
    assert callback.values[0]["losses"]["after"] == pytest.approx(analysed.history.records[3]["test_loss"])


def test_invalid_options_and_names_raise(problem: Problem) -> None:
    with raises(FedkeepError, key="what", value="divergense", valid=[*ins.STUDIES, "all"], mentions=["divergence"]):
        ins.Every(2, "divergense")
    for n in (0, 1.5, True):
        with raises(FedkeepError, key="n", value=n):
            ins.Every(n)
    for key, value in {"samples": 1, "steps": 1, "seed": -1, "span": 0, "directions": "up"}.items():
        with raises(FedkeepError, key=key, value=value):
            ins.Options(**{key: value})
    simulation = problem.simulation(fk.methods.FedAvg())
    cohort = ins.train_next_round(simulation).ids
    with raises(FedkeepError, key="client", value=99, valid=cohort, mentions=["client 99", "round 1"]):
        ins.analyse(simulation, "surface", ins.Options(client=99))


def test_study_names_can_be_a_list_or_text_with_commas() -> None:
    assert ins.Every(1, "losses, where,losses").what == ["losses", "where"]
    assert ins.Every(1, ["tsne"]).what == ["tsne"]
    assert ins.Every(1).what == list(ins.CHEAP)
    assert ins.Every(1, "all").what == ins.Every(1, "where,all").what == list(ins.STUDIES)


# From a run folder


@pytest.fixture
def run(problem: Problem, tmp_path: Path) -> Path:
    path = tmp_path / "run"
    settings = {**problem.settings, "participation": 4}
    fk.simulate(fk.methods.Scaffold(), problem.model, problem.data, problem.clients, run_dir=path, **settings)
    return path


def test_analyse_does_not_modify_the_run_folder(problem: Problem, run: Path) -> None:
    files = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    parts = {"model": problem.model, "data": problem.data, "clients": problem.clients}
    steps: list[str] = []
    analysis = ins.analyse(run, "all", ins.Options(samples=8, steps=3), steps.append, **parts)
    assert steps == ["the trial round", *ins.STUDIES]
    assert analysis["round"] == 4
    assert set(ins.STUDIES) <= set(analysis)
    named = [name.replace("*", "last") for name in HEADINGS if not name.startswith("personal.own.")]  # not of FedAvg
    assert [name for name in named if find_value(analysis, name) is None] == [], "a heading of no value"
    assert np.shape(analysis["surface"]["losses"]) == (3, 3)
    assert analysis["surface"]["losses"][1][1] == pytest.approx(analysis["surface"]["loss"])
    assert np.shape(analysis["tsne"]["points"]) == (6, 8, 2)
    assert analysis["surface"]["eigenvalues"][0] >= analysis["surface"]["eigenvalues"][1]
    json.dumps(analysis)
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == files


def test_missing_or_different_parts_raise(problem: Problem, run: Path, tmp_path: Path) -> None:
    with raises(ConfigError, mentions=[str(run), "analyse(run_dir"]):
        ins.analyse(run)
    with raises(RunError, mentions=["model", "data", "clients"]):
        ins.analyse(run, model=problem.model)
    other = [c[:-1] for c in problem.clients]
    with raises(RunError, mentions=[str(run), "split"]):
        ins.analyse(run, model=problem.model, data=problem.data, clients=other)
    for file in run.glob("checkpoint-*.safetensors"):
        file.unlink()
    with raises(RunError, key="checkpoint", value=str(run)):
        ins.analyse(run, model=problem.model, data=problem.data, clients=problem.clients)
    with raises(RunError, mentions=[str(tmp_path / "nowhere")]):
        ins.analyse(tmp_path / "nowhere")


def test_lines_of_repeated_rounds_are_replaced(problem: Problem, tmp_path: Path) -> None:
    path = tmp_path / "run"
    settings = {**problem.settings, "rounds": 2}
    fk.simulate(
        "fedavg",
        problem.model,
        problem.data,
        problem.clients,
        run_dir=path,
        callbacks=ins.Every(1, "losses"),
        **settings,
    )
    assert [line["after_round"] for line in read_instruments(path)] == [1, 2]
    append_result(path, {"after_round": 2, "again": True})
    assert [line["after_round"] for line in read_instruments(path)] == [1, 2]
    assert read_instruments(path)[1]["again"]


# Studies of local training, predictions and neurons


def test_training_ends_in_the_local_models_and_starts_from_the_global_one(problem: Problem) -> None:
    simulation = problem.simulation(fk.methods.Scaffold(), epochs=3)
    simulation.step()
    trial = ins.train_next_round(simulation)
    course = ins.STUDIES["training"](trial, ins.Options())
    where = ins.STUDIES["where"](trial, ins.Options())
    assert course["epochs"] == [0, 1, 2, 3]
    assert course["in_local"][-1] == where["in_local"]["clients"]
    assert course["out_local"][-1] == where["out_local"]["clients"]
    before = np.broadcast_to(trial.class_accuracy[0], trial.label_counts.shape)
    assert course["in_local"][0] == fk.forgetting.in_local(before, trial.label_counts).tolist()


def test_a_round_of_the_first_epochs_has_their_batches(problem: Problem) -> None:
    """Without augmentation, a plan of one epoch begins like one of three: the models are those of a one-epoch run."""
    long, short = (problem.simulation(fk.methods.FedAvg(), epochs=number) for number in (3, 1))
    stopped = ins.train_next_round(local_training.with_epochs(long, 1))
    assert same(stopped.clients, ins.train_next_round(short).clients)
    assert not same(stopped.clients, ins.train_next_round(long).clients)


def test_a_trial_round_can_have_another_split(problem: Problem) -> None:
    simulation = problem.simulation(fk.methods.FedAvg())
    split = {"kind": "shards", "s": 1, "seed": 3}
    trial = ins.train_next_round(with_split(simulation, split))
    expected = fk.data.partition.shards(problem.data.y_train, len(simulation.clients), s=1, seed=3)
    other = fk.Simulation(simulation.method, problem.model, problem.data, expected, simulation.settings)
    assert same(trial.clients, ins.train_next_round(other).clients)
    assert trial.label_counts.tolist() == ins.train_next_round(other).label_counts.tolist()
    assert not same(trial.clients, ins.train_next_round(simulation).clients)
    for wrong, key in (
        ({"kind": "shard"}, "split.kind"),
        ({"kind": "shards"}, "split"),
        ({"kind": "file"}, "split.kind"),
    ):
        with raises(FedkeepError, key=key):
            with_split(simulation, wrong)
    with raises(FedkeepError, key="split.n_clients", value=2):
        with_split(simulation, {"kind": "iid", "n_clients": 2})


def test_confusion_matrices_agree_with_the_class_accuracies(problem: Problem) -> None:
    simulation = problem.simulation(fk.methods.FedAvg())
    trial = ins.train_next_round(simulation)
    client = trial.ids[-1]
    found = ins.STUDIES["confusion"](trial, ins.Options(client=client))
    for name, row in (("before", 0), ("local", len(trial.ids)), ("after", -1)):
        accuracy = fk.forgetting.class_accuracy(np.array(found[name]))
        assert np.array_equal(accuracy, trial.class_accuracy[row], equal_nan=True)
    assert found["label_counts"] == trial.label_counts[-1].tolist()


def test_regions_are_the_predictions_over_the_plane() -> None:
    data = fk.data.load("squares")
    clients = fk.data.partition.iid(data.y_train, 2, seed=0)
    model = fk.models.build("mlp", (2,), 4, hidden=[8])
    simulation = fk.Simulation("fedavg", model, data, clients, fk.Settings(participation=2))
    trial = ins.train_next_round(simulation)
    found = ins.STUDIES["regions"](trial, ins.Options(steps=3, samples=5))
    predict = simulation.task.module(trial.after)
    corner = torch.tensor([[found["x"][2], found["y"][0]]])
    assert found["classes"][-1][0][2] == int(predict(corner).argmax())
    assert [len(points) for points in found["points"]] == [5, 5]
    x, y, c = found["points"][0][0]
    assert c == (x > 0) + 2 * (y > 0)


def test_neurons_are_those_whose_alignment_is_measured(problem: Problem) -> None:
    trial = ins.train_next_round(problem.simulation(fk.methods.FedAvg()))
    before, *clients, after = np.array(ins.STUDIES["neurons"](trial, ins.Options())["preferences"])
    last = list(ins.STUDIES["alignment"](trial, ins.Options())["layers"].values())[-1]
    assert last["clients"] == [ins.alignment(before, one) for one in clients]
    assert last["after"] == ins.alignment(before, after)
