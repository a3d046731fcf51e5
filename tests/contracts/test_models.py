"""What every model owes, by automatic differentiation: each closed form that it offers is what it says."""

import dataclasses
import runpy
from functools import cache
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import pdvi
from models_for_tests import hierarchical_problem, learned_mixture, offset_problem, tissue_problem, two_samples
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
    "potts mixture": lambda: tissue_problem(300, 5),
    "tied mixture": lambda: learned_mixture("tied"),
    "tied mixture with fixed precision": lambda: learned_mixture("tied", precision=False),
    "tied mixture of samples on a graph": lambda: learned_mixture("tied", samples=True, graph=True),
    "diagonal mixture": lambda: learned_mixture("diagonal"),
    "diag mixture": lambda: learned_mixture("diag"),
    "spherical mixture": lambda: learned_mixture("spherical"),
    "full mixture": lambda: learned_mixture("full"),
    "hierarchical mixture": lambda: hierarchical_problem(),
    "hierarchical mixture with fixed precision": lambda: hierarchical_problem(covariance="diagonal", precision=False),
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


def has_matrices(problem):
    """Whether precisions are matrices, which have one penalty each, as have their means."""
    return getattr(problem.model, "covariance", None) in ("tied", "full")


def learns_precision(problem):
    return "precision" in dict(problem.blocks)


def symmetric(problem, lam):
    """Vectors of the globals in which precisions are symmetric where they are matrices."""
    globals_ = dict(problem.unravel(lam))
    if learns_precision(problem) and has_matrices(problem):
        globals_["precision"] = 0.5 * (globals_["precision"] + jnp.swapaxes(globals_["precision"], -1, -2))
    return problem.ravel(globals_)


def somewhere(problem, b=1):
    """Globals near the start, the locals of a shard after a step from there, as its model sees them; and the shard."""
    lam, local = problem.init(jax.random.key(0))
    lam = symmetric(problem, lam + 0.1 * jax.random.normal(jax.random.key(1), lam.shape))
    shard = take(problem.shards, b)
    phi = problem.read(local, jnp.asarray(b))
    if offers(problem.model, LocalStep):
        own = problem.model.local_step(phi, problem.unravel(lam), shard)
        phi = jax.tree.map(lambda new, old: jnp.concatenate([new, old[new.shape[0] :]]), own, phi)
    return lam, phi, shard


def augmentation(problem, lam):
    """A dual and a penalty as Algorithm 1 has them."""
    dual = 0.1 * jax.random.normal(jax.random.key(2), lam.shape)
    penalty = dict(problem.unravel(jax.random.uniform(jax.random.key(3), lam.shape, minval=0.5, maxval=1.0)))
    if has_matrices(problem):
        axes = {"mean": -1, "offset": -1, "precision": (-2, -1)}
        for name in axes.keys() & penalty.keys():
            penalty[name] = jnp.broadcast_to(penalty[name].mean(axes[name], keepdims=True), penalty[name].shape)
    return problem.augmentation(lam, symmetric(problem, dual), problem.ravel(penalty))


def to_the_end(problem):
    """The same problem, whose global steps go over the blocks until nothing changes where one pass is not exact."""
    if not learns_precision(problem):
        return problem
    model = problem.model
    if hasattr(model, "types"):
        model = dataclasses.replace(model, types=dataclasses.replace(model.types, passes=400))
    else:
        model = dataclasses.replace(model, passes=400)
    return eqx.tree_at(lambda p: p.model, problem, model)


@eqx.filter_jit
def best_globals(problem, phi, shard, added):
    return problem.ravel(problem.model.global_step(problem.model.statistics(phi, shard), added))


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


def test_a_global_step_is_a_minimizer(problem):
    wanting(problem, Conjugate)
    problem = to_the_end(problem)
    lam, phi, shard = somewhere(problem)
    added = augmentation(problem, lam)
    best = best_globals(problem, phi, shard, added)
    slope = jax.grad(lambda x: problem.loss(phi, x, shard) + added(problem.unravel(x)))(best)
    scale = jnp.abs(jax.grad(problem.loss, argnums=1)(phi, lam, shard)).max()
    np.testing.assert_allclose(slope, 0, atol=1e-8 * max(1, float(scale)))


def test_a_pass_over_the_blocks_lowers_the_augmented_loss(problem):
    """Where one pass is not the minimizer, it leads there."""
    wanting(problem, Conjugate)
    lam, phi, shard = somewhere(problem)
    added = augmentation(problem, lam)
    value = eqx.filter_jit(lambda x: problem.loss(phi, x, shard) + added(problem.unravel(x)))
    one, all_ = (best_globals(each, phi, shard, added) for each in (problem, to_the_end(problem)))
    assert value(all_) <= value(one) + 1e-9 * abs(value(one))
    assert value(one) < value(lam)


def test_improved_globals_are_better_and_end_at_a_minimizer(problem):
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


def test_a_joint_step_is_a_minimizer(problem):
    wanting(problem, Exact)
    lam, phi, shard = somewhere(problem)
    added = augmentation(problem, lam)
    local, globals_ = problem.model.joint_step(phi, shard, added)
    by_both = jax.grad(lambda p, x: problem.loss(p, x, shard) + added(problem.unravel(x)), argnums=(0, 1))
    np.testing.assert_allclose(ravel_pytree(by_both(local, problem.ravel(globals_)))[0], 0, atol=1e-8)


# How far a block's curvature may be from the Hessian's diagonal where the globals fit the locals. That of loadings is
# for factors of size one; that of weights has a thousandth added, so that a single component has some.
CURVATURE = {("factor analysis", "loading"): 0.2, ("count mixture", "log_weight"): 0.01}
PRECISION_CURVATURE = 2.0  # a factor: one number stands for a whole matrix


def test_the_curvature_is_the_diagonal_of_the_hessian_where_globals_fit_the_locals(problem, request):
    wanting(problem, Curved)
    lam, phi, shard = somewhere(problem)
    if offers(problem.model, Conjugate):
        lam = best_globals(to_the_end(problem), phi, shard, problem.augmentation(lam, 0 * lam, 0 * lam))
    offered = problem.unravel(problem.ravel(problem.model.curvature(phi, problem.unravel(lam), shard)))
    hessian = jax.hessian(lambda x: problem.loss(phi, x, shard))(lam)
    name_of_problem = request.node.callspec.id.replace("_", " ")
    for name, exact in problem.unravel(jnp.diagonal(hessian)).items():
        assert (offered[name] > 0).all()
        if name == "precision" and has_matrices(problem):
            exact = along_symmetric(problem, hessian)
            ratio = np.asarray(offered[name]).mean((-2, -1)) / exact
            assert ((ratio > 1 / PRECISION_CURVATURE) & (ratio < PRECISION_CURVATURE)).all(), ratio
            continue
        if name in ("mean", "offset") and has_matrices(problem):  # the mean over features
            exact = jnp.broadcast_to(exact.mean(-1, keepdims=True), exact.shape)
        rtol = CURVATURE.get((name_of_problem, name), 1e-6)
        np.testing.assert_allclose(offered[name], exact, rtol=rtol, err_msg=name)


def along_symmetric(problem, hessian):
    """The mean curvature of a precision over an orthonormal basis of the symmetric matrices, for each matrix."""
    part = problem.block_slices["precision"]
    *leading, d, _ = dict(problem.blocks)["precision"]
    own = np.asarray(hessian[part, part]).reshape(-1, d * d, max(1, int(np.prod(leading))), d * d)
    basis = [np.outer(*np.eye(d)[[i, j]]) for i in range(d) for j in range(i, d)]
    basis = np.stack([(one + one.T).ravel() / np.linalg.norm(one + one.T) for one in basis])
    found = [np.einsum("si,ij,sj->s", basis, own[k, :, k], basis).mean() for k in range(len(own))]
    return np.array(found if leading else found[0])


def test_natural_parameters_and_back(problem):
    wanting(problem, Natural)
    globals_ = problem.unravel(somewhere(problem)[0])
    again = problem.model.from_natural(problem.model.natural(globals_))
    np.testing.assert_allclose(problem.ravel(again), problem.ravel(globals_), rtol=1e-9)


def test_a_natural_gradient_step_of_one_is_the_conjugate_optimum(problem):
    """On a conjugate model eta - grad_m f = eta' of the best globals, where the shard is all there is."""
    wanting(problem, NaturalGradient)
    if learns_precision(problem) or "offset" in dict(problem.blocks):
        pytest.skip("means are not conjugate together with a precision or with offsets")
    lam, phi, shard = somewhere(problem)
    nothing = problem.augmentation(lam, 0 * lam, 0 * lam)
    best = problem.model.natural(problem.unravel(best_globals(problem, phi, shard, nothing)))
    stepped = natural_step(problem, lam, phi, shard)
    for name, eta in stepped.items():
        np.testing.assert_allclose(eta, best[name], rtol=1e-7, atol=1e-9)


def natural_step(problem, lam, phi, shard):
    """Natural parameters after a step of one.

    The shard counts a fraction w of the prior's and q's terms: f_b = w (conjugate part), so is its natural gradient.
    """
    gradient = problem.unravel(jax.grad(problem.loss, argnums=1)(phi, lam, shard))
    globals_ = problem.unravel(lam)
    step = problem.model.natural_gradient(globals_, gradient)
    return {name: eta - step[name] / shard["fraction"] for name, eta in problem.model.natural(globals_).items()}


NORMAL = ("mean", "log_var"), ("offset", "offset_log_var")  # both blocks of a posterior
SINGLE = ("precision",), ("log_weight",), ("log_concentration",), ("domain_log_weight",)


def test_a_natural_gradient_step_of_one_block_is_the_best_for_the_others(problem):
    wanting(problem, NaturalGradient)
    lam, phi, shard = somewhere(problem)
    globals_, slope_at = problem.unravel(lam), jax.jit(jax.grad(problem.loss, argnums=1))
    stepped = problem.model.from_natural(natural_step(problem, lam, phi, shard))
    before = problem.unravel(slope_at(phi, lam, shard))
    looked = 0
    for group in (*NORMAL, *SINGLE):
        if group[0] not in globals_ or (group in NORMAL and has_matrices(problem)):
            continue  # q has no correlations, which a matrix asks for
        if group[0] == "precision" and problem.model.covariance not in ("tied", "diagonal"):
            continue  # the step takes all components for equally large, as it must not depend on the locals
        moved = problem.ravel({**globals_, **{name: stepped[name] for name in group}})
        after = problem.unravel(slope_at(phi, moved, shard))
        for name in group:
            scale = float(jnp.abs(before[name]).max())
            assert scale > 1e-3
            np.testing.assert_allclose(after[name], 0, atol=1e-8 * max(1, scale), err_msg=name)
        looked += 1
    assert looked


def test_unconstrained_locals_and_back(problem):
    wanting(problem, Constrained)
    _, phi, shard = somewhere(problem)
    own = jax.tree.map(lambda leaf: leaf[: leaf.shape[0] - problem.halo_rows], phi)
    again = problem.model.from_unconstrained(problem.model.to_unconstrained(own), shard)
    np.testing.assert_allclose(ravel_pytree(again)[0], ravel_pytree(own)[0], atol=1e-12)


def test_the_local_gradient_is_that_of_all_shards_together(problem):
    """Along the probabilities: what is the same for all labels of a row moves nothing."""
    wanting(problem, Coupled)
    lam, local = problem.init(jax.random.key(0))
    numbers = iter(jax.random.split(jax.random.key(4), 8))

    def moved(phi):
        other = jnp.exp(jax.random.normal(next(numbers), phi.shape))
        return other / other.sum(-1, keepdims=True) * phi.sum(-1, keepdims=True)

    local = jax.tree.map(moved, local)
    whole = jax.grad(lambda phi: problem.evaluate(lam, phi)[0].sum())(local)
    offered = problem.map_shards(
        lambda phi, shard: problem.model.local_gradient(phi, problem.unravel(lam), shard), local
    )
    for one, two in zip(jax.tree.leaves(offered), jax.tree.leaves(whole), strict=True):
        real = np.asarray(problem.shards["mask"]) > 0 if "mask" in problem.shards else np.ones(one.shape[:2], bool)
        one, two = (np.asarray(leaf)[real] for leaf in (one, two))
        one, two = (leaf - leaf.mean(-1, keepdims=True) for leaf in (one, two))
        np.testing.assert_allclose(one, two, rtol=1e-9, atol=1e-9)
