"""The instruments against numbers worked out by hand, and on runs where the answer is known."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from support.problems import Problem, same

import fedkeep as fk
from fedkeep import forgetting as fg
from fedkeep import instruments as ins
from fedkeep import tree
from fedkeep.errors import FedkeepError, RunError
from fedkeep.instruments.every import _keep
from fedkeep.runs.reading import read_instruments

NAN = float("nan")
VANISHED = 7


def close(actual, expected) -> bool:
    return np.allclose(actual, expected, rtol=1e-9, atol=1e-9, equal_nan=True)


# Formulas on class accuracies


def test_local_forgetting_is_what_each_client_lost_of_each_class():
    """Before (0.5, 0.8, 0.2): client 0 loses 0.5 of the first and gains elsewhere, client 1 loses 0.8 of the second."""
    lost = fg.local_forgetting([0.5, 0.8, 0.2], [[0.0, 0.9, 0.2], [0.6, 0.0, 0.3]])
    assert close(lost, [[0.5, 0, 0], [0, 0.8, 0]])
    assert close(lost.mean(0), [0.25, 0.4, 0])


def test_aggregation_forgetting_is_what_the_average_lost_of_each_client():
    """Clients (1, 0) and (0.2, 0.9), after (0.5, 0.6): 0.5 of what the first knew, 0.3 of what the second did."""
    assert close(fg.aggregation_forgetting([[1.0, 0.0], [0.2, 0.9]], [0.5, 0.6]), [[0.5, 0], [0, 0.3]])


def test_untested_classes_stay_out_of_local_and_aggregation_forgetting():
    assert close(fg.local_forgetting([0.5, NAN], [[0.2, NAN]]), [[0.3, NAN]])
    assert close(fg.aggregation_forgetting([[0.5, NAN]], [0.2, NAN]), [[0.3, NAN]])


@pytest.mark.parametrize("call", [fg.local_forgetting, lambda a, b: fg.aggregation_forgetting(b, a)])
def test_accuracies_of_the_wrong_shape_are_refused(call):
    with pytest.raises(ValueError, match="the global model is"):
        call([0.5, 0.5], [0.5, 0.5])
    with pytest.raises(ValueError, match="the global model is"):
        call([0.5, 0.5], [[0.5, 0.5, 0.5]])


def test_personalised_weighs_each_clients_model_by_its_own_labels():
    """Client 0: p = (1/4, 3/4), accuracies (0.4, 0.8): 0.1 + 0.6. Client 1: p = (1, 0): 0.3. Untested: renormalised."""
    assert close(fg.personalised([[0.4, 0.8], [0.3, 0.9]], [[1, 3], [2, 0]]), [0.7, 0.3])
    assert close(fg.personalised([[0.4, NAN]], [[1, 3]]), [0.4])
    with pytest.raises(ValueError, match="both"):
        fg.personalised([0.4, 0.8], [1, 3])


def test_consistency_is_the_cosine_with_the_round_before():
    """(3, 4) to (4, 3): (12 + 12) / 25 = 0.96; to (0, 1): 3/5; then a model that knows nothing: NaN twice."""
    found = fg.consistency([[0.3, 0.4], [0.4, 0.3], [0.0, 1.0], [0.0, 0.0], [1.0, 1.0]])
    assert close(found, [0.96, 0.6, NAN, NAN])
    assert close(fg.consistency([[0.3, NAN, 0.4], [0.4, NAN, 0.3]]), [0.96])
    assert fg.consistency([[0.3, 0.4]]).shape == (0,)


def test_underlying_distribution_sums_to_one():
    """(0.2, 0.6) / 0.8 = (1/4, 3/4); an untested class counts as 0; a model that knows nothing has none."""
    assert close(fg.underlying_distribution([[0.2, 0.6], [0.0, 0.0]]), [[0.25, 0.75], [NAN, NAN]])
    assert close(fg.underlying_distribution([0.2, NAN, 0.6]), [0.25, 0, 0.75])


def test_distribution_distance_is_l1_between_knowledge_and_labels():
    """A_G = (1/4, 3/4); p = (1/2, 1/2): 1/4 + 1/4; p = (1, 0): 3/4 + 3/4."""
    assert close(fg.distribution_distance([0.2, 0.6], [[5, 5], [3, 0]]), [0.5, 1.5])


def test_rounds_to_fractions_of_a_target():
    """A = 0.8: 0.4 in round 2, 0.6 in round 4, 0.76 never; where every fifth round was evaluated, in 10 and 20."""
    accuracy = [0.1, 0.4, 0.3, 0.7]
    assert fg.rounds_to_fractions(accuracy, 0.8) == {0.5: 2, 0.75: 4, 0.95: None}
    assert fg.rounds_to_fractions(accuracy, 0.8, (0.5, 0.75), [5, 10, 15, 20]) == {0.5: 10, 0.75: 20}


# Formulas on weights, activations and losses


def test_weight_divergence_runs_over_all_leaves():
    """From (0, 0 | 1): client 0 at (3, 0 | 5): sqrt(9 + 16) = 5, in L1 7; client 1 stayed."""
    before = {"a": torch.zeros(2), "b": torch.ones(1, 1)}
    clients = {"a": torch.tensor([[3.0, 0.0], [0.0, 0.0]]), "b": torch.tensor([[[5.0]], [[1.0]]])}
    assert close(ins.weight_divergence(before, clients), [5, 0])
    assert close(ins.weight_divergence(before, clients, order=1), [7, 0])


def test_relation_is_pearsons_r_and_the_least_squares_line():
    """x = (0, 1, 2), y = (0, 2, 1): dx = (-1, 0, 1), dy = (-1, 1, 0): r = 1/2, slope 1/2, intercept 1 - 1/2."""
    assert ins.relation([0, 1, 2], [0, 2, 1]) == pytest.approx({"pearson": 0.5, "slope": 0.5, "intercept": 0.5})
    assert math.isnan(ins.relation([1, 1], [0, 2])["slope"])
    assert math.isnan(ins.relation([], [])["pearson"])
    flat = ins.relation([0, 1], [2, 2])
    assert math.isnan(flat["pearson"])
    assert flat["slope"] == 0
    with pytest.raises(ValueError, match="2 and 1 values"):
        ins.relation([0, 1], [2])


def test_gradient_diversity_of_eq_8():
    """(3, 0) and (0, 4): (9 + 16)/2 over |(1.5, 2)|^2 = 6.25: 2. K equal ones: 1. Opposite ones: infinite."""
    assert ins.gradient_diversity([[3.0, 0.0], [0.0, 4.0]]) == 2
    assert ins.gradient_diversity({"w": torch.ones(5, 3)}) == 1
    assert ins.gradient_diversity([[1.0], [-1.0]]) == math.inf
    assert math.isnan(ins.gradient_diversity([[0.0], [0.0]]))


def test_gradient_diversity_of_orthogonal_class_gradients_is_proposition_1s():
    """FedNTD eq. 20 (with the 1/K of eq. 8 in the mean): p^1 = (1, 0), p^2 = (1/2, 1/2) and g = identity.

    (1 + 1/2)/2 = 3/4 over |(3/4, 1/4)|^2 = 10/16: 1.2. Adding beta = 1 times the out-local (0, 1) and (1/2, 1/2):
    (1, 1) and (1, 1): 1, so that preserving knowledge aligns the gradients, as the proposition says.
    """
    p = np.array([[1.0, 0.0], [0.5, 0.5]])
    out = 1 - p
    assert ins.gradient_diversity(p) == pytest.approx(1.2)
    assert ins.gradient_diversity(p + out) == pytest.approx(1.0)


def test_class_preference_is_the_class_of_the_largest_mean_activation():
    """Neuron 0: means 2 and 3; neuron 1: 1.5 and 1. By sums the first prefers class 0, 4 > 3: the mean is a choice."""
    activations, y = [[1.0, 1.0], [3.0, 2.0], [3.0, 1.0]], [0, 0, 2]
    assert ins.class_preference(activations, y, n_classes=4).tolist() == [2, 0]


def test_an_absent_class_is_never_preferred():
    """All activations negative: class 1, which has no examples, must not win with its empty 0."""
    assert ins.class_preference([[-1.0], [-2.0]], [0, 2], n_classes=3).tolist() == [0]


def test_alignment_is_the_share_of_matching_preferences():
    assert ins.alignment([0, 1, 2, 3], [0, 2, 2, 0]) == 0.5
    with pytest.raises(ValueError, match="same neurons"):
        ins.alignment([0, 1], [0])


def test_loss_transition_takes_turns():
    """Round 1: clients (1, 3), mean 2, then global 1; round 2: clients (2, 2), mean 2, then global 0.5."""
    assert close(ins.loss_transition([[1, 3], [2, 2]], [1, 0.5]), [2, 1, 2, 0.5])
    with pytest.raises(ValueError, match="local losses"):
        ins.loss_transition([1, 2], [1, 0.5])


def test_tsne_keeps_far_groups_apart_and_repeats_itself():
    """Two groups a hundred standard deviations apart stay apart: every point is nearer to its own group's centre."""
    rng = np.random.default_rng(0)
    groups = np.arange(30) % 2
    features = np.stack([rng.normal(size=(30, 6)) + 100 * groups[:, None] for _ in range(2)])
    points = ins.tsne(features, seed=3)
    assert points.shape == (2, 30, 2)
    flat, who = points.reshape(-1, 2), np.tile(groups, 2)
    centres = np.stack([flat[who == g].mean(0) for g in (0, 1)])
    assert (np.linalg.norm(flat[:, None] - centres, axis=-1).argmin(1) == who).all()
    assert np.array_equal(points, ins.tsne(features, seed=3))


def test_separation_tells_clusters_by_class_from_clusters_by_model():
    """One feature: 0 and 10 by class in the first case, by model in the second, with a little of the other."""
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
    """L = 1/2 w' H w with H = Q diag(5, 3, 1, 0.1) Q': the two first columns of Q, up to their signs."""
    q = np.linalg.qr(np.random.default_rng(0).normal(size=(4, 4)))[0]
    h = torch.from_numpy(q @ np.diag([5.0, 3.0, 1.0, 0.1]) @ q.T)
    params = {"w": torch.zeros(2, 2, dtype=torch.float64)}
    values, directions = ins.hessian_directions(lambda w: w["w"].reshape(-1) @ h @ w["w"].reshape(-1) / 2, params)
    assert close(values, [5, 3])
    for column, direction in zip(q.T, directions, strict=False):
        assert abs(float(torch.from_numpy(column) @ direction["w"].reshape(-1))) == pytest.approx(1, abs=1e-6)


def test_loss_under_noise_of_a_linear_loss_is_the_loss_of_the_mean_draw():
    """L = sum(w): sigma times the sum of the mean draw, so proportional to sigma; at 0 the loss itself."""
    found = ins.loss_under_noise(lambda w: w["w"].sum(), {"w": torch.ones(4)}, [0.0, 0.5, 1.0])
    assert found[0] == 4
    assert (found[2] - 4) == pytest.approx(2 * (found[1] - 4), rel=1e-5)


def test_random_directions_are_as_long_as_the_filters():
    weights = {"conv": torch.randn(3, 2, 2, 2, generator=torch.Generator().manual_seed(0)), "bias": torch.ones(3)}
    for direction in ins.random_directions(weights, seed=1):
        ours, theirs = (w["conv"].flatten(1).norm(dim=1) for w in (direction, weights))
        assert torch.allclose(ours, theirs)
        assert direction["bias"].abs().sum() == 0


# Runs where the answer is known


@pytest.fixture(scope="module")
def taught() -> tuple[fk.data.Dataset, torch.nn.Module]:
    """Digits, and a model that knows all ten."""
    data = fk.data.load("digits")
    everyone = fk.data.partition.iid(data.y_train, n_clients=4, seed=0)
    history = fk.simulate(
        "fedavg", "mlp", data, everyone, rounds=6, participation=1.0, batch_size=20, lr=0.1, momentum=0.0
    )
    assert history.class_accuracy[-1].min() > 0.8
    return data, history.model


@pytest.fixture(scope="module")
def without(taught) -> list[np.ndarray]:
    """Three clients of equal distribution, none of whom has seen the vanished class."""
    data, _ = taught
    rest = np.flatnonzero(data.y_train.numpy() != VANISHED)
    return list(np.array_split(np.random.default_rng(0).permutation(rest), 3))


SETTINGS = {
    "participation": 1.0,
    "epochs": 15,
    "batch_size": 10,
    "lr": 0.1,
    "momentum": 0.0,
    "eval_local_every": 1,
}


def test_a_class_that_vanishes_from_the_cohort_is_forgotten_by_every_client(taught, without) -> None:
    data, model = taught
    history = fk.simulate("fedavg", model, data, without, rounds=2, **SETTINGS)
    lost = history.anatomy(1)["local_forgetting"]
    assert (lost.argmax(1) == VANISHED).all()
    assert (lost[:, VANISHED] > 0.3).all()
    assert np.delete(lost, VANISHED, 1).max() < 0.1
    degree = fg.forgetting_degree(history.initial_class_accuracy, history.local(1)["class_accuracy"])
    assert (np.nan_to_num(degree).argmax(1) == VANISHED).all()
    assert history.anatomy(2)["before"].tolist() == history.class_accuracy[0].tolist()


def test_the_study_of_a_simulation_names_the_vanished_class(taught, without) -> None:
    data, model = taught
    simulation = fk.Simulation("fedavg", model, data, without, fk.Settings(rounds=2, **SETTINGS))
    before = tree.map(torch.clone, simulation.server)
    found = ins.analyse(simulation)
    assert found["round"] == 1
    assert found["clients"] == [0, 1, 2]
    assert found["where"]["most_forgotten_locally"] == VANISHED
    assert min(found["where"]["personalised"]) > 0.9
    for client in found["where"]["label_counts"]:
        assert client[VANISHED] == 0
    in_local, out_local = found["where"]["in_local"], found["where"]["out_local"]
    assert np.mean(out_local["clients"]) < out_local["before"]
    assert np.mean(in_local["clients"]) > in_local["before"] - 0.01
    assert found["losses"]["mean_of_clients"] > found["losses"]["before"]  # the test set still asks for the lost class
    assert found["gradients"]["diversity"] >= 1
    assert len(found["divergence"]["weight_divergence"]) == 3
    assert simulation.round == 0
    assert same(before, simulation.server)


def test_averaging_permuted_twins_is_aggregation_forgetting(taught) -> None:
    """Eight models that compute one function with their hidden neurons in another order: each knows everything, their
    average does not, and their neurons' preferences no longer match those of the first."""
    data, model = taught
    task = fk.Simulation("fedavg", model, data, [np.arange(9)], fk.Settings()).task
    weights = task.init
    hidden, bias, out = "body.1.weight", "body.1.bias", "classifier.weight"
    generator = torch.Generator().manual_seed(0)
    twins = [weights]
    for _ in range(7):
        order = torch.randperm(64, generator=generator)
        twins.append(
            {**weights, hidden: weights[hidden][order], bias: weights[bias][order], out: weights[out][:, order]}
        )
    simulation = fk.Simulation("fedavg", model, data, [np.arange(9)] * 8, fk.Settings())
    all_of_them = tree.stack(twins)
    seen = ins.Probe(simulation, 1, list(range(8)), weights, all_of_them, tree.mean(all_of_them))
    found = ins.STUDIES["where"](seen, ins.Options())
    assert max(found["local_forgetting"]) == 0
    assert np.mean(found["aggregation_forgetting"]) > 0.2
    [layer] = ins.STUDIES["alignment"](seen, ins.Options())["layers"].values()
    assert layer["clients"][0] == 1
    assert max(layer["clients"][1:]) < 0.5
    assert layer["neurons"] == 64


def test_labels_of_one_class_are_far_from_what_a_model_of_all_classes_knows(taught) -> None:
    """FedNTD figure 8's distance: a client whose labels are those of the whole is near, one of a single class is about
    2 (1 - 1/10) away; and the gradients of single classes hardly agree."""
    data, model = taught
    y = data.y_train.numpy()
    rng = np.random.default_rng(0)
    clients = [rng.permutation(len(y))[:100], *(np.flatnonzero(y == c)[:100] for c in range(5))]
    simulation = fk.Simulation("fedavg", model, data, clients, fk.Settings(**SETTINGS))
    found = ins.analyse(simulation, "divergence,gradients")
    near, *far = found["divergence"]["distribution_distance"]
    assert near < 0.5
    assert far == pytest.approx([1.8] * 5, abs=0.05)
    assert (np.array(found["divergence"]["weight_divergence"]) > 0).all()
    assert found["gradients"]["diversity"] > 2


def test_iid_clients_agree_more_than_clients_of_one_class(taught) -> None:
    data, _ = taught
    y = data.y_train.numpy()

    def diversity(clients) -> float:
        simulation = fk.Simulation("fedavg", "mlp", data, clients, fk.Settings(**SETTINGS))
        return ins.analyse(simulation, "gradients")["gradients"]["diversity"]

    alike = diversity(fk.data.partition.iid(y, 5, seed=0))
    apart = diversity([np.flatnonzero(y == c) for c in range(5)])
    assert 1 <= alike < 1.5 < 2 < apart


# The round aside is the round itself


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "flashback"])
@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_the_round_trained_aside_is_the_round_that_comes(problem: Problem, method: str, engine: str) -> None:
    simulation = problem.simulation(fk.methods.get(method)(), engine=engine)
    simulation.step()
    seen = ins.probe(simulation)
    assert simulation.round == 1
    record = simulation.step()
    assert seen.ids == record["cohort"]
    assert seen.round == 2
    assert same(seen.after, simulation.params)


def test_a_callback_changes_nothing_and_keeps_its_values(problem: Problem) -> None:
    watch = ins.Every(2, "divergence,losses")
    plain = problem.run(fk.methods.Scaffold())
    watched = problem.simulation(fk.methods.Scaffold())
    watched.callbacks = (watch,)
    watched.run()
    assert same(plain.server, watched.server)
    assert [v["after_round"] for v in watch.values] == [2, 3]
    assert watch.values[0]["round"] == 3
    assert watch.values[0]["losses"]["before"] == pytest.approx(watched.history.records[2]["test_loss"])
    assert watch.values[0]["losses"]["after"] == pytest.approx(watched.history.records[3]["test_loss"])


def test_options_and_names_that_are_wrong_are_refused(problem: Problem) -> None:
    with pytest.raises(FedkeepError, match="did you mean divergence"):
        ins.Every(2, "divergense")
    with pytest.raises(FedkeepError, match="at least 1"):
        ins.Every(0)
    for bad in ({"samples": 1}, {"steps": 1}, {"span": 0}, {"directions": "up"}):
        with pytest.raises(FedkeepError, match=next(iter(bad))):
            ins.Options(**bad)
    simulation = problem.simulation(fk.methods.FedAvg())
    with pytest.raises(FedkeepError, match="client 99 does not take part in round 1"):
        ins.analyse(simulation, "surface", ins.Options(client=99))


# From a run folder


@pytest.fixture
def run(problem: Problem, tmp_path: Path) -> Path:
    path = tmp_path / "run"
    settings = {**problem.settings, "participation": 4}
    fk.simulate(fk.methods.Scaffold(), problem.model, problem.data, problem.clients, run_dir=path, **settings)
    return path


def test_a_run_folder_is_studied_and_left_as_it_was(problem: Problem, run: Path) -> None:
    files = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    parts = {"model": problem.model, "data": problem.data, "clients": problem.clients}
    found = ins.analyse(run, "all", ins.Options(samples=8, steps=3), **parts)
    assert found["round"] == 4
    assert set(ins.STUDIES) <= set(found)
    assert np.shape(found["surface"]["losses"]) == (3, 3)
    assert found["surface"]["losses"][1][1] == pytest.approx(found["surface"]["loss"])
    assert np.shape(found["tsne"]["points"]) == (6, 8, 2)
    assert found["surface"]["eigenvalues"][0] >= found["surface"]["eigenvalues"][1]
    json.dumps(found)
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == files


def test_the_wrong_parts_are_refused(problem: Problem, run: Path, tmp_path: Path) -> None:
    with pytest.raises(FedkeepError, match=r"analyse\(run_dir"):
        ins.analyse(run)
    with pytest.raises(RunError, match="all three"):
        ins.analyse(run, model=problem.model)
    other = [c[:-1] for c in problem.clients]
    with pytest.raises(RunError, match="split"):
        ins.analyse(run, model=problem.model, data=problem.data, clients=other)
    (run / "checkpoint.safetensors").unlink()
    with pytest.raises(RunError, match="no checkpoint yet"):
        ins.analyse(run, model=problem.model, data=problem.data, clients=problem.clients)
    with pytest.raises(RunError, match="not a run folder"):
        ins.analyse(tmp_path / "nowhere")


def test_lines_of_rounds_run_again_make_way(problem: Problem, tmp_path: Path) -> None:
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
    _keep(path / "instruments.jsonl", {"after_round": 2, "again": True})
    assert [line["after_round"] for line in read_instruments(path)] == [1, 2]
    assert read_instruments(path)[1]["again"]
