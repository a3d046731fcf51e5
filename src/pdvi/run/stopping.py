"""When a run has reached its tolerance."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from pdvi.core.solver import RemainingGain

NATS = 0.02  # of evidence: no conclusion depends on less
Rows = list[dict[str, Any]]  # of the trace


class Tolerances(NamedTuple):
    """The tolerances of `pdvi.fit`."""

    tol: float = 0.0
    abs_tol: float = 0.0
    grad_tol: float = 0.0

    def of(self, objective: float) -> float:
        """Return how much an objective may change from one log point to the next when a run has settled."""
        return self.tol * abs(objective) + self.abs_tol


def flat(rows: Rows, grad_tol: float) -> bool:
    """Return whether the gradient in the globals is small and the objective moves no more: the locals settled too."""
    if len(rows) < 2 or rows[-1]["grad_norm"] >= grad_tol * rows[0]["grad_norm"]:
        return False
    values = np.array([row["objective"] for row in rows])
    return bool(abs(values[-1] - values[-2]) <= grad_tol * np.ptp(values[np.isfinite(values)]))


def settled(rows: Rows, tolerances: Tolerances) -> bool:
    """Return whether two changes in a row were below the tolerances, between points at least an epoch apart."""
    points = [rows[-1]]
    for row in reversed(rows):
        if row["event"]:
            break
        if points[-1]["epoch"] - row["epoch"] >= 1 - 1e-9:
            points.append(row)
        if len(points) == 3:
            values = [point["objective"] for point in points]
            return all(abs(a - b) < tolerances.of(b) for a, b in pairwise(values))
    return False


def little(left: RemainingGain, objective: float, tolerances: Tolerances) -> bool:
    """Return whether what is left to gain is below what matters, what rounding hides, and what ``tol`` lets pass."""
    return bool(left.nats <= max(NATS, left.noise, 0.1 * tolerances.of(objective)))
