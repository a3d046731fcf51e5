"""The mixture of negative binomials against SciPy's likelihood, and against L-BFGS on it."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import gammaln, log_softmax, logsumexp
from scipy.stats import nbinom
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.estimator_checks import check_estimator

import pdvi
from pdvi.estimators import count_problem
from pdvi.models.count_mixture import size_term

DATA = pdvi.datasets.counts(150, n_columns=4, n_components=2, seed=1)


def log_likelihood(X, s, log_mean, log_size, log_weight):
    """Of every row, by SciPy."""
    mean, size = s[:, None, None] * np.exp(log_mean), np.exp(log_size)
    return logsumexp(nbinom.logpmf(X[:, None], size, size / (size + mean)).sum(-1) + log_softmax(log_weight), axis=1)


def penalised(problem, X, s, log_mean, log_size, log_weight):
    """Minus the log-likelihood of all rows, and what the weak priors add."""
    relative = log_mean - np.log(np.asarray(problem.model.prior_mean))
    prior = (
        0.1 * (np.exp(relative) - relative - 1).sum() + 0.5 * (log_size**2).sum() / 9 - log_softmax(log_weight).sum()
    )
    return prior - log_likelihood(X, s, log_mean, log_size, log_weight).sum()


def split(x, K, G):
    return x[: K * G].reshape(K, G), x[K * G : K * G + G], x[K * G + G :]


def totals(X):
    return X.sum(1) / X.sum(1).mean()


@eqx.filter_jit
def evaluated(problem, lam):
    """Losses and slope at these globals, and the locals that fit them."""
    local = problem.init(jax.random.key(0))[1]
    local = problem.map_shards(lambda phi, shard: problem.model.local_step(phi, problem.unravel(lam), shard), local)
    return problem.evaluate(lam, local)


def test_the_size_term(x64):
    y, t = np.array([0, 1, 2, 30, 1_000])[:, None], np.array([1e-3, 0.1, 1, 5, 100.0])
    expected = gammaln(y + t) - gammaln(t) - (y + t) * np.log(y + t) + t * np.log(t) + y
    np.testing.assert_allclose(size_term(y, np.log(t)), expected, atol=1e-9, rtol=1e-11)
    # Stirling's formula for two large numbers, where log Gamma has no digits left in single precision
    large = size_term(jnp.float32(1e6), jnp.float32(np.log(1e4)))
    np.testing.assert_allclose(large, -0.5 * np.log(1e6 / 1e4 + 1), atol=1e-4)


def test_after_a_local_step_the_loss_is_the_likelihood(x64):
    """So is its slope: locals are at their best. Shards of 21 and 22 rows are padded."""
    X, problem = DATA.X.toarray(), count_problem(DATA.X, 2, n_shards=7)
    lam = problem.init(jax.random.key(0))[0]
    lam = lam + 0.2 * jax.random.normal(jax.random.key(1), lam.shape)
    losses, slope = evaluated(problem, lam)

    def exact(x):
        return penalised(problem, X, totals(X), *split(x, 2, 4))

    lam = np.asarray(lam)
    np.testing.assert_allclose(losses.sum(), exact(lam), rtol=1e-10)
    for place in (0, 9, 13):
        ends = [exact(lam + sign * 1e-5 * np.eye(len(lam))[place]) for sign in (-1, 1)]
        np.testing.assert_allclose(slope[place], (ends[1] - ends[0]) / 2e-5, rtol=1e-5, atol=1e-5)


def test_the_partition_does_not_change_the_objective(x64):
    values = []
    for n_shards in (1, 7):
        problem = count_problem(DATA.X, 2, n_shards=n_shards)
        lam, local = problem.init(jax.random.key(0))
        values.append(float(eqx.filter_jit(problem.evaluate)(lam, local)[0].sum()))
    np.testing.assert_allclose(values[0], values[1], rtol=1e-12)


@pytest.mark.slow
def test_it_ends_where_quasi_newton_steps_on_the_likelihood_end(x64):
    X = DATA.X.toarray()
    problem = count_problem(DATA.X, 2, n_shards=7)
    result = pdvi.fit(problem, pdvi.P2DVI(scale=0.5), tol=1e-10, max_epochs=100)
    assert result.converged

    def exact(x):
        return penalised(problem, X, totals(X), *split(x, 2, 4))

    truth = np.concatenate([np.log(DATA.means).ravel(), -np.log(DATA.dispersions), np.zeros(2)])
    best = minimize(exact, truth, method="L-BFGS-B", options={"maxiter": 1_000, "ftol": 1e-13, "maxfun": 100_000})
    np.testing.assert_allclose(result.objective, best.fun, atol=1e-4)
    order = [0, 1] if np.abs(result.global_params["log_mean"][0] - best.x[:4]).max() < 0.1 else [1, 0]
    mean, size, weight = split(best.x, 2, 4)
    np.testing.assert_allclose(result.global_params["log_mean"][order], mean, atol=1e-2)
    np.testing.assert_allclose(result.global_params["log_size"], size, atol=1e-2)
    np.testing.assert_allclose(log_softmax(result.global_params["log_weight"])[order], log_softmax(weight), atol=1e-2)
    assert result.trace["grad_norm"].iloc[-1] < 1e-4 * result.trace["grad_norm"].iloc[0]


@pytest.mark.slow
def test_the_estimator_finds_groups_that_come_sorted():
    data = pdvi.datasets.counts(500, n_columns=30, n_components=3, in_order=True, seed=2)
    found = pdvi.CountMixture(3, random_state=0).fit(data.X)
    assert found.converged_
    assert pdvi.metrics.ari(data.labels, found.labels_) > 0.95
    chances = found.predict_proba(data.X)
    np.testing.assert_allclose(chances.sum(1), 1)
    np.testing.assert_array_equal(chances.argmax(1), found.predict(data.X))
    X = data.X.toarray()
    parameters = np.log(found.means_), -np.log(found.dispersions_), np.log(found.weights_)
    expected = log_likelihood(X, totals(X), *parameters)
    np.testing.assert_allclose(found.score_samples(data.X), expected, rtol=1e-9)
    problem = count_problem(data.X, 3)
    np.testing.assert_allclose(found.elbo_, -penalised(problem, X, totals(X), *parameters), atol=0.05)
    ratio = found.dispersions_ / data.dispersions
    assert 0.8 < np.median(ratio) < 1.25
    sparse = found.means_
    np.testing.assert_array_equal(found.fit(X).means_, sparse)
    with pytest.warns(ConvergenceWarning, match="CountMixture did not converge in 1 epochs"):
        pdvi.CountMixture(3, max_epochs=1).fit(X)


@pytest.mark.slow
def test_size_factors_that_are_given():
    """Twice the size factors, half the means."""
    s = DATA.size_factors
    once, twice = (pdvi.CountMixture(2, random_state=0).fit(DATA.X, size_factors=c * s) for c in (1, 2))
    np.testing.assert_allclose(once.means_, 2 * twice.means_, rtol=0.02)
    assert once.score(DATA.X, size_factors=s) == pytest.approx(twice.score(DATA.X, size_factors=2 * s), abs=1e-3)


@pytest.mark.slow
def test_columns_and_rows_without_counts():
    X = DATA.X.toarray()
    X[:3], X[:, 0] = 0, 0
    found = pdvi.CountMixture(2, random_state=0).fit(X)
    assert found.converged_
    assert np.isfinite(found.means_).all()
    assert (found.means_[:, 0] < 0.1).all()
    np.testing.assert_allclose(found.predict_proba(X[:3]), np.tile(found.weights_, (3, 1)), atol=0.05)


@pytest.mark.slow
def test_on_a_disk_it_is_the_same(tmp_path):
    problem = count_problem(DATA.X, 2, n_shards=7)
    pdvi.write_store(tmp_path / "store", problem)
    stored = pdvi.Problem.from_store(tmp_path / "store")
    memory, disk = (pdvi.fit(where, pdvi.P2DVI(scale=0.5), max_epochs=3, tol=0) for where in (problem, stored))
    for name, value in memory.global_params.items():
        np.testing.assert_allclose(disk.global_params[name], value, rtol=1e-3, atol=1e-4)


def test_what_it_refuses():
    with pytest.raises(ValueError, match="Negative values in data passed to CountMixture"):
        pdvi.CountMixture(2).fit([[1, -1], [0, 1]])
    with pytest.raises(ValueError, match="`X` must have at least one count, got 2 rows without any"):
        pdvi.CountMixture(2).fit(np.zeros((2, 3)))
    with pytest.raises(ValueError, match=r"`n_components` must be between 1 and the number of rows \(150\), got 151"):
        pdvi.CountMixture(151).fit(DATA.X)
    with pytest.raises(ValueError, match="`size_factors` must be positive, one for each of the 150 rows, got 0"):
        pdvi.CountMixture(2).fit(DATA.X, size_factors=np.zeros(150))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
def test_scikit_learns_own_checks():
    reason = "asks for a classifier's tags wherever there is `predict_proba`; sparse counts are tested above"
    sparse = dict.fromkeys(["check_estimator_sparse_array", "check_estimator_sparse_matrix"], reason)
    check_estimator(pdvi.CountMixture(n_components=2, random_state=0, max_epochs=5), expected_failed_checks=sparse)
