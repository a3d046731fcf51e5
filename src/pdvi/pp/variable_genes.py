"""The most variable genes: variances of counts against a smooth trend over the means (Stuart et al. 2019).

The same genes as scanpy's flavor "seurat_v3", whose import alone takes longer than all that is done here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp

SPAN, DEGREE = 0.3, 2  # of the trend


def most_variable(counts: Any, n_genes: int, samples: np.ndarray | None = None) -> np.ndarray:
    """Return whether each gene is among the ``n_genes`` most variable ones; in several samples, within each of them.

    With several samples genes are ordered by the median of their ranks within the first ``n_genes`` of a sample; genes
    that are in none of these come last.
    """
    groups = np.zeros(counts.shape[0], int) if samples is None else samples
    scores = np.stack([excess_variance(counts[groups == group]) for group in np.unique(groups)])
    order = np.argsort(np.argsort(-scores, axis=1, kind="stable"), axis=1, kind="stable").astype(float)
    order[order >= n_genes] = np.nan
    in_samples = (~np.isnan(order)).sum(0)
    rank = np.full(scores.shape[1], np.inf)
    ranked = in_samples > 0
    rank[ranked] = np.nanmedian(order[:, ranked], axis=0)
    chosen = np.zeros(scores.shape[1], bool)
    chosen[np.lexsort((-in_samples, rank))[:n_genes]] = True
    return chosen


def excess_variance(counts: Any) -> np.ndarray:
    """Return each gene's variance after division by the trend's standard deviation, outliers clipped."""
    from skmisc.loess import loess

    counts = sp.csc_array(counts, dtype=np.float64)
    n = counts.shape[0]
    mean, square = np.asarray(counts.mean(0)).ravel(), np.asarray(counts.multiply(counts).mean(0)).ravel()
    variance = (square - mean**2) * n / max(n - 1, 1)
    varies = variance > 0
    expected = np.zeros_like(variance)
    if varies.any():
        trend = loess(np.log10(mean[varies]), np.log10(variance[varies]), span=SPAN, degree=DEGREE)
        trend.fit()
        expected[varies] = trend.outputs.fitted_values
    scale = np.sqrt(10**expected)
    most = scale * np.sqrt(n) + mean
    gene = np.repeat(np.arange(counts.shape[1]), np.diff(counts.indptr))
    clipped = np.minimum(counts.data, most[gene])
    total, squares = (np.bincount(gene, values, minlength=counts.shape[1]) for values in (clipped, clipped**2))
    return (n * mean**2 + squares - 2 * total * mean) / ((n - 1) * scale**2)
