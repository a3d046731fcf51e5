"""Simulate problems of the paper, mixtures, and tissues at feature level."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from scipy.ndimage import gaussian_filter

from pdvi._base import checks
from pdvi.core.problem import Problem
from pdvi.mixtures import EmpiricalBayes, empirical_bayes, gaussian_mixture_problem
from pdvi.models import Quadratic, Quartic, TanhRegression
from pdvi.shards.partition import Layout, layout


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
    """Simulate the paper's quadratic: n shards x' Q_b x + v_b' x, x = (phi_b, lam), each Q_b with one condition number.

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
    rng = checked_rng(seed, n=n, dim_local=dim_local, dim_global=dim_global)
    checks.share("heterogeneity", heterogeneity)
    checks.at_least("condition", condition, 1)
    checks.at_least("linear", linear)
    checks.at_least("nonconvexity", nonconvexity)
    dim = dim_local + dim_global
    values = np.geomspace(1 / condition, 1, dim)
    is_global = np.zeros(dim, bool)  # evenly spread, with the first and the last
    is_global[np.round(np.linspace(0, dim - 1, dim_global)).astype(int)] = True
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
    """Simulate a convex problem that is not strongly convex; its optimum, of value 0, is at the origin."""
    rng = checked_rng(seed, n=n, dim_global=dim_global)
    a, b = rng.standard_normal((2, n, dim_global))
    return Problem(Quartic(dim_global), {"a": a, "b": b})


def tanh_regression(n: int = 100, *, dim_global: int = 3, dim_local: int = 2, seed: int = 0) -> Problem:
    """Simulate a nonconvex problem that is strongly convex in its local variables."""
    rng = checked_rng(seed, n=n, dim_global=dim_global, dim_local=dim_local)
    A = rng.standard_normal((n, dim_local, dim_global))
    truth = rng.standard_normal(dim_global)
    y = 2 * np.tanh(A @ truth) + 0.3 * rng.standard_normal((n, dim_local))
    return Problem(TanhRegression(dim_global), {"A": A, "y": y})


class MixtureData(NamedTuple):
    """Rows from a Gaussian mixture, and the mini-batch each belongs to."""

    X: np.ndarray
    labels: np.ndarray
    means: np.ndarray
    noise_variance: np.ndarray
    batch: np.ndarray

    @property
    def where(self) -> Layout:
        """Return the mini-batches as shards."""
        return layout(self.batch)

    def problem(self, settings: EmpiricalBayes | None = None, *, seed: int = 0) -> Problem:
        """Return the mixture problem with one shard per mini-batch, by default from a k-means start."""
        settings = settings or empirical_bayes(self.X, len(self.means), seed=seed)
        return gaussian_mixture_problem(self.X, settings, self.where)


def mixture(
    n: int = 100_000,
    *,
    dim: int = 10,
    n_components: int = 5,
    batch_size: int = 1_000,
    bias: float = 0.95,
    separation: float = 1.0,
    seed: int = 0,
) -> MixtureData:
    """Simulate the paper's mixture: equal weights, unit noise, means from N(0, separation^2 I).

    Mini-batches of ``batch_size`` rows are dominated by one component each: a share ``bias`` of a batch is of its
    own component, the rest are drawn from all that is left. With bias 0 the batches are i.i.d.
    """
    rng = checked_rng(seed, n=n, dim=dim, n_components=n_components)
    checks.whole("batch_size", batch_size, least=1, most=n, of="the number of rows")
    checks.share("bias", bias)
    checks.factor("separation", separation)
    means = separation * rng.standard_normal((n_components, dim))
    labels = rng.permutation(np.arange(n) % n_components)
    X = (means[labels] + rng.standard_normal((n, dim))).astype(np.float32)
    n_batches = n // batch_size
    batch = np.full(n, -1)
    own = rng.permutation(np.arange(n_batches) % n_components)
    rows = [rng.permutation(np.flatnonzero(labels == k)) for k in range(n_components)]
    used = np.zeros(n_components, int)
    for b, k in enumerate(own):
        take = rows[k][used[k] : used[k] + round(bias * batch_size)]
        batch[take] = b
        used[k] += len(take)
    sizes = np.diff(np.arange(n_batches + 1) * n // n_batches)
    missing = np.repeat(np.arange(n_batches), sizes - np.bincount(batch[batch >= 0], minlength=n_batches))
    batch[batch < 0] = rng.permutation(missing)
    return MixtureData(X, labels, means, np.ones(dim), batch)


class TissueFeatures(NamedTuple):
    """Spots on a tissue as features (principal components, say), with their true domains."""

    X: np.ndarray
    coordinates: np.ndarray
    labels: np.ndarray


def tissue_features(
    n_spots: int = 147_456,
    *,
    n_features: int = 50,
    n_domains: int = 23,
    noise: float = 1.8,
    patchiness: float = 27.0,
    seed: int = 0,
) -> TissueFeatures:
    """Simulate a square tissue of spots on a grid, at feature level: for speed and optimization, not for biology.

    Domains are where one of ``n_domains`` smooth random fields is largest (``patchiness``: how many of their length
    scales fit along a side). Features are domain centers, decreasing from 1.2 to 0.2 in spread as
    principal components do, plus ``noise`` times standard normal.
    """
    rng = checked_rng(seed, {"patchiness": patchiness}, n_spots=n_spots, n_features=n_features, n_domains=n_domains)
    checks.at_least("noise", noise)
    labels, coordinates = _smooth_domains(rng, n_spots, n_domains, patchiness)
    centers = (rng.standard_normal((n_domains, n_features)) * np.linspace(1.2, 0.2, n_features)).astype(np.float32)
    X = centers[labels] + np.float32(noise) * rng.standard_normal((n_spots, n_features), np.float32)
    return TissueFeatures(X, coordinates, labels)


class TwoLevelTissue(NamedTuple):
    """Cells on a tissue as features, with their true domains and types, and what each domain is made of."""

    X: np.ndarray
    coordinates: np.ndarray
    labels: np.ndarray
    types: np.ndarray
    compositions: np.ndarray  # share of every type in every domain


def two_level_tissue(
    n_spots: int = 10_000,
    *,
    n_features: int = 10,
    n_domains: int = 5,
    n_types: int = 8,
    separation: float = 2.0,
    evenness: float = 0.3,
    patchiness: float = 8.0,
    seed: int = 0,
) -> TwoLevelTissue:
    """Simulate a tissue whose domains are mixtures of cell types, the same types in other shares.

    Domains are those of `tissue_features`; a domain's composition is Dirichlet with concentration ``evenness`` (small:
    few types each), and a cell has its type's center, from N(0, separation^2 I), plus standard normal noise.
    """
    positive = {"separation": separation, "evenness": evenness, "patchiness": patchiness}
    rng = checked_rng(seed, positive, n_spots=n_spots, n_features=n_features, n_domains=n_domains, n_types=n_types)
    labels, coordinates = _smooth_domains(rng, n_spots, n_domains, patchiness)
    compositions = rng.dirichlet(np.full(n_types, evenness), n_domains)
    below = np.cumsum(compositions, axis=1)[labels]
    types = np.minimum((rng.random((n_spots, 1)) > below).sum(1), n_types - 1)
    centers = separation * rng.standard_normal((n_types, n_features))
    X = (centers[types] + rng.standard_normal((n_spots, n_features))).astype(np.float32)
    return TwoLevelTissue(X, coordinates, labels, types, compositions)


def _smooth_domains(
    rng: np.random.Generator, n_spots: int, n_domains: int, patchiness: float
) -> tuple[np.ndarray, np.ndarray]:
    """Labels and coordinates of spots on a square grid: which of several smooth random fields is largest."""
    side = int(np.ceil(np.sqrt(n_spots)))
    noise = rng.standard_normal((n_domains, side, side), np.float32)
    fields = gaussian_filter(noise, (0, side / patchiness, side / patchiness))
    places = np.moveaxis(np.indices((side, side)), 0, -1).reshape(-1, 2)[:n_spots]
    return fields.argmax(0).ravel()[:n_spots], places.astype(np.float32)


def checked_rng(seed: int, positive: Mapping[str, float] | None = None, **sizes: int) -> np.random.Generator:
    """Return a random generator; the sizes must be whole and at least 1, the other numbers ``positive``."""
    for name, size in sizes.items():
        checks.whole(name, size, least=1)
    for name, value in (positive or {}).items():
        checks.positive(name, value)
    return np.random.default_rng(checks.seed("seed", seed))
