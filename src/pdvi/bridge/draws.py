"""Fixed draws: standard normal numbers that stand for q in every expectation of a fit.

They come in pairs, e and -e, so that odd moments vanish; and, where there are enough of them, their second moments are
exactly those of q: over all globals, over the locals of a row, and between the two. What is left is an error in the
fourth moments, the same in every row, which does not average out over rows, while posteriors become narrower. So the
draws of locals are led to the fourth moments of a normal. Those of two locals of a row together are not: rows with
several have more draws, and the more the more rows there are.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from scipy.optimize import brentq
from scipy.stats import norm

FEWEST = 32
FEWEST_JOINT = 64  # where rows have several locals; with 32, random slopes of 5,000 groups were off by 0.2 standard
# deviations of log tau, with 64 by less than 0.1
JOINT_ROWS = 5_000  # for which these are enough
MOST = 128  # by default; exact second moments of more unknowns than half as many are not bought with time
FLAT = 3  # sizes: so few cannot have both moments
ROUNDS = 3  # in which draws of locals are led to the fourth moments of a normal; further ones change little


def number_of_draws(n_global: int, n_local: int, rows: int) -> int:
    """Return how many draws give exact second moments, and errors in the fourth that do not matter; within limits.

    These errors fall with the square of the number, at least, and standard deviations with the root of the rows.
    """
    joint = FEWEST_JOINT * max(1.0, rows / JOINT_ROWS) ** 0.25 if n_local > 1 else FEWEST
    return min(MOST, max(2 * round(joint / 2), 2 * (n_global + n_local)))


def global_draws(rng: np.random.Generator, half: int, n_global: int) -> np.ndarray:
    """Return the first half of the draws of the globals, (half, n_global)."""
    return np.swapaxes(_orthogonal(rng.standard_normal((1, n_global, half)), np.zeros((0, half)))[0], 0, 1)


def local_draws(rng: np.random.Generator, of_globals: np.ndarray, rows: int, n_local: int) -> np.ndarray:
    """Return the first half of the draws of the locals of each row, (half, rows, n_local)."""
    half, n_global = of_globals.shape
    fixed = of_globals.T / np.sqrt(half) if n_global + n_local <= half else np.zeros((0, half))
    found = _orthogonal(rng.standard_normal((rows, n_local, half)), fixed)
    for _ in range(ROUNDS if half > FLAT else 0):
        rank = np.abs(found).argsort(2).argsort(2)
        found = _orthogonal(np.sign(found) * _typical(half)[rank], fixed)
    return np.moveaxis(found, 2, 0)


@cache
def _typical(half: int) -> np.ndarray:
    """Return sizes of ``half`` normal numbers, smallest first, whose mean square is 1 and mean fourth power 3."""
    quantiles = norm.ppf(0.5 + (np.arange(half) + 0.5) / (2 * half))

    def stretched(power: float) -> np.ndarray:
        sizes = quantiles**power
        return np.asarray(sizes / np.sqrt((sizes**2).mean()))

    return stretched(brentq(lambda power: float((stretched(power) ** 4).mean()) - 3.0, 0.2, 5.0))


def both(half: np.ndarray) -> np.ndarray:
    """Return all draws of a first half."""
    return np.concatenate([half, -half])


def _orthogonal(vectors: np.ndarray, fixed: np.ndarray) -> np.ndarray:
    """Return vectors (rows, k, half) of mean square one, orthogonal to each other and to ``fixed`` if there is room."""
    half = vectors.shape[2]
    if vectors.shape[1] + len(fixed) > half:
        return np.sqrt(half) * vectors / np.linalg.norm(vectors, axis=2, keepdims=True)
    for _ in range(2):  # once more, for what rounding left
        vectors = vectors - (vectors @ fixed.T) @ fixed
    Q, R = np.linalg.qr(vectors.mT)
    return np.sqrt(half) * (Q * np.sign(np.diagonal(R, axis1=1, axis2=2))[:, None]).mT
