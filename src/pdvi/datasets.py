"""Simulated problems and data."""

from __future__ import annotations

import numpy as np

from pdvi.models import Quadratic, Quartic, TanhRegression
from pdvi.problem import Problem


def quadratic(
    n: int = 10_000,
    *,
    dim_local: int = 5,
    dim_global: int = 5,
    condition: float = 1_000,
    heterogeneity: float = 0.99,
    linear: float = 0.0,
    nonconvexity: float = 0.0,
    seed: int = 0,
) -> Problem:
    """The paper's quadratic: n shards x' Q_b x + v_b' x, x = (phi_b, lam), each Q_b with one condition number.

    Q_b = P_b diag(s) P_b', where s runs geometrically from 1/condition to 1 and is dealt out so that local and
    global coordinates both span the whole range, and P_b is the orthogonal factor of h I + (1 - h) G_b with
    G_b standard normal and h = ``heterogeneity``. At 1 the scales lie exactly on the axes; at 0 the
    rotations are uniform and all coordinates look alike on average.

    Parameters
    ----------
    linear
        standard deviation of v_b; 0 (the paper) puts the optimum, of value 0, at the origin.
    nonconvexity
        adds to every global-global part of Q_b a random symmetric matrix of this size that cancels over
        pairs of shards: single shards become nonconvex in lam, the sum stays strongly convex.
    """
    if n < 1:
        msg = f"`n` must be at least 1, got {n!r}."
        raise ValueError(msg)
    if not 0 <= heterogeneity <= 1:
        msg = f"`heterogeneity` must be between 0 and 1, got {heterogeneity!r}."
        raise ValueError(msg)
    if condition < 1:
        msg = f"`condition` must be at least 1, got {condition!r}."
        raise ValueError(msg)
    rng = np.random.default_rng(seed)
    dim = dim_local + dim_global
    values = np.geomspace(1 / condition, 1, dim)
    is_global = _spread(dim, dim_global)
    scales = np.concatenate([values[~is_global], values[is_global]])
    mixing = heterogeneity * np.eye(dim) + (1 - heterogeneity) * rng.standard_normal((n, dim, dim))
    P = np.linalg.qr(mixing)[0]
    Q = (P * scales) @ np.swapaxes(P, 1, 2)
    v = linear * rng.standard_normal((n, dim))
    if nonconvexity:
        noise = rng.standard_normal((n // 2, dim_global, dim_global))
        noise = nonconvexity * (noise + np.swapaxes(noise, 1, 2)) / 2
        Q[: n // 2, dim_local:, dim_local:] += noise
        Q[n // 2 : 2 * (n // 2), dim_local:, dim_local:] -= noise
    model = Quadratic(dim_local, dim_global)
    return Problem(model, model.shard(Q, v))


def quartic(n: int = 100, *, dim_global: int = 3, seed: int = 0) -> Problem:
    """A convex problem that is not strongly convex; its optimum, of value 0, is at the origin."""
    rng = np.random.default_rng(seed)
    return Problem(
        Quartic(dim_global),
        {"a": rng.standard_normal((n, dim_global)), "b": rng.standard_normal((n, dim_global))},
    )


def tanh_regression(n: int = 100, *, dim_global: int = 3, dim_local: int = 2, seed: int = 0) -> Problem:
    """A nonconvex problem, strongly convex in its local variables."""
    rng = np.random.default_rng(seed)
    A = rng.standard_normal((n, dim_local, dim_global))
    truth = rng.standard_normal(dim_global)
    y = 2 * np.tanh(A @ truth) + 0.3 * rng.standard_normal((n, dim_local))
    return Problem(TanhRegression(dim_global), {"A": A, "y": y})


def _spread(dim: int, chosen: int) -> np.ndarray:
    """A mask with ``chosen`` of ``dim`` positions, evenly spread and with the first and the last."""
    mask = np.zeros(dim, bool)
    mask[np.round(np.linspace(0, dim - 1, chosen)).astype(int)] = True
    return mask
