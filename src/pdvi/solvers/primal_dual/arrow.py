"""Second derivatives of a shard's loss, where rows of local variables meet in the globals only.

    H = [ H_pp  H_pl ]      H_pp block-diagonal, a small block for each row,
        [ H_lp  H_ll ]      S = H_ll - H_lp H_pp^-1 H_pl  the curvature after the locals are minimised over.

d + P products with H give all of it, whatever the number of rows: a product with the k-th coordinate of all rows at
once is the k-th column of every block. Locals that are not independent by row are one row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from pdvi._base.types import Array, PyTree
from pdvi.core.model import Rowwise, offers
from pdvi.core.problem import Problem
from pdvi.shards.stacking import take, to_device

FLOOR = 16  # times the rounding error: what an eigenvalue is at least, relative to a diagonal of ones
PROBED = 2  # shards whose Hessians are looked at, to find out whether rows are independent
COUPLED = 1e-4  # of the largest entry: a product across rows that is no rounding error


class Arrow(NamedTuple):
    """Derivatives at a point: R rows of d local variables, P globals."""

    value: Array
    by_local: Array  # (R, d)
    by_global: Array  # (P,)
    inverse: Array  # (R, d, d): of the blocks of H_pp, eigenvalues made positive
    cross: Array  # (R, d, P): H_pl
    own: Array  # (P, P): H_ll

    @property
    def profiled(self) -> Array:
        """Return S, the curvature in the globals after minimising over the locals."""
        return self.own - jnp.einsum("rip,rij,rjq->pq", self.cross, self.inverse, self.cross)

    @property
    def reduced(self) -> Array:
        """Return the gradient in the globals after a step of the locals."""
        return self.by_global - jnp.einsum("rip,rij,rj->p", self.cross, self.inverse, self.by_local)

    @property
    def local_decrement(self) -> Array:
        """Return g_p' H_pp^-1 g_p: twice what a step of the locals gains."""
        return jnp.einsum("ri,rij,rj->", self.by_local, self.inverse, self.by_local)

    def local_step(self, global_step: Array) -> Array:
        """Return the step of the locals that goes with one of the globals."""
        return -jnp.einsum("rij,rj->ri", self.inverse, self.by_local + self.cross @ global_step)


def arrow(loss: Callable[[Array, Array], Array], local: Array, lam: Array) -> Arrow:
    """Return the derivatives of ``loss(local, lam)``; ``local`` has a row for each independent group of locals."""
    (rows, d), P = local.shape, lam.size

    def derivatives(local: Array, lam: Array) -> tuple[Array, tuple[Array, Array]]:
        return jax.value_and_grad(loss, argnums=(0, 1))(local, lam)

    # one linear map for all products: it is compiled once, and what does not depend on the direction is computed once
    (value, (by_local, by_global)), product = jax.linearize(derivatives, local, lam)
    along_local = jnp.broadcast_to(jnp.eye(d + P, d, dtype=lam.dtype)[:, None, :], (d + P, rows, d))
    along_global = jnp.eye(d + P, P, k=-d, dtype=lam.dtype)
    at_local, at_global = jax.vmap(lambda *along: product(*along)[1])(along_local.astype(local.dtype), along_global)
    inverse = positive_inverse(jnp.moveaxis(at_local[:d], 0, 2))
    own = at_global[d:]
    return Arrow(value, by_local, by_global, inverse, jnp.moveaxis(at_local[d:], 0, 2), 0.5 * (own + own.T))


def positive_inverse(H: Array) -> Array:
    """Return the inverse of symmetric matrices with eigenvalues made positive, after Jacobi's scaling."""
    if H.shape[-1] == 0:
        return H
    if H.shape[-1] == 1:  # by far the commonest size has no eigenvalues to look for
        tiny = jnp.finfo(H.dtype).tiny
        return jnp.where(jnp.abs(H) > tiny, 1 / jnp.maximum(jnp.abs(H), tiny), 1.0)
    diagonal = jnp.abs(jnp.diagonal(H, axis1=-2, axis2=-1))
    size = jnp.where(diagonal > 0, jnp.sqrt(diagonal), 1.0)  # a padded row has 0
    units = size[..., :, None] * size[..., None, :]
    values, vectors = jnp.linalg.eigh(0.5 * (H + H.mT) / units)
    values = jnp.maximum(jnp.abs(values), FLOOR * jnp.finfo(H.dtype).eps)
    return (vectors / values[..., None, :]) @ vectors.mT / units


# ---------------------------------------------------------------------------------------------------------------


def as_rows(local: PyTree, independent: bool) -> tuple[Array, Callable[[Array], PyTree]]:
    """Return local variables as a matrix, a row for each independent group, and the way back."""
    leaves, structure = jax.tree.flatten(local)
    if not leaves:
        return jnp.zeros((1, 0)), lambda x: local
    rows = leaves[0].shape[0] if independent else 1
    flat = [leaf.reshape(rows, -1) for leaf in leaves]
    ends = np.cumsum([part.shape[1] for part in flat]).tolist()

    def back(x: Array) -> PyTree:
        parts = [x[:, a:b] for a, b in zip([0, *ends], ends)]
        return jax.tree.unflatten(structure, [part.reshape(leaf.shape) for part, leaf in zip(parts, leaves)])

    return jnp.concatenate(flat, axis=1), back


def rows_are_independent(problem: Problem) -> bool:
    """Return whether the rows of a shard's local variables meet in the globals only: as the model says, or looked up.

    Looked up means that products of the Hessian with vectors that are 0 in some rows, at random points of a few shards,
    are 0 in these rows: those with a 0 as k-th binary digit of their number, for each k, since any two rows differ in
    some digit.
    """
    leaves = jax.tree.leaves(problem.local_shape())
    if not leaves or any(leaf.ndim == 0 or leaf.shape[0] != leaves[0].shape[0] for leaf in leaves):
        return False
    if offers(problem.model, Rowwise):
        return bool(problem.model.independent_rows())
    rows = leaves[0].shape[0]
    if rows == 1:
        return False
    some = jnp.asarray(np.arange(rows) >> np.arange((rows - 1).bit_length())[:, None] & 1, bool)
    d = sum(math.prod(leaf.shape[1:]) for leaf in leaves)
    for b in np.unique(np.linspace(0, problem.n_shards - 1, PROBED).astype(int)).tolist():
        rng = np.random.default_rng(b)  # numbers from outside: JAX's generator takes longer to compile than most losses
        noise = [jnp.asarray(rng.standard_normal(shape)) for shape in ((problem.n_global,), (rows, d), (rows, d))]
        shard = None if problem.store is None else jax.tree.map(to_device, problem.store.read(b))
        inside, across = _products(problem, shard, jnp.asarray(b), some, *noise)
        if not (np.isfinite(inside).all() and np.abs(across).max() <= COUPLED * np.abs(inside).max()):
            return False
    return True


@eqx.filter_jit
def _products(
    problem: Problem, shard: PyTree, b: Array, some: Array, lam_noise: Array, noise: Array, v: Array
) -> tuple[Array, Array]:
    """Products of the Hessian with a vector in some rows: in these, and in the others."""
    shard = take(problem.shards, b) if shard is None else shard
    key = jax.random.key(0)
    lam = problem.init_global(key)
    x, back = as_rows(problem.init_shard(key, b, shard), True)
    lam = lam + 0.1 * lam_noise.astype(lam.dtype)
    x = x + 0.1 * noise.astype(x.dtype)
    _, product = jax.linearize(jax.grad(lambda x: problem.loss(back(x), lam, shard)), x)
    here = some[:, :, None]
    found = jax.vmap(product)(jnp.where(here, v.astype(x.dtype), 0))
    return jnp.where(here, found, 0), jnp.where(here, 0, found)
