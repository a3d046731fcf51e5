"""What every model owes, by automatic differentiation: each closed form that it offers is what it says."""

import runpy
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import pdvi
from models_for_tests import free_problem, offset_problem, tissue_problem, two_samples
from pdvi.core.model import (
    Conjugate,
    Constrained,
    Coupled,
    Curved,
    Exact,
    GlobalStep,
    LocalStep,
    Natural,
    NaturalGradient,
    offers,
)
from pdvi.estimators import count_problem, factor_problem
from pdvi.shards.stacking import take

SKELETON = runpy.run_path(str(Path(__file__).parents[2] / "docs/skeletons/model.py"))
PROBLEMS = {
    "quadratic": lambda: pdvi.datasets.quadratic(n=6, condition=20, heterogeneity=0.8, linear=0.3),
    "quartic": lambda: pdvi.datasets.quartic(6),
    "tanh regression": lambda: pdvi.datasets.tanh_regression(6),
    "gaussian mixture": lambda: pdvi.datasets.mixture(200, dim=2, n_components=3, batch_size=24, seed=1).problem(),
    "free mixture": lambda: free_problem(),
    "potts mixture": lambda: tissue_problem(300, 5),
    "samples with offsets": lambda: offset_problem(two_samples(300), 5)[0],
    "latent dirichlet": lambda: pdvi.datasets.documents(40, n_words=12, n_topics=3, length=20).problem(n_shards=3),
    "factor analysis": lambda: factor_problem(pdvi.datasets.factors(60, n_columns=6).X, 2, n_shards=4)[0],
    "count mixture": lambda: count_problem(pdvi.datasets.counts(60, n_columns=4, n_components=2).X, 2, n_shards=4),
    "skeleton": lambda: pdvi.Problem(SKELETON["RobustRegression"](3), SKELETON["simulate"](60, n_shards=4)[0]),
}


@cache
def problem_of(name):
    return PROBLEMS[name]()


SLOW = ("latent dirichlet", "count mixture", "samples with offsets")  # to compile: `make test` leaves them out


@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in PROBLEMS],
    ids=lambda name: name.replace(" ", "_"),
)
def problem(request, x64):
    return problem_of(request.param)


def somewhere(problem, b=1):
    """Globals near the start, the locals of a shard after a step from there, as its model sees them; and the shard."""
    lam, local = problem.init(jax.random.key(0))
    lam = lam + 0.1 * jax.random.normal(jax.random.key(1), lam.shape)
    shard = take(problem.shards, b)
    phi = problem.read(local, jnp.asarray(b))
    if offers(problem.model, LocalStep):
        own = problem.model.local_step(phi, problem.unravel(lam), shard)
        phi = jax.tree.map(lambda new, old: jnp.concatenate([new, old[new.shape[0] :]]), own, phi)
    return lam, phi, shard


def augmentation(problem, lam):
    dual = 0.1 * jax.random.normal(jax.random.key(2), lam.shape)
    return problem.augmentation(lam, dual, jnp.full(lam.shape, 0.7))


def wanting(problem, ability):
    if not offers(problem.model, ability):
        pytest.skip(f"{type(problem.model).__name__} offers no {ability.__name__}")


def test_the_loss_is_a_finite_number(problem):
    lam, phi, shard = somewhere(problem)
    assert np.isfinite(problem.loss(phi, lam, shard))


def test_a_local_step_does_not_raise_the_objective(problem):
    """That of all shards: where they touch, a shard's own loss has only half of what it shares."""
    wanting(problem, LocalStep)
    lam, local = problem.init(jax.random.key(0))

    def swept(local):
        def step(phi, shard):
            return problem.model.local_step(phi, problem.unravel(lam), shard)

        return problem.map_shards(step, local)

    values = []
    for _ in range(4):
        values.append(float(problem.evaluate(lam, local)[0].sum()))
        local = swept(local)
    assert (np.diff(values) <= 1e-9 * np.abs(values[:-1])).all()
    assert values[-1] < values[0]


def test_a_global_step_is_a_minimiser(problem):
    wanting(problem, Conjugate)
    lam, phi, shard = somewhere(problem)
    added = augmentation(problem, lam)
    best = problem.ravel(problem.model.global_step(problem.model.statistics(phi, shard), added))
    slope = jax.grad(lambda x: problem.loss(phi, x, shard) + added(problem.unravel(x)))(best)
    scale = jnp.abs(jax.grad(problem.loss, argnums=1)(phi, lam, shard)).max()
    np.testing.assert_allclose(slope, 0, atol=1e-8 * max(1, float(scale)))


def test_improved_globals_are_better_and_end_at_a_minimiser(problem):
    wanting(problem, GlobalStep)
    lam, phi, shard = somewhere(problem)
    added = augmentation(problem, lam)

    @jax.jit
    def look(x):
        better = problem.model.improve_globals(phi, problem.unravel(x), shard, added)
        value, slope = jax.value_and_grad(lambda x: problem.loss(phi, x, shard) + added(problem.unravel(x)))(x)
        return value, slope, problem.ravel(better)

    values, x = [], lam
    for _ in range(8):
        value, slope, x = look(x)
        values.append(float(value))
    assert (np.diff(values) <= 1e-9 * np.abs(values[:-1])).all()
    assert values[-1] < values[0]
    np.testing.assert_allclose(slope, 0, atol=1e-8 * max(1, abs(value)))


def test_a_joint_step_is_a_minimiser(problem):
    wanting(problem, Exact)
    lam, phi, shard = somewhere(problem)
    added = augmentation(problem, lam)
    local, globals_ = problem.model.joint_step(phi, shard, added)
    by_both = jax.grad(lambda p, x: problem.loss(p, x, shard) + added(problem.unravel(x)), argnums=(0, 1))
    np.testing.assert_allclose(ravel_pytree(by_both(local, problem.ravel(globals_)))[0], 0, atol=1e-8)


def test_the_curvature_has_the_units_of_the_hessian(problem):
    """A model may give a typical value instead of that at the point: it must be positive and of the same size."""
    wanting(problem, Curved)
    lam, phi, shard = somewhere(problem)
    offered = problem.ravel(problem.model.curvature(phi, problem.unravel(lam), shard))
    exact = jnp.diagonal(jax.hessian(lambda x: problem.loss(phi, x, shard))(lam))
    assert (offered > 0).all()
    ratio = np.asarray(offered).sum() / np.abs(np.asarray(exact)).sum()
    assert 0.05 < ratio < 20


def test_natural_parameters_and_back(problem):
    wanting(problem, Natural)
    globals_ = problem.unravel(somewhere(problem)[0])
    again = problem.model.from_natural(problem.model.natural(globals_))
    np.testing.assert_allclose(problem.ravel(again), problem.ravel(globals_), rtol=1e-9)


def test_a_natural_gradient_step_of_one_is_the_conjugate_optimum(problem):
    """On a conjugate model eta - grad_m f = eta' of the best globals, where the shard is all there is."""
    wanting(problem, NaturalGradient)
    lam, phi, shard = somewhere(problem)
    nothing = problem.augmentation(lam, 0 * lam, 0 * lam)
    best = problem.model.natural(problem.model.global_step(problem.model.statistics(phi, shard), nothing))
    gradient = problem.unravel(jax.grad(problem.loss, argnums=1)(phi, lam, shard))
    globals_ = problem.unravel(lam)
    step = problem.model.natural_gradient(globals_, gradient)
    # the shard counts a fraction w of the prior's and q's terms: f_b = w (conjugate part), so is its natural gradient
    fraction = shard["fraction"]
    for name, eta in problem.model.natural(globals_).items():
        np.testing.assert_allclose(eta - step[name] / fraction, best[name], rtol=1e-7, atol=1e-9)


def test_unconstrained_locals_and_back(problem):
    wanting(problem, Constrained)
    _, phi, shard = somewhere(problem)
    own = jax.tree.map(lambda leaf: leaf[: leaf.shape[0] - problem.halo_rows], phi)
    again = problem.model.from_unconstrained(problem.model.to_unconstrained(own), shard)
    np.testing.assert_allclose(ravel_pytree(again)[0], ravel_pytree(own)[0], atol=1e-12)


def test_the_local_gradient_is_that_of_all_shards_together(problem):
    wanting(problem, Coupled)
    lam, local = problem.init(jax.random.key(0))
    whole = jax.grad(lambda phi: problem.evaluate(lam, phi)[0].sum())(local)
    offered = problem.map_shards(
        lambda phi, shard: problem.model.local_gradient(phi, problem.unravel(lam), shard), local
    )
    real = np.asarray(problem.shards["mask"]) > 0 if "mask" in problem.shards else np.ones(local.shape[:2], bool)
    np.testing.assert_allclose(np.asarray(offered)[real], np.asarray(whole)[real], rtol=1e-9)
