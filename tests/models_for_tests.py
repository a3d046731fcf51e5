"""Small models written the way a user would: plain classes, nothing inherited; and a small tissue."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse as sp

import pdvi
from pdvi.mixtures import empirical_bayes, potts_mixture_problem
from pdvi.mixtures.sharded_graph import pad_halo
from pdvi.models import HierarchicalPottsModel, MixtureModel, PottsMixtureModel
from pdvi.run.running import Run
from pdvi.shards.neighbours import neighbour_tables
from pdvi.shards.partition import along_space, layout, median_cuts
from pdvi.solvers.primal_dual.algorithm import Server


class Regression:
    """Rows y ~ N(latent, 1), latent ~ N(tanh(x w), 1), w ~ N(0, 1): nonconvex in w, with a row-wise mask."""

    def init_global(self, key):
        return {"w": jnp.array([0.5, -0.3, 0.2]), "bias": jnp.zeros(())}

    def init_local(self, key, shard):
        return jnp.zeros(shard["y"].shape)

    def loss(self, local, globals_, shard):
        mask = shard.get("mask", 1.0)
        predicted = jnp.tanh(shard["x"] @ globals_["w"]) + globals_["bias"]
        rows = 0.5 * mask * ((shard["y"] - local) ** 2 + (local - predicted) ** 2)
        prior = 0.5 * (jnp.sum(globals_["w"] ** 2) + globals_["bias"] ** 2)
        return rows.sum() + shard["fraction"] * prior


def regression_rows(rng, n=60):
    x = rng.standard_normal((n, 3))
    y = 1.5 * np.tanh(x @ np.array([1.0, -2.0, 0.5])) + 0.1 * rng.standard_normal(n)
    return x, y


def regression_shards(rng, sizes):
    x, y = regression_rows(rng, sum(sizes))
    ends = np.cumsum(sizes)
    return [{"x": x[b - s : b], "y": y[b - s : b], "fraction": np.asarray(s / sum(sizes))} for b, s in zip(ends, sizes)]


def tissue_problem(n_spots=1_200, n_patches=6, poor=False):
    """A small tissue; a poor start is four rows that lie side by side."""
    tissue = pdvi.datasets.tissue_features(n_spots, n_features=8, n_domains=4, patchiness=6)
    graph = pdvi.graphs.weights(pdvi.graphs.nearest(tissue.coordinates, 6), tissue.X)
    where = layout(median_cuts(tissue.coordinates, n_patches), along_space(tissue.coordinates))
    settings = empirical_bayes(tissue.X, 4)
    if poor:
        settings = settings._replace(means=tissue.X[:4])
    return potts_mixture_problem(tissue.X, graph, settings, where, beta=0.3, damping=0.0)  # weak edges: F cannot rise


class Samples(NamedTuple):
    """Rows of two samples, each minus its mean, which is kept; what the second was shifted by; graph and truth."""

    X: np.ndarray
    sample: np.ndarray
    mean: np.ndarray
    shift: np.ndarray
    coordinates: np.ndarray
    graph: Any
    truth: np.ndarray


def two_samples(n_spots, shift=2.0):
    """Four stripes in both samples, of other widths in each, and the second sample shifted."""
    rng = np.random.default_rng(2)
    coordinates = rng.uniform(size=(n_spots, 2))
    sample = np.arange(n_spots) % 2
    ends = np.array([[0.25, 0.5, 0.75], [0.15, 0.55, 0.9]])[sample]
    truth = (coordinates[:, :1] > ends).sum(1)
    centers = np.array([[0, 0, 0], [2, 0, 0], [0, 2, 0], [0, 1, 2.0]])
    moved = shift * np.array([1.0, -0.5, 0.3])
    X = centers[truth] + 0.5 * rng.standard_normal((n_spots, 3)) + np.outer(sample, moved)
    mean = np.stack([X[sample == s].mean(0) for s in (0, 1)])
    coordinates = coordinates + 3 * np.column_stack([sample, 0 * sample])
    graph = pdvi.graphs.weights(pdvi.graphs.nearest(coordinates, 6), X - mean[sample])
    return Samples(X - mean[sample], sample, mean, moved, coordinates, graph, truth)


def offset_problem(tissue, n_patches=6):
    """The Potts mixture of two samples, with offsets."""
    where = layout(median_cuts(tissue.coordinates, n_patches), along_space(tissue.coordinates))
    settings = empirical_bayes(tissue.X, 4)
    problem = potts_mixture_problem(tissue.X, tissue.graph, settings, where, beta=0.3, sample=tissue.sample)
    return problem, where


def begun(problem, solver, batch_size=1, key=0):
    """A run before its first step."""
    return Run(problem, solver, batch_size=None if solver.full_batch else batch_size, seed=key)


def algorithm_1(server):
    """Algorithm 1's own server, within whatever wraps it."""
    while not isinstance(server, Server):
        server = server.inner
    return server


def states_of(problem, solver, batches, state=None):
    """The states after every one of these steps."""
    run = begun(problem, solver, len(batches[0]))
    states = [run.state if state is None else state]
    for batch in batches:
        states.append(run.executor.run(run.solver, states[-1], np.asarray(batch)[None]))
    return states


def numbers(result):
    """All parameters of a result."""
    return [np.asarray(leaf) for leaf in jax.tree.leaves((result.global_params, result.local_params))]


def largest_difference(a, b):
    """Between the parameters of two results, relative to the largest entry of each array."""
    return max(np.abs(x - y).max() / max(np.abs(x).max(), 1e-300) for x, y in zip(numbers(a), numbers(b)))


def learned_mixture(covariance, *, n_rows=60, n_shards=4, samples=False, graph=False, precision=True, passes=1, seed=0):
    """A mixture of three clouds whose precision and weights are blocks; without a graph rows have weights, some 0."""
    rng = np.random.default_rng(seed)
    k, d = 3, 2
    X = np.array([[0, 0], [4, 0], [0, 4]])[rng.integers(k, size=n_rows)] + rng.normal(size=(n_rows, d))
    weight = np.ones(n_rows) if graph else rng.uniform(0.2, 2, n_rows) * (rng.random(n_rows) < 0.9)
    learned = {"precision": precision, "passes": passes}
    model = mixture_of(X, covariance, k, weight.sum(), samples=samples, graph=graph, rng=rng, **learned)
    return sharded(model, X, n_shards, weight=weight, sample=np.arange(n_rows) % 2 if samples else None, graph=graph)


def mixture_of(X, covariance, k, n_rows, *, samples=False, graph=False, precision=True, weights=True, passes=1, rng):
    """A mixture that begins at the first rows, with a precision of any kind and priors that show."""
    d = X.shape[1]
    first = {
        "diagonal": rng.uniform(0.5, 1.5, d),
        "tied": np.eye(d),
        "diag": rng.uniform(0.5, 1.5, (k, d)),
        "spherical": rng.uniform(0.5, 1.5, k),
        "full": np.broadcast_to(np.eye(d), (k, d, d)),
    }
    matrix, full = covariance in ("tied", "full"), covariance == "full"
    values = {
        "start": np.zeros((k, d)) if full else X[:k],
        "prior_mean": rng.normal(size=d),
        "prior_variance": np.full(d, 3.0) if matrix else rng.uniform(2, 4, d),
        "precision": first[covariance],
        "log_weight": np.log(rng.dirichlet(np.full(k, 5.0))),
        "n_rows": n_rows,
        "log_scale": 0.2,
        "temperature": 1.0,
        "damping": 0.3,
        "offset_variance": np.array([1.5, 2.0]) if samples else None,
        "frame_mean": X[:k] if full else None,
        "frame": np.eye(d) + 0.2 * rng.normal(size=(k, d, d)) if full else None,
    }
    dtype = np.dtype(jnp.result_type(float))
    arrays = {name: None if value is None else jnp.asarray(value, dtype) for name, value in values.items()}
    learned = {"learn_precision": precision, "learn_weight": weights, "passes": passes}
    return (PottsMixtureModel if graph else MixtureModel)(**arrays, covariance=covariance, **learned)


def sharded(model, X, n_shards, *, weight=None, sample=None, graph=False):
    """The problem of a mixture, or of a hierarchical one, on a ring if there is a graph; the last shard is padded."""
    n_rows = len(X)
    where = cut(n_rows, n_shards)
    weight = np.ones(n_rows) if weight is None else weight
    x, mask = where.shard(X), where.shard(weight) * where.mask
    shards = {"x": x, "mask": mask, "fraction": mask.sum(1) / weight.sum()}
    if model.covariance in ("diagonal", "tied"):
        shards["square"] = np.einsum("bnd,bn,bne->bde" if model.covariance == "tied" else "bnd,bn,bnd->bd", x, mask, x)
    if sample is not None:
        shards["sample"] = where.shard(sample).astype(np.int32)
    if not graph:
        return pdvi.Problem(model, shards)
    tables = list(neighbour_tables(ring(n_rows), where))
    shards |= {name: np.stack([getattr(table, name) for table in tables]) for name in ("table", "weight")}
    return pdvi.Problem(model, shards, halo=pad_halo([table.halo for table in tables], bucketed=False))


def cut(n_rows, n_shards):
    """Rows in equal pieces, but for the last."""
    return layout(np.arange(n_rows) // -(-n_rows // n_shards))


def ring(n_rows, weight=0.5):
    """A graph in which every row has two neighbors."""
    one_way = sp.csr_array((np.full(n_rows, weight), (np.arange(n_rows), (np.arange(n_rows) + 1) % n_rows)))
    return sp.csr_array(one_way + one_way.T)


def hierarchical_problem(n_rows=60, n_shards=4, *, covariance="tied", precision=True, weights=True, passes=1):
    """Two domains of three types on a ring, everything a block."""
    rng = np.random.default_rng(1)
    n_domains, n_types = 2, 3
    kind = np.where(np.arange(n_rows) < n_rows // 2, rng.integers(0, 2, n_rows), rng.integers(1, 3, n_rows))
    X = np.array([[0, 0], [4, 0], [0, 4]])[kind] + rng.normal(size=(n_rows, 2))
    types = mixture_of(
        X, covariance, n_types, float(n_rows), weights=False, precision=precision, passes=passes, rng=rng
    )
    types = dataclasses.replace(types, log_weight=jnp.zeros(n_types))  # the compositions have the weights
    concentration, prior = rng.uniform(0.5, 9, (n_domains, n_types)), np.array([0.7, 1.0, 1.3])
    log_weight = np.log([0.4, 0.6])
    dtype = np.dtype(jnp.result_type(float))
    arrays = (jnp.asarray(value, dtype) for value in (concentration, prior, log_weight))
    model = HierarchicalPottsModel(types, *arrays, learn_weight=weights)
    return sharded(model, X, n_shards, graph=True)
