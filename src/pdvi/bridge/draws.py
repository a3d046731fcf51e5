"""Fixed draws: standard normal numbers that stand for q in every expectation of a fit.

They come in pairs, e and -e, so that odd moments vanish; and, where there are enough of them, their second moments are
exactly those of q: over all globals, over the locals of a row, and between the two. What is quadratic in the unknowns
then has its exact expectation, and what is left is an error in the fourth moments.
"""

from __future__ import annotations

import numpy as np

FEWEST = 16
MOST = 128  # by default; exact second moments of more unknowns than half as many are not bought with time


def number_of_draws(n_global: int, n_local: int) -> int:
    """Return how many draws give exact second moments, within limits."""
    return min(MOST, max(FEWEST, 2 * (n_global + n_local)))


def global_draws(rng: np.random.Generator, half: int, n_global: int) -> np.ndarray:
    """Return the first half of the draws of the globals, (half, n_global)."""
    return np.swapaxes(_orthogonal(rng.standard_normal((1, n_global, half)), np.zeros((0, half)))[0], 0, 1)


def local_draws(rng: np.random.Generator, of_globals: np.ndarray, rows: int, n_local: int) -> np.ndarray:
    """Return the first half of the draws of the locals of each row, (half, rows, n_local)."""
    half, n_global = of_globals.shape
    fixed = of_globals.T / np.sqrt(half) if n_global + n_local <= half else np.zeros((0, half))
    return np.moveaxis(_orthogonal(rng.standard_normal((rows, n_local, half)), fixed), 2, 0)


def both(half: np.ndarray) -> np.ndarray:
    """Return all draws of a first half."""
    return np.concatenate([half, -half])


def _orthogonal(vectors: np.ndarray, fixed: np.ndarray) -> np.ndarray:
    """Return vectors (rows, k, half) of mean square one, orthogonal to each other and to ``fixed`` if there is room."""
    rows, k, half = vectors.shape
    room = k + len(fixed) <= half
    done: list[np.ndarray] = []
    for j in range(k):
        vector = vectors[:, j]
        if room:
            for _ in range(2):  # once more, for what rounding left
                vector = vector - (vector @ fixed.T) @ fixed
                for other in done:
                    vector = vector - (vector * other).sum(1, keepdims=True) * other
        done.append(vector / np.linalg.norm(vector, axis=1, keepdims=True))
    return np.sqrt(half) * np.stack(done, axis=1) if done else np.zeros((rows, 0, half))
