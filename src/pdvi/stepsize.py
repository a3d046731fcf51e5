"""Step sizes nobody has to tune, and what to do when a run goes wrong all the same.

    D = c * mean_b |diag grad^2_lam f_b|   at the starting point, per coordinate,   c = max(1, 0.1 B / |S|)

so that D has the units of the loss's curvature: rescaling a parameter rescales its step size with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from pdvi.problem import Problem
from pdvi.shards import take

Array = jax.Array
PyTree = Any

EXACT_DIMENSION = 256  # up to here the Hessian's diagonal is computed exactly
PROBES = 64  # above, Hutchinson probes
SAMPLED_SHARDS = 256  # autodiff curvature looks at this many shards, evenly spread
FLOOR = 1e-4  # of the block's mean: keeps D positive where the loss is flat


def automatic_penalty(
    problem: Problem, lam: Array, local: PyTree, batch_size: int, scale: float = 0.1
) -> Array:
    """D per coordinate from the curvature at the start; ``scale`` is c / (B / |S|)."""
    curvature = _curvature(problem, lam, local)
    if not bool(jnp.isfinite(curvature).all()):
        bad = [
            name for name, part in problem.block_slices.items() if not jnp.isfinite(curvature[part]).all()
        ]
        msg = (
            f"the curvature of the loss at the start is not finite in {bad}; give another `start`, "
            "or set `eta` by hand."
        )
        raise ValueError(msg)
    constant = max(1.0, scale * problem.n_shards / batch_size)
    return constant * _floored(problem, curvature)


def scalar_penalty(penalty: Array) -> Array:
    """One number for all coordinates: the geometric mean, half-way between the stiff and the flat ones."""
    return jnp.exp(jnp.log(penalty).mean())


def penalty_from_eta(problem: Problem, eta: float | Mapping[str, Any]) -> Array:
    """D = 1/eta: one number, one per block, or an array of a block's shape for one per coordinate."""
    if not isinstance(eta, Mapping):
        eta = {name: eta for name, _ in problem.blocks}
    names = [name for name, _ in problem.blocks]
    if set(eta) != set(names):
        wrong = sorted(set(eta) - set(names))
        problem_words = f"unknown {wrong}" if wrong else f"missing {sorted(set(names) - set(eta))}"
        msg = f"`eta` must name the blocks of the model ({names}) and no others: {problem_words}."
        raise ValueError(msg)
    parts = {}
    for name, shape in problem.blocks:
        value = np.asarray(eta[name], float)
        if value.shape not in ((), shape):
            msg = f"`eta` of block {name!r} must be a number or have its shape {shape}, got {value.shape}."
            raise ValueError(msg)
        if not (np.isfinite(value) & (value > 0)).all():
            msg = f"`eta` must be positive and finite, got {eta[name]!r} for block {name!r}."
            raise ValueError(msg)
        parts[name] = jnp.broadcast_to(1.0 / value, shape)
    return problem.ravel(parts).astype(jnp.result_type(float))


@eqx.filter_jit
def _curvature(problem: Problem, lam: Array, local: PyTree) -> Array:
    if hasattr(problem.model, "curvature"):

        def offered(pair: tuple[PyTree, PyTree]) -> Array:
            return problem.ravel(problem.model.curvature(pair[0], problem.unravel(lam), pair[1]))

        return jnp.abs(problem.map_shards(offered, (local, problem.shards))).mean(0)

    def gradient(local: PyTree, shard: PyTree) -> Any:
        return jax.grad(lambda x: problem.loss(local, x, shard))

    def exact(pair: tuple[PyTree, PyTree]) -> Array:
        return jnp.diagonal(jax.jacfwd(gradient(*pair))(lam))

    probes = jax.random.rademacher(jax.random.key(0), (PROBES, lam.size), lam.dtype)

    def hutchinson(pair: tuple[PyTree, PyTree]) -> Array:
        def probe(z: Array) -> Array:
            return z * jax.jvp(gradient(*pair), (lam,), (z,))[1]

        return jax.lax.map(probe, probes).mean(0)

    sample = np.unique(np.linspace(0, problem.n_shards - 1, SAMPLED_SHARDS).astype(int))
    diagonal = exact if lam.size <= EXACT_DIMENSION else hutchinson
    return jnp.abs(problem.map_shards(diagonal, take((local, problem.shards), sample))).mean(0)


def _floored(problem: Problem, curvature: Array) -> Array:
    everywhere = curvature.mean()
    parts = []
    for part in problem.block_slices.values():
        block = curvature[part]
        typical = jnp.where(block.mean() > 0, block.mean(), jnp.where(everywhere > 0, everywhere, 1.0))
        parts.append(jnp.maximum(block, FLOOR * typical))
    return jnp.concatenate(parts)


class Safeguard:
    """Watches the objective: non-finite, or rising for several epochs, means D was too small.

    ``fit`` then restores the last good state and asks the solver to go on from there more carefully
    (`recover`: D times 4, h rebuilt from the duals), at most ``tries`` times.
    """

    factor = 4.0
    tries = 5
    rises = 4  # log points in a row, and at least as many epochs
    slack = 1e-6  # of the objective, plus 1e-12 of the largest seen: smaller rises are rounding

    def __init__(self) -> None:
        self.largest = 0.0
        self.streak = 0
        self.good_epoch = 0.0
        self.previous = np.inf

    def judge(self, epoch: float, objective: float) -> str | None:
        """The reason to go back, or None."""
        if not np.isfinite(objective):
            return "the objective is not finite"
        self.largest = max(self.largest, abs(objective))
        rising = objective > self.previous + self.slack * abs(self.previous) + 1e-12 * self.largest
        self.previous = objective
        if not rising:
            self.streak, self.good_epoch = 0, epoch
            return None
        self.streak += 1
        if self.streak >= self.rises and epoch - self.good_epoch >= self.rises:
            return f"the objective rose for {epoch - self.good_epoch:g} epochs"
        return None
