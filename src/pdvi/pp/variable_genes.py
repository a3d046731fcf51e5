"""The most variable genes: variances of counts against a smooth trend over the means (Stuart et al. 2019).

The same genes as scanpy's flavor "seurat_v3", whose import alone takes longer than all that is done here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp

SPAN, DEGREE = 0.3, 2  # of the trend


def most_variable(counts: Any, n_genes: int, samples: np.ndarray | None = None) -> np.ndarray:
    """Return whether each gene is among the ``n_genes`` most variable ones; in several samples, within each of them.

    With several samples genes are ordered by the median of their ranks within the first ``n_genes`` of a sample; genes
    that are in none of these come last.
    """
    groups = np.zeros(counts.shape[0], int) if samples is None else samples
    return best_ranked(np.stack([_excess_variance(counts[groups == group]) for group in np.unique(groups)]), n_genes)


def best_ranked(scores: np.ndarray, n_genes: int) -> np.ndarray:
    """Return whether each gene is among the best by its scores, a row for each sample."""
    order = np.argsort(np.argsort(-scores, axis=1, kind="stable"), axis=1, kind="stable").astype(float)
    order[order >= n_genes] = np.nan
    in_samples = (~np.isnan(order)).sum(0)
    rank = np.full(scores.shape[1], np.inf)
    ranked = in_samples > 0
    rank[ranked] = np.nanmedian(order[:, ranked], axis=0)
    chosen = np.zeros(scores.shape[1], bool)
    chosen[np.lexsort((-in_samples, rank))[:n_genes]] = True
    return chosen


def _excess_variance(counts: Any) -> np.ndarray:
    """Return each gene's variance after division by the trend's standard deviation, outliers clipped."""
    counts = sp.csc_array(counts, dtype=np.float64)
    n = counts.shape[0]
    mean, square = np.asarray(counts.mean(0)).ravel(), np.asarray(counts.multiply(counts).mean(0)).ravel()
    trend = Trend.of(n, mean, square)
    gene = np.repeat(np.arange(counts.shape[1]), np.diff(counts.indptr))
    clipped = np.minimum(counts.data, trend.most[gene])
    total, squares = (np.bincount(gene, values, minlength=counts.shape[1]) for values in (clipped, clipped**2))
    return trend.excess(total, squares)


class Trend(NamedTuple):
    """The standard deviation that a smooth trend expects of every gene of ``n`` rows, and where counts are clipped."""

    n: int
    mean: np.ndarray
    scale: np.ndarray
    most: np.ndarray

    @classmethod
    def of(cls, n: int, mean: np.ndarray, square: np.ndarray) -> Trend:
        """Return the trend over genes' means and mean squares."""
        from skmisc.loess import loess

        variance = (square - mean**2) * n / max(n - 1, 1)
        varies = variance > 0
        expected = np.zeros_like(variance)
        if varies.any():
            trend = loess(np.log10(mean[varies]), np.log10(variance[varies]), span=SPAN, degree=DEGREE)
            trend.fit()
            expected[varies] = trend.outputs.fitted_values
        scale = np.sqrt(10**expected)
        return cls(n, mean, scale, scale * np.sqrt(n) + mean)

    def excess(self, total: np.ndarray, squares: np.ndarray) -> np.ndarray:
        """Return the variance over the trend's, from sums and sums of squares of clipped counts."""
        return (self.n * self.mean**2 + squares - 2 * total * self.mean) / ((self.n - 1) * self.scale**2)
