"""A tissue of fewer, larger spots: where the domains are is found on it, their borders on the tissue itself."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp

from pdvi.shards.partition import along_curve


def coarsen(
    X: np.ndarray, graph: sp.csr_array, coordinates: np.ndarray, size: int
) -> tuple[np.ndarray, sp.csr_array, np.ndarray, np.ndarray]:
    """Return groups of ``size`` rows next to each other in space, each coupled to others as strongly as a row was.

    Returns
    -------
    means of the groups, the graph between them, their centers, and the group of every row.
    """
    group = np.empty(len(X), np.int64)
    group[along_curve(coordinates)] = np.arange(len(X)) // size
    member = sp.csr_array((np.ones(len(group), X.dtype), (group, np.arange(len(group)))))
    between = sp.csr_array(member @ graph @ member.T)
    between.setdiag(0)
    between.eliminate_zeros()
    strength = graph.sum() / len(X), between.sum() / between.shape[0]
    between *= strength[0] / max(strength[1], 1e-300)
    means, centers = (
        np.asarray(member.astype(values.dtype) @ values / np.bincount(group)[:, None].astype(values.dtype))
        for values in (X, coordinates)
    )
    return means, between, centers, group
