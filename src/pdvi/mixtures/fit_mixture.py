"""One fit of a mixture from given labels: a model in units in which its noise is white, and one call of `fit`.

Everything that is estimated (means, covariance, weights, offsets of samples, compositions) is a block of the globals,
so nothing iterates around `fit`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import xlogy

from pdvi._base.device import on_device
from pdvi.core.problem import Problem
from pdvi.core.result import Point, Result, Status
from pdvi.mixtures.config import CONFIG, Config
from pdvi.mixtures.density import Density, MixtureFit
from pdvi.mixtures.init import (
    KMEANS_ROWS,
    MIN_VARIANCE,
    WhiteRows,
    in_unit,
    means_by_sample,
    means_of,
    unit_of,
    whitening_of,
)
from pdvi.mixtures.sharded_graph import ShardedGraph
from pdvi.models.collapsed_mixture import Collapsed, CollapsedMixtureModel
from pdvi.models.hierarchical_potts import HierarchicalPottsModel
from pdvi.models.mixture import ABSENT, MixtureModel, PottsMixtureModel
from pdvi.run.fit import fit
from pdvi.run.running import RESTORED
from pdvi.solvers import CAVI, P2DVI, PDVI, MemoizedVB

MATRICES = ("tied", "full")


@dataclasses.dataclass(frozen=True)
class FitOptions:
    """What is estimated, and how."""

    covariance: str = "tied"
    learn_precision: bool = True
    learn_weight: bool = True
    temperature: float = 1.0
    concentration: float = 1.0  # of the prior of a domain's composition, for each type
    added_variance: float = 0.0  # to every feature's
    n_present: int | None = None  # components that are no padding; None: all
    solver: Any = None
    seed: int = 0
    config: Config = CONFIG


def fit_mixture(X: np.ndarray, graph: ShardedGraph, start: np.ndarray, options: FitOptions) -> MixtureFit:
    """Fit a mixture of rows from probabilities ``start``, (rows, K).

    On a graph it is fitted without damping first. If the objective rises on the way, sweeps oscillate, and it is fitted
    again with the damping that excludes it; the better fit is returned.
    """
    model, rows = model_of(X, start, graph, options)
    result = _without_oscillation(graph.problem(model, rows), graph.shard(start), graph, options)
    return MixtureFit(result, model, graph.unshard(result.local_params), rows.offset, rows.whitening)


def collapses(solver: Any) -> bool:
    """Return whether a solver (None: the usual one) needs no more of responsibilities than their statistics."""
    return solver is None or isinstance(solver, PDVI | P2DVI | CAVI | MemoizedVB)


def fit_rows(
    X: np.ndarray, graph: ShardedGraph, sampled: np.ndarray, start: np.ndarray, options: FitOptions
) -> MixtureFit:
    """Fit a mixture without a graph from probabilities ``start`` of the rows ``sampled``, in little memory.

    At first every shard is thought to be as these rows are. What is returned has the probabilities of these rows.
    """
    model, rows = model_of(X, start, graph, options, sampled)
    model = CollapsedMixtureModel(**vars(model))
    problem = graph.problem(model, rows)
    weight = np.ones(len(sampled)) if graph.weight is None else graph.weight[sampled]
    local = _as_in_sample(model, rows[sampled], start, weight, np.asarray(problem.shards["fraction"]))
    fitted = MixtureFit(run_fit(problem, local, options), model, start, rows.offset, rows.whitening)
    return fitted._replace(probabilities=Density(fitted).probabilities(X[sampled]))


def _as_in_sample(
    model: CollapsedMixtureModel, x: np.ndarray, start: np.ndarray, weight: np.ndarray, fraction: np.ndarray
) -> Collapsed:
    """The local variables of shards that are all as the rows of a sample are."""
    on_host = jax.tree.map(lambda leaf: np.asarray(leaf, float), model)
    weighted, total = x * weight[:, None], weight.sum()
    square = (weighted * x).sum(0) if model.covariance == "diagonal" else weighted.T @ x
    shard = {"x": x, "square": square, "fraction": total / on_host.n_rows}
    statistics = MixtureModel.statistics(on_host, start * weight[:, None], shard)
    entropy = on_host.temperature * weight @ xlogy(start, start).sum(1)
    scale = fraction * on_host.n_rows / total
    dtype = np.dtype(jnp.result_type(float))
    return jax.tree.map(lambda leaf: np.multiply.outer(scale, leaf).astype(dtype), Collapsed(statistics, entropy))


def fit_hierarchical(
    X: np.ndarray, graph: ShardedGraph, start: np.ndarray, types: np.ndarray, options: FitOptions
) -> MixtureFit:
    """Fit a hierarchical mixture from probabilities of domains, (rows, K), and of types, (rows, T)."""
    lower, rows = model_of(X, types, graph, dataclasses.replace(options, learn_weight=False))
    lower = dataclasses.replace(lower, log_weight=on_device(np.zeros(types.shape[1])))
    prior = np.full(types.shape[1], options.concentration)
    model = HierarchicalPottsModel(
        types=lower,
        concentration=on_device(prior + start.T @ types),
        prior_concentration=on_device(prior),
        log_weight=on_device(np.full(start.shape[1], -np.log(start.shape[1]))),
        learn_weight=options.learn_weight,
    )
    local = {"domain": graph.shard(start), "type": graph.shard(types)}
    result = _without_oscillation(graph.problem(model, rows), local, graph, options)
    found = {name: graph.unshard(values) for name, values in result.local_params.items()}
    return MixtureFit(result, model, found["domain"], rows.offset, rows.whitening, found["type"])


def model_of(
    X: Any, start: np.ndarray, graph: ShardedGraph, options: FitOptions, subset: np.ndarray | None = None
) -> tuple[MixtureModel, WhiteRows]:
    """Return the model of rows from labels (of a ``subset`` of them, if there is one), and the rows as it sees them.

    The prior of the means has the variance between the starting means; that of the offsets is as wide, so that two
    samples without a common domain are not forced onto each other.
    """
    sampled: Any = subset
    if subset is None:
        offset, start, sampled = means_by_sample(X, graph.sample), start[graph.sampled], graph.sampled
    else:
        offset = means_by_sample(X[subset], None)
    some = X[sampled] - (offset if graph.sample is None else offset[graph.sample[sampled]])
    unit = unit_of(X, some)
    some, covariance, d = np.asarray(in_unit(some, unit)), options.covariance, X.shape[1]
    n_components = start.shape[1] if options.n_present is None else options.n_present
    labels, means = start.argmax(1), means_of(some, start)
    means[n_components:] = 0
    whitening = whitening_of(some, labels, means) if covariance in MATRICES else np.eye(d)
    means = means @ whitening.T
    every = slice(None, None, max(1, len(some) // KMEANS_ROWS))
    within, shared, between = _variances(
        some[every] @ whitening.T, means, np.asarray(start[every], float), n_components
    )
    if covariance in MATRICES:
        between = np.full(d, max(float(between.mean()), MIN_VARIANCE))
    log_weight = np.full(len(means), ABSENT)
    log_weight[:n_components] = -np.log(n_components)
    values: dict[str, Any] = {
        "start": means,
        "prior_mean": np.zeros(d),
        "prior_variance": between,
        "precision": _first_precision(covariance, within, shared),
        "log_weight": log_weight,
        "n_rows": graph.total_weight,
        "log_scale": float(np.linalg.slogdet(whitening)[1]) - d * np.log(unit),
        "temperature": options.temperature,
        "damping": 0.0,
    }
    if options.added_variance:
        added = options.added_variance / unit**2
        values["added_variance"] = added * (whitening @ whitening.T if covariance in MATRICES else np.eye(d))
    if graph.sample is not None:
        values["offset_variance"] = np.full(graph.n_samples, float(between.mean()))
    if covariance == "full":
        frame_mean, frame = _frames(some @ whitening.T, start, means)
        values |= {"frame_mean": frame_mean, "frame": frame, "start": np.zeros_like(means)}
        values["prior_mean"] = -np.einsum("kde,ke->kd", frame, frame_mean)
    fields: dict[str, Any] = {name: on_device(value) for name, value in values.items()}
    fields |= {"learn_precision": options.learn_precision, "learn_weight": options.learn_weight}
    model = (MixtureModel if graph.graph is None else PottsMixtureModel)(**fields, covariance=covariance)
    return model, WhiteRows(X, offset, whitening / unit, graph.sample)


def _variances(X: np.ndarray, means: np.ndarray, start: np.ndarray, n_components: int) -> tuple[np.ndarray, ...]:
    """Variances per feature: within every component and between components; none is 0, so no precision is infinite.

    A component has one more row with the variance within all of them.
    """
    total, mass = X.var(0), start.sum(0)[:, None]
    least = MIN_VARIANCE * (float(total.mean()) or 1.0)
    within = start.T @ X**2 - 2 * means * (start.T @ X) + mass * means**2
    shared = np.maximum(within.sum(0) / len(X), least)
    between = means[:n_components].var(0) if n_components > 1 else total
    return np.maximum((np.maximum(within, 0) + shared) / (mass + 1), least), shared, np.maximum(between, least)


def _first_precision(covariance: str, within: np.ndarray, shared: np.ndarray) -> np.ndarray:
    d = len(shared)
    if covariance == "spherical":
        return 1 / within.mean(1)
    if covariance == "tied":
        return np.eye(d)
    if covariance == "full":
        return np.broadcast_to(np.eye(d), (len(within), d, d))
    return 1 / shared if covariance == "diagonal" else 1 / within


def _frames(X: np.ndarray, start: np.ndarray, means: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and whitening of every component's rows, as if it had d + 1 more of unit covariance."""
    d = X.shape[1]
    frames = []
    for k, mean in enumerate(means):
        residuals = X - mean
        scatter = (residuals * start[:, k : k + 1]).T @ residuals
        covariance = (scatter + (d + 1) * np.eye(d)) / (start[:, k].sum() + d + 1)
        frames.append(np.linalg.inv(np.linalg.cholesky(covariance)))
    return means, np.stack(frames)


def run_fit(problem: Any, local: Any, options: FitOptions, executor: Any = None) -> Result:
    """Return the result of `fit` from given responsibilities."""
    config = options.config
    solver = options.solver
    if solver is None:  # a single shard has nobody to agree with: Algorithm 1 without a penalty is coordinate ascent
        solver = P2DVI() if problem.n_shards > 1 else CAVI()
    result = fit(
        problem,
        solver,
        start=Point({}, local),
        batch_size=problem.n_shards if solver.full_batch else max(1, problem.n_shards // 100),
        max_epochs=config.max_epochs,
        tol=0.0,
        abs_tol=config.tol * float(problem.model.n_rows),
        seed=options.seed,
        executor=executor,
        progress=False,
    )
    if result.status is Status.INTERRUPTED:  # a part of a fit is of no use here
        raise KeyboardInterrupt
    return result


def _without_oscillation(problem: Problem, local: Any, graph: ShardedGraph, options: FitOptions) -> Result:
    """Return the result without damping, or if that oscillates the better of it and one with damping."""

    def run(damping: float) -> Result:
        damped = eqx.tree_at(lambda p: getattr(p.model, "types", p.model).damping, problem, on_device(damping))
        return run_fit(damped, local, options, graph.executor)

    result = run(0.0)
    tol, objective = options.config.tol * graph.total_weight, result.trace["objective"].to_numpy()
    set_back = result.trace["event"].str.contains(RESTORED, regex=False).any()
    # on the way it may rise before it falls
    if graph.graph is None or not (set_back or objective[-1] > objective.min() + 10 * tol):
        return result
    damping = graph.safe_damping(options.temperature)
    again = run(damping) if damping else result
    return again if again.objective < result.objective else result
