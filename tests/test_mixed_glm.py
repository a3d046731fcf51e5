"""Mixed models against statsmodels, and their integrals against quadrature."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.integrate import quad

import pdvi
from pdvi.estimators.mixed_glm import parsed
from pdvi.models.mixed_glm import covariance_factor, expected_softplus, triangle


@pytest.mark.parametrize(("m", "s"), [(0.3, 0.5), (-2.0, 1.0), (4.0, 2.0), (0.0, 1e-4)])
def test_the_expectation_of_a_softplus(x64, m, s):
    def exact(m, s):
        return quad(lambda e: np.logaddexp(0, m + s * e) * np.exp(-e * e / 2) / np.sqrt(2 * np.pi), -12, 12)[0]

    np.testing.assert_allclose(expected_softplus(jnp.asarray(m), jnp.asarray(s)), exact(m, s), rtol=1e-4)


def test_its_derivatives_are_those_of_the_sum_over_nodes(x64):
    nodes, weights = np.polynomial.hermite_e.hermegauss(20)

    def plain(m, s):
        return jax.nn.softplus(m + s * jnp.asarray(nodes)) @ jnp.asarray(weights / weights.sum())

    at = jnp.asarray(0.4), jnp.asarray(1.3)
    for derivative in (jax.grad, jax.hessian):
        np.testing.assert_allclose(
            jnp.asarray(derivative(expected_softplus, argnums=(0, 1))(*at)),
            jnp.asarray(derivative(plain, argnums=(0, 1))(*at)),
            rtol=1e-10,
        )


def test_triangles():
    np.testing.assert_allclose(triangle(jnp.asarray([1.0, 2.0, 3.0])), [[1, 0], [2, 3]])
    np.testing.assert_allclose(
        covariance_factor(jnp.asarray([[0.0, 2.0, 0.0, 4.0, 5.0, 0.0]])), [[[1, 0, 0], [2, 1, 0], [4, 5, 1]]]
    )


def test_formulas():
    assert parsed("y ~ x + (1 + x | g)") == ("y ~ x", "1 + x", "g")
    assert parsed("y ~ (1 | g) + x") == ("y ~ + x", "1", "g")
    assert parsed("y ~ (1 | g)") == ("y ~ 1", "1", "g")
    for wrong in ("y ~ x", "y ~ (1 | g) + (1 | h)", "y ~ (1 || g)", "(1 | g)", 3):
        with pytest.raises(ValueError, match="`formula` must have a response and one term of random effects"):
            parsed(wrong)


def test_what_it_refuses():
    pytest.importorskip("formulaic")
    table = pdvi.datasets.grouped(5, size=3).table
    with pytest.raises(ValueError, match="`family` must be one of"):
        pdvi.MixedGLM("y ~ x1 + (1 | group)", family="gamma").fit(table)
    with pytest.raises(ValueError, match="'g' not in the columns of `data`"):
        pdvi.MixedGLM("y ~ x1 + (1 | g)").fit(table)
    with pytest.raises(ValueError, match="the response must be 0 or 1 for family='bernoulli'"):
        pdvi.MixedGLM("y ~ x1 + (1 | group)", family="bernoulli").fit(table)


@pytest.mark.slow
def test_normal_observations_give_what_statsmodels_gives():
    """The ELBO is the likelihood: estimates, standard errors, covariance and log-likelihood."""
    pytest.importorskip("formulaic")
    api = pytest.importorskip("statsmodels.formula.api")
    table = pdvi.datasets.grouped(300, size=8, n_slopes=1).table
    ours = pdvi.MixedGLM("y ~ x1 + x2 + (1 + x1 | group)").fit(table)
    theirs = api.mixedlm("y ~ x1 + x2", table, groups="group", re_formula="1 + x1").fit(reml=False)
    assert ours.converged_
    np.testing.assert_allclose(ours.elbo_, theirs.llf, atol=0.02)
    np.testing.assert_allclose(ours.coef_, theirs.fe_params, atol=0.02 * float(ours.coef_sd_.min()))
    np.testing.assert_allclose(ours.coef_sd_, theirs.bse_fe, rtol=0.01)
    np.testing.assert_allclose(ours.covariance_, theirs.cov_re, rtol=0.01)
    np.testing.assert_allclose(ours.sigma_, np.sqrt(theirs.scale), rtol=1e-3)
    effects = np.stack([theirs.random_effects[name].to_numpy() for name in ours.random_effects_.index])
    np.testing.assert_allclose(ours.random_effects_, effects, atol=0.01)
