"""Steps of the local variables that methods share: by the model's own steps, or down the gradient.

Functions that take no `Shards` are about one shard, whose locals come with halo rows appended if it has a halo.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from pdvi._base.checks import whole
from pdvi._base.types import Array, PyTree
from pdvi.core.model import Constrained, Coupled, offers, require
from pdvi.core.problem import Problem, with_halo_of
from pdvi.core.solver import Shards, Solver
from pdvi.solvers.primal_dual.oracles import CoordinateDescent

SETTLED = 1e-3  # largest change in a sweep, relative to the largest entry
COUPLED = 20  # sweeps over locals that read each other, where they are optimised at every visit (the paper's number)
PASSES = 3  # over touching shards, whose rows next to each other settle together
FEW = 3  # sweeps: to look after each whether it was the last costs more than it saves


def own_rows(problem: Problem, local: PyTree) -> PyTree:
    """Return the shard's locals without the halo rows."""
    foreign = problem.halo_rows
    return jax.tree.map(lambda leaf: leaf[: leaf.shape[0] - foreign], local) if foreign else local


def optimise(problem: Problem, local: PyTree, lam: Array, shard: PyTree, sweeps: int | None, tol: float) -> PyTree:
    """Return the locals after at most ``sweeps`` local steps for fixed globals and halo.

    Fewer steps, if one moves no entry by more than ``tol`` times the largest. ``sweeps`` None: 20 where locals read
    each other, else one, which is exact where ``local_step`` is a minimiser.
    """
    if sweeps is None:
        sweeps = COUPLED if offers(problem.model, Coupled) else 1
    whole("sweeps", sweeps, least=1)

    def sweep(old: PyTree) -> PyTree:
        return with_halo_of(old, CoordinateDescent().local_step(problem, old, lam, shard))

    if not jax.tree.leaves(local):
        return sweep(local)
    if sweeps <= FEW:
        for _ in range(sweeps):
            local = sweep(local)
        return local

    def unfinished(carry: tuple[Any, ...]) -> Array:
        count, _, moved = carry
        return (count < sweeps) & (moved > tol)

    def again(carry: tuple[Any, ...]) -> tuple[PyTree, PyTree, PyTree]:
        count, old, _ = carry
        new = sweep(old)
        changes = jax.tree.leaves(jax.tree.map(lambda a, b: jnp.abs(b - a).max(initial=0), old, new))
        size = jnp.stack([jnp.abs(leaf).max(initial=0) for leaf in jax.tree.leaves(new)]).max()
        return count + 1, new, jnp.stack(changes).max() / jnp.maximum(size, jnp.finfo(size.dtype).tiny)

    return jax.lax.while_loop(unfinished, again, (0, local, jnp.asarray(jnp.inf, lam.dtype)))[1]


def settle(problem: Problem, lam: Array, local: PyTree, own: PyTree, shard: PyTree) -> tuple[PyTree, PyTree, PyTree]:
    """Return the locals near ``local`` that fit given globals, where a run goes on from globals alone."""
    return optimise(problem, local, lam, shard, None, SETTLED), own, None


def local_step(
    problem: Problem, lam: Array, local: PyTree, own: PyTree, shard: PyTree
) -> tuple[PyTree, PyTree, PyTree]:
    """Return the locals after one local step for given globals: a `LocalUpdateFn`."""
    return optimise(problem, local, lam, shard, 1, 0.0), own, None


def as_it_is(broadcast: Any, shard_state: PyTree) -> PyTree:
    """Return the shard state: a `ShardStateFn`."""
    return shard_state


def like(template: PyTree, total: PyTree) -> PyTree:
    """Return a sum over shards, which may have been added in double precision, in the types of ``template``."""
    return jax.tree.map(lambda leaf, value: jnp.asarray(value, leaf.dtype), template, total)


class Recall(eqx.Module):
    """A `LocalUpdateFn`: the shard state as if a shard had been visited at this point."""

    solver: Solver

    def __call__(
        self, problem: Problem, lam: Array, local: PyTree, own: PyTree, shard: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Return the same local variables, and the shard state that belongs to them."""
        return local, self.solver.init_shard_state(problem, lam, local, shard), None


def reset_and_optimize_locals(problem: Problem, shards: Shards, lam: Array) -> None:
    """Find new local variables that fit ``lam``."""
    shards.reset()
    for _ in range(PASSES if problem.halo_rows else 1):
        shards.update(settle, lam)


def reinit_shard_states(problem: Problem, shards: Shards, solver: Solver) -> None:
    """Make the shard states that belong to the local variables and to the globals, and the server's sums of them."""
    shards.update(Recall(solver), shards.lam)
    solver.rebuild_sums(problem, shards)


def require_gradients(by: str, problem: Problem) -> None:
    """Raise if shards have a halo and the model lacks the gradient of F: a shard's loss has half of each cut edge."""
    if problem.halo_rows:
        require(by, problem.model, Coupled)


def free(problem: Problem, local: PyTree) -> PyTree:
    """Return the locals as numbers without constraints; a model whose locals are any numbers offers nothing for it."""
    return problem.model.to_unconstrained(local) if offers(problem.model, Constrained) else local


def constrained(problem: Problem, x: PyTree, shard: PyTree) -> PyTree:
    """Return the inverse of `free`."""
    return problem.model.from_unconstrained(x, shard) if offers(problem.model, Constrained) else x


def gradients(problem: Problem, local: PyTree, lam: Array, shard: PyTree) -> tuple[PyTree, PyTree, Array]:
    """Return x, the shard's own locals in free form; grad_x F; and grad_lam of the shard's loss."""
    x = free(problem, own_rows(problem, local))

    def loss(x: PyTree, lam: Array) -> Array:
        return problem.loss(with_halo_of(local, constrained(problem, x, shard)), lam, shard)

    if not offers(problem.model, Coupled):
        return x, *jax.grad(loss, argnums=(0, 1))(x, lam)
    _, pull_back = jax.vjp(lambda x: constrained(problem, x, shard), x)
    by_x: Any = pull_back(problem.model.local_gradient(local, problem.unravel(lam), shard))[0]
    return x, by_x, jax.grad(loss, argnums=1)(x, lam)
