"""One move between local optima: a component is given up, another split in two, and the fit from there kept if better.

Rows are judged by their residuals, averaged over their neighbors in the graph if there is one: of two domains that
share a component single rows may show nothing, where averages of a few dozen show it plainly.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import scipy.sparse as sp

from pdvi.mixtures.density import MixtureFit, component_means

UNUSED = 0.05  # of an equal fraction of the rows: a component with less is unused
MIN_ROWS = 4  # in a component that may be split
SMOOTHINGS = 3  # averages of residuals over the graph: with ten neighbors some thirty rows count
NORMAL_SPLIT = 2 / np.pi  # the fraction of a normal variable's variance that its best split explains

Refit = Callable[[np.ndarray], MixtureFit]


def split_and_merge(
    fitted: MixtureFit,
    rows: np.ndarray,
    refit: Refit,
    *,
    graph: sp.csr_array | None = None,
    merge: bool = False,
    max_moves: int = 8,
) -> MixtureFit:
    """Return the fit after moves that lower its objective, at most ``max_moves``.

    Parameters
    ----------
    fitted
        The fit to improve.
    rows
        The rows as its model sees them, minus offsets of samples.
    refit
        Fits from given probabilities.
    graph
        Edge weights between the rows.
    merge
        Whether components in use may be given up; otherwise only those that have lost their rows.
    """
    for _ in range(max_moves):
        start = propose_move(fitted.probabilities, component_means(fitted), rows, graph, merge=merge)
        if start is None:
            break
        trial = refit(start)
        if not trial.objective < fitted.objective:
            break
        fitted = trial
    return fitted


def propose_move(
    probabilities: np.ndarray, means: np.ndarray, rows: np.ndarray, graph: sp.csr_array | None, *, merge: bool
) -> np.ndarray | None:
    """Return probabilities in which cheap components have taken over parts of those that look like two.

    All unused components move at once; with ``merge``, of those in use the one that is worth least, if the best split
    promises more. None: nothing to move.
    """
    mass = probabilities.sum(0)
    unused = mass < UNUSED * mass.sum() / len(mass)
    if not (unused.any() or merge):
        return None
    distance = ((means[:, None] - means) ** 2).sum(-1)
    distance[:, unused] = np.inf
    np.fill_diagonal(distance, np.inf)
    worth = np.where(unused, 0.0, mass * distance.min(1))
    splits = _splits(probabilities, means, rows, graph, np.flatnonzero(~unused))
    found, n_moves = np.array(probabilities), int(unused.sum()) or 1
    moved = False
    for free in np.argsort(worth, kind="stable")[:n_moves]:
        splits = [split for split in splits if split[1] != free]
        if not splits or splits[0][0] <= worth[free]:
            break
        _, k, part = splits.pop(0)
        nearest = int(distance[free].argmin())
        found[:, nearest] += found[:, free]
        found[:, free] = 0
        found[part, free], found[part, k] = found[part, k], 0
        moved = True
    return found if moved else None


def _splits(
    probabilities: np.ndarray, means: np.ndarray, rows: np.ndarray, graph: sp.csr_array | None, used: np.ndarray
) -> list[tuple[float, int, np.ndarray]]:
    """What a split of each component promises, the component, and the rows to take from it; the best first."""
    labels = probabilities.argmax(1)
    residuals = rows - probabilities @ means.astype(rows.dtype)
    if graph is not None:
        # the row itself counts as much as its heaviest neighbor
        own = sp.csr_array(graph).max(axis=1).toarray().ravel()
        total = np.maximum(np.asarray(graph.sum(1)).ravel() + own, 1e-12)[:, None]
        for _ in range(SMOOTHINGS):
            residuals = (own[:, None] * residuals + graph @ residuals) / total
    members = ((int(k), np.flatnonzero(labels == k)) for k in used)
    found = [(*_split(residuals[part]), k, part) for k, part in members if len(part) >= MIN_ROWS]
    return sorted(((gain, k, part[side]) for gain, side, k, part in found), key=lambda split: -split[0])


def _split(residuals: np.ndarray) -> tuple[float, np.ndarray]:
    """The best split along the leading direction: what it explains beyond a normal cloud's, and the smaller side."""
    centered = residuals - residuals.mean(0)
    along = centered @ np.linalg.eigh(centered.T @ centered)[1][:, -1]
    order = np.argsort(along)
    n = len(along)
    left = np.arange(1, n)
    explained = np.cumsum(along[order], dtype=float)[:-1] ** 2 * n / (left * (n - left))
    cut = int(explained.argmax()) + 1
    side = order[:cut] if 2 * cut <= n else order[cut:]
    return float(explained[cut - 1] - NORMAL_SPLIT * np.sum(along**2, dtype=float)), side
