"""Spatial components: directions of expression in which neighbours agree, where PCA takes all that vary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import scipy.sparse as sp
from scipy.sparse.linalg import LinearOperator, eigsh

from pdvi._anndata.checks import coordinates_of, counts_of, features_of, is_sparse, samples_of, say
from pdvi._anndata.keys import SPATIAL, SPATIAL_COMPONENTS
from pdvi._base.checks import positive, whole
from pdvi._base.checks import seed as checked_seed
from pdvi.pp.normalise import expression_of, times, to_median
from pdvi.pp.tiles import mean_of_others, neighbor_table

SMALL = 500  # genes up to which the genes x genes matrix is simply made
BLOCK = 64  # of its columns made at once
FEWEST_GENES = 0.5  # of those that components are made of: with fewer on another slide their directions mean little
ACCURACY = 1e-6  # of the eigenvalues, relative: expression is in single precision


def spatial_components(
    adata: Any,
    *,
    n_components: int = 30,
    n_neighbors: int = 6,
    n_genes: int = 2_000,
    layer: str | None = None,
    use_rep: str | None = None,
    sample_key: str | None = None,
    spatial_key: str = SPATIAL,
    key_added: str = SPATIAL_COMPONENTS,
    clip: float = 10.0,
    normalize: bool | None = None,
    log: bool = True,
    seed: int = 0,
) -> None:
    """Write the components in which neighbours agree most to ``obsm[key_added]``, and how they were made to ``uns``.

    They are the projections on the leading eigenvectors of X' W X + X' W' X, where X is scaled (log) expression of the
    most variable genes, centred in each sample, and W takes the mean over neighbours without the spot itself. The
    matrix is applied, not formed, and sparse expression stays sparse, since it is centred on the fly.

    ``uns[key_added]`` has what projects another slide in the same way: the names of the ``genes``, the ``target``
    total, the ``scale`` and the ``mean`` (a row per sample) of every gene, the ``loadings``, and their ``values``.

    Parameters
    ----------
    n_neighbors
        how many of the nearest spots of the same sample count as neighbours.
    n_genes
        how many genes are selected, by their variance within samples; all of a smaller panel.
    layer
        where the counts are; by default X.
    use_rep
        components in obsm (principal ones, say, or ones that another tool has integrated) to take directions of,
        instead of expression. ``uns[key_added]`` then has no genes.
    sample_key
        a column of obs that tells samples apart: no neighbours in other samples, and no differences between samples.
    clip
        largest scaled value.
    normalize
        whether X holds counts to be normalised; by default as in `prepare`.
    log
        whether logarithms of normalised counts are taken. Of one sample `tl.domains` takes none: it averages over
        neighbours, and what is typical of a place is the mean of its counts, to which the few cells that express a gene
        strongly contribute most. On labelled slides, and on halves of them, domains were better so. Of several samples
        it does, since what differs between them multiplies counts, and is an offset of their logarithms.
    """
    checked_seed("seed", seed)
    whole("n_components", n_components, least=1)
    whole("n_neighbors", n_neighbors, least=1)
    whole("n_genes", n_genes, least=2)
    positive("clip", clip)
    coordinates, samples = coordinates_of(adata, spatial_key), samples_of(adata, sample_key)
    made: dict[str, Any] = {}
    if use_rep is None:
        expression = expression_of(adata, layer=layer, n_genes=n_genes, normalize=normalize, samples=samples, log=log)
        X = expression.X
        made["scale"] = _scale(X, samples, clip)
        made["genes"] = adata.var_names.to_numpy()[expression.genes].astype(str)
        made["target"] = np.nan if expression.target is None else expression.target
        normalize = expression.normalized
    else:
        X = features_of(adata, use_rep, "pdvi.pp.prepare(adata)")
    agreement = Agreement(X, mean_of_others(neighbor_table(coordinates, samples, n_neighbors), n_neighbors), samples)
    values, loadings = leading_eigenvectors(agreement, min(n_components, X.shape[1]), seed)
    adata.obsm[key_added] = agreement.project(loadings)
    adata.uns[key_added] = {
        "params": {
            "n_components": len(values),
            "n_neighbors": int(n_neighbors),
            "n_genes": int(n_genes),
            "layer": layer or "",
            "use_rep": use_rep or "",
            "sample_key": sample_key or "",
            "spatial_key": spatial_key,
            "clip": float(clip),
            "normalize": bool(normalize),
            "log": bool(normalize) and bool(log),
            "seed": int(seed),
        },
        **made,
        "mean": agreement.mean,
        "loadings": loadings.astype(np.float32),
        "values": values,
    }


def projected(adata: Any, made: Mapping[str, Any], *, layer: str | None = None) -> np.ndarray:
    """Return the components of spots along directions that ``made`` (``uns["X_spatial"]`` of another slide) tells.

    Every step is that of `spatial_components` with the other slide's genes, target, scales and loadings. Genes that
    are missing count as if they had their mean everywhere; the mean of all spots is not taken off.
    """
    genes = np.asarray(made["genes"]).astype(str)
    places = adata.var_names.get_indexer(genes)
    missing = places < 0
    if missing.mean() > 1 - FEWEST_GENES:
        msg = (
            f"`adata` must have the genes of the fitted slide: {int(missing.sum())} of {len(genes)} are not in "
            f"adata.var_names (such as {', '.join(genes[missing][:3])}); use the same names."
        )
        raise ValueError(msg)
    if missing.any():
        say(f"{int(missing.sum())} of {len(genes)} genes of the fitted slide are missing; they count as their mean.")
    X = counts_of(adata, layer)[:, places[~missing]]
    target, params = float(made["target"]), made["params"]
    if params["normalize"]:
        totals = np.asarray(X.sum(1)).ravel()
        share = 1.0
        if missing.any():  # a spot without them is expected to have a smaller total
            kept = totals[totals > 0]
            share = float(np.median(kept)) / target if len(kept) else 1.0
        X = times(
            X, to_median(totals, target * share)[1], log=bool(params.get("log", True))
        )  # of slides that an older version has fitted
    scale, clip = np.asarray(made["scale"])[~missing].astype(np.float32), float(params["clip"])
    _divide(X := sp.csr_array(X) if is_sparse(X) else X, scale, clip)
    return np.asarray(X @ np.asarray(made["loadings"], np.float32)[~missing], np.float32)


class Agreement:
    """The symmetric matrix X' (W + W') X, genes by genes, of rows centred in each sample, as something to apply."""

    def __init__(self, X: Any, W: sp.csr_array, samples: np.ndarray):
        self.X = X
        self.size: int = X.shape[1]
        self.both_ways = sp.csr_array(W + W.T)
        self.of_sample = _indicator(samples, X.dtype)
        self.mean = sample_means(X, samples)

    def project(self, directions: np.ndarray) -> np.ndarray:
        """Return the centred rows' coordinates along ``directions``."""
        # in the type of X: another would copy all of it at every product
        along = np.asarray(self.X @ directions.astype(self.X.dtype))
        return along - self.of_sample.T @ (self.mean @ directions).astype(self.X.dtype)

    def __call__(self, V: np.ndarray) -> np.ndarray:
        """Return the product with one vector, or with several as columns."""
        around = self.both_ways @ self.project(V)
        return np.asarray(self.X.T @ around, float) - self.mean.T @ np.asarray(self.of_sample @ around, float)


def leading_eigenvectors(agreement: Agreement, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the largest eigenvalues, falling, and their vectors as columns, the largest entry of each positive."""
    size = agreement.size
    if size <= SMALL or count >= size // 2:
        identity = np.eye(size)
        matrix = np.hstack([agreement(identity[:, start : start + BLOCK]) for start in range(0, size, BLOCK)])
        values, vectors = np.linalg.eigh(0.5 * (matrix + matrix.T))
    else:
        operator = LinearOperator((size, size), matvec=agreement, matmat=agreement, dtype=np.dtype(float))
        first = np.random.default_rng(seed).standard_normal(size)
        values, vectors = eigsh(operator, count, which="LA", v0=first, tol=ACCURACY)
    order = np.argsort(-values)[:count]
    values, vectors = values[order], vectors[:, order]
    return values, upright(vectors)


def upright(vectors: np.ndarray) -> np.ndarray:
    """Return vectors, columns, with the sign that makes the largest entry of each positive."""
    largest = np.take_along_axis(vectors, np.abs(vectors).argmax(0)[None], axis=0)
    return vectors * np.where(largest < 0, -1.0, 1.0)


def sample_means(X: Any, samples: np.ndarray) -> np.ndarray:
    """Return the mean row of every sample."""
    indicator = _indicator(samples, float)
    total: Any = indicator @ X
    return (total.toarray() if is_sparse(total) else np.asarray(total)) / indicator.sum(1).reshape(-1, 1)


def _scale(X: Any, samples: np.ndarray, clip: float) -> np.ndarray:
    """Divide every gene by its standard deviation within samples, in place, clip, and return what it was divided by."""
    mean = sample_means(X, samples)
    square = X.multiply(X) if is_sparse(X) else X**2
    scale = scale_of_genes(mean, sample_means(square, samples), np.bincount(samples) / len(samples))
    _divide(X, scale, clip)
    return scale


def _divide(X: Any, scale: np.ndarray, clip: float) -> None:
    """Divide genes by their scale, in place, and clip."""
    values, divisor = (X.data, scale.astype(X.dtype)[X.indices]) if is_sparse(X) else (X, scale.astype(X.dtype))
    values /= divisor
    np.clip(values, -clip, clip, out=values)


def scale_of_genes(mean: np.ndarray, square: np.ndarray, share: np.ndarray) -> np.ndarray:
    """Return the standard deviation of genes within samples, from the means of each and the samples' shares."""
    variance = share @ np.maximum(square - mean**2, 0)
    flat = variance <= 1e-6 * (share @ mean**2) if variance.any() else np.ones(len(variance), bool)
    return np.where(flat, np.inf, np.sqrt(variance))  # a constant gene tells nothing


def _indicator(samples: np.ndarray, dtype: Any) -> sp.csr_array:
    """Samples by spots: which spot is in which."""
    n = len(samples)
    return sp.csr_array((np.ones(n, dtype), (samples, np.arange(n))), shape=(samples.max() + 1, n))
