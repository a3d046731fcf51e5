"""How an augmented Lagrangian subproblem is minimised, one shard at a time.

    minimise over phi, lam   f_b(phi, lam) + <mu, lam - lam0> + 1/2 ||lam - lam0||_D^2

An oracle may be inexact. `CoordinateDescent` ends on the global step, so after it mu_b is minus the gradient
of f_b in lam at the point it returns, however few sweeps it made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

from pdvi._base.checks import whole
from pdvi._base.types import Array, PyTree
from pdvi.core.model import Conjugate, Exact, GlobalStep, LocalStep, offers, require
from pdvi.core.problem import Problem, with_halo_of
from pdvi.solvers.primal_dual.arrow import FLOOR, arrow, as_rows
from pdvi.solvers.primal_dual.metric import (
    applied,
    curvature_in_units,
    from_units,
    into_units,
    root,
    squared,
    to_coordinates,
)

Objective = Callable[[Array], Array]

LONGEST = 2.0  # times 1 + |x|: a step's length in any coordinate
DIGITS = 0, 3  # smallest steps by which coordinates are moved to see rounding errors: twice the time of a value
DECREASE = 1e-4, 4.0  # of what the slope promises, that a step must bring, and may: far more is rounding noise
ROWS_TOL = 1e-3  # of the first gradient: how well the locals of independent rows are found in a visit
NEWTON_DIMENSION = 64  # up to here a dense Hessian is cheaper than a line-searched quasi-Newton run


class Newton(eqx.Module):
    """At most ``steps`` damped Newton steps, until the gradient, measured by the Hessian, is ``tol`` times the first.

    Eigenvalues are taken in the units of the Hessian's diagonal and made positive, so that it leaves saddles. It also
    ends when rounding hides any decrease.
    """

    steps: int = 20
    tol: float = 1e-7
    halvings: int = 60  # a flat tail makes the first step very long

    def minimise(self, objective: Objective, start: Array) -> Array:
        """Return a minimiser of ``objective`` near ``start``.

        ``start`` is a vector, or a matrix whose rows do not meet in the objective: each has a Hessian of its own.
        """
        nothing = jnp.zeros(0, start.dtype)

        def value(x: Array, _: Array = nothing) -> Array:
            return objective(x.reshape(start.shape))

        def direction(point: tuple[Array]) -> Direction:
            at = arrow(value, point[0], nothing)
            return Direction((at.local_step(nothing),), at.value, at.local_decrement, jnp.abs(at.value))

        def enough(point: tuple[Array], first: Array) -> Array:
            return self.tol**2 * first  # a gain is the square of a gradient

        rows = start if start.ndim == 2 else start[None]
        found = descended(lambda point: value(*point), direction, enough, (rows,), self.steps, self.halvings)
        return found[0].reshape(start.shape)


class JointNewton(eqx.Module):
    """Newton steps on the locals and the globals of a shard at once, whatever their units.

    Rows of locals that meet in the globals only (``independent_rows``) cost a small block each; others are one row.
    Eigenvalues are made positive, in the units of the diagonal for locals, in those of D for globals
    (lam = lam0 + D^-1/2 z). Ends when another step would gain less than ``tol`` times what D charges for the way from
    lam0.
    """

    independent_rows: bool = eqx.field(default=False, static=True)
    steps: int = 12
    tol: float = 1e-3

    def __call__(
        self, problem: Problem, local: PyTree, shard: PyTree, lam0: Array, mu: Array, penalty: Array
    ) -> tuple[PyTree, Array]:
        """Minimise shard ``shard``'s augmented Lagrangian."""
        start, back = as_rows(local, self.independent_rows)
        R = root(penalty)

        def loss(x: Array, lam: Array) -> Array:
            return problem.loss(back(x), lam, shard)

        def added(lam: Array) -> Array:
            return mu @ (lam - lam0) + 0.5 * squared(penalty, lam - lam0)

        def direction(point: tuple[Array, Array]) -> Direction:
            x, lam = point
            at = arrow(loss, x, lam)
            slope = at.reduced + mu + applied(penalty, lam - lam0)
            bend = curvature_in_units(R, at.profiled) + jnp.eye(lam.size, dtype=lam.dtype)
            values, vectors = jnp.linalg.eigh(bend)
            values = jnp.maximum(jnp.abs(values), FLOOR * jnp.finfo(lam.dtype).eps)
            downhill = vectors.T @ into_units(R, slope)
            move = -from_units(R, vectors @ (downhill / values))
            gain = downhill @ (downhill / values) + at.local_decrement
            noise = jnp.abs(at.value) + jnp.abs(added(lam))
            return Direction((at.local_step(move), move), at.value + added(lam), gain, noise)

        def enough(point: tuple[Array, Array], first: Array) -> Array:
            return self.tol * squared(penalty, point[1] - lam0)

        first = start.astype(lam0.dtype), lam0
        x, lam = descended(lambda point: loss(*point) + added(point[1]), direction, enough, first, self.steps)
        return back(x), lam


def as_promised(brought: Any, promised: Any, rounding: Any) -> Any:
    """Return whether a value fell as its slope had promised: not too little nor, out of rounding noise, too much."""
    least, most = DECREASE
    return (brought >= least * promised - rounding) & (brought <= most * promised + rounding)


def with_noise(value: Callable[[Any], Array], point: Any) -> tuple[Array, Array]:
    """Return the value at a point, and by how much it changes with the last digits of the coordinates.

    A loss with log gamma functions of e^25, which cancel each other, changes by thousands.
    """
    nearby = jax.tree.map(
        lambda x: x * (1 + jnp.finfo(x.dtype).eps * jnp.asarray(DIGITS, x.dtype).reshape(-1, *[1] * x.ndim)), point
    )
    values = jax.vmap(value)(nearby)
    return values[0], jnp.abs(values - values[0]).max()


class Direction(NamedTuple):
    """A step, and what is known where it begins."""

    move: tuple[Array, ...]
    value: Array
    gain: Array  # minus the slope along the step, which is twice what a quadratic would gain
    size: Array  # of the terms that make the value: its rounding error is eps times that


def descended(value: Any, direction: Any, enough: Any, start: Any, steps: int, halvings: int = 40) -> Any:
    """Return the point after steps that are capped, halved until the value falls, and ended when they gain too little.

    A step is at most 2 (1 + |x|) in every coordinate: a tail without curvature would send it to where the loss is
    rounding noise. ``enough(point, first)`` is the least gain to go on for, ``first`` that of the first step, which is
    known in the loop only: what is differentiated outside of it as well is compiled twice.
    """
    eps = jnp.finfo(start[0].dtype).eps

    def step(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        count, point, first, _ = carry
        go: Direction = direction(point)
        first = jnp.where(count == 0, go.gain, first)
        relative = [jnp.max(jnp.abs(m) / (1 + jnp.abs(x)), initial=0.0) for m, x in zip(go.move, point)]
        length = jnp.minimum(1.0, LONGEST / jnp.maximum(jnp.stack(relative).max(), LONGEST))
        rounding = 8 * eps * go.size

        def fits(search: tuple[Any, ...]) -> Array:
            halving, _, candidate, noise = search
            promised = length * 0.5**halving * go.gain
            return as_promised(go.value - candidate, promised, rounding) & (noise <= promised + rounding)

        def too_long(search: tuple[Any, ...]) -> Array:
            return ~fits(search) & (search[0] < halvings)

        def halve(search: tuple[Any, ...]) -> tuple[Any, ...]:
            halving = search[0] + 1
            moved = tuple(x + length * 0.5**halving * m for x, m in zip(point, go.move))
            return halving, moved, *with_noise(value, moved)

        infinite = jnp.full_like(go.value, jnp.inf)
        tried = jax.lax.while_loop(too_long, halve, (-1, point, infinite, infinite))
        accepted = fits(tried)
        new = tuple(jnp.where(accepted, after, before) for after, before in zip(tried[1], point))
        return count + 1, new, first, accepted & (go.gain > enough(new, first)) & (go.gain > rounding)

    def unfinished(carry: tuple[Any, ...]) -> Array:
        return (carry[0] < steps) & carry[3]

    return jax.lax.while_loop(unfinished, step, (0, start, jnp.zeros((), start[0].dtype), jnp.asarray(True)))[1]


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

    Each step is the model's closed form if it has one, else ``inner`` on autodiff derivatives (by default `Newton` up
    to 64 variables, `LBFGS` above; where rows of locals meet in the globals only, ``independent_rows``, Newton's with a
    small block for each). Stops after ``sweeps``, or when a sweep moves no entry of lam by more than ``tol`` times its
    distance from lam0. One sweep per visit is the fastest way to a given objective; many with a small ``tol`` make the
    oracle exact.
    """

    sweeps: int = 1
    tol: float = 0.0
    inner: Newton | LBFGS | None = None
    independent_rows: bool = eqx.field(default=False, static=True)

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
            own, new = sweep(local, lam)
            return count + 1, with_halo_of(local, own), new, jnp.abs(new - lam).max()

        carry = (0, local, lam0, jnp.asarray(jnp.inf, lam0.dtype))
        return jax.lax.while_loop(unfinished, again, carry)[1:3]

    def local_step(self, problem: Problem, local: PyTree, lam: Array, shard: PyTree) -> PyTree:
        """Return the local variables that are best for fixed globals, or better ones."""
        if offers(problem.model, LocalStep):
            return problem.model.local_step(local, problem.unravel(lam), shard)
        start, back = as_rows(local, self.independent_rows)
        if start.size == 0:
            return local
        if problem.halo_rows:  # a shard's loss holds half of each cut edge: to minimise it would not lower F
            require("the generic oracle, where shards have a halo,", problem.model, LocalStep)

        def objective(x: Array) -> Array:
            return problem.loss(back(x.reshape(start.shape)), lam, shard)

        if self.independent_rows and self.inner is None:
            return back(Newton(tol=ROWS_TOL).minimise(objective, start))
        return back(self._minimise(objective, start.ravel()).reshape(start.shape))

    def global_step(
        self, problem: Problem, local: PyTree, lam: Array, shard: PyTree, lam0: Array, mu: Array, penalty: Array
    ) -> Array:
        """Return the global variables that are best for fixed locals."""
        if offers(problem.model, Conjugate) and penalty.ndim == 1:
            statistics = problem.model.statistics(local, shard)
            return problem.ravel(problem.model.global_step(statistics, problem.augmentation(lam0, mu, penalty)))
        if offers(problem.model, GlobalStep) and penalty.ndim == 1:
            added = problem.augmentation(lam0, mu, penalty)
            return problem.ravel(problem.model.improve_globals(local, problem.unravel(lam), shard, added))

        def objective(lam: Array) -> Array:
            return problem.loss(local, lam, shard) + mu @ (lam - lam0) + 0.5 * squared(penalty, lam - lam0)

        if self.inner is not None:
            return self.inner.minimise(objective, lam)
        R = root(penalty)  # in the units of D it is at least as steep as a unit bowl, whatever those of the model
        found = self._minimise(lambda z: objective(lam0 + from_units(R, z)), to_coordinates(R, lam - lam0))
        return lam0 + from_units(R, found)

    def _minimise(self, objective: Objective, start: Array) -> Array:
        inner = self.inner or (Newton() if start.size <= NEWTON_DIMENSION else LBFGS())
        return inner.minimise(objective, start)


def default_oracle(problem: Problem) -> JointStep | CoordinateDescent:
    """Return the exact closed form if the model has one, else one sweep of coordinate descent."""
    return JointStep() if offers(problem.model, Exact) else CoordinateDescent()
