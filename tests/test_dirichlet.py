"""Dirichlet blocks against SciPy's special functions and its generic minimiser, in double precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import digamma, gammaln, polygamma

from pdvi.models import dirichlet

augmented_step = jax.jit(dirichlet.augmented_step)
PRIOR = np.array([0.1, 1.0, 0.5, 3.0, 0.05])


def objective(rho, counts, fraction, centre, dual, penalty):
    """One row, as the specification has it."""
    alpha = np.exp(rho)
    expected = digamma(alpha) - digamma(alpha.sum())
    divergence = gammaln(alpha.sum()) - gammaln(alpha).sum() - gammaln(PRIOR.sum()) + gammaln(PRIOR).sum()
    divergence += (alpha - PRIOR) @ expected
    away = rho - centre
    return fraction * divergence - counts @ expected + dual @ away + 0.5 * penalty @ away**2


def gradient(rho, counts, fraction, centre, dual, penalty):
    """Its slope in rho."""
    alpha = np.exp(rho)
    excess = fraction * (alpha - PRIOR) - counts
    slope = excess * polygamma(1, alpha) - excess.sum() * polygamma(1, alpha.sum())
    return alpha * slope + dual + penalty * (rho - centre)


def subproblems(penalty, size=40, seed=0):
    """Rows whose counts and centres lie between 1e-3 and 1e6, some counts zero."""
    rng = np.random.default_rng(seed)
    low, high = np.log(1e-3), np.log(1e6)
    fraction = 0.05
    counts = fraction * np.exp(rng.uniform(low, high, (size, 5))) * (rng.random((size, 5)) < 0.8)
    centre = rng.uniform(low, high, (size, 5))
    # a penalty is a share of the curvature somewhere between the centre and the counts' own optimum
    curvature = fraction * np.exp(rng.uniform(0, 0.5, (size, 5)) * centre)
    penalties = penalty * curvature
    dual = penalties * rng.standard_normal((size, 5)) * rng.choice([0, 0.1, 1.0], (size, 1))
    return counts, fraction, centre, dual, penalties


@pytest.mark.parametrize("penalty", [1e-2, 0.3, 1.0, 30.0, 1e4])
def test_the_augmented_step_is_the_minimiser(x64, penalty):
    counts, fraction, centre, dual, penalties = subproblems(penalty)
    found = np.asarray(augmented_step(counts, PRIOR, fraction, centre, dual, penalties))
    for k, rho in enumerate(found):
        row = (counts[k], fraction, centre[k], dual[k], penalties[k])
        alpha = np.exp(rho)
        terms = (fraction * (alpha + PRIOR) + counts[k]) * alpha * polygamma(1, alpha)
        terms += np.abs(dual[k]) + penalties[k] * (np.abs(rho) + np.abs(centre[k]))
        # exact to rounding: that of the largest term of a row reaches the others through their common total
        assert np.abs(gradient(rho, *row)).max() <= 1e-13 * terms.max()
        starts = (centre[k], np.log(PRIOR + counts[k] / fraction), rho + 0.1)
        others = [minimize(objective, start, args=row, jac=gradient, method="L-BFGS-B") for start in starts]
        lowest = min(other.fun for other in others if np.isfinite(other.fun))
        rounding = 1e-15 * (fraction * (alpha + PRIOR) + counts[k]) @ (1 + np.abs(rho))
        assert objective(rho, *row) <= lowest + 10 * rounding + 1e-12 * abs(lowest)


def test_without_augmentation_the_closed_form_comes_out_exactly(x64):
    counts, _, centre, *_ = subproblems(1.0)
    zero = np.zeros_like(counts)
    for fraction in (1.0, 0.05):
        found = augmented_step(counts, PRIOR, fraction, centre, zero, zero)
        assert np.array_equal(found, jnp.log(PRIOR + counts / fraction))
        slope = [gradient(rho, n, fraction, 0.0, 0.0, 0.0) for rho, n in zip(np.asarray(found), counts)]
        np.testing.assert_allclose(slope, 0, atol=1e-9 * counts.max())


def test_rows_do_not_depend_on_each_other(x64):
    """So that it does not matter which rows share a loop."""
    counts, fraction, centre, dual, penalties = subproblems(1.0, size=12)
    together = augmented_step(counts, PRIOR, fraction, centre, dual, penalties)
    for k in range(0, 12, 3):
        row = slice(k, k + 1)
        alone = augmented_step(counts[row], PRIOR, fraction, centre[row], dual[row], penalties[row])
        np.testing.assert_allclose(alone[0], together[k], rtol=1e-9)


def test_single_precision_agrees_with_double():
    problem = subproblems(1.0)
    with jax.enable_x64(True):
        exact = np.asarray(augmented_step(problem[0], PRIOR, *problem[1:]))
    single = [jnp.asarray(part, jnp.float32) for part in problem]
    found = np.asarray(augmented_step(single[0], jnp.asarray(PRIOR, jnp.float32), *single[1:]))
    assert found.dtype == np.float32
    assert np.isfinite(found).all()
    values = [
        [objective(rho, n, problem[1], c, m, p) for rho, n, c, m, p in zip(point, problem[0], *problem[2:])]
        for point in (exact, found.astype(float))
    ]
    alpha = np.exp(exact)
    terms = ((problem[1] * (alpha + PRIOR) + problem[0]) * (1 + np.abs(exact))).sum(1) + np.abs(values[0])
    assert (np.abs(np.subtract(*values)) <= 8 * np.finfo(np.float32).eps * terms).all()


def test_divergence_and_expected_log(x64):
    rng = np.random.default_rng(1)
    rho = rng.uniform(np.log(1e-3), np.log(1e6), (200, 5))
    zero = np.zeros(5)
    expected = [objective(row, zero, 1.0, zero, zero, zero) for row in rho]
    np.testing.assert_allclose(dirichlet.divergence(rho, PRIOR), expected, rtol=1e-9, atol=1e-7)
    at_prior = dirichlet.divergence(jnp.log(PRIOR), PRIOR)
    np.testing.assert_allclose(at_prior, 0, atol=1e-13)
    alpha = np.exp(rho)
    logs = digamma(alpha) - digamma(alpha.sum(1, keepdims=True))
    np.testing.assert_allclose(dirichlet.expected_log(rho), logs, rtol=1e-12, atol=1e-12)


def test_the_divergence_keeps_its_digits_in_single_precision():
    """Its terms are a million times larger than it is."""
    rho = np.log(np.array([[1e6, 2e6, 5e5, 3e6, 1e6]]))
    with jax.enable_x64(True):
        exact = float(dirichlet.divergence(rho, PRIOR)[0])
    assert float(dirichlet.divergence(jnp.asarray(rho, jnp.float32), PRIOR)[0]) == pytest.approx(exact, rel=1e-6)


def test_autodiff_agrees(x64):
    rng = np.random.default_rng(2)
    rho = rng.uniform(-5, 10, (30, 5))
    counts = rng.gamma(1.0, 100.0, (30, 5))

    def loss(rho):
        return jnp.sum(0.3 * dirichlet.divergence(rho, PRIOR)) - jnp.sum(counts * dirichlet.expected_log(rho))

    zero = np.zeros(5)
    expected = np.array([gradient(row, n, 0.3, zero, zero, zero) for row, n in zip(rho, counts)])
    np.testing.assert_allclose(
        jax.grad(loss)(jnp.asarray(rho)), expected, rtol=1e-10, atol=1e-10 * np.abs(expected).max()
    )


def test_curvature_is_that_at_the_minimum(x64):
    rho = np.random.default_rng(3).uniform(-3, 8, 5)
    counts = 0.2 * (np.exp(rho) - PRIOR)  # whose minimum is at rho; some are negative, which does not matter here

    def loss(rho):
        return 0.2 * dirichlet.divergence(rho, PRIOR) - jnp.sum(counts * dirichlet.expected_log(rho))

    hessian = jax.jit(jax.hessian(loss))(jnp.asarray(rho))
    np.testing.assert_allclose(dirichlet.curvature(jnp.asarray(rho), 0.2), np.diagonal(hessian), rtol=1e-9)


def test_the_natural_gradient_is_the_gradient_in_the_expectation_parameters(x64):
    rng = np.random.default_rng(4)
    rho, counts = rng.uniform(-3, 6, (4, 5)), rng.gamma(1.0, 10.0, (4, 5))
    slope = np.array([gradient(row, n, 1.0, 0.0, 0.0, 0.0) for row, n in zip(rho, counts)])
    found = dirichlet.natural_gradient(jnp.asarray(rho), jnp.asarray(slope))
    jacobian = jax.jit(jax.jacobian(dirichlet.expected_log))
    for k, row in enumerate(rho):
        # the chain rule: d loss / d rho = (d E log theta / d rho)' (d loss / d E log theta)
        by_rho = jacobian(jnp.asarray(row))
        np.testing.assert_allclose(by_rho.T @ found[k], slope[k], rtol=1e-8, atol=1e-8)
    # a conjugate model's natural gradient leads to the optimum in one step of length one
    np.testing.assert_allclose(np.exp(rho) - found, PRIOR + counts, rtol=1e-8)
