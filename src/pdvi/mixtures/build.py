"""Problems of the paper's mixtures, with fixed noise and equal weights; and their shards one by one, for stores."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp

from pdvi._base.device import on_device
from pdvi.core.problem import Problem
from pdvi.mixtures.checks import check_coupling, check_graph
from pdvi.mixtures.init import KMEANS_ROWS, MIN_VARIANCE, kmeans_of
from pdvi.mixtures.sharded_graph import pad_halo, safe_damping
from pdvi.models.mixture import MixtureModel, PottsMixtureModel
from pdvi.shards.neighbours import neighbour_tables
from pdvi.shards.partition import Layout
from pdvi.shards.store import StoreWriter


class EmpiricalBayes(NamedTuple):
    """Starting means and the hyper-parameters that an initial k-means suggests."""

    means: np.ndarray
    prior_mean: np.ndarray
    prior_variance: np.ndarray
    noise_variance: np.ndarray


def empirical_bayes(
    X: np.ndarray, n_components: int, *, seed: int = 0, subsample: int = KMEANS_ROWS, runs: int = 1
) -> EmpiricalBayes:
    """Return the paper's settings from k-means, the best of so many runs, on at most ``subsample`` rows.

    The prior mean xi is the mean of the rows, s0^2 the average variance within clusters, s1^2 that of their means.
    """
    sample, kmeans = kmeans_of(X, n_components, seed=seed, runs=runs, max_rows=subsample)
    return from_labels(sample, kmeans.labels_, kmeans.cluster_centers_)


def from_labels(X: np.ndarray, labels: np.ndarray, means: np.ndarray) -> EmpiricalBayes:
    """Return the same settings from given labels and means."""
    X = np.asarray(X, float)
    total = X.var(0)
    # a constant feature, or one cluster only: no NaN and no infinite precision
    floor = MIN_VARIANCE * (float(total.mean()) or 1.0)
    within = ((X - means[labels]) ** 2).mean(0)
    between = means.var(0) if len(means) > 1 else total
    return EmpiricalBayes(means, X.mean(0), np.maximum(between, floor), np.maximum(within, floor))


def gaussian_mixture_problem(
    X: np.ndarray, settings: EmpiricalBayes, where: Layout, *, log_scale: float = 0.0
) -> Problem:
    """Return the problem of a mixture with diagonal, fixed noise and equal weights on the shards of ``where``.

    ``log_scale`` is log |det A| if the rows are A times those whose ELBO is wanted (whitened, say).
    """
    model = mixture_model(settings, len(X), log_scale=log_scale)
    return in_memory(model, mixture_shards(X, where), where)


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
    sample: np.ndarray | None = None,
) -> Problem:
    """Return the same on a graph with edge weights times ``beta``; exact across shards with ``halo``.

    With ``sample``, a whole number for every row, every sample has an offset, which is estimated. ``damping`` None:
    as much as keeps parallel sweeps from ever letting the objective rise.
    """
    check_coupling(beta, temperature, damping)
    graph = check_graph(graph, len(X))
    damping = safe_damping(graph, float(beta), temperature) if damping is None else damping
    n_samples = 0 if sample is None else int(sample.max()) + 1
    options = {"temperature": temperature, "damping": damping, "log_scale": log_scale}
    model = potts_model(settings, len(X), n_samples=n_samples, **options)
    return in_memory(model, mixture_shards(X, where, graph, beta=float(beta), halo=halo, sample=sample), where)


def mixture_model(settings: EmpiricalBayes, n_rows: int, **options: Any) -> MixtureModel:
    """Return the model of a mixture without a graph alone, for shards that are made elsewhere."""
    return MixtureModel(**_fields(settings, n_rows, **options))


def potts_model(settings: EmpiricalBayes, n_rows: int, **options: Any) -> PottsMixtureModel:
    """Return the model of a mixture on a graph alone, for shards that are made elsewhere."""
    return PottsMixtureModel(**_fields(settings, n_rows, **options))


def _fields(
    settings: EmpiricalBayes,
    n_rows: int,
    *,
    temperature: float = 1.0,
    damping: float = 0.0,
    log_scale: float = 0.0,
    n_samples: int = 0,
) -> dict[str, Any]:
    n_components = len(settings.means)
    values: dict[str, Any] = {
        "start": settings.means,
        "prior_mean": settings.prior_mean,
        "prior_variance": settings.prior_variance,
        "precision": 1 / settings.noise_variance,
        "log_weight": np.full(n_components, -np.log(n_components)),
        "n_rows": n_rows,
        "log_scale": log_scale,
        "temperature": temperature,
        "damping": damping,
    }
    if n_samples:
        values["offset_variance"] = np.full(n_samples, settings.prior_variance.mean())
    return {name: on_device(value) for name, value in values.items()}


def mixture_shards(
    X: Any,
    where: Layout,
    graph: sp.csr_array | None = None,
    *,
    covariance: str = "diagonal",
    beta: float = 1.0,
    halo: bool = True,
    sample: np.ndarray | None = None,
) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
    """Yield the arrays of every shard and the flat slots of others that it reads; rows and graph may lie on disk."""
    mask, fraction = where.mask, where.fraction
    padded = where.bucketed or not mask.all()
    alone: Iterable[Any] = repeat(None)
    tables = alone if graph is None else neighbour_tables(graph, where, beta, halo=halo)
    for rows, real, share, neighbors in zip(where.rows, mask, fraction, tables):
        x = np.asarray(X[np.maximum(rows, 0)])
        weighted = x * real[:, None].astype(x.dtype)
        square = x.T @ weighted if covariance == "tied" else np.einsum("nd,nd->d", x, weighted, dtype=float)
        arrays = {"x": x, "fraction": share, "square": square}
        if padded:
            arrays["mask"] = real.astype(float)
        if sample is not None:
            arrays["sample"] = sample[np.maximum(rows, 0)].astype(np.int32)
        if neighbors is None:
            yield arrays, np.empty(0, np.int32)
            continue
        yield {**arrays, "table": neighbors.table, "weight": neighbors.weight}, neighbors.halo


def in_memory(model: Any, shards: Iterator[tuple[dict[str, Any], np.ndarray]], where: Layout) -> Problem:
    """Return the problem of a model on shards, stacked as they come: no second copy of the data is alive."""
    stacked: dict[str, np.ndarray] = {}
    halos = []
    for b, (arrays, halo) in enumerate(shards):
        for name, values in arrays.items():
            if b == 0:
                stacked[name] = np.empty((len(where.rows), *np.shape(values)), np.asarray(values).dtype)
            stacked[name][b] = values
        halos.append(halo)
    return Problem(model, stacked, halo=pad_halo(halos, bucketed=where.bucketed), check=False)


def write_shards(writer: StoreWriter, shards: Iterator[tuple[dict[str, Any], np.ndarray]]) -> np.ndarray | None:
    """Add shards to a store in single precision, one after the other, and return the halos of all."""
    halos = []
    for arrays, halo in shards:
        values = {name: np.asarray(value) for name, value in arrays.items()}
        writer.add({name: a.astype(np.float32) if a.dtype.kind == "f" else a for name, a in values.items()})
        halos.append(halo)
    return pad_halo(halos, bucketed=False)
