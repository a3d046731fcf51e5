"""The local variables' turn, as the methods share it: by the model's own steps, or down the gradient.

All of it is about one shard, whose locals come with the halo rows appended if it has a halo.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pdvi.core.problem import Problem
from pdvi.solvers.conjugate import require
from pdvi.solvers.primal_dual.oracles import CoordinateDescent

Array = jax.Array
PyTree = Any

SETTLED = 1e-3  # largest change in a sweep, relative to the largest entry
FEW = 3  # sweeps: to look after each whether it was the last costs more than it saves


def own_rows(problem: Problem, local: PyTree) -> PyTree:
    """The shard's locals without the halo rows."""
    if problem.halo is None:
        return local
    foreign = problem.halo.shape[1]
    return jax.tree.map(lambda leaf: leaf[: leaf.shape[0] - foreign], local)


def with_halo_of(local: PyTree, own: PyTree) -> PyTree:
    """``own`` with the halo rows of ``local``, if it has some, appended."""

    def append(mine: Array, all_: Array) -> Array:
        return mine if mine.shape == all_.shape else jnp.concatenate([mine, all_[mine.shape[0] :]])

    return jax.tree.map(append, own, local)


def optimise(problem: Problem, local: PyTree, lam: Array, shard: PyTree, sweeps: int | None, tol: float) -> PyTree:
    """The locals after at most ``sweeps`` local steps for fixed globals and halo.

    Fewer steps, if one moves no entry by more than ``tol`` times the largest. ``sweeps`` None: as many as the model
    recommends (``local_sweeps``), else one, which is exact where ``local_step`` is a minimiser.
    """
    sweeps = getattr(problem.model, "local_sweeps", 1) if sweeps is None else sweeps
    if not isinstance(sweeps, int) or sweeps < 1:
        msg = f"`sweeps` must be a whole number of at least 1, got {sweeps!r}."
        raise ValueError(msg)

    def sweep(old: PyTree) -> PyTree:
        return with_halo_of(old, CoordinateDescent().local_step(problem, old, lam, shard))

    if not jax.tree.leaves(local):
        return sweep(local)
    if sweeps <= FEW:
        for _ in range(sweeps):
            local = sweep(local)
        return local

    def unfinished(carry: tuple) -> Array:
        count, _, moved = carry
        return (count < sweeps) & (moved > tol)

    def again(carry: tuple) -> tuple:
        count, old, _ = carry
        new = sweep(old)
        return count + 1, new, _largest_change(old, new)

    return jax.lax.while_loop(unfinished, again, (0, local, jnp.asarray(jnp.inf, lam.dtype)))[1]


def settled(problem: Problem, local: PyTree, lam: Array, shard: PyTree) -> PyTree:
    """The locals near ``local`` that fit given globals: where a run goes on from globals alone."""
    return optimise(problem, local, lam, shard, None, SETTLED)


def _largest_change(old: PyTree, new: PyTree) -> Array:
    changes = jax.tree.map(lambda a, b: jnp.abs(b - a).max(initial=0), old, new)
    sizes = jax.tree.map(lambda b: jnp.abs(b).max(initial=0), new)
    largest, size = jnp.stack(jax.tree.leaves(changes)).max(), jnp.stack(jax.tree.leaves(sizes)).max()
    return largest / jnp.maximum(size, jnp.finfo(size.dtype).tiny)


def require_gradients(solver: Any, problem: Problem) -> None:
    """Say what the model lacks for gradient steps on its locals.

    A shard with a halo has only its share of the terms it has in common with others in its loss, so the model must
    offer the gradient of F: ``local_gradient(local, globals_, shard)``, in the shard's own rows.
    """
    if problem.halo is not None:
        require(solver, problem, "local_gradient")


def free(problem: Problem, local: PyTree) -> PyTree:
    """The locals as numbers without constraints; models whose locals are any real numbers offer nothing for it."""
    offered = getattr(problem.model, "to_unconstrained", None)
    return local if offered is None else offered(local)


def constrained(problem: Problem, x: PyTree, shard: PyTree) -> PyTree:
    """The inverse of `free`."""
    offered = getattr(problem.model, "from_unconstrained", None)
    return x if offered is None else offered(x, shard)


def gradients(problem: Problem, local: PyTree, lam: Array, shard: PyTree) -> tuple[PyTree, PyTree, Array]:
    """x, the shard's own locals in free form; grad_x F; and grad_lam of the shard's loss."""
    x = free(problem, own_rows(problem, local))

    def loss(x: PyTree, lam: Array) -> Array:
        return problem.loss(with_halo_of(local, constrained(problem, x, shard)), lam, shard)

    if not hasattr(problem.model, "local_gradient"):
        return x, *jax.grad(loss, argnums=(0, 1))(x, lam)
    _, pull_back = jax.vjp(lambda x: constrained(problem, x, shard), x)
    by_x = pull_back(problem.model.local_gradient(local, problem.unravel(lam), shard))[0]
    return x, by_x, jax.grad(loss, argnums=1)(x, lam)
