from dataclasses import make_dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pdvi
from models_for_tests import Regression, regression_shards
from pdvi.shards.stacking import take


def test_a_plain_class_and_a_list_of_unequal_shards_are_enough():
    shards = regression_shards(np.random.default_rng(0), [5, 7, 3])
    problem = pdvi.Problem(Regression(), shards)
    assert problem.n_shards == 3
    assert problem.shards["x"].shape == (3, 7, 3)
    np.testing.assert_array_equal(problem.shards["mask"].sum(1), [5, 7, 3])
    result = pdvi.fit(problem, pdvi.P2DVI(), max_epochs=50)
    assert result.converged
    assert set(result.global_params) == {"w", "bias"}


def test_equal_shards_get_no_mask():
    shards = regression_shards(np.random.default_rng(0), [5, 5])
    assert set(pdvi.Problem(Regression(), shards).shards) == {"x", "y", "fraction"}


@pytest.mark.slow
def test_objective_does_not_depend_on_the_partition(x64):
    """Spec fact: f_b summed over any partition is F, with padding or without."""
    values = []
    for sizes in ([60], [30, 30], [7, 13, 1, 39], [1] * 60):
        problem = pdvi.Problem(Regression(), regression_shards(np.random.default_rng(1), sizes))
        lam = jnp.array([0.3, -1.0, 0.7, 0.1])
        latent = np.random.default_rng(2).standard_normal(60)
        local = np.zeros(problem.shards["y"].shape)
        start = 0
        for b, size in enumerate(sizes):
            local[b, :size] = latent[start : start + size]
            start += size
        losses, gradient = problem.evaluate(lam, jnp.asarray(local))
        values.append([float(losses.sum()), *gradient.tolist()])
    np.testing.assert_allclose(values, np.broadcast_to(values[0], (4, 5)), rtol=1e-12)


def test_ravel_and_unravel_are_inverse():
    problem = pdvi.datasets.tanh_regression(4)
    globals_ = {"weight": jnp.arange(3.0), "gain": jnp.asarray(7.0)}
    lam = problem.ravel(globals_)
    assert lam.tolist() == [0, 1, 2, 7]
    back = problem.unravel(lam)
    assert back["gain"].shape == ()
    np.testing.assert_array_equal(back["weight"], globals_["weight"])


def test_evaluate_is_the_sum_and_its_gradient(x64):
    problem = pdvi.datasets.tanh_regression(7)
    lam, local = problem.init(jax.random.key(0))

    def total(lam):
        return sum(problem.loss(take(local, b), lam, take(problem.shards, b)) for b in range(7))

    losses, gradient = problem.evaluate(lam, local)
    np.testing.assert_allclose(losses.sum(), total(lam), rtol=1e-12)
    np.testing.assert_allclose(gradient, jax.grad(total)(lam), rtol=1e-10)


def test_each_shard_has_its_own_key():
    class Random(Regression):
        def init_local(self, key, shard):
            return jax.random.normal(key, shard["y"].shape)

    problem = pdvi.Problem(Random(), regression_shards(np.random.default_rng(0), [4, 4]))
    local = problem.init(jax.random.key(0))[1]
    assert not np.allclose(local[0], local[1])


def test_arrays_inside_a_model_do_not_recompile():
    compiled = []

    class Scaled(eqx.Module):
        scale: np.ndarray

        def init_global(self, key):
            return {"a": jnp.ones(2)}

        def init_local(self, key, shard):
            return jnp.zeros(())

        def loss(self, local, globals_, shard):
            compiled.append(1)
            return self.scale * jnp.sum((globals_["a"] - shard) ** 2) + local**2

    solver = pdvi.P2DVI(eta=1.0)
    shards = np.ones((4, 2))
    pdvi.fit(pdvi.Problem(Scaled(np.asarray(1.0)), shards), solver, max_epochs=2)
    problem = pdvi.Problem(Scaled(np.asarray(2.0)), shards)
    before = len(compiled)
    pdvi.fit(problem, solver, max_epochs=2)
    assert len(compiled) == before


GOOD = {"x": np.zeros((3, 4, 3)), "y": np.zeros((3, 4)), "fraction": np.full(3, 1 / 3)}


def _with(**changes):
    return {**GOOD, **changes}


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([], r"`shards` must hold at least one shard, got 0"),
        ({"x": np.zeros((0, 3))}, r"`shards` must hold at least one shard, got 0"),
        (_with(y=np.full((3, 4), np.nan)), r"`shards` must be finite: leaf \['y'\] has 12 NaN or infinite.*shard 0"),
        (_with(y=np.array([[0.0] * 4, [0, 0, 0, np.inf], [0] * 4])), r"has 1 NaN or infinite.*shard 1; remove"),
        (_with(y=np.zeros((2, 4))), r"number of shards as leading size, got"),
        (_with(y=np.array([["a"] * 4] * 3)), r"`shards` must hold numbers: leaf \['y'\] has dtype"),
        (_with(x=np.zeros((3, 0, 3)), y=np.zeros((3, 0))), r"no shard may be empty"),
        (
            [{"x": np.zeros((2, 3))}, {"x": np.zeros((0, 3))}],
            r"no shard may be empty: leaf \['x'\] of shards\[1\] has 0",
        ),
        ([{"x": np.zeros((2, 3))}, {"x": np.zeros((2, 4))}], r"may differ in their leading size only: leaf \['x'\]"),
        ([{"x": np.zeros(2)}, {"y": np.zeros(2)}], r"same structure: shards\[1\]"),
        ([np.zeros((2, 3)), np.zeros((3, 3))], r"unequal size \(2 to 3 rows\) must be dicts"),
        (
            [{"x": np.zeros((2, 3)), "y": np.zeros(3)}, {"x": np.zeros((3, 3)), "y": np.zeros(2)}],
            r"same number of rows: in shards\[0\] leaf \['x'\] has 2 and leaf \['y'\] has 3",
        ),
    ],
)
def test_bad_shards_are_named(shards, message):
    with pytest.raises(ValueError, match=message):
        pdvi.Problem(Regression(), shards)


def test_a_loss_that_returns_a_vector_is_named():
    class Vector(Regression):
        def loss(self, local, globals_, shard):
            return (shard["y"] - local) ** 2

    with pytest.raises(ValueError, match=r"`loss` must return a scalar, got shape \(4,\); sum over"):
        pdvi.Problem(Vector(), GOOD)


def test_a_loss_that_counts_padded_rows_is_named():
    class Forgetful(Regression):
        def loss(self, local, globals_, shard):
            return super().loss(local, globals_, {**shard, "mask": 1.0})

    with pytest.raises(ValueError, match=r"must leave out the rows where shard\['mask'\] is 0.*3 to 7 rows"):
        pdvi.Problem(Forgetful(), regression_shards(np.random.default_rng(0), [5, 7, 3]))


def test_a_model_without_a_method_is_named():
    class Half:
        def init_global(self, key):
            return {}

    with pytest.raises(ValueError, match="`model` must have a method 'init_local'; Half has none"):
        pdvi.Problem(Half(), GOOD)


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (np.zeros(3), "`init_global` must return a dict"),
        ({}, "`init_global` must return a dict"),
        ({"w": np.array([np.nan])}, "block 'w' has NaN"),
    ],
)
def test_bad_global_starts_are_named(start, message):
    class Bad(Regression):
        def init_global(self, key):
            return start

    with pytest.raises(ValueError, match=message):
        pdvi.Problem(Bad(), GOOD)


class Mean:
    """A model as a dataclass would have it; `scale` is its field."""

    def init_global(self, key):
        return {"m": jnp.zeros(2)}

    def init_local(self, key, shard):
        return jnp.zeros(len(shard["x"]))

    def loss(self, local, globals_, shard):
        return 0.5 * jnp.sum((shard["x"] - globals_["m"] - local[:, None]) ** 2 / self.scale) + jnp.sum(local**2)


@pytest.mark.parametrize("how", [{}, {"frozen": True}])
def test_a_dataclass_that_has_no_hash_is_told_the_remedy(how):
    shards = {"x": np.random.default_rng(0).normal(size=(5, 20, 2))}
    with pytest.raises(ValueError, match=r"`model` must be hashable, Own is not.*@dataclass\(eq=False\)"):
        pdvi.Problem(make_dataclass("Own", [("scale", np.ndarray)], bases=(Mean,), **how)(np.ones(2)), shards)
    remedied = make_dataclass("Own", [("scale", np.ndarray)], bases=(Mean,), eq=False)(np.ones(2))
    assert pdvi.fit(pdvi.Problem(remedied, shards), pdvi.P2DVI(), max_epochs=30).converged
