"""A tissue of fewer, larger spots: where the domains are is found on it, their borders on the tissue itself."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import scipy.sparse as sp

from pdvi.partition import along_curve


class Coarse(NamedTuple):
    """Means of groups of rows, the graph between groups, their centres, and the group of every row."""

    X: np.ndarray
    graph: sp.csr_array
    coordinates: np.ndarray
    group: np.ndarray


def coarsened(X: np.ndarray, graph: sp.csr_array, coordinates: np.ndarray, size: int) -> Coarse:
    """Groups of ``size`` rows next to each other in space. A group is coupled to others as strongly as a row was."""
    n_rows = len(X)
    group = np.empty(n_rows, np.int64)
    group[along_curve(coordinates)] = np.arange(n_rows) // size
    member = sp.csr_array((np.ones(n_rows, X.dtype), (group, np.arange(n_rows))))
    sizes = np.bincount(group)[:, None].astype(X.dtype)
    between = sp.csr_array(member @ graph @ member.T)
    between.setdiag(0)
    between.eliminate_zeros()
    strength = graph.sum() / n_rows, between.sum() / len(sizes)
    return Coarse(
        member @ X / sizes, between * (strength[0] / max(strength[1], 1e-300)), member @ coordinates / sizes, group
    )
