"""Where a hierarchical mixture begins: domains from the types around every row."""

from __future__ import annotations

import numpy as np

from pdvi.mixtures.init import kmeans_labels, one_hot
from pdvi.shards.nearest import nearest_rows


def domains_of_types(
    types: np.ndarray, coordinates: np.ndarray, n_domains: int, *, n_neighbors: int = 30, seed: int = 0, runs: int = 1
) -> np.ndarray:
    """Return domains by k-means of the root mean fractions of types around each row, as probabilities, (rows, K)."""
    few = max(1, len(types) // n_domains)  # rows of an average domain: with more all places would look alike
    near = nearest_rows(coordinates, min(n_neighbors + 1, few))
    fractions = np.zeros_like(types)
    for column in near.T:
        fractions += types[column]
    roots = np.sqrt(fractions / near.shape[1])  # distances between roots tell compositions apart as counts do
    return one_hot(kmeans_labels(roots, n_domains, seed=seed, runs=runs), n_domains)
