"""Rows of several samples: each minus its sample's mean to begin with; the rest of the offset is learned."""

from __future__ import annotations

import numpy as np


def means_by_sample(X: np.ndarray, sample: np.ndarray | None) -> np.ndarray:
    """Return the mean row of every sample, (S, d); of all rows, (d,), where there are no samples."""
    if sample is None:
        return np.asarray(X.mean(0))
    sums = np.stack([np.bincount(sample, column) for column in X.T], axis=1)
    return np.asarray(sums / np.bincount(sample)[:, None], X.dtype)


def about_mean(X: np.ndarray, sample: np.ndarray | None) -> np.ndarray:
    """Return every row minus the mean of its sample."""
    mean = means_by_sample(X, sample)
    return X - (mean if sample is None else mean[sample])
