"""From rows and a graph to a two-level mixture problem, its start, and its fit with hyper-parameters re-estimated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pdvi._base.checks import positive, whole
from pdvi.core.problem import Problem
from pdvi.mixtures.build import BuiltShard, Coupling, coupled, in_memory, mixture_shards, with_offsets
from pdvi.mixtures.checks import check_graph
from pdvi.mixtures.em import Fitted, variational_em
from pdvi.mixtures.program import fit_together
from pdvi.mixtures.recipe import RECIPE
from pdvi.mixtures.reestimate import reestimate, starting_point
from pdvi.mixtures.start import EmpiricalBayes, empirical_bayes
from pdvi.mixtures.task import Task
from pdvi.models import TwoLevelMixtureModel
from pdvi.shards.nearest import nearest_rows
from pdvi.shards.partition import Layout
from pdvi.solvers import P2DVI


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
    few = max(1, len(X) // n_domains)  # rows of an average domain: with more all places would look alike
    near = nearest_rows(coordinates, min(n_neighbors + 1, few))
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
    graph = check_graph(graph, len(X))
    coupling = coupled(graph, where, beta=beta, halo=halo, temperature=temperature, damping=damping)
    return coupled_two_level(X, start, where, coupling, concentration=concentration, log_scale=log_scale)


def coupled_two_level(
    X: np.ndarray,
    start: TwoLevelStart,
    where: Layout,
    coupling: Coupling,
    *,
    concentration: float = 1.0,
    log_scale: float = 0.0,
    sample: np.ndarray | None = None,
) -> Problem:
    """Return the two-level mixture with a coupling that is known already; ``sample`` adds offsets."""
    positive("concentration", concentration)
    n_types = len(start.types.means)
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
        "temperature": coupling.temperature,
        "damping": coupling.damping,
    }
    dtype = np.dtype(jnp.result_type(float))
    fields = {name: jax.device_put(np.asarray(value, dtype)) for name, value in values.items()}
    model = with_offsets(TwoLevelMixtureModel(**fields), sample)
    labels = {"domain": where.shard(start.domain).astype(np.int32), "type": where.shard(start.type).astype(np.int32)}
    shards = (
        BuiltShard({**arrays, **{name: values[b] for name, values in labels.items()}}, halo_rows)
        for b, (arrays, halo_rows) in enumerate(mixture_shards(X, where, coupling, sample))
    )
    return in_memory(model, shards, where)


def two_level_em(
    problem: Problem, solver: Any, *, noise: str | None = "tied", shares: bool = False, seed: int = 0, **settings: Any
) -> Fitted:
    """Fit from the starting labels, re-estimating noise and shares before the first epoch and then as for any mixture.

    ``shares``: whether the domains' shares follow their sizes. Each such step lowers F, which lacks log Z and so is
    lowest where all rows share one domain: with weak evidence and strong coupling that is where the rounds lead.
    """
    problem, point, whitening = reestimate(problem, starting_point(problem, seed=seed), noise=noise, weights=shares)
    settings = {"max_epochs": RECIPE.max_epochs, "first": RECIPE.round_epochs, **settings}
    fitted = variational_em(problem, solver, noise=noise, weights=shares, start=point, seed=seed, **settings)
    return fitted._replace(whitening=fitted.whitening @ np.asarray(whitening, float))


def fit_two_level(
    problem: Problem, task: Task, *, one_program: bool, damping: Callable[[], float] | None = None, seed: int = 0
) -> Fitted:
    """Fit from the starting labels with tied noise: a small tissue as one program, any other shard by shard."""
    if one_program:
        how: dict[str, Any] = {"noise": "tied", "weights": False, "tol": task.tol, "recipe": task.recipe}
        return fit_together([problem], **how, seed=seed, from_labels=True, damping=damping)[0]
    solver = P2DVI() if task.solver is None else task.solver
    batch = max(1, problem.n_shards // task.recipe.shards_per_batch)
    return two_level_em(problem, solver, batch_size=batch, seed=seed, max_epochs=task.max_epochs, tol=task.tol)


def _nearest_mean(X: np.ndarray, means: np.ndarray) -> np.ndarray:
    return np.asarray((0.5 * (means**2).sum(1) - X @ means.T).argmin(1))
