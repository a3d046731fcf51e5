"""Normal distributions around a fitted point from which unknowns are drawn, where they have no constraints.

Mean-field: what was fitted. Its standard deviations are too small where unknowns are correlated. The covariance of
linear response (Giordano, Broderick and Jordan, 2018) is the means' part of the inverse of the Hessian H of the
negative ELBO in all its parameters. With W = H_pp^-1 H_pl of the locals of a row and S the curvature of the globals
after the locals have followed,

    u ~ N(0, S^-1),    globals = mean + u,    locals of a row = mean - W u + N(0, H_pp^-1),    the means' parts of each

have exactly this covariance, locals and globals together.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from pdvi._base.types import Array, Globals, PyTree
from pdvi.core.problem import Problem
from pdvi.solvers.primal_dual.curvature import derivatives

MOST = 256  # globals up to which the curvature is made: a matrix of twice their number


class Gaussian(NamedTuple):
    """Draws of the globals, and for each row how its locals go with them."""

    draws: np.ndarray  # (draws, globals)
    log_q: np.ndarray  # (draws,)
    tilts: np.ndarray  # (draws, k): u, which moves the locals
    follow: Array  # (shards, rows, locals, k): - W
    spread: Array  # (shards, rows, locals, locals): the Cholesky factor of the locals' covariance for given globals
    kind: str


def mean_field(rng: np.random.Generator, draws: int, globals_: Globals, local: PyTree) -> Gaussian:
    """Return draws of q."""
    mean, log_sd = (np.asarray(globals_[name], float) for name in ("mean", "log_sd"))
    noise = rng.standard_normal((draws, mean.size))
    log_q = -0.5 * (noise**2).sum(1) - log_sd.sum() - 0.5 * mean.size * np.log(2 * np.pi)
    follow = spread = jnp.zeros(0)
    if local:
        sd = jnp.exp(jnp.asarray(local["log_sd"]))
        follow, spread = jnp.zeros((*sd.shape, 0)), sd[..., None] * jnp.eye(sd.shape[-1], dtype=sd.dtype)
    return Gaussian(mean + np.exp(log_sd) * noise, log_q, np.zeros((draws, 0)), follow, spread, "mean-field")


def linear_response(
    rng: np.random.Generator, draws: int, problem: Problem, globals_: Globals, local: PyTree
) -> Gaussian:
    """Return draws with the linear-response covariance; refused where the fit is at no minimum."""
    lam = problem.ravel({name: jnp.asarray(value) for name, value in globals_.items()})
    curvature, follow, spread = _responses(problem, lam, jax.tree.map(jnp.asarray, local))
    S = np.asarray(curvature, float).sum(0)
    units = np.sqrt(np.abs(np.diagonal(S)))
    values, vectors = np.linalg.eigh(0.5 * (S + S.T) / (units[:, None] * units))
    if not (np.isfinite(values).all() and values.min() > 1e-6 * values.max()):
        msg = (
            '`covariance` must be "mean-field" here: the curvature at the fitted point is not positive, so it is no '
            "minimum yet; fit further with pdvi.fit(problem, solver, start=result), or leave out the covariances."
        )
        raise ValueError(msg)
    root = vectors / np.sqrt(values) / units[:, None]  # root root' = S^-1
    tilts = rng.standard_normal((draws, len(S))) @ root.T
    means = problem.block_slices["mean"]
    covariance = root[means] @ root[means].T
    moved = tilts[:, means]
    chol = np.linalg.cholesky(covariance)
    log_q = -0.5 * (np.linalg.solve(chol, moved.T) ** 2).sum(0)
    log_q -= np.log(np.diagonal(chol)).sum() + 0.5 * moved.shape[1] * np.log(2 * np.pi)
    mean = np.asarray(globals_["mean"], float)
    return Gaussian(mean + moved, log_q, tilts, follow, spread, "linear-response")


@eqx.filter_jit
def _responses(problem: Problem, lam: Array, local: PyTree) -> tuple[Array, Array, Array]:
    def one(phi: PyTree, shard: PyTree) -> Any:
        at = derivatives(problem, lam, phi, shard, bool(phi))
        if not phi:
            return at.profiled, jnp.zeros(0), jnp.zeros(0)
        n_local = phi["mean"].shape[-1]
        own = slice(n_local, None)  # a row's locals are its log sds, then its means: in the order of names
        follow = -jnp.einsum("rij,rjp->rip", at.inverse, at.cross)[:, own]
        there = problem.model.density.weights(shard)
        spread = jnp.where(there[:, :, None] * there[:, None, :] > 0, at.inverse[:, own, own], jnp.eye(n_local))
        return at.profiled, there[..., None] * follow, jnp.linalg.cholesky(spread)

    return problem.map_shards(one, local)
