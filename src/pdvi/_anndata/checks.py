"""What the facades ask of an AnnData, with messages that say what exists and which function makes the rest."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import scipy.sparse as sp

SPATIAL = "spatial"


def coordinates_of(adata: Any, key: str = SPATIAL) -> np.ndarray:
    """The finite coordinates of all spots."""
    if key not in adata.obsm:
        msg = f"{key!r} not in adata.obsm (it has {sorted(adata.obsm)}); put the spots' coordinates there."
        raise ValueError(msg)
    coordinates = np.asarray(adata.obsm[key], float)
    if coordinates.ndim != 2 or coordinates.shape[1] < 2:
        msg = f"adata.obsm[{key!r}] must have at least two columns, got shape {coordinates.shape}."
        raise ValueError(msg)
    bad = int((~np.isfinite(coordinates).all(1)).sum())
    if bad:
        msg = f"adata.obsm[{key!r}] must be finite: {bad} of {len(coordinates)} spots are not; remove these spots."
        raise ValueError(msg)
    return coordinates


def features_of(adata: Any, key: str, maker: str) -> np.ndarray:
    """A finite feature matrix in obsm."""
    if key not in adata.obsm:
        msg = f"{key!r} not in adata.obsm (it has {sorted(adata.obsm)}); run {maker} first."
        raise ValueError(msg)
    features = np.asarray(adata.obsm[key], np.float32)
    if not np.isfinite(features).all():
        msg = (
            f"adata.obsm[{key!r}] must be finite; it has {int((~np.isfinite(features)).sum())} NaN or infinite values."
        )
        raise ValueError(msg)
    return features


def samples_of(adata: Any, key: str | None) -> np.ndarray:
    """The sample of every spot, numbered from 0; all 0 without a key."""
    if key is None:
        return np.zeros(adata.n_obs, int)
    if key not in adata.obs:
        msg = f"{key!r} not in adata.obs (it has {sorted(adata.obs)}); give the column that tells samples apart."
        raise ValueError(msg)
    column = adata.obs[key]
    if column.isna().any():
        msg = f"adata.obs[{key!r}] must name a sample for every spot; {int(column.isna().sum())} are missing."
        raise ValueError(msg)
    return np.unique(column.astype(str).to_numpy(), return_inverse=True)[1]


def counts_of(adata: Any, layer: str | None) -> Any:
    """A float32 copy of the expression matrix, checked."""
    if layer is not None and layer not in adata.layers:
        msg = f"{layer!r} not in adata.layers (it has {sorted(adata.layers)})."
        raise ValueError(msg)
    if adata.n_obs < 2:
        msg = f"adata must have at least 2 spots, got {adata.n_obs}."
        raise ValueError(msg)
    if adata.n_vars < 1:
        msg = "adata must have at least one gene, got 0."
        raise ValueError(msg)
    if adata.isbacked:
        adata = adata.to_memory()
    matrix: Any = adata.X if layer is None else adata.layers[layer]
    if matrix is None:
        msg = "adata.X is empty; put counts there, or name the layer that has them."
        raise ValueError(msg)
    if np.dtype(matrix.dtype).kind not in "fiub":
        msg = f"adata.X must hold numbers, got dtype {matrix.dtype}."
        raise ValueError(msg)
    matrix = sp.csr_matrix(matrix, dtype=np.float32, copy=True) if is_sparse(matrix) else np.array(matrix, np.float32)
    values = matrix.data if is_sparse(matrix) else matrix
    if not np.isfinite(values).all():
        msg = f"adata.X must be finite; it has {int((~np.isfinite(values)).sum())} NaN or infinite values."
        raise ValueError(msg)
    return matrix


def is_sparse(matrix: Any) -> bool:
    """Whether a matrix is stored sparsely."""
    return bool(sp.issparse(matrix))


def say(message: str) -> None:
    """Tell once what was done on the user's behalf."""
    warnings.warn(message, UserWarning, stacklevel=4)
