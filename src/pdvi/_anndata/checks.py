"""What the facades ask of an AnnData, with messages that say what exists and which function makes the rest."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import scipy.sparse as sp

from pdvi._anndata.keys import SPATIAL
from pdvi._base.checks import instance, key_in

if TYPE_CHECKING:
    from anndata import AnnData

FIT = ("params", "status", "elbo", "trace")  # what `tl.domains` notes in uns
MAKES_DOMAINS = "run pdvi.tl.domains(adata, n_domains) first"


def check_adata(adata: AnnData) -> AnnData:
    """Return ``adata`` if it is an AnnData; otherwise say how to get one from what was given."""
    from anndata import AnnData

    return instance("adata", adata, AnnData, "an AnnData", way_to_adata(adata))


def way_to_adata(given: Any) -> str:
    """Return the remedy: how an AnnData is had from something else."""
    # by name: neither library is needed here, and whoever has such an object has imported it
    kind = type(given).__name__
    if kind == "SpatialData":
        return "give its table, sdata.tables[name], with the coordinates in obsm['spatial']"
    if kind == "MuData":
        return "give one of its modalities, mdata[name]"
    if kind in {"str", "PosixPath", "WindowsPath"}:
        return "read the file first with anndata.read_h5ad(path)"
    return "make one with anndata.AnnData(counts, obsm={'spatial': coordinates})"


def to_change(adata: AnnData, *, copy: bool) -> AnnData:
    """Return the AnnData that a facade writes to: ``adata`` itself, or a copy of it."""
    if not copy:
        return check_adata(adata)
    return adata.to_memory() if check_adata(adata).isbacked else adata.copy()


def check_names(**names: str | None) -> None:
    """Refuse keys of an AnnData that are no names; None is left to the caller."""
    for name, value in names.items():
        if value is not None:
            instance(name, value, str, "the name of an entry")


def coordinates_of(adata: AnnData, key: str = SPATIAL) -> np.ndarray:
    """Return the coordinates of all spots, all columns, finite."""
    key_in(check_adata(adata).obsm, key, "adata.obsm", "put the spots' coordinates there")
    coordinates = np.asarray(adata.obsm[key], float)
    if coordinates.ndim != 2 or coordinates.shape[1] < 2:
        msg = f"adata.obsm[{key!r}] must have at least two columns, got shape {coordinates.shape}."
        raise ValueError(msg)
    bad = int((~np.isfinite(coordinates).all(1)).sum())
    if bad:
        msg = f"adata.obsm[{key!r}] must be finite: {bad} of {len(coordinates)} spots are not; remove these spots."
        raise ValueError(msg)
    return coordinates


def features_of(adata: AnnData, key: str, maker: str) -> np.ndarray:
    """Return the finite feature matrix ``obsm[key]``; ``maker`` is the call that would make it."""
    key_in(check_adata(adata).obsm, key, "adata.obsm", f"run {maker} first")
    features = np.asarray(adata.obsm[key], np.float32)
    if not np.isfinite(features).all():
        msg = (
            f"adata.obsm[{key!r}] must be finite; it has {int((~np.isfinite(features)).sum())} NaN or infinite values."
        )
        raise ValueError(msg)
    return features


def samples_of(adata: AnnData, key: str | None) -> np.ndarray:
    """Return the sample of every spot, numbered from 0; all 0 without a key."""
    if key is None:
        return np.zeros(check_adata(adata).n_obs, int)
    key_in(check_adata(adata).obs, key, "adata.obs", "give the column that tells samples apart")
    column = pd.Series(adata.obs[key].to_numpy())  # a lazy frame has other columns than pandas
    if column.isna().any():
        msg = f"adata.obs[{key!r}] must name a sample for every spot; {int(column.isna().sum())} are missing."
        raise ValueError(msg)
    return np.unique(column.astype(str).to_numpy(), return_inverse=True)[1]


def fit_of(adata: AnnData, key: str) -> Mapping[str, Any]:
    """Return what `tl.domains` noted in ``uns[key]``; other tools' entries of that name are refused."""
    uns = check_adata(adata).uns
    check_names(key=key)
    if not is_fit(uns.get(key)):
        fits = [str(name) for name in uns if is_fit(uns[name])]
        other = f"give one of {fits}" if fits else MAKES_DOMAINS
        msg = f"`key` must name a fit of pdvi.tl.domains in adata.uns, got {key!r}; {other}."
        raise ValueError(msg)
    return uns[key]


def is_fit(entry: Any) -> bool:
    """Return whether an entry of uns is what `tl.domains` notes."""
    return isinstance(entry, Mapping) and all(name in entry for name in FIT)


def counts_of(adata: AnnData, layer: str | None) -> Any:
    """Return a checked float32 copy of the expression matrix, sparse or dense as it is."""
    if layer is not None:
        key_in(check_adata(adata).layers, layer, "adata.layers", "name the layer with the counts, or none for adata.X")
    if check_adata(adata).n_obs < 2:
        msg = f"adata must have at least 2 spots, got {adata.n_obs}."
        raise ValueError(msg)
    if adata.n_vars < 1:
        msg = "adata must have at least one gene, got 0."
        raise ValueError(msg)
    if adata.isbacked:
        adata = adata.to_memory()
    matrix: Any = adata.X if layer is None else adata.layers[layer]
    check_numbers(matrix)
    matrix = sp.csr_matrix(matrix, dtype=np.float32, copy=True) if is_sparse(matrix) else np.array(matrix, np.float32)
    values = matrix.data if is_sparse(matrix) else matrix
    if not np.isfinite(values).all():
        msg = f"adata.X must be finite; it has {int((~np.isfinite(values)).sum())} NaN or infinite values."
        raise ValueError(msg)
    return matrix


def check_numbers(matrix: Any) -> None:
    """Refuse expression that is missing or is not numbers."""
    if matrix is None:
        msg = "adata.X is empty; put counts there, or name the layer that has them."
        raise ValueError(msg)
    if np.dtype(matrix.dtype).kind not in "fiub":
        msg = f"adata.X must hold numbers, got dtype {matrix.dtype}."
        raise ValueError(msg)


def is_sparse(matrix: Any) -> bool:
    """Return whether a matrix is stored sparsely."""
    return bool(sp.issparse(matrix))


def say(message: str) -> None:
    """Tell once what was done on the user's behalf."""
    warnings.warn(message, UserWarning, stacklevel=4)
