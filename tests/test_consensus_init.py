"""Models with closed-form globals: shards start in consensus, and batches may come in any order."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pdvi
from models_for_tests import algorithm_1, begun
from pdvi.core.result import Point
from pdvi.estimators import topic_problem
from pdvi.mixtures import empirical_bayes, gaussian_mixture_problem
from pdvi.run.running import Run
from pdvi.shards.partition import layout
from pdvi.solvers import AdaptivePenalty


def small(n=400, seed=0):
    return pdvi.datasets.mixture(n, batch_size=n // 20, bias=0.95, seed=seed).problem(seed=seed)


def gradients(problem, lam, local):
    """grad_lam f_b of every shard, by autodiff."""
    return jax.vmap(jax.grad(problem.loss, argnums=1), in_axes=(0, None, 0))(local, lam, problem.shards)


def moved(problem, seed=1):
    """A start away from the model's own."""
    lam = problem.init(jax.random.key(0))[0]
    return problem.unravel(lam + 0.3 * jax.random.normal(jax.random.key(seed), lam.shape, lam.dtype))


def test_shards_start_in_consensus(x64):
    """phi_b is best at the start, lam for these phi, mu_b = - grad f_b there (fact two), h = D^-1 mean(mu) = 0."""
    problem = small()
    first = moved(problem)
    run = Run(problem, pdvi.P2DVI(), batch_size=1, start=first)
    assert isinstance(run.solver, AdaptivePenalty)
    assert run.solver.initialization == "consensus"
    np.testing.assert_array_equal(run.state.lam, problem.ravel(first))
    run.next_segment()
    inner, own, phi = algorithm_1(run.state.server), run.state.own, run.state.local
    best = jax.vmap(lambda old, shard: problem.model.local_step(old, first, shard))(phi, problem.shards)
    np.testing.assert_allclose(phi, best, atol=1e-12)
    slopes = np.asarray(gradients(problem, inner.lam, phi))
    np.testing.assert_allclose(own.dual, -slopes, atol=1e-10)
    size = np.abs(slopes).max()
    assert np.abs(slopes.sum(0)).max() < 1e-9 * size  # the least F for these phi
    np.testing.assert_allclose(inner.h, 0, atol=1e-10)
    np.testing.assert_allclose(inner.lam0, inner.lam + inner.h, atol=1e-12)


def test_known_local_variables_are_taken_as_they_are(x64):
    problem = small()
    phi = jax.random.dirichlet(jax.random.key(2), jnp.ones(5), problem.init(jax.random.key(0))[1].shape[:2])
    run = Run(problem, pdvi.P2DVI(), batch_size=1, start=Point(moved(problem), phi))
    run.next_segment()
    np.testing.assert_array_equal(run.state.local, phi)
    slopes = np.asarray(gradients(problem, run.state.lam, phi))
    assert np.abs(slopes.sum(0)).max() < 1e-9 * np.abs(slopes).max()


def test_given_local_variables_have_one_penalty(x64):
    """D = c mean_b diag grad^2_lam f_b at the best globals for them, per coordinate, so that units do not matter."""
    problem = small()
    phi = jax.random.dirichlet(jax.random.key(2), jnp.ones(5), problem.init(jax.random.key(0))[1].shape[:2])
    run = Run(problem, pdvi.P2DVI(), batch_size=1, start=Point({}, phi))
    run.next_segment()
    first = algorithm_1(run.state.server)

    def mean_curvature(loss):
        return jax.vmap(lambda local, shard: jnp.diagonal(jax.hessian(lambda lam: loss(local, lam, shard))(first.lam)))(
            phi, problem.shards
        ).mean(0)

    exact = np.abs(np.asarray(mean_curvature(problem.loss)))
    c = max(1.0, 0.5 * problem.n_shards)
    np.testing.assert_allclose(first.penalty, c * exact, rtol=1e-6)
    for _ in range(4):
        run.advance(100)
        np.testing.assert_array_equal(algorithm_1(run.state.server).penalty, first.penalty)


class WithIdleBlock(pdvi.models.MixtureModel):
    """A mixture with a block of globals that its loss does not depend on."""

    def init_global(self, key):
        return {**super().init_global(key), "idle": jnp.ones(2)}

    def curvature(self, local, globals_, shard):
        return {**super().curvature(local, globals_, shard), "idle": jnp.zeros(2)}


def test_a_block_without_curvature_stays_where_it_is(x64):
    problem = small()
    idle = pdvi.Problem(WithIdleBlock(**vars(problem.model)), problem.shards)
    start = Point({}, pdvi.fit(problem, pdvi.CAVI(), max_epochs=3, tol=0).local_params)
    plain, found = (pdvi.fit(one, pdvi.P2DVI(), max_epochs=6, tol=0, start=start) for one in (problem, idle))
    np.testing.assert_array_equal(found.global_params["idle"], 1)
    np.testing.assert_allclose(found.trace["objective"], plain.trace["objective"], rtol=1e-10)


def test_an_optimum_stays_put(x64):
    problem = small()
    first = pdvi.fit(problem, pdvi.MemoizedVB(), max_epochs=200, tol=0)
    again = pdvi.fit(problem, pdvi.P2DVI(), max_epochs=3, tol=0, start=first.point, seed=1)
    for name, block in first.global_params.items():
        np.testing.assert_allclose(again.global_params[name], block, atol=1e-6)


def test_the_penalty_follows_the_run(x64):
    """D = c mean_b |diag grad^2 f_b| where the run is, after epochs 1, 2, 3, 4, 6, ..., and no tenfold fall at once."""
    problem = small()
    run = begun(problem, pdvi.P2DVI())
    run.log()
    before = np.asarray(algorithm_1(run.state.server).penalty)
    for _ in range(5):
        run.next_segment()
        D = np.asarray(algorithm_1(run.state.server).penalty)
        hessians = jax.vmap(jax.hessian(problem.loss, argnums=1), in_axes=(0, None, 0))
        mean = np.diagonal(hessians(run.state.local, run.state.lam, problem.shards).mean(0))
        means = problem.block_slices["mean"]
        expected = np.maximum(10 * mean, before / 10)  # c = 20 / 2
        np.testing.assert_allclose(D[means], expected[means], rtol=1e-9)
        before = D
        run.advance(10_000)
        run.log()
    assert int(run.state.server.due) == 6
    run.next_segment()
    np.testing.assert_array_equal(algorithm_1(run.state.server).penalty, before)  # none is due after epoch 5
    assert (np.asarray([row["constant"] for row in run.rows]) == 10).all()


def test_disk_is_memory(x64, tmp_path):
    problem = small()
    pdvi.write_store(tmp_path / "store", problem)
    stored = pdvi.Problem.from_store(tmp_path / "store", problem.model)
    one, two = (pdvi.fit(p, pdvi.P2DVI(), max_epochs=3, tol=0) for p in (problem, stored))
    np.testing.assert_allclose(two.trace["objective"], one.trace["objective"], rtol=1e-10)
    assert list(two.trace["event"]) == list(one.trace["event"])
    assert "consensus initialization" in one.trace["event"][1]


def test_it_is_resumed_to_the_same_bits(tmp_path):
    problem, path = small(), tmp_path / "run.zarr"
    settings = {"tol": 0, "log_every": 0.5, "sampling": pdvi.sampling.Fixed()}
    pdvi.fit(problem, pdvi.P2DVI(), max_epochs=1.5, checkpoint=path, **settings)
    resumed = pdvi.fit(problem, pdvi.P2DVI(), max_epochs=4, start=path, **settings)
    whole = pdvi.fit(problem, pdvi.P2DVI(), max_epochs=4, **settings)
    for name, array in whole.state.items():
        np.testing.assert_array_equal(resumed.state[name], array)
    np.testing.assert_array_equal(resumed.trace["objective"], whole.trace["objective"])


# -------------------------------------------------------------------------------------------------- where runs end


@cache
def by_component(seed, bias, n=10_000):
    data = pdvi.datasets.mixture(n, batch_size=n // 100, bias=bias, seed=seed)
    own = [np.bincount(data.labels[data.batch == b], minlength=5).argmax() for b in range(100)]
    return data, pdvi.sampling.Fixed(tuple(int(b) for b in np.argsort(own, kind="stable")))


def epochs_to(result, objective):
    return result.trace["epoch"][result.trace["objective"] < objective * (1 + 1e-5)].min()


@pytest.mark.slow
@pytest.mark.parametrize("bias", [0.95, 1.0])
@pytest.mark.parametrize(("start", "seed"), [("k-means", 0), ("rows", 0), ("rows", 8), ("known", 8)])
def test_sorted_batches_end_where_memoized_vb_ends(start, seed, bias):
    data, order = by_component(seed, bias)
    problem = data.problem(seed=seed)
    point = {}
    if start != "k-means":
        rows = np.random.default_rng(seed).choice(len(data.X), 5, replace=False)
        lam, local = problem.init(jax.random.key(seed))
        globals_ = {**problem.unravel(lam), "mean": jnp.asarray(data.X[rows], lam.dtype)}
        phi = jax.vmap(lambda old, shard: problem.model.local_step(old, globals_, shard))(local, problem.shards)
        point = {"start": Point(globals_, phi) if start == "known" else globals_}
    rival = pdvi.fit(problem, pdvi.MemoizedVB(), max_epochs=40, tol=0, seed=seed, sampling=order, **point)
    in_order = pdvi.fit(problem, pdvi.P2DVI(), max_epochs=40, seed=seed, sampling=order, **point)
    shuffled = pdvi.fit(problem, pdvi.P2DVI(), max_epochs=40, seed=seed, **point)
    assert in_order.converged
    assert in_order.objective < rival.objective * (1 + 1e-5)
    assert epochs_to(in_order, rival.objective) <= 2 * epochs_to(shuffled, rival.objective)


@pytest.mark.slow
def test_rare_components_are_no_slower():
    """One row in two hundred: a penalty for components of one size would be forty times too firm for it."""
    rng = np.random.default_rng(0)
    shares = np.array([0.005, 0.245, 0.25, 0.25, 0.25])
    means = 4 * rng.standard_normal((5, 4))
    labels = rng.choice(5, 20_000, p=shares)
    X = means[labels] + rng.standard_normal((20_000, 4))
    settings = empirical_bayes(X, 5, seed=0)._replace(means=means + 0.5)
    problem = gaussian_mixture_problem(X, settings, layout(np.arange(20_000) % 100))
    rival = pdvi.fit(problem, pdvi.MemoizedVB(), max_epochs=30, tol=0)
    result = pdvi.fit(problem, pdvi.P2DVI(), max_epochs=8, tol=0)
    assert result.objective < rival.objective + 0.1


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 2])
def test_topics_converge_in_any_order(seed):
    """Rare words end with a hundredth of the curvature they begin with: with D of the start they never arrive."""
    data = pdvi.datasets.documents(400, n_words=60, n_topics=3, length=60, in_order=True, seed=seed)
    problem = topic_problem(data.X, 3)
    rival = pdvi.fit(problem, pdvi.MemoizedVB(), max_epochs=60)
    for sampling in (pdvi.sampling.Fixed(), None):
        result = pdvi.fit(problem, pdvi.P2DVI(), max_epochs=40, sampling=sampling)
        assert result.objective < rival.objective * (1 + 1e-3)
