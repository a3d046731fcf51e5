"""The methods against things nobody here wrote: scikit-learn, optax, plain NumPy, and each other where they agree."""

import warnings
from functools import cache

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture

import pdvi
from models_for_tests import begun
from pdvi import graphs
from pdvi.core.solver import State
from pdvi.mixtures import (
    EmpiricalBayes,
    empirical_bayes,
    gaussian_mixture_problem,
    potts_mixture_problem,
)
from pdvi.shards.partition import consecutive, layout, median_cuts
from pdvi.solvers import SOLVERS

N, D, K = 240, 3, 3
FLAT = 1e12  # a prior variance that says nothing


def rows(seed=0):
    """Three overlapping clusters of unequal size."""
    rng = np.random.default_rng(seed)
    means = 1.5 * rng.standard_normal((K, D))
    labels = rng.choice(K, N, p=[0.5, 0.3, 0.2])
    return means[labels] + rng.standard_normal((N, D)) * [1.0, 0.7, 1.3]


X = rows()


def mixture_problem(X, means, noise_variance, n_shards=6, prior_variance=FLAT):
    settings = EmpiricalBayes(means, X.mean(0), np.full(D, prior_variance), noise_variance)
    where = layout(consecutive(len(X), n_shards))
    return gaussian_mixture_problem(X, settings, where), where


@cache
def small_mixture():
    means = X[[0, 1, 2]]
    return mixture_problem(X, means, np.array([1.0, 0.5, 1.7]), prior_variance=4.0)[0]


@cache
def small_quadratic():
    return pdvi.datasets.quadratic(n=12, condition=20, heterogeneity=0.8, linear=0.3)


def run(problem, solver, batches, key=0):
    one = begun(problem, solver, len(batches[0]), key)
    return one.executor.run(one.solver, one.state, np.asarray(batches))


@eqx.filter_jit
def evaluated(problem, lam, local):
    return problem.evaluate(lam, local)


def draws(problem, size, steps):
    return pdvi.sampling.batches(pdvi.sampling.Uniform(), 0, 0, steps, problem.n_shards, size)


def assert_same_point(one, two, **tolerance):
    for a, b in zip(jax.tree.leaves(point(one)), jax.tree.leaves(point(two)), strict=True):
        np.testing.assert_allclose(a, b, **tolerance)


def point(state):
    return (state.lam, state.local) if isinstance(state, State) else state


# scikit-learn ------------------------------------------------------------------------------------------------


def test_one_step_of_cavi_is_one_em_step_of_scikit_learn(x64):
    """With a flat prior, equal weights, one noise variance and equal posterior variances the E steps coincide, and
    then so do the means of the M steps."""
    means, noise = X[[3, 50, 100]], np.array([1.2, 0.6, 1.5])
    problem, where = mixture_problem(X, means, noise)
    state = run(problem, pdvi.CAVI(), [np.arange(6)])
    reference = GaussianMixture(
        K,
        covariance_type="diag",
        weights_init=np.full(K, 1 / K),
        means_init=means,
        precisions_init=np.tile(1 / noise, (K, 1)),
        max_iter=1,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # one iteration is what is wanted
        reference.fit(X)
    np.testing.assert_allclose(problem.unravel(state.lam)["mean"], reference.means_, rtol=1e-9)
    before = GaussianMixture(K, covariance_type="diag")
    before.weights_, before.means_ = np.full(K, 1 / K), means
    before.precisions_cholesky_ = np.tile(noise**-0.5, (K, 1))
    np.testing.assert_allclose(where.unshard(state.local), before.predict_proba(X), atol=1e-12)


def test_cavi_ends_where_scikit_learn_ends(x64):
    """Where EM with a tied covariance ends, it would also end with weights and covariance held there. Whitened by
    that covariance, and with the one term that EM lacks, exp(rho) / 2 = 1 / (2 N_k) per feature, put into the
    weights, ours is the same model: the same means, the same responsibilities."""
    reference = GaussianMixture(K, covariance_type="tied", tol=1e-13, reg_covar=0, max_iter=5000, random_state=0).fit(X)
    responsibilities = reference.predict_proba(X)
    mass = responsibilities.sum(0)
    whiten = reference.precisions_cholesky_  # x @ whiten has unit noise
    rng = np.random.default_rng(1)
    start = (reference.means_ + 0.2 * rng.standard_normal((K, D))) @ whiten
    problem, where = mixture_problem(X @ whiten, start, np.ones(D))
    weights = jnp.log(reference.weights_ * np.exp(0.5 * D / mass))
    problem = eqx.tree_at(lambda p: p.model.log_weight, problem, weights)
    result = pdvi.fit(problem, pdvi.CAVI(), max_epochs=5000, tol=0, grad_tol=1e-12, log_every=500)
    np.testing.assert_allclose(result.global_params["mean"], reference.means_ @ whiten, atol=1e-5)
    np.testing.assert_allclose(where.unshard(result.local_params), responsibilities, atol=1e-5)
    np.testing.assert_allclose(np.exp(result.global_params["log_var"]), np.tile(1 / mass[:, None], D), rtol=1e-5)


# the methods among themselves --------------------------------------------------------------------------------


def test_svi_with_step_one_and_all_shards_is_cavi(x64):
    problem = small_mixture()
    everything = [np.arange(6)] * 4
    assert_same_point(run(problem, pdvi.SVI(rate=1.0), everything), run(problem, pdvi.CAVI(), everything), rtol=1e-10)


class KnownVariance:
    """x ~ N(c, noise), c ~ N(0, prior), q(c) = N(mean, exp log_var): conjugate, and no local variables."""

    noise, prior = 0.5, 2.0

    def init_global(self, key):
        return {"mean": jnp.array([3.0, -1.0]), "log_var": jnp.array([0.3, -0.2])}

    def init_local(self, key, shard):
        return ()

    def loss(self, local, globals_, shard):
        mean, variance = globals_["mean"], jnp.exp(globals_["log_var"])
        fit = 0.5 * jnp.sum((shard["x"] - mean) ** 2 + variance) / self.noise
        return fit + 0.5 * shard["fraction"] * jnp.sum((mean**2 + variance) / self.prior - globals_["log_var"])

    def statistics(self, local, shard):
        x = shard["x"]
        return {"n": jnp.full(2, float(len(x))), "total": x.sum(0), "fraction": jnp.full(2, shard["fraction"])}

    def global_step(self, statistics, augmentation):  # without augmentation: for the methods of this file
        precision = statistics["n"] / self.noise + statistics["fraction"] / self.prior
        mean = statistics["total"] / self.noise / precision
        return {"mean": mean, "log_var": jnp.log(statistics["fraction"]) - jnp.log(precision)}

    def natural(self, globals_):
        precision = jnp.exp(-globals_["log_var"])
        return {"mean": precision * globals_["mean"], "log_var": precision}

    def from_natural(self, natural):
        return {"mean": natural["mean"] / natural["log_var"], "log_var": -jnp.log(natural["log_var"])}

    def natural_gradient(self, globals_, gradient):
        by_variance = gradient["log_var"] * jnp.exp(-globals_["log_var"])
        return {"mean": gradient["mean"] - 2 * globals_["mean"] * by_variance, "log_var": -2 * by_variance}


class WithPotential(KnownVariance):
    """The same with a term outside the conjugate family, E log(1 + exp c) at the mean plus a bit of variance."""

    def nonconjugate(self, local, globals_, shard):
        return shard["fraction"] * 20 * jnp.sum(jax.nn.softplus(globals_["mean"] + 0.1 * jnp.exp(globals_["log_var"])))

    def loss(self, local, globals_, shard):
        return super().loss(local, globals_, shard) + self.nonconjugate(local, globals_, shard)


def without_locals(model):
    x = np.random.default_rng(4).normal([1.0, 2.0], size=(8, 5, 2))
    return pdvi.Problem(model, {"x": x, "fraction": np.full(8, 1 / 8)})


def test_sngvi_without_locals_is_svi_on_a_conjugate_model(x64):
    problem = without_locals(KnownVariance())
    batches = draws(problem, 2, 12)
    for settings in ({"rate": 0.3}, {"rate": 1.0, "forgetting": 0.6, "delay": 2.0}):
        one, two = run(problem, pdvi.SNGVI(**settings), batches), run(problem, pdvi.SVI(**settings), batches)
        assert_same_point(one, two, rtol=1e-10)


def test_sngvi_is_svi_on_the_mixture_whose_locals_have_a_closed_form(x64):
    problem = small_mixture()
    batches = draws(problem, 2, 8)
    assert_same_point(run(problem, pdvi.SNGVI(rate=0.3), batches), run(problem, pdvi.SVI(rate=0.3), batches), rtol=1e-8)


@pytest.mark.parametrize("which", ["without locals", "mixture"])
def test_pgsvi_with_conjugate_terms_only_is_svi(x64, which):
    problem = small_mixture() if which == "mixture" else without_locals(KnownVariance())
    batches = draws(problem, 2, 8)
    one = run(problem, pdvi.PGSVI(rate=0.25), batches)
    assert_same_point(one, run(problem, pdvi.SVI(rate=0.25 / 1.25), batches), rtol=1e-10)


@pytest.mark.parametrize("solver", [pdvi.PGSVI(rate=0.3), pdvi.SNGVI(rate=0.2)], ids=lambda s: type(s).__name__)
def test_with_a_nonconjugate_term_they_end_where_newton_ends(x64, solver):
    problem = without_locals(WithPotential())
    start, _ = problem.init(jax.random.key(0))
    newton = pdvi.Newton(steps=100, tol=1e-14)
    best = jax.jit(lambda start: newton.minimise(lambda lam: problem.evaluate(lam, ())[0].sum(), start))(start)
    reached = run(problem, solver, [np.arange(8)] * 300)
    np.testing.assert_allclose(reached.lam, best, atol=1e-8)


def test_pgsvi_with_a_nonconjugate_term_wants_natural_gradients(x64):
    class Without(WithPotential):
        natural_gradient = None

    with pytest.raises(ValueError, match="PGSVI needs a model with 'natural_gradient'; Without lacks"):
        run(without_locals(Without()), pdvi.PGSVI(), [np.arange(8)])


def test_the_natural_gradient_is_that_in_the_expectation_parameters(x64):
    """By autodiff through the map from expectation parameters to the globals."""
    problem = small_mixture()
    lam, local = problem.init(jax.random.key(0))
    globals_ = problem.unravel(lam + 0.1 * jnp.arange(lam.size) / lam.size)

    def objective(expectation):
        mean, half_square = expectation
        variance = -2 * half_square - mean**2
        return problem.evaluate(problem.ravel({"mean": mean, "log_var": jnp.log(variance)}), local)[0].sum()

    variance = jnp.exp(globals_["log_var"])
    expected = jax.jit(jax.grad(objective))((globals_["mean"], -0.5 * (globals_["mean"] ** 2 + variance)))
    slope = problem.unravel(evaluated(problem, problem.ravel(globals_), local)[1])
    natural = problem.model.natural_gradient(globals_, slope)
    np.testing.assert_allclose(natural["mean"], expected[0], rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(natural["log_var"], expected[1], rtol=1e-8, atol=1e-8)


# plain NumPy and optax ---------------------------------------------------------------------------------------


def numpy_quadratic():
    problem = small_quadratic()
    Q, v = np.asarray(problem.shards["Q"]), np.asarray(problem.shards["v"])
    return Q, v, np.ones(5), np.zeros((12, 5))


def test_sgd_is_that_of_numpy(x64):
    Q, v, lam, phi = numpy_quadratic()
    batches = draws(small_quadratic(), 3, 20)
    for batch in batches:
        x = np.concatenate([phi[batch], np.tile(lam, (3, 1))], 1)
        slope = 2 * np.einsum("bij,bj->bi", Q[batch], x) + v[batch]
        phi[batch] -= 0.2 * slope[:, :5]
        lam = lam - 0.01 * 12 / 3 * slope[:, 5:].sum(0)
    state = run(small_quadratic(), pdvi.SGD(rate=0.01, local_rate=0.2), batches)
    assert_same_point(state, (lam, phi), rtol=1e-10)


def test_control_variates_are_saga_of_numpy(x64):
    Q, v, lam, phi = numpy_quadratic()
    batches, table = draws(small_quadratic(), 3, 20), np.zeros((12, 5))
    for batch in batches:
        phi[batch] = [np.linalg.solve(2 * Q[i, :5, :5], -v[i, :5] - 2 * Q[i, :5, 5:] @ lam) for i in batch]
        x = np.concatenate([phi[batch], np.tile(lam, (3, 1))], 1)
        slope = (2 * np.einsum("bij,bj->bi", Q[batch], x) + v[batch])[:, 5:]
        lam = lam - 0.01 * (12 / 3 * (slope - table[batch]).sum(0) + table.sum(0))
        table[batch] = slope
    state = run(small_quadratic(), pdvi.ControlVariates(rate=0.01), batches)
    assert_same_point(state, (lam, phi), rtol=1e-10)
    np.testing.assert_allclose(state.own, table, rtol=1e-10)


def test_control_variates_move_locals_down_their_gradient_if_told(x64):
    batches = draws(small_quadratic(), 3, 1)
    one = run(small_quadratic(), pdvi.ControlVariates(rate=0.01, local_rate=0.2), batches)
    two = run(small_quadratic(), pdvi.SGD(rate=0.01, local_rate=0.2), batches)
    np.testing.assert_array_equal(one.local, two.local)


@pytest.mark.parametrize(
    ("solver", "reference"),
    [
        (pdvi.SGD(rate=0.05, local_rate=0.05), optax.sgd(0.05)),
        (pdvi.RMSProp(rate=0.05, local_rate=0.05), optax.rmsprop(0.05, decay=0.9, eps=1e-8)),
        (pdvi.Adam(rate=0.05, local_rate=0.05), optax.adam(0.05)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_with_all_shards_they_are_those_of_optax_on_one_vector(x64, solver, reference):
    problem = small_quadratic()
    start, unflatten = ravel_pytree(problem.init(jax.random.key(0)))
    slope = jax.jit(jax.grad(lambda x: problem.evaluate(*unflatten(x))[0].sum()))
    x, memory = start, reference.init(start)
    for _ in range(10):
        moves, memory = reference.update(slope(x), memory, x)
        x = optax.apply_updates(x, moves)
    assert_same_point(run(problem, solver, [np.arange(12)] * 10), unflatten(x), rtol=1e-9)


def test_logits_of_the_mixture_move_down_the_gradient_of_a_softmax(x64):
    """One SGD step on the locals, from the formula of the loss alone; padded rows stay empty."""
    where = layout(np.array([0] * 100 + [1] * 90 + [2] * 50))
    settings = EmpiricalBayes(X[:K], X.mean(0), np.full(D, 4.0), np.ones(D))
    problem = gaussian_mixture_problem(X, settings, where)
    state = run(problem, pdvi.SGD(rate=1e-9, local_rate=0.7), [np.arange(3)])
    variance = np.exp(np.asarray(problem.init(jax.random.key(0))[0][K * D :]).reshape(K, D))
    energy = -0.5 * ((X[:, None] - X[:K]) ** 2 + variance).sum(-1)
    phi = np.full((N, K), 1 / K)
    by_phi = np.log(phi) + 1 - energy
    logits = np.log(phi) - 0.7 * phi * (by_phi - (phi * by_phi).sum(1, keepdims=True))
    expected = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    np.testing.assert_allclose(where.unshard(state.local), expected, rtol=1e-9)
    assert (np.asarray(state.local)[~where.mask] == 0).all()


def test_rates_per_block(x64):
    """A rate per block is that of the block alone; the other block barely moves with a tiny one."""
    problem = without_locals(KnownVariance())
    batches = draws(problem, 2, 1)
    blocks = {"mean": 1e-3, "log_var": 1e-12}
    for solver in (pdvi.SGD, pdvi.RMSProp, pdvi.Adam, pdvi.ControlVariates):
        both = problem.unravel(run(problem, solver(rate=1e-3), batches).lam)
        one = problem.unravel(run(problem, solver(rate=blocks), batches).lam)
        start = problem.unravel(problem.init(jax.random.key(0))[0])
        np.testing.assert_allclose(one["mean"], both["mean"], rtol=1e-12)
        np.testing.assert_allclose(one["log_var"], start["log_var"], rtol=0, atol=1e-10)
        assert not np.allclose(both["log_var"], start["log_var"], rtol=0, atol=1e-8)


@pytest.mark.parametrize(
    ("rate", "says"),
    [
        ({"mean": 1.0}, r"`rate` must be a number or have the blocks \['.*'\], got \['mean'\]"),
        (-1.0, "`rate` must be positive and finite, got -1.0"),
        (float("nan"), "`rate` must be positive and finite, got nan"),
        ("fast", "`rate` must be positive and finite, got 'fast'"),
        ({"mean": 1.0, "log_var": 0.0}, "`rate` must be positive and finite, got 0.0"),
    ],
)
@pytest.mark.parametrize("solver", [pdvi.SGD, pdvi.ControlVariates])
def test_bad_rates_are_refused(x64, solver, rate, says):
    problem = small_mixture()
    with pytest.raises(ValueError, match=says):
        run(problem, solver(rate=rate), [np.arange(2)])


@pytest.mark.parametrize(
    ("solver", "says"),
    [
        (pdvi.SVI(rate=0.0), "`rate` must be positive"),
        (pdvi.SVI(delay=-1.0), "`delay` must be positive"),
        (pdvi.SNGVI(forgetting=-0.5), "`forgetting` must be positive"),
        (pdvi.PGSVI(rate={"mean": 1.0}), "`rate` must be positive"),
        (pdvi.SGD(local_rate=-1.0), "`local_rate` must be positive"),
        (pdvi.SVI(sweeps=0), "`sweeps` must be a whole number of at least 1, got 0"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_bad_settings_are_refused(x64, solver, says):
    with pytest.raises(ValueError, match=says):
        run(small_mixture(), solver, [np.arange(2)])


@pytest.mark.parametrize("name", ["SGD", "RMSProp", "Adam", "ControlVariates"])
def test_gradient_methods_need_nothing_but_a_loss(name):
    """Two blocks, no closed forms; the locals of control variates are then minimised numerically."""
    result = pdvi.fit(
        pdvi.datasets.tanh_regression(12), SOLVERS[name], batch_size=3, max_epochs=30, tol=0, log_every=10
    )
    assert result.objective < 0.9 * result.trace["objective"].iloc[0]


# the Potts mixture -------------------------------------------------------------------------------------------


@cache
def coupled():
    """Strong coupling across four patches, so that halos and sweeps matter."""
    tissue = pdvi.datasets.tissue_features(144, n_features=3, n_domains=3, noise=1.0, patchiness=5, seed=2)
    rows = tissue.X.astype(float)
    graph = graphs.weights(graphs.nearest(tissue.coordinates, 6), rows)
    where = layout(median_cuts(tissue.coordinates, 4))
    return potts_mixture_problem(rows, graph, empirical_bayes(rows, 3), where)


def test_the_local_gradient_is_that_of_the_whole_objective(x64):
    """Autodiff through all shards at once, where an edge between patches counts in both."""
    problem = coupled()
    lam, local = problem.init(jax.random.key(0))
    local = jax.random.dirichlet(jax.random.key(1), jnp.ones(3), local.shape[:2])
    whole = jax.jit(jax.grad(lambda phi: problem.evaluate(lam, phi)[0].sum()))(local)

    @jax.jit
    def offered_and_share(local):
        def one(phi, shard):
            offered = problem.model.local_gradient(phi, problem.unravel(lam), shard)
            return offered, jax.grad(problem.loss)(phi, lam, shard)[: local.shape[1]]

        return problem.map_shards(one, local)

    offered, share = offered_and_share(local)
    np.testing.assert_allclose(offered, whole, rtol=1e-9)
    assert not np.allclose(share, whole, rtol=1e-3)


def test_gradient_methods_want_the_local_gradient_where_shards_have_a_halo(x64):
    problem = coupled()

    class Plain:
        init_global, init_local, loss = problem.model.init_global, problem.model.init_local, problem.model.loss

    bare = pdvi.Problem(Plain, problem.shards, halo=problem.halo)
    for solver in (pdvi.SGD(), pdvi.RMSProp(), pdvi.Adam(), pdvi.ControlVariates(local_rate=0.1)):
        with pytest.raises(ValueError, match="needs a model with 'local_gradient'"):
            run(bare, solver, [np.arange(2)])


def test_svi_optimises_the_locals_of_a_visit(x64):
    """Twenty sweeps by default on the Potts mixture, fewer where they settle; the globals make one step."""
    problem = coupled()
    batch = [np.array([1])]
    swept = {sweeps: run(problem, pdvi.SVI(sweeps=sweeps, tol=0.0), batch).local[1] for sweeps in (1, 19, 20)}
    default = run(problem, pdvi.SVI(tol=0.0), batch).local[1]
    np.testing.assert_array_equal(default, swept[20])
    assert np.abs(swept[20] - swept[1]).max() > 1e-3
    early = run(problem, pdvi.SVI(tol=1.0), batch).local[1]
    np.testing.assert_array_equal(early, swept[1])
    # more sweeps, lower objective for the same globals
    lam, local = problem.init(jax.random.key(0))
    values = [evaluated(problem, lam, local.at[1].set(swept[s]))[0].sum() for s in (1, 20)]
    assert values[1] < values[0]


def test_robbins_monro_steps(x64):
    """a_t = rate (t + delay)^-kappa, never above 1: on a model where the natural parameters tell."""
    problem = without_locals(KnownVariance())
    lam, _ = problem.init(jax.random.key(0))
    full = np.arange(8)
    best = problem.unravel(run(problem, pdvi.CAVI(), [full]).lam)
    target, old = problem.model.natural(best), problem.model.natural(problem.unravel(lam))
    for steps in (1, 2, 3):
        state = run(problem, pdvi.SVI(rate=2.0, forgetting=0.7, delay=1.0), [full] * steps)
        left = np.prod([1 - min(1.0, 2.0 * (t + 1.0) ** -0.7) for t in range(steps)])
        for name, value in problem.model.natural(problem.unravel(state.lam)).items():
            np.testing.assert_allclose(value, target[name] + left * (old[name] - target[name]), rtol=1e-9)


def test_every_solver_says_where_it_comes_from():
    for solver in SOLVERS.values():
        text = type(solver).__doc__
        assert len(text.splitlines()) > 4, type(solver)
        assert "=" in text or "<-" in text, type(solver)
