"""Rows cut into shards, with their part of a graph: found once for all fits of a tissue, whatever their features."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse as sp

from pdvi.core.problem import Problem
from pdvi.shards.buckets import bucket
from pdvi.shards.neighbours import neighbour_tables
from pdvi.shards.partition import Layout, along_curve, consecutive, layout, median_cuts

BUCKETED_ROWS = 100_000  # up to so many rows sizes are rounded up, so that other data compile nothing


class ShardedGraph:
    """The layout of rows, their neighbor tables and the halo, on the device.

    Parameters
    ----------
    n_rows
        Number of rows.
    graph
        Checked edge weights; None for a mixture without a graph, whose rows are dealt out to shards at random.
    coordinates
        Places of the rows, which are cut into compact patches; None: rows are cut as they come.
    n_shards
        Number of patches.
    beta
        Strength of the coupling: edge weights are multiplied by it.
    sample
        Sample of every row, whole numbers from 0; None: there are no offsets.
    weight
        Weight of every row; None: all are 1.
    halo
        Whether edges between patches count.
    order
        Order of rows without a graph in which they are dealt out; None: as they come.
    blocks
        Number of blocks that rows of a shard come in, without a graph; None: they have no dimension for blocks.
    seed
        Of the draws with which rows without a graph are dealt out.
    """

    executor: Any = None  # of fits; None: in memory

    def __init__(
        self,
        n_rows: int,
        graph: sp.csr_array | None = None,
        coordinates: np.ndarray | None = None,
        *,
        n_shards: int = 1,
        beta: float = 1.0,
        sample: np.ndarray | None = None,
        weight: np.ndarray | None = None,
        halo: bool = True,
        order: np.ndarray | None = None,
        blocks: int | None = None,
        seed: int = 0,
    ):
        if graph is None or coordinates is None:
            found = layout(consecutive(n_rows, n_shards * (blocks or 1)))
        else:
            found = layout(median_cuts(coordinates, n_shards), along_curve(coordinates))
        if graph is None:
            dealt = np.random.default_rng(seed).permutation(n_rows)
            dealt = dealt if order is None else order[dealt]
            found = Layout(np.where(found.mask, dealt[found.rows], -1))
        self.layout = found.in_buckets() if n_rows <= BUCKETED_ROWS else found
        self.graph, self.sample, self.beta, self.weight, self._blocks = graph, sample, beta, weight, blocks
        self.sampled = slice(None)  # the rows that a model is built from: all of them
        self.total_weight = float(n_rows if weight is None else weight.sum())
        dtype = np.dtype(jnp.result_type(float))
        mask = self.layout.mask if weight is None else self.layout.mask * self.layout.shard(weight)
        arrays: dict[str, Any] = {"fraction": mask.sum(1) / self.total_weight}
        if weight is not None or not mask.all() or self.layout.bucketed:
            arrays["mask"] = mask
        arrays = {name: values.astype(dtype) for name, values in arrays.items()}
        if sample is not None:
            arrays["sample"] = self.layout.shard(sample).astype(np.int32)
        self.halo: np.ndarray | None = None
        if graph is not None:
            tables = list(neighbour_tables(graph, self.layout, beta, halo=halo))
            arrays |= {name: np.stack([getattr(t, name) for t in tables]) for name in ("table", "weight")}
            self.halo = pad_halo([table.halo for table in tables])
        self._arrays = {name: jax.device_put(values) for name, values in arrays.items()}

    @property
    def n_samples(self) -> int:
        """Return how many samples have an offset."""
        return 0 if self.sample is None else int(self.sample.max()) + 1

    @property
    def n_shards(self) -> int:
        """Return the number of shards."""
        return len(self.layout.rows) // (self._blocks or 1)

    def safe_damping(self, temperature: float = 1.0) -> float:
        """Return a damping with which no parallel sweep lets the objective rise."""
        return 0.0 if self.graph is None else safe_damping(self.graph, self.beta, temperature)

    def problem(self, model: Any, rows: Any) -> Problem:
        """Return the problem of a mixture of rows as ``model`` sees them; of rows in blocks there is no second copy."""
        dtype = np.dtype(jnp.result_type(float))
        if self._blocks is None:
            x = self.layout.shard(np.asarray(rows[:], dtype))
            return Problem(model, self._with_rows(model, x), halo=self.halo, check=False)
        x = np.empty((*self.layout.rows.shape, rows.shape[1]), dtype)
        for block, index in zip(x, self.layout.rows):
            block[:] = rows[np.maximum(index, 0)]
        arrays = {name: np.asarray(values) for name, values in self._with_rows(model, x).items()}
        shards = {name: values.reshape(-1, self._blocks, *values.shape[1:]) for name, values in arrays.items()}
        shards |= {name: shards[name].sum(1) for name in ("fraction", "square") if name in shards}
        return Problem(model, shards, check=False)

    def _with_rows(self, model: Any, x: np.ndarray) -> dict[str, Any]:
        """The arrays of the shards with rows ``x``."""
        shards = {**self._arrays, "x": x}
        if model.covariance in ("tied", "diagonal"):
            weighted = x * np.asarray(self._arrays["mask"])[..., None] if "mask" in self._arrays else x
            if model.covariance == "tied":  # one product after the other: a stack of transposed ones misses BLAS
                shards["square"] = np.stack([one.T @ other for one, other in zip(x, weighted)])
            else:
                shards["square"] = np.einsum("bnd,bnd->bd", x, weighted)
        return shards

    def shard(self, probabilities: np.ndarray) -> np.ndarray:
        """Return the responsibilities of rows by shard: probabilities times weights, 0 in padding."""
        local = self.layout.shard(np.asarray(probabilities, np.dtype(jnp.result_type(float))))
        return np.asarray(local * np.asarray(self._arrays["mask"])[..., None] if "mask" in self._arrays else local)

    def unshard(self, local: Any) -> np.ndarray:
        """Return the probabilities of rows from responsibilities by shard."""
        values = self.layout.unshard(np.asarray(local))
        return np.asarray(values / np.maximum(values.sum(1, keepdims=True), np.finfo(values.dtype).tiny))


def safe_damping(graph: sp.csr_array, beta: float = 1.0, temperature: float = 1.0) -> float:
    """Return a damping with which no parallel sweep lets the objective rise; see `MixtureModel`.

    The lowest eigenvalue of the weights is at least minus the largest sum of a row (Gershgorin).
    """
    largest = beta * float(abs(graph).sum(1).max(initial=0.0))
    return max(0.0, largest / (4 * temperature) - 0.5)


def pad_halo(halos: list[np.ndarray], *, bucketed: bool = True) -> np.ndarray | None:
    """Return the halos of all shards as one array, the shorter ones filled up with a row that they read anyway.

    Halo rows are read once a visit, so they may be padded to powers of two: halos vary more than numbers of rows do.
    """
    longest = max(map(len, halos))
    if longest == 0:
        return None
    padded = np.zeros((len(halos), bucket(longest, 0) if bucketed else longest), np.int32)
    for line, halo in zip(padded, halos):
        line[:] = halo[0] if len(halo) else 0
        line[: len(halo)] = halo
    return padded
