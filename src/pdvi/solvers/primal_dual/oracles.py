"""How an augmented Lagrangian subproblem is minimised, one shard at a time.

    minimise over phi, lam   f_b(phi, lam) + <mu, lam - lam0> + 1/2 ||lam - lam0||_D^2

An oracle may be inexact. `CoordinateDescent` ends on the global step, so after it mu_b is minus the gradient
of f_b in lam at the point it returns, however few sweeps it made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from pdvi._base.checks import whole
from pdvi._base.types import Array, PyTree
from pdvi.core.model import Conjugate, Exact, LocalStep, offers, require
from pdvi.core.problem import Problem

Objective = Callable[[Array], Array]

NEWTON_DIMENSION = 64  # up to here a dense Hessian is cheaper than a line-searched quasi-Newton run


class Newton(eqx.Module):
    """At most ``steps`` damped Newton steps, until no gradient entry exceeds ``tol`` times the first's.

    The Hessian's eigenvalues are made positive, so that it leaves saddles, and a step that does not lower
    the objective is halved, so that it cannot overshoot. It also ends when rounding hides any decrease.
    """

    steps: int = 20
    tol: float = 1e-7
    halvings: int = 60  # a flat tail makes the first step very long

    def minimise(self, objective: Objective, start: Array) -> Array:
        """Return a minimiser of ``objective`` near ``start``."""
        eps, tiny = jnp.finfo(start.dtype).eps, jnp.finfo(start.dtype).tiny

        def step(carry: tuple[Any, ...]) -> tuple[Any, ...]:
            count, x, limit, _ = carry
            value, gradient = jax.value_and_grad(objective)(x)
            steepest = jnp.abs(gradient).max()
            limit = jnp.where(count == 0, self.tol * steepest, limit)
            values, vectors = jnp.linalg.eigh(jax.hessian(objective)(x))
            values = jnp.maximum(jnp.abs(values), eps * jnp.abs(values).max() + tiny)
            move = vectors @ ((vectors.T @ gradient) / values)
            slope, rounding = gradient @ move, 4 * eps * jnp.abs(value)

            def too_long(search: tuple[Any, ...]) -> Array:
                halving, _, candidate = search
                wanted = value - 1e-4 * 0.5**halving * slope + rounding
                return ~(candidate <= wanted) & (halving < self.halvings)

            def halve(search: tuple[Any, ...]) -> tuple[Any, ...]:
                halving = search[0] + 1
                moved = x - 0.5**halving * move
                return halving, moved, objective(moved)

            nothing_tried = (-1, x, jnp.full_like(value, jnp.inf))
            _, moved, candidate = jax.lax.while_loop(too_long, halve, nothing_tried)
            accepted = candidate <= value + rounding
            more = accepted & (slope > rounding) & (steepest > limit)
            return count + 1, jnp.where(accepted, moved, x), limit, more

        def unfinished(carry: tuple[Any, ...]) -> Array:
            return (carry[0] < self.steps) & carry[3]

        carry = (0, start, jnp.zeros((), start.dtype), jnp.asarray(True))
        return jax.lax.while_loop(unfinished, step, carry)[1]


class LBFGS(eqx.Module):
    """Limited-memory BFGS from optimistix, for subproblems too large for a dense Hessian."""

    steps: int = 200
    tol: float = 1e-7

    def minimise(self, objective: Objective, start: Array) -> Array:
        """Return a minimiser of ``objective`` near ``start``."""
        import optimistix as optx

        solver: Any = optx.LBFGS(rtol=self.tol, atol=self.tol)
        return optx.minimise(lambda x, _: objective(x), solver, start, max_steps=self.steps, throw=False).value


class JointStep(eqx.Module):
    """The model's own closed form for both kinds of variables at once: exact."""

    def __call__(
        self, problem: Problem, local: PyTree, shard: PyTree, lam0: Array, mu: Array, penalty: Array
    ) -> tuple[PyTree, Array]:
        """Minimise shard ``shard``'s augmented Lagrangian."""
        local, globals_ = problem.model.joint_step(local, shard, problem.augmentation(lam0, mu, penalty))
        return local, problem.ravel(globals_)


class CoordinateDescent(eqx.Module):
    """Sweeps of a local step, then a global step, from the shard's last locals and from lam0.

    Each step is the model's closed form if it has one, else ``inner`` on autodiff derivatives (by default
    `Newton` up to 64 variables, `LBFGS` above). Stops after ``sweeps``, or when a sweep moves no entry of lam
    by more than ``tol`` times its distance from lam0. One sweep per visit is the fastest way to a given
    objective; many sweeps with a small ``tol`` make the oracle exact.
    """

    sweeps: int = 1
    tol: float = 0.0
    inner: Newton | LBFGS | None = None

    def __check_init__(self) -> None:
        whole("sweeps", self.sweeps, least=1)

    def __call__(
        self, problem: Problem, local: PyTree, shard: PyTree, lam0: Array, mu: Array, penalty: Array
    ) -> tuple[PyTree, Array]:
        """Minimise shard ``shard``'s augmented Lagrangian."""

        def sweep(local: PyTree, lam: Array) -> tuple[PyTree, Array]:
            local = self.local_step(problem, local, lam, shard)
            return local, self.global_step(problem, local, lam, shard, lam0, mu, penalty)

        if self.sweeps == 1:
            return sweep(local, lam0)

        def unfinished(carry: tuple[Any, ...]) -> Array:
            count, _, lam, moved = carry
            rounding = 4 * jnp.finfo(lam.dtype).eps * jnp.abs(lam).max()
            return (count < self.sweeps) & (moved > self.tol * jnp.abs(lam - lam0).max() + rounding)

        def again(carry: tuple[Any, ...]) -> tuple[Any, ...]:
            count, local, lam, _ = carry
            local, new = sweep(local, lam)
            return count + 1, local, new, jnp.abs(new - lam).max()

        carry = (0, local, lam0, jnp.asarray(jnp.inf, lam0.dtype))
        return jax.lax.while_loop(unfinished, again, carry)[1:3]

    def local_step(self, problem: Problem, local: PyTree, lam: Array, shard: PyTree) -> PyTree:
        """Return the local variables that are best for fixed globals, or better ones."""
        if offers(problem.model, LocalStep):
            return problem.model.local_step(local, problem.unravel(lam), shard)
        flat, unflatten = ravel_pytree(local)
        if flat.size == 0:
            return local
        if problem.halo_rows:  # a shard's loss holds half of each cut edge: to minimise it would not lower F
            require("the generic oracle, where shards have a halo,", problem.model, LocalStep)
        return unflatten(self._minimise(lambda x: problem.loss(unflatten(x), lam, shard), flat))

    def global_step(
        self,
        problem: Problem,
        local: PyTree,
        lam: Array,
        shard: PyTree,
        lam0: Array,
        mu: Array,
        penalty: Array,
    ) -> Array:
        """Return the global variables that are best for fixed locals."""
        augmentation = problem.augmentation(lam0, mu, penalty)
        if offers(problem.model, Conjugate):
            statistics = problem.model.statistics(local, shard)
            return problem.ravel(problem.model.global_step(statistics, augmentation))
        return self._minimise(lambda x: problem.loss(local, x, shard) + augmentation(problem.unravel(x)), lam)

    def _minimise(self, objective: Objective, start: Array) -> Array:
        inner = self.inner or (Newton() if start.size <= NEWTON_DIMENSION else LBFGS())
        return inner.minimise(objective, start)


def default_oracle(problem: Problem) -> JointStep | CoordinateDescent:
    """Return the exact closed form if the model has one, else one sweep of coordinate descent."""
    return JointStep() if offers(problem.model, Exact) else CoordinateDescent()
