"""From rows (and a graph) to the problem of a mixture: one builder of shards, for memory and for stores."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse as sp

from pdvi._base.types import PyTree
from pdvi.core.problem import Problem
from pdvi.core.result import Point
from pdvi.mixtures.checks import check_coupling, check_graph
from pdvi.mixtures.damping import damping_of_patches
from pdvi.mixtures.recipe import RECIPE, Recipe
from pdvi.mixtures.start import EmpiricalBayes
from pdvi.models import GaussianMixtureModel, PottsMixtureModel, SampleOffsets
from pdvi.models.gaussian_mixture import ABSENT
from pdvi.shards.buckets import bucket
from pdvi.shards.neighbours import neighbour_tables
from pdvi.shards.partition import Layout
from pdvi.solvers.conjugate import add, best_globals


class Coupling(NamedTuple):
    """Hold how neighbours are coupled: a checked graph, and with which strength, temperature and damping."""

    graph: sp.csr_array
    beta: float = 1.0
    halo: bool = True
    temperature: float = 1.0
    damping: float = 0.0


def coupled(
    graph: sp.csr_array,
    where: Layout,
    *,
    beta: float = 1.0,
    halo: bool = True,
    temperature: float = 1.0,
    damping: float | None = None,
    recipe: Recipe = RECIPE,
) -> Coupling:
    """Return the coupling by a checked graph; its damping is measured unless given."""
    check_coupling(beta, temperature, damping)
    if damping is None:
        damping = damping_of_patches(graph, where, temperature, beta=float(beta), recipe=recipe)
    return Coupling(graph, float(beta), halo, temperature, damping)


class BuiltShard(NamedTuple):
    """Hold the arrays of one shard, and the flat slots of other shards that it reads."""

    arrays: dict[str, Any]
    halo: np.ndarray


def mixture_shards(
    X: np.ndarray, where: Layout, coupling: Coupling | None = None, sample: np.ndarray | None = None
) -> Iterator[BuiltShard]:
    """Yield the shards of a layout one by one; rows and graph may lie on disk. ``sample``: that of every row."""
    mask, fraction = where.mask, where.fraction
    padded = where.bucketed or not mask.all()
    alone: Iterable[Any] = repeat(None)
    tables = alone if coupling is None else neighbour_tables(coupling.graph, where, coupling.beta, halo=coupling.halo)
    for rows, real, share, neighbours in zip(where.rows, mask, fraction, tables):
        x = np.asarray(X[np.maximum(rows, 0)])
        square = np.einsum("nd,nd,n->d", x, x, real.astype(x.dtype), dtype=float, casting="same_kind")
        arrays = {"x": x, "fraction": share, "square": square}
        if padded:
            arrays["mask"] = real.astype(float)
        if sample is not None:
            arrays["sample"] = sample[np.maximum(rows, 0)].astype(np.int32)
        halo = np.empty(0, np.int32)
        if coupling is not None:
            halo = neighbours.halo
            arrays |= {"table": neighbours.table, "weight": neighbours.weight}
        yield BuiltShard(arrays, halo)


def padded_halo(halos: list[np.ndarray], bucketed: bool = False) -> np.ndarray | None:
    """Return the halos of all shards as one array, the shorter ones filled up with a row that they read anyway.

    None if there is no halo row.
    """
    longest = max(map(len, halos))
    longest = bucket(longest) if bucketed and longest else longest
    if longest == 0:
        return None
    padded = np.zeros((len(halos), longest), np.int32)
    for line, halo in zip(padded, halos):
        line[:] = halo[0] if len(halo) else 0
        line[: len(halo)] = halo
    return padded


def gaussian_mixture_problem(
    X: np.ndarray, settings: EmpiricalBayes, where: Layout, *, log_scale: float = 0.0
) -> Problem:
    """Return the problem of a mixture with diagonal, fixed noise and uniform weights on the shards of ``where``.

    ``log_scale`` is log |det A| if the rows are A times those whose ELBO is wanted (whitened, say).
    """
    model = GaussianMixtureModel(**_hyper(settings, len(X), log_scale))
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

    With ``sample``, a whole number for every row, every sample has an offset, which is learned (`SampleOffsets`).
    """
    graph = check_graph(graph, len(X))
    coupling = coupled(graph, where, beta=beta, halo=halo, temperature=temperature, damping=damping)
    return coupled_problem(X, settings, where, coupling, log_scale=log_scale, sample=sample)


def coupled_problem(
    X: np.ndarray,
    settings: EmpiricalBayes,
    where: Layout,
    coupling: Coupling,
    *,
    log_scale: float = 0.0,
    sample: np.ndarray | None = None,
) -> Problem:
    """Return the Potts mixture with a coupling that is known already."""
    temperature, damping = coupling.temperature, coupling.damping
    model = potts_model(settings, len(X), temperature=temperature, damping=damping, log_scale=log_scale)
    return in_memory(with_offsets(model, sample), mixture_shards(X, where, coupling, sample), where)


def replaced(problem: Problem, X: np.ndarray, settings: EmpiricalBayes, where: Layout, log_scale: float) -> Problem:
    """Return the problem with other rows and settings of the same shape; graph, samples and all else stay."""
    hyper = _hyper(settings, len(X), log_scale)
    model = problem.model
    if isinstance(model, SampleOffsets):
        mixture = dataclasses.replace(model.mixture, **hyper)
        model = _offsets(mixture, len(model.offset_variance))
    else:
        model = dataclasses.replace(model, **hyper)
    x = where.shard(X).astype(np.dtype(jnp.result_type(float)))
    square = np.einsum("bnd,bnd,bn->bd", x, x, where.mask.astype(x.dtype))
    shards = {**problem.shards, "x": jax.device_put(x), "square": jax.device_put(square)}
    return eqx.tree_at(lambda p: (p.model, p.shards), problem, (model, shards))


def with_offsets(model: Any, sample: np.ndarray | None) -> Any:
    """Return the model with an offset for every sample; as it is where there are none.

    The offsets' prior is as wide as that of the components' means: two samples without a common domain differ in their
    means by what components differ by, and the prior must let the offsets undo that.
    """
    return model if sample is None else _offsets(model, int(sample.max()) + 1)


def _offsets(mixture: Any, n_samples: int) -> SampleOffsets:
    return SampleOffsets(mixture, jax.device_put(np.tile(np.asarray(mixture.prior_variance), (n_samples, 1))))


def potts_model(
    settings: EmpiricalBayes, n_rows: int, *, temperature: float = 1.0, damping: float = 0.0, log_scale: float = 0.0
) -> PottsMixtureModel:
    """Return the model alone, for shards that are made elsewhere."""
    return PottsMixtureModel(**_hyper(settings, n_rows, log_scale, temperature=temperature, damping=damping))


@eqx.filter_jit
def point_at(problem: Problem, local: PyTree) -> Point:
    """Return the point with these responsibilities, padding left out, and the globals that are best for them."""
    local = jnp.asarray(local)
    if "mask" in problem.shards:
        local *= problem.shards["mask"][..., None]
    found = best_globals(problem, add(problem.map_shards(problem.model.statistics, local)))
    return Point(problem.unravel(found), local)


def in_memory(model: Any, shards: Iterator[BuiltShard], where: Layout) -> Problem:
    """Return the problem of a model on shards, stacked as they come: no second copy of the data is alive."""
    n_shards = len(where.rows)
    stacked: dict[str, np.ndarray] = {}
    halos = []
    if n_shards == 1:  # nothing to stack
        (only,) = shards
        stacked, halos = {name: np.asarray(values)[None] for name, values in only.arrays.items()}, [only.halo]
        shards = iter(())
    for b, (arrays, halo) in enumerate(shards):
        for name, values in arrays.items():
            if b == 0:
                stacked[name] = np.empty((n_shards, *np.shape(values)), np.asarray(values).dtype)
            stacked[name][b] = values
        halos.append(halo)
    return Problem(model, stacked, halo=padded_halo(halos, where.bucketed), check=False)


def _hyper(settings: EmpiricalBayes, n_rows: int, log_scale: float, **more: float) -> dict[str, Any]:
    n_components = len(settings.means) - settings.absent
    log_weights = np.full(n_components + settings.absent, ABSENT)
    log_weights[:n_components] = -np.log(n_components)
    values: dict[str, Any] = {
        "start": settings.means,
        "prior_mean": settings.prior_mean,
        "prior_variance": settings.prior_variance,
        "noise_variance": settings.noise_variance,
        "log_weights": log_weights,
        "n_rows": n_rows,
        "log_scale": log_scale,
        **more,
    }
    dtype = np.dtype(jnp.result_type(float))  # converted here: on the device it would be compiled, shape by shape
    return {name: jax.device_put(np.asarray(value, dtype)) for name, value in values.items()}
