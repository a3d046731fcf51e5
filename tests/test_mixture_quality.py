"""Where the fits end: bounded forms of benchmarks/mixture_quality.py."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.cluster import KMeans

import pdvi
from pdvi import graphs, metrics
from pdvi.core.solver import Segment
from pdvi.mixtures import empirical_bayes, potts_mixture_problem
from pdvi.run.running import Run
from pdvi.shards.partition import along_space, layout, median_cuts

pytestmark = pytest.mark.slow

K = 5


def biased(seed, bias=0.95):
    return pdvi.datasets.mixture(20_000, batch_size=500, bias=bias, seed=seed)


def poor(data, settings, seed):
    rows = np.random.default_rng(seed).choice(len(data.X), 200, replace=False)
    return settings._replace(means=KMeans(K, n_init=1, random_state=seed).fit(data.X[rows]).cluster_centers_)


def best_known(data, settings):
    """Coordinate ascent from the true labels."""
    truth = np.array([data.X[data.labels == k].mean(0) for k in range(K)])
    return pdvi.fit(data.problem(settings._replace(means=truth)), pdvi.CAVI(), tol=1e-9, max_epochs=300)


def gap(data, settings, solver, reference):
    result = pdvi.fit(data.problem(settings), solver, tol=1e-8, max_epochs=100)
    return (result.objective - reference.objective) / abs(reference.objective), result


@pytest.mark.parametrize("seed", range(5))
def test_biased_batches_end_at_the_optimum_of_the_true_labels(seed):
    data = biased(seed)
    settings = empirical_bayes(data.X, K, seed=seed)
    reference = best_known(data, settings)
    for solver in (pdvi.P2DVI(), pdvi.PDVI()):
        reached, result = gap(data, settings, solver, reference)
        assert reached < 1e-6
    noise = np.tile(settings.noise_variance, (K, 1))
    ours, best = (
        metrics.wasserstein_matched(r.global_params["mean"], noise, data.means, np.ones((K, 10)))
        for r in (result, reference)
    )
    assert ours < best + 1e-3


def test_poor_starts_end_as_well_as_those_of_coordinate_ascent():
    hits = {"P2DVI": 0, "CAVI": 0, "MemoizedVB": 0}
    for seed in range(5):
        data = biased(seed)
        settings = empirical_bayes(data.X, K, seed=seed)
        reference = best_known(data, settings)
        for solver in (pdvi.P2DVI(), pdvi.CAVI(), pdvi.MemoizedVB()):
            hits[type(solver).__name__] += gap(data, poor(data, settings, seed), solver, reference)[0] < 1e-6
    assert hits["P2DVI"] >= max(hits.values()), hits


def test_bias_costs_at_most_twice_the_epochs():
    def epochs(bias):
        total = 0
        for seed in range(3):
            data = biased(seed, bias)
            settings = empirical_bayes(data.X, K, seed=seed)
            reference = best_known(data, settings)
            _, result = gap(data, settings, pdvi.P2DVI(), reference)
            arrived = (result.trace["objective"] - reference.objective) / abs(reference.objective) < 1e-6
            total += result.trace["epoch"][arrived.idxmax()]
        return total

    assert epochs(0.95) <= 2 * epochs(0.0)


def test_exploring_ends_better_than_a_constant_penalty_from_poor_starts():
    """Patches touch each other, and an epoch visits sixteen of them: exploring is what P2D-VI does by itself."""
    tissue = pdvi.datasets.tissue_features(36_864, n_domains=12, noise=1.6, patchiness=15, seed=0)
    graph = graphs.weights(graphs.nearest(tissue.coordinates, 12), tissue.X)
    where = layout(median_cuts(tissue.coordinates, 16), along_space(tissue.coordinates))
    problem = potts_mixture_problem(tissue.X, graph, empirical_bayes(tissue.X, 12), where, beta=0.5)
    ends = {"default": [], "adaptive": []}
    for seed in range(4):
        rows = np.random.default_rng(seed).choice(len(tissue.X), 150, replace=False)
        means = KMeans(12, n_init=1, random_state=seed).fit(tissue.X[rows]).cluster_centers_
        poorly = eqx.tree_at(lambda p: p.model.start, problem, jnp.asarray(means, jnp.float32))
        for name, solver in (("default", pdvi.P2DVI()), ("adaptive", pdvi.P2DVI(exploration=0))):
            result = pdvi.fit(poorly, solver, log_every=2)
            assert explored(result) == (name == "default")
            ends[name].append(result.objective)
    assert np.mean(ends["default"]) <= np.mean(ends["adaptive"]), ends


@pytest.fixture(scope="module")
def explorable():
    """A small tissue in enough patches for noisy steps, and a start that is poor enough for them."""
    tissue = pdvi.datasets.tissue_features(2_000, n_features=8, n_domains=5, patchiness=20)
    graph = graphs.weights(graphs.nearest(tissue.coordinates, 6), tissue.X)
    where = layout(median_cuts(tissue.coordinates, 16), along_space(tissue.coordinates))
    settings = empirical_bayes(tissue.X, 5)._replace(means=tissue.X[:5])
    return potts_mixture_problem(tissue.X, graph, settings, where, beta=0.3)


def explored(result):
    return result.trace["event"].str.contains("exploring").any()


def test_exploration_is_told_in_the_trace_and_can_be_left_out(explorable):
    by_default = pdvi.fit(explorable, pdvi.P2DVI(), max_epochs=6, tol=0)
    assert list(by_default.trace["event"]) == [*3 * [""], *3 * ["exploring"], ""]
    for without in (pdvi.P2DVI(exploration=0), pdvi.P2DVI(eta=0.1)):
        assert not explored(pdvi.fit(explorable, without, max_epochs=1, tol=0))
    few = pdvi.fit(explorable, pdvi.P2DVI(), batch_size=2, max_epochs=1, tol=0)
    assert not explored(few)  # 8 batches an epoch: such steps would explore nothing


def test_exploration_leaves_algorithm_1_at_the_best_globals_and_duals_of_what_it_found(explorable):
    run = Run(explorable, pdvi.P2DVI(exploration=2), batch_size=1, sampling=pdvi.sampling.Fixed(), log_every=4)
    run.advance(64)
    assert run.exploring
    state = run.state
    assert run.next_segment() == Segment(run.solver)
    found = run.state
    losses, gradient = explorable.evaluate(found.lam, found.local)
    assert np.linalg.norm(gradient) < 1e-3 * np.linalg.norm(explorable.evaluate(state.lam, state.local)[1])
    assert float(losses.sum()) <= float(explorable.evaluate(state.lam, state.local)[0].sum())
    server = found.server.inner
    np.testing.assert_allclose(server.h, found.own.dual.mean(0) / server.penalty, rtol=1e-4, atol=1e-6)


def test_exploring_begins_where_the_run_began(explorable):
    run = Run(explorable, pdvi.P2DVI(), batch_size=1, sampling=pdvi.sampling.Fixed(), log_every=2)
    begun = run.state
    run.advance(32)
    state = run.state
    assert run.next_segment().n_steps == 3 * 16
    np.testing.assert_array_equal(run.state.lam, begun.lam)
    np.testing.assert_array_equal(run.state.local, begun.local)
    np.testing.assert_array_equal(run.state.server.kept, state.lam)


class Killed(BaseException):
    """As if the process had ended here."""


@pytest.mark.parametrize("epoch", [1, 2, 4, 5])
def test_a_run_killed_while_exploring_goes_on_to_the_same_bits(explorable, tmp_path, epoch):
    def kill(progress):
        if progress.record["epoch"] == epoch:
            raise Killed

    keep = pdvi.Checkpoint(tmp_path / "kept", every_seconds=0)
    with pytest.raises(Killed):
        pdvi.fit(explorable, pdvi.P2DVI(), max_epochs=8, tol=0, checkpoint=keep, callbacks=[kill])
    whole = pdvi.fit(explorable, pdvi.P2DVI(), max_epochs=8, tol=0)
    resumed = pdvi.fit(explorable, pdvi.P2DVI(), max_epochs=8, tol=0, start=keep.path)
    assert resumed.objective == whole.objective
    np.testing.assert_array_equal(resumed.local_params, whole.local_params)


def test_a_run_that_ends_while_exploring_gives_the_best_it_has(explorable):
    for solver in (pdvi.P2DVI(), pdvi.P2DVI(exploration=20)):
        ended = pdvi.fit(explorable, solver, max_epochs=4, tol=0)
        *before, last = ended.trace["event"]
        assert before == [*3 * [""], *2 * ["exploring"]]
        assert last.startswith("ended while exploring")
        assert ended.objective < ended.trace["objective"].iloc[:-1].min()
        longer = pdvi.fit(explorable, solver, start=ended, max_epochs=8, tol=0)
        assert not longer.trace["event"].iloc[len(ended.trace) :].any()
        assert longer.objective <= ended.objective


def test_exploration_ends_between_log_points_too(explorable):
    often = pdvi.fit(explorable, pdvi.P2DVI(), max_epochs=6, tol=0)
    seldom = pdvi.fit(explorable, pdvi.P2DVI(), max_epochs=6, tol=0, log_every=3)
    assert seldom.trace["event"].tolist() == ["", "exploring", ""]
    np.testing.assert_allclose(seldom.objective, often.objective, rtol=1e-6)


def test_exploring_in_vain_does_no_harm():
    """Each domain lies in one or two patches: noisy steps forget it. The run goes on from where it was before them."""
    rng = np.random.default_rng(0)
    coordinates = np.stack(np.meshgrid(np.arange(48), np.arange(48)), -1).reshape(-1, 2).astype(float)
    truth = (coordinates // 12 @ [1, 4]).astype(int)
    X = 3 * rng.standard_normal((16, 6))[truth] + rng.standard_normal((len(truth), 6))
    graph = graphs.weights(graphs.nearest(coordinates, 6), X)
    where = layout(median_cuts(coordinates, 32), along_space(coordinates))
    problem = potts_mixture_problem(X, graph, empirical_bayes(X, 16), where)
    explored = pdvi.fit(problem, pdvi.P2DVI(), max_epochs=30, tol=1e-9)
    plain = pdvi.fit(problem, pdvi.P2DVI(exploration=0), max_epochs=30, tol=1e-9)
    objective, event = explored.trace["objective"], explored.trace["event"]
    assert event[6] == "warm-up did not improve the objective"
    assert objective[5] > objective[2]  # as noisy steps left it
    assert objective[7] < objective[2]
    np.testing.assert_allclose(explored.objective, plain.objective, rtol=1e-3)


def test_a_known_point_is_not_explored_away(explorable):
    result = pdvi.fit(explorable, pdvi.P2DVI(), max_epochs=60, tol=1e-9)
    again = pdvi.fit(explorable, pdvi.P2DVI(), start=result.point, max_epochs=3, tol=0)
    assert not explored(again)
    assert again.objective <= result.objective + 1e-6 * abs(result.objective)


@pytest.mark.parametrize("wrong", [-1, 1.5])
def test_exploration_must_be_whole_epochs(wrong):
    with pytest.raises(ValueError, match="`exploration` must be a whole number of epochs"):
        pdvi.P2DVI(exploration=wrong)


def test_exploration_says_what_a_model_lacks():
    with pytest.raises(ValueError, match=r"P2DVI needs a model with 'statistics'.*; Quadratic lacks"):
        pdvi.fit(pdvi.datasets.quadratic(n=40), pdvi.P2DVI(exploration=1), batch_size=1)
