"""Small models written the way a user would: plain classes, nothing inherited; and a small tissue."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import pdvi
from pdvi.mixtures import empirical_bayes, potts_mixture_problem
from pdvi.run.running import Run
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
    return potts_mixture_problem(tissue.X, graph, settings, where, beta=0.3)


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
    centres = np.array([[0, 0, 0], [2, 0, 0], [0, 2, 0], [0, 1, 2.0]])
    moved = shift * np.array([1.0, -0.5, 0.3])
    X = centres[truth] + 0.5 * rng.standard_normal((n_spots, 3)) + np.outer(sample, moved)
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


def free_problem(n_shards=4, n_rows=30, dim=2, n_components=3, seed=0):
    """A mixture whose components have covariances of their own; rows have weights, some none."""
    rng = np.random.default_rng(seed)
    factors = rng.normal(size=(n_components, dim, dim))
    weight = rng.uniform(0.2, 2, size=(n_shards, n_rows)) * (rng.random((n_shards, n_rows)) < 0.9)
    model = pdvi.models.FreeMixtureModel(
        start=rng.normal(size=(n_components, dim)),
        prior_mean=rng.normal(size=dim),
        prior_variance=rng.uniform(0.5, 2, size=dim),
        precision=factors @ factors.transpose(0, 2, 1) + np.eye(dim),
        log_weights=np.log(rng.dirichlet(np.ones(n_components))),
        n_rows=np.asarray(weight.sum()),
    )
    x = rng.normal(size=(n_shards, n_rows, dim))
    return pdvi.Problem(model, {"x": x, "mask": weight, "fraction": weight.sum(1) / weight.sum()})
