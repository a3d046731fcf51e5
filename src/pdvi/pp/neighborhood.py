"""Features that join a spot's own expression with that of its surroundings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from pdvi._anndata.checks import coordinates_of, features_of, samples_of, to_change
from pdvi._anndata.keys import COMPONENTS, NEIGHBORHOOD, SPATIAL
from pdvi._base.checks import factor, whole
from pdvi.pp.tiles import averaged, neighbor_table
from pdvi.shards.nearest import nearest_rows

if TYPE_CHECKING:
    from anndata import AnnData


def neighborhood(
    adata: AnnData,
    *,
    n_neighbors: int = 30,
    n_components: int = 20,
    own: float = 0.0,
    gradient: float = 0.0,
    use_rep: str = COMPONENTS,
    sample_key: str | None = None,
    spatial_key: str = SPATIAL,
    key_added: str = NEIGHBORHOOD,
    copy: bool = False,
) -> AnnData | None:
    """Write the mean of each spot and its nearest neighbours to ``obsm[key_added]``, and how to ``uns[key_added]``.

    Parameters
    ----------
    n_neighbors
        how many of the nearest spots of the same sample are averaged with the spot itself.
    n_components
        how many leading columns of ``use_rep`` are used.
    own
        weight of the spot's own features, appended as further columns; 0 leaves them out.
    gradient
        weight of the length of the mean's spatial gradient, per column; 0 leaves it out.
    use_rep, spatial_key
        features and coordinates in obsm.
    sample_key
        a column of obs that tells samples apart.
    copy
        change and return a copy of ``adata`` instead of ``adata`` itself.
    """
    whole("n_neighbors", n_neighbors)
    whole("n_components", n_components, least=1)
    factor("own", own)
    factor("gradient", gradient)
    adata = to_change(adata, copy=copy)
    features = features_of(adata, use_rep, "pdvi.pp.prepare(adata)")[:, :n_components]
    coordinates = coordinates_of(adata, spatial_key)
    samples = samples_of(adata, sample_key)
    mean = averages(features, coordinates, samples, [n_neighbors])[n_neighbors]
    parts = [own * features, mean] if own else [mean]
    if gradient:
        slope = np.empty_like(features)
        for sample in np.unique(samples):
            rows = np.flatnonzero(samples == sample)
            index = nearest_rows(coordinates[rows], n_neighbors + 1)
            slope[rows] = _gradient(coordinates[rows], mean[rows], index)
        parts.append(gradient * slope)
    adata.obsm[key_added] = np.hstack(parts).astype(np.float32)
    adata.uns[key_added] = {
        "params": {
            "n_neighbors": int(n_neighbors),
            "n_components": int(n_components),
            "own": float(own),
            "gradient": float(gradient),
            "use_rep": use_rep,
            "sample_key": sample_key or "",
            "spatial_key": spatial_key,
        }
    }
    return adata if copy else None


def averages(
    features: np.ndarray, coordinates: np.ndarray, samples: np.ndarray, counts: Iterable[int]
) -> dict[int, np.ndarray]:
    """Return the means over each of ``counts`` nearest neighbours and the spot itself; neighbours are found once."""
    table = neighbor_table(coordinates, samples, max(counts := set(counts)))
    found = {count: np.empty_like(features) for count in sorted(counts)}
    for count, mean in found.items():
        averaged(table, count, features, mean)
    return found


def _gradient(coordinates: np.ndarray, values: np.ndarray, index: np.ndarray) -> np.ndarray:
    """The length of the least-squares slope of each column over the neighbours, per unit of their distance."""
    steps = coordinates[index, :2] - coordinates[:, None, :2]
    steps /= max(float(np.median(np.linalg.norm(steps, axis=2))), 1e-12)
    inverse = np.linalg.pinv(steps)  # (n, 2, k)
    slope = np.zeros((2, *values.shape), np.float32)
    for j in range(index.shape[1]):
        change = values[index[:, j]] - values
        slope += inverse[:, :, j].T[:, :, None] * change
    return np.linalg.norm(slope, axis=0)
