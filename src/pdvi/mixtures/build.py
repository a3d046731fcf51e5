"""From rows (and a graph) to a mixture problem: k-means start, empirical-Bayes settings, shards, halo."""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import scipy.sparse as sp
from scipy.sparse.linalg import eigsh

from pdvi.core.problem import Problem
from pdvi.core.result import Point
from pdvi.models import GaussianMixtureModel, PottsMixtureModel
from pdvi.shards.neighbours import neighbour_table
from pdvi.shards.partition import Layout
from pdvi.solvers.conjugate import add, best_globals

LARGE, SPARE = 20_000, 1.1  # rows above which damping is measured patch by patch, and what is added then
SUBSAMPLE = 20_000  # rows that k-means looks at: all of them would cost more than the fit


class EmpiricalBayes(NamedTuple):
    """Starting means and the hyper-parameters that an initial k-means suggests."""

    means: np.ndarray
    prior_mean: np.ndarray
    prior_variance: np.ndarray
    noise_variance: np.ndarray


def empirical_bayes(X: np.ndarray, n_components: int, *, seed: int = 0, subsample: int = SUBSAMPLE) -> EmpiricalBayes:
    """The paper's settings: xi the mean, s0^2 the average variance within, s1^2 the variance between clusters."""
    from sklearn.cluster import KMeans

    rng = np.random.default_rng(seed)
    sample = X if len(X) <= subsample else X[np.sort(rng.choice(len(X), subsample, replace=False))]
    kmeans = KMeans(n_components, n_init=1, random_state=int(rng.integers(2**31))).fit(sample)
    return from_labels(sample, kmeans.labels_, kmeans.cluster_centers_)


def from_labels(X: np.ndarray, labels: np.ndarray, means: np.ndarray) -> EmpiricalBayes:
    """The same from given labels and means."""
    X = np.asarray(X, float)
    prior_mean = X.mean(0)
    total = X.var(0)
    # a constant feature, or one cluster only: no NaN and no infinite precision
    floor = 1e-6 * max(float(total.mean()), 1e-12)
    within = ((X - means[labels]) ** 2).mean(0)
    between = means.var(0) if len(means) > 1 else total
    return EmpiricalBayes(means, prior_mean, np.maximum(between, floor), np.maximum(within, floor))


def means_of(X: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    """The mean of every component's rows."""
    mass = np.maximum(probabilities.sum(0), 1e-6)
    return np.asarray(probabilities.T @ X / mass[:, None])


@eqx.filter_jit
def point_at(problem: Problem, local: Any) -> Point:
    """The point with these responsibilities, padding left out, and the globals that are best for them."""
    local = jnp.asarray(local)
    if "mask" in problem.shards:
        local *= problem.shards["mask"][..., None]
    found = best_globals(problem, add(problem.map_shards(problem.model.statistics, local)))
    return Point(problem.unravel(found), local)


def gaussian_mixture_problem(
    X: np.ndarray, settings: EmpiricalBayes, where: Layout, *, log_scale: float = 0.0
) -> Problem:
    """A mixture with diagonal, fixed noise and uniform weights on the shards of ``where``.

    ``log_scale`` is log |det A| if the rows are A times those whose ELBO is wanted (whitened, say).
    """
    model = GaussianMixtureModel(**_hyper(settings, len(X), log_scale))
    return Problem(model, _shards(X, where))


def potts_mixture_problem(
    X: np.ndarray,
    graph: Any,
    settings: EmpiricalBayes,
    where: Layout,
    *,
    beta: float = 1.0,
    halo: bool = True,
    temperature: float = 1.0,
    damping: float | None = None,
    log_scale: float = 0.0,
) -> Problem:
    """The same on a graph with edge weights times ``beta``; exact across shards with ``halo``."""
    graph = sp.csr_array(graph) * beta
    if damping is None:
        damping = damping_of_patches(graph, where, temperature)
    model = potts_model(settings, len(X), temperature=temperature, damping=damping, log_scale=log_scale)
    table, weight, ghosts = neighbour_table(graph, where, halo=halo)
    return Problem(model, {**_shards(X, where), "table": table, "weight": weight}, halo=ghosts)


def potts_model(
    settings: EmpiricalBayes, n_rows: int, *, temperature: float = 1.0, damping: float = 0.0, log_scale: float = 0.0
) -> PottsMixtureModel:
    """The model alone, for shards that are made elsewhere."""
    return PottsMixtureModel(**_hyper(settings, n_rows, log_scale, temperature=temperature, damping=damping))


def damping_of_patches(graph: sp.csr_array, where: Layout, temperature: float = 1.0) -> float:
    """The damping for a graph; for a large one the highest of its patches, a few times faster.

    The lowest eigenvectors of such a graph live in small places, most of which lie within a patch.
    """
    if graph.shape[0] <= LARGE:
        return safe_damping(graph, temperature)
    patches = (rows[rows >= 0] for rows in where.rows)
    return max(safe_damping(sp.csr_array(graph[own][:, own]), temperature, spare=SPARE) for own in patches)


def safe_damping(graph: sp.csr_array, temperature: float = 1.0, *, spare: float = 1.05) -> float:
    """The damping with which parallel sweeps never let F rise; see `PottsMixtureModel`.

    ``spare`` makes up for an eigenvalue that is not quite the lowest.
    """
    reach = float(abs(graph).sum(1).max(initial=0.0))  # no eigenvalue is larger in size
    if reach <= 2 * temperature:
        return 0.0
    if graph.shape[0] < 50:
        smallest = float(np.linalg.eigvalsh(graph.toarray()).min())
    else:
        start = np.random.default_rng(0).standard_normal(graph.shape[0])
        smallest = spare * float(eigsh(graph, 1, which="SA", tol=0.02, v0=start, return_eigenvectors=False)[0])
    return max(0.0, -smallest / (4 * temperature) - 0.5)


def with_weights(problem: Problem, weights: np.ndarray) -> Problem:
    """The same problem with other component weights."""
    return eqx.tree_at(lambda p: p.model.log_weights, problem, jnp.log(jnp.asarray(weights, jnp.result_type(float))))


def _hyper(settings: EmpiricalBayes, n_rows: int, log_scale: float, **more: float) -> dict[str, Any]:
    n_components = len(settings.means)
    values: dict[str, Any] = {
        "start": settings.means,
        "prior_mean": settings.prior_mean,
        "prior_variance": settings.prior_variance,
        "noise_variance": settings.noise_variance,
        "log_weights": np.full(n_components, -np.log(n_components)),
        "n_rows": n_rows,
        "log_scale": log_scale,
        **more,
    }
    return {name: jnp.asarray(value, jnp.result_type(float)) for name, value in values.items()}


def _shards(X: np.ndarray, where: Layout) -> dict[str, np.ndarray]:
    x = where.shard(X)
    mask = where.mask
    square = np.einsum("bnd,bnd,bn->bd", x, x, mask.astype(x.dtype), dtype=float, casting="same_kind")
    shards = {"x": x, "fraction": where.fraction, "square": square}
    return shards if mask.all() else {**shards, "mask": mask.astype(float)}
