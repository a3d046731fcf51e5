"""Draws of the unknowns of a fitted NumPyro model, in its own terms, rows in the order of the user's data.

The log likelihood of a row is that of all its data with its locals integrated out, log p(y_i | globals): what leaving
the row out means. Points of the integral lie around the fitted locals, moved with the globals: Gauss and Hermite's for
one local a row, else the row's own fixed draws, weighted by their importance. They are the same for all draws of the
globals, so that differences between these, on which k-hat and LOO rest, are smooth.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp

from pdvi._base.types import Array, Globals, PyTree
from pdvi.bridge.density import Density
from pdvi.bridge.gaussian import MOST, Gaussian, linear_response, mean_field
from pdvi.bridge.sites import Site
from pdvi.core.model import Sampled, Variable, Wanted
from pdvi.core.problem import Problem
from pdvi.q.quadrature import hermite

QUADRATURE = 16  # points of the integral over one local
AT_ONCE = 2**22  # numbers of a trace worked on at once


def sampled(density: Density, problem: Problem, globals_: Globals, local: PyTree, wanted: Wanted) -> Sampled:
    """Return what is wanted of the posterior."""
    problem = problem.load()
    rng = np.random.default_rng(wanted.seed)
    suits = "linear-response" if density.n_global <= MOST else "mean-field"
    if (wanted.covariance or suits) == "linear-response":
        q = linear_response(rng, wanted.draws, problem, globals_, local)
    else:
        q = mean_field(rng, wanted.draws, globals_, local)
    told = jax.tree.map(np.asarray, _told(problem, density, wanted, q, local))
    there = np.asarray(problem.shards["weight"]).reshape(-1) > 0
    order = np.flatnonzero(there)[np.argsort(np.asarray(problem.shards["row"]).reshape(-1)[there])]

    def rows(by_shard: dict[tuple[str, int], np.ndarray]) -> dict[str, Variable]:
        """Variables, rows in the user's order, from arrays (shards, draws, ..., rows, ...) by name and axis of rows."""
        found = {}
        for (name, axis), values in by_shard.items():
            moved = np.moveaxis(values, axis + 2, 1)
            moved = moved.reshape(-1, *moved.shape[2:])[order]
            found[name] = Variable(np.moveaxis(moved, 0, axis + 1), axis)
        return found

    unknowns = {name: Variable(values[0]) for name, values in told["outside"].items()}  # all shards say the same
    unknowns |= rows(told["inside"])
    unknowns = {name: unknowns[name] for name in density.names if name in unknowns}
    likelihood = rows(told["likelihood"])
    log_joint = told["prior"][0].astype(float) if wanted.log_likelihood else None
    for variable in likelihood.values():
        log_joint = log_joint + variable.values.astype(float).sum(1)
    observed = {name: Variable(values[0], axis) for name, (values, axis) in rows(told["observed"]).items()}
    predictive = rows(told["predictive"])
    return Sampled(unknowns, likelihood, predictive, observed, log_joint, q.log_q, q.kind, density.plate)


def _told(problem: Problem, density: Density, wanted: Wanted, q: Gaussian, local: PyTree) -> Any:
    """Return all that shards say, stacked: (shards, draws, ...)."""
    numbers = sum(math.prod(leaf.shape[1:]) for leaf in jax.tree.leaves(problem.shards["data"]))
    chunk = max(1, AT_ONCE // max(1, numbers * max(QUADRATURE, len(problem.model.draws))))
    working = jnp.result_type(float)
    keys = jax.random.split(jax.random.key(wanted.seed), wanted.draws)
    draws = jnp.asarray(q.draws, working), jnp.asarray(q.tilts, working), keys

    @jax.jit
    def shard_by_shard(draws: Any, shards: Any, places: Any) -> Any:
        def one(arguments: Any) -> Any:
            index, shard, place = arguments

            def draw(drawn: Any) -> Any:
                z, tilt, key = drawn
                return _one_draw(density, wanted, z, tilt, jax.random.fold_in(key, index), shard, *place)

            told = jax.lax.map(draw, draws, batch_size=min(chunk, wanted.draws))
            trace = density.trace(draws[0][0], jnp.zeros((shard["weight"].shape[0], density.n_local)), shard)
            told["observed"] = {
                key: value[None] for key, value in _values(density, density.observed, trace, shard).items()
            }
            return told

        return jax.lax.map(one, (jnp.arange(problem.n_shards), shards, places))

    places = (jnp.asarray(local["mean"]), q.follow, q.spread) if local else ()
    return shard_by_shard(draws, problem.shards, places)


def _one_draw(
    density: Density,
    wanted: Wanted,
    z: Array,
    tilt: Array,
    key: Array,
    shard: Any,
    mean: Array | None = None,
    follow: Any = None,
    spread: Any = None,
) -> dict[str, Any]:
    """Return what one shard says of one draw of the globals."""
    centre = jnp.zeros((shard["weight"].shape[0], 0)) if mean is None else mean + follow @ tilt
    spread = jnp.zeros((*centre.shape, 0)) if spread is None else spread

    def moved(noise: Array) -> Array:
        return centre + jnp.einsum("rij,rj->ri", spread, jnp.broadcast_to(noise, centre.shape))

    keys = jax.random.split(key)
    z_local = moved(jax.random.normal(keys[0], centre.shape))
    trace = density.trace(z, z_local, shard)
    outside = {site.name: trace[site.name]["value"] for site in density.globals_}
    outside |= {name: trace[name]["value"] for name, axis in density.deterministic if axis is None}
    told: dict[str, Any] = {"outside": outside, "inside": {}, "likelihood": {}, "predictive": {}}
    if wanted.locals:
        told["inside"] = _values(density, density.locals_, trace, shard)
        told["inside"] |= {
            (name, axis): trace[name]["value"] for name, axis in density.deterministic if axis is not None
        }
    if wanted.predictive:
        anew = density.trace(z, z_local, shard, keys[1], observed=False)
        told["predictive"] = _values(density, density.observed, anew, shard)
    if wanted.log_likelihood:
        points, log_weights = _points(shard, density.n_local)
        log_p, outside_terms = jax.vmap(lambda noise: density.by_row(z, moved(noise), shard))(points)
        there = density.weights(shard) if density.n_local else jnp.zeros(centre.shape)
        log_size = jnp.log(jnp.diagonal(spread, axis1=1, axis2=2))
        log_q = -jnp.sum(there * (0.5 * points**2 + log_size + 0.5 * math.log(2 * math.pi)), axis=-1)
        names = [site.name for site in density.observed]
        name = names[0] if len(names) == 1 else density.plate
        told["likelihood"] = {(name, 0): logsumexp(log_p - log_q + log_weights[:, None], axis=0)}
        told["prior"] = outside_terms[0]
    return told


def _points(shard: Any, n_local: int) -> tuple[Array, Array]:
    """Return standard points (points, rows, locals) that stand for a normal distribution, and their log weights."""
    if n_local == 1:
        nodes, weights = hermite(QUADRATURE)
        working = jnp.result_type(float)
        everywhere = jnp.broadcast_to(
            jnp.asarray(nodes, working)[:, None, None], (QUADRATURE, *shard["weight"].shape, 1)
        )
        return everywhere, jnp.asarray(np.log(weights), working)
    points = shard["noise"] if n_local else jnp.zeros((1, *shard["weight"].shape, 0))
    return points, jnp.full(len(points), -math.log(len(points)))


def _values(density: Density, sites: tuple[Site, ...], trace: Any, shard: Any) -> dict[tuple[str, int], Array]:
    """Return the values of sites inside the plate, by name and axis of the rows."""
    return {
        (site.name, site.axis(density.plate)): density.present(site, trace[site.name]["value"], shard) for site in sites
    }
