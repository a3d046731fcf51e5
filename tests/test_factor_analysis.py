"""Factor analysis against scikit-learn's, probabilistic PCA against its closed form, both against the likelihood."""

import equinox as eqx
import jax
import numpy as np
import pytest
from scipy.stats import multivariate_normal
from sklearn.decomposition import PCA
from sklearn.decomposition import FactorAnalysis as Reference
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.estimator_checks import check_estimator

import pdvi
from pdvi.estimators import factor_problem
from pdvi.models.factor_analysis import posterior

DATA = pdvi.datasets.factors(300, n_columns=9, n_factors=2, seed=1)


def reference(X, k):
    """Scikit-learn's, far beyond its own tolerance, on columns of size one; its log-likelihood in the rows' units."""
    scale = X.std(0)
    found = Reference(k, tol=1e-10, max_iter=20_000, svd_method="lapack").fit(X / scale)
    return found.score(X / scale) * len(X) - len(X) * np.log(scale).sum(), found, scale


def likelihood(problem, globals_):
    """Minus the log-likelihood of all real rows, by SciPy."""
    W, log_t = np.asarray(globals_["loading"]), np.asarray(globals_["log_precision"])
    noise = np.broadcast_to(np.exp(-log_t), len(W))
    rows = np.asarray(problem.shards["x"])[np.asarray(problem.shards["mask"]) > 0]
    return -multivariate_normal(np.asarray(globals_["mean"]), W @ W.T + np.diag(noise)).logpdf(rows).sum()


@eqx.filter_jit
def evaluated(problem, lam):
    """Losses and slope at these globals, and the locals that fit them."""
    local = problem.init(jax.random.key(0))[1]
    local = problem.map_shards(lambda phi, shard: problem.model.local_step(phi, problem.unravel(lam), shard), local)
    return problem.evaluate(lam, local)


@pytest.mark.parametrize("noise", ["diagonal", "isotropic"])
def test_after_a_local_step_the_loss_is_the_likelihood(x64, noise):
    """So is its slope: locals are at their best. Shards of 42 and 43 rows are padded."""
    problem, _ = factor_problem(DATA.X, 2, noise=noise, n_shards=7)
    lam = problem.init(jax.random.key(0))[0] + 0.2 * jax.random.normal(jax.random.key(1), (problem.n_global,))
    losses, slope = evaluated(problem, lam)
    np.testing.assert_allclose(losses.sum(), likelihood(problem, problem.unravel(lam)), rtol=1e-10)
    step = 1e-5
    for place in (0, problem.n_global - 1):
        ends = [likelihood(problem, problem.unravel(lam.at[place].add(sign * step))) for sign in (-1, 1)]
        np.testing.assert_allclose(slope[place], (ends[1] - ends[0]) / (2 * step), rtol=1e-5)


def test_the_partition_does_not_change_the_objective(x64):
    values = []
    for n_shards in (1, 7):
        problem, _ = factor_problem(DATA.X, 2, n_shards=n_shards)
        lam, local = problem.init(jax.random.key(0))
        local = jax.tree.map(lambda leaf: leaf + 0.3, local)
        values.append(float(eqx.filter_jit(problem.evaluate)(lam, local)[0].sum()))
    np.testing.assert_allclose(values[0], values[1], rtol=1e-12)


def test_it_ends_where_scikit_learn_ends(x64):
    best, theirs, scale = reference(DATA.X, 2)
    ours = pdvi.FactorAnalysis(2, random_state=0, tol=1e-10).fit(DATA.X)
    assert ours.converged_
    np.testing.assert_allclose(ours.elbo_, best, atol=1e-5)
    np.testing.assert_allclose(ours.noise_variance_, theirs.noise_variance_ * scale**2, rtol=1e-3)
    np.testing.assert_allclose(ours.get_covariance(), theirs.get_covariance() * np.outer(scale, scale), atol=2e-3)
    np.testing.assert_allclose(ours.score_samples(DATA.X).sum(), ours.elbo_, atol=1e-6)
    np.testing.assert_allclose(ours.get_precision() @ ours.get_covariance(), np.eye(9), atol=1e-10)
    np.testing.assert_allclose(np.abs(ours.transform(DATA.X)), np.abs(theirs.transform(DATA.X / scale)), atol=5e-3)


def test_equal_noise_gives_probabilistic_pca(x64):
    """Tipping and Bishop's closed form, as scikit-learn's PCA has it."""
    theirs = PCA(2, svd_solver="full").fit(DATA.X)
    ours = pdvi.FactorAnalysis(2, noise="isotropic", random_state=0, tol=1e-10).fit(DATA.X)
    n = len(DATA.X)
    spectrum = np.linalg.eigvalsh(np.cov(DATA.X.T, bias=True))[::-1]  # PCA divides by n - 1, the likelihood by n
    rest = spectrum[2:].mean()
    np.testing.assert_allclose(ours.noise_variance_, rest, rtol=1e-5)
    np.testing.assert_allclose((ours.components_**2).sum(1), spectrum[:2] - rest, rtol=1e-4)
    cosines = (ours.components_ * theirs.components_).sum(1) / np.linalg.norm(ours.components_, axis=1)
    np.testing.assert_allclose(np.abs(cosines), 1, atol=1e-6)
    log_det = np.log(spectrum[:2]).sum() + 7 * np.log(rest)
    np.testing.assert_allclose(ours.elbo_, -0.5 * n * (log_det + 9 + 9 * np.log(2 * np.pi)), atol=1e-5)


def test_single_precision_units_and_order_do_not_matter():
    """Rows sorted along the first factor, columns from 1 to a million: the likelihood is the same."""
    units = 2.0 ** np.arange(0, 27, 3)
    best = reference(DATA.X, 2)[0] - len(DATA.X) * np.log(units).sum()
    sorted_rows = DATA.X[np.argsort(DATA.factors[:, 0])] * units
    ours = pdvi.FactorAnalysis(2, random_state=0).fit(sorted_rows)
    assert ours.converged_
    assert best - 0.02 < ours.score(sorted_rows) * len(sorted_rows) < best + 1e-3
    np.testing.assert_allclose(ours.elbo_, best, atol=0.03)
    plain = pdvi.FactorAnalysis(2, random_state=0).fit(sorted_rows / units)
    np.testing.assert_allclose(ours.components_ / units, plain.components_, rtol=1e-6)


@pytest.mark.slow
def test_on_a_disk_it_is_the_same(tmp_path):
    problem, _ = factor_problem(DATA.X, 2, n_shards=7)
    pdvi.write_store(tmp_path / "store", problem)
    stored = pdvi.Problem.from_store(tmp_path / "store")
    settings = {"max_epochs": 3, "tol": 0.0}
    memory, disk = (pdvi.fit(where, pdvi.P2DVI(), **settings) for where in (problem, stored))
    for name, value in memory.global_params.items():
        np.testing.assert_allclose(disk.global_params[name], value, rtol=1e-4, atol=1e-5)


def test_the_factors_that_made_the_rows_are_found(x64):
    covariance, to_factors = posterior({"loading": DATA.loading, "log_precision": -np.log(DATA.noise_variance)})
    best = (DATA.X - DATA.mean) @ to_factors
    found = pdvi.FactorAnalysis(2, random_state=0).fit_transform(DATA.X)
    left = best - found @ np.linalg.lstsq(found, best, rcond=None)[0]
    assert (left**2).mean() < 0.1 * np.diagonal(covariance).mean()


@pytest.mark.slow
def test_a_constant_column_is_taken_as_it_is():
    X = np.column_stack([DATA.X, np.full(len(DATA.X), 7.0)])
    found = pdvi.FactorAnalysis(2, random_state=0).fit(X)
    np.testing.assert_allclose(found.mean_[-1], 7.0)
    np.testing.assert_allclose(found.components_[:, -1], 0, atol=1e-4)
    np.testing.assert_allclose(found.noise_variance_[-1], 1e-4, rtol=1e-3)
    rest = pdvi.FactorAnalysis(2, random_state=0).fit(DATA.X)
    np.testing.assert_allclose(found.noise_variance_[:-1], rest.noise_variance_, rtol=0.01)


@pytest.mark.slow
def test_a_column_given_twice_ends_at_the_least_noise():
    """Where scikit-learn's likelihood grows without end. Ours is nearly flat: 5e-4 nats an epoch after 200 of them."""
    found = pdvi.FactorAnalysis(2, tol=1e-6, random_state=0).fit(np.column_stack([DATA.X, DATA.X[:, 0]]))
    assert found.converged_
    np.testing.assert_allclose(found.noise_variance_[[0, -1]], 1e-4 * DATA.X[:, 0].var(), rtol=1e-3)


def test_what_it_refuses():
    with pytest.raises(ValueError, match=r"`n_components` must be between 1 and the number of columns \(9\), got 10"):
        pdvi.FactorAnalysis(10).fit(DATA.X)
    with pytest.raises(ValueError, match=r"`noise` must be one of \('diagonal', 'isotropic'\), got 'full'"):
        pdvi.FactorAnalysis(2, noise="full").fit(DATA.X)
    with pytest.warns(ConvergenceWarning, match="FactorAnalysis did not converge in 1 epochs"):
        pdvi.FactorAnalysis(2, max_epochs=1).fit(DATA.X)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
def test_scikit_learns_own_checks():
    check_estimator(pdvi.FactorAnalysis(n_components=1, random_state=0, max_epochs=5))
