"""From counts to expression of the genes that vary: what principal and spatial components begin with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import scipy.sparse as sp

from pdvi._anndata.checks import counts_of, is_sparse, say
from pdvi.pp.variable_genes import most_variable

if TYPE_CHECKING:
    from anndata import AnnData


class Expression(NamedTuple):
    """Expression of the selected genes; sparse if the counts were."""

    X: Any
    genes: np.ndarray  # which columns of the original they are
    normalized: bool
    target: float | None  # the total that every spot was scaled to


def expression_of(
    adata: AnnData,
    *,
    layer: str | None,
    n_genes: int,
    normalize: bool | None,
    samples: np.ndarray | None = None,
    log: bool = True,
) -> Expression:
    """Select the most variable genes (within ``samples``, if given), scale spots to the median total, take log1p.

    With ``log=False`` the last is left out.
    Counts are told from logarithms by their values unless ``normalize`` says; those are left as they are.
    """
    matrix = counts_of(adata, layer)
    values = matrix.data if is_sparse(matrix) else matrix.ravel()
    if normalize:
        check_not_negative(values)
    normalize = wants_normalizing(normalize, counts=normalize is None and looks_like_counts(values))
    genes = np.flatnonzero(np.asarray((matrix != 0).sum(0)).ravel())
    if not len(genes):
        msg = "adata.X must have at least one value that is not 0; all genes are empty."
        raise ValueError(msg)
    X = matrix[:, genes]
    if normalize and len(genes) > n_genes:
        chosen = most_variable(X, n_genes, samples)
        X, genes = X[:, chosen], genes[chosen]
    target = None
    if normalize:
        target, factors = to_median(np.asarray(X.sum(1)).ravel())
        X = times(X, factors, log=log)
    return Expression(X, genes, normalize, target)


def wants_normalizing(normalize: bool | None, *, counts: bool) -> bool:
    """Return ``normalize``; where it is not said, normalize counts, and say so if there are none."""
    if normalize is None and not counts:
        say("X looks normalised already (logarithms or negative values): totals and log1p are left out.")
    return counts if normalize is None else normalize


def check_not_negative(values: np.ndarray) -> None:
    """Refuse counts below 0."""
    if values.min(initial=0) < 0:
        msg = f"counts must not be negative, but the smallest is {values.min():g}; set normalize=False."
        raise ValueError(msg)


def to_median(totals: np.ndarray, target: float | None = None) -> tuple[float, np.ndarray]:
    """Return the median total, or ``target``, and what scales every spot to it; an empty spot stays empty."""
    filled = totals > 0
    if target is None:
        target = float(np.median(totals[filled])) if filled.any() else 1.0
    return target, (target / np.where(filled, totals, target)).astype(np.float32)


def times(X: Any, factors: np.ndarray, *, log: bool) -> Any:
    """Return rows times their factors, or log1p of that."""
    if is_sparse(X):
        X = sp.csr_array(sp.diags_array(factors) @ X)
        return X.log1p() if log else X
    X = X * factors[:, None]
    return np.log1p(X) if log else X


def scaled(X: Any, clip: float) -> Any:
    """Return genes divided by their standard deviation without centring, so that zeros stay, and clipped at the top."""
    mean, square = np.asarray(X.mean(0), float).ravel(), np.asarray((X * X).mean(0), float).ravel()
    n = X.shape[0]
    spread = np.sqrt(np.maximum(square - mean**2, 0) * n / max(n - 1, 1))
    factors = (1 / np.where(spread > 0, spread, 1.0)).astype(np.float32)
    if not is_sparse(X):
        return np.minimum(X * factors, clip)
    X = sp.csr_array(X @ sp.diags_array(factors))
    X.data = np.minimum(X.data, np.float32(clip))
    return X


def looks_like_counts(values: np.ndarray) -> bool:
    """Return whether values are counts, not logarithms: none negative, and all whole or some above 30."""
    if values.size == 0 or values.min() < 0:
        return values.size == 0
    sample = values[:: max(1, values.size // 100_000)]
    return bool(np.all(sample == np.round(sample)) or sample.max() > 30)
