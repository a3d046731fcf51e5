"""From rows and a graph to a two-level mixture problem, its start, and its fit with hyper-parameters re-estimated."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from scipy.spatial import cKDTree

from pdvi._base.checks import positive, whole
from pdvi.core.problem import Problem
from pdvi.core.result import Point, Result, Status
from pdvi.mixtures.build import BuiltShard, coupled, in_memory, mixture_shards
from pdvi.mixtures.checks import check_graph
from pdvi.mixtures.em import Fitted, joined, reestimate, whole_fit
from pdvi.mixtures.recipe import RECIPE
from pdvi.mixtures.start import EmpiricalBayes, empirical_bayes
from pdvi.models import TwoLevelMixtureModel
from pdvi.shards.partition import Layout
from pdvi.solvers.conjugate import add, best_globals

FIRST = 10  # epochs before the first re-estimation: from labels there is nothing to explore


class TwoLevelStart(NamedTuple):
    """Types found on single rows, and domains found on the types around each row."""

    types: EmpiricalBayes
    type: np.ndarray  # of every row
    domain: np.ndarray  # of every row
    n_domains: int


def two_level_start(
    X: np.ndarray, coordinates: np.ndarray, n_domains: int, n_types: int = 30, *, n_neighbors: int = 30, seed: int = 0
) -> TwoLevelStart:
    """Find types by k-means of the rows, and domains by k-means of the root mean type shares of neighbours."""
    whole("n_domains", n_domains, least=1, most=len(X), of="the number of rows")
    whole("n_types", n_types, least=1, most=len(X), of="the number of rows")
    types = empirical_bayes(X, n_types, seed=seed)
    type_ = _nearest_mean(X, types.means)
    near = cKDTree(coordinates).query(coordinates, k=min(n_neighbors + 1, len(X)), workers=-1)[1].reshape(len(X), -1)
    shares = np.zeros((len(X), n_types), np.float32)
    for column in near.T:
        shares[np.arange(len(X)), type_[column]] += 1 / near.shape[1]
    roots = np.sqrt(shares)  # distances between roots tell compositions apart as counts do
    domain = _nearest_mean(roots, empirical_bayes(roots, n_domains, seed=seed).means)
    return TwoLevelStart(types, type_, domain, n_domains)


def two_level_problem(
    X: np.ndarray,
    graph: Any,
    start: TwoLevelStart,
    where: Layout,
    *,
    beta: float = 1.0,
    concentration: float = 1.0,
    halo: bool = True,
    temperature: float = 1.0,
    damping: float | None = None,
    log_scale: float = 0.0,
) -> Problem:
    """Make the two-level mixture of rows on a graph whose edge weights are multiplied by ``beta``.

    The noise is diagonal and fixed, the domains' shares are equal; `two_level_em` re-estimates both. The prior of
    every composition is Dirichlet with ``concentration`` for each type. Exact across shards with ``halo``.
    """
    positive("concentration", concentration)
    n_types = len(start.types.means)
    graph = check_graph(graph, len(X))
    coupling = coupled(graph, where, beta=beta, halo=halo, temperature=temperature, damping=damping)
    pairs = np.bincount(start.domain * n_types + start.type, minlength=start.n_domains * n_types)
    values = {
        "start": start.types.means,
        "concentration": concentration + pairs.reshape(start.n_domains, n_types),
        "prior_mean": start.types.prior_mean,
        "prior_variance": start.types.prior_variance,
        "noise_variance": start.types.noise_variance,
        "prior_concentration": np.full(n_types, concentration),
        "log_share": np.full(start.n_domains, -np.log(start.n_domains)),
        "n_rows": len(X),
        "log_scale": log_scale,
        "temperature": temperature,
        "damping": coupling.damping,
    }
    model = TwoLevelMixtureModel(**{name: jnp.asarray(value, jnp.result_type(float)) for name, value in values.items()})
    labels = {"domain": where.shard(start.domain).astype(np.int32), "type": where.shard(start.type).astype(np.int32)}
    shards = (
        BuiltShard({**arrays, **{name: values[b] for name, values in labels.items()}}, halo_rows)
        for b, (arrays, halo_rows) in enumerate(mixture_shards(X, where, coupling))
    )
    return in_memory(model, shards, where)


def two_level_em(
    problem: Problem,
    solver: Any,
    *,
    noise: str | None = "tied",
    shares: bool = False,
    first: int = FIRST,
    rounds: int = RECIPE.rounds,
    epochs: int = RECIPE.round_epochs,
    seed: int = 0,
    **settings: Any,
) -> Fitted:
    """Fit, re-estimate noise and shares, go on; until a round brings too little to be worth another.

    Parameters
    ----------
    noise
        "diagonal", "tied" (one full covariance, applied by whitening the rows) or None for fixed noise; it is
        estimated from the starting labels, too, before the first epoch.
    shares
        whether the domains' shares follow their sizes. Each such step lowers F, which lacks log Z and so is lowest
        where all rows share one domain: with weak evidence and strong coupling that is where the rounds lead.
    """
    point = starting_point(problem, seed=seed)
    problem, point, whitening = two_level_reestimate(problem, point, noise=noise, shares=shares)
    result = whole_fit(problem, solver, start=point, seed=seed, **{**settings, "max_epochs": first, "log_every": first})
    settings = {**settings, "max_epochs": epochs, "log_every": epochs, "seed": seed}
    for _ in range(rounds if noise or shares else 0):
        problem, point, step = two_level_reestimate(problem, result.point, noise=noise, shares=shares)
        whitening = step @ whitening
        before = result
        result = joined(result, whole_fit(problem, solver, start=point, **settings), "hyper-parameters re-estimated")
        if _little(before, result, float(problem.model.n_rows)):
            result = dataclasses.replace(result, status=Status.CONVERGED)
            break
    return Fitted(problem, result, whitening)


@eqx.filter_jit
def starting_point(problem: Problem, *, seed: int = 0) -> Point:
    """Return the starting labels with the globals that are best for them."""
    local = problem.init(jax.random.key(seed))[1]
    found = best_globals(problem, add(problem.map_shards(problem.model.statistics, local)))
    return Point(problem.unravel(found), local)


def two_level_reestimate(
    problem: Problem, point: Point, *, noise: str | None, shares: bool
) -> tuple[Problem, Point, np.ndarray]:
    """Return the problem with the best hyper-parameters for a point, the point in it, and how rows were whitened."""
    model = problem.model
    globals_, local = dict(point.global_params), point.local_params
    step = np.eye(problem.shards["x"].shape[-1])
    if noise is not None:  # the lower level is a Gaussian mixture, and its noise that of one
        lower = Problem(model.types, problem.shards)
        lower_point = Point({name: globals_[name] for name in ("mean", "log_var")}, local["type"])
        lower, lower_point, found = reestimate(lower, lower_point, noise=noise, weights=False)
        fields = ("prior_mean", "prior_variance", "noise_variance", "log_scale")
        model = dataclasses.replace(model, **{name: getattr(lower.model, name) for name in fields})
        problem = eqx.tree_at(lambda p: (p.model, p.shards), problem, (model, lower.shards))
        globals_ |= lower_point.global_params
        step = np.asarray(found, float)
    if shares:
        problem = eqx.tree_at(lambda p: p.model.log_share, problem, _log_shares(problem, local))
    return problem, Point(globals_, local), step


@eqx.filter_jit
def _log_shares(problem: Problem, local: Any) -> jax.Array:
    local = jax.tree.map(jnp.asarray, local)
    mass = add(problem.map_shards(problem.model.statistics, local)).counts.sum(1)
    mass = jnp.maximum(mass, 1e-6 * problem.model.n_rows / len(mass))
    return jnp.log(mass / mass.sum())


def _little(before: Result, after: Result, n_rows: float) -> bool:
    """Whether a round brought too little to go on."""
    gain = before.objective - after.objective
    labels = [np.asarray(result.local_params["domain"]).argmax(-1) for result in (before, after)]
    steady = (labels[0] != labels[1]).sum() < RECIPE.steady_labels * n_rows
    return bool(gain < RECIPE.least_gain * n_rows or (gain < RECIPE.steady_gain * n_rows and steady))


def _nearest_mean(X: np.ndarray, means: np.ndarray) -> np.ndarray:
    return np.asarray((0.5 * (means**2).sum(1) - X @ means.T).argmin(1))
