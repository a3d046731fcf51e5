"""Read slides from disk, with one clear message when it fails."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from pdvi._anndata.checks import coordinates_of
from pdvi._anndata.keys import SPATIAL
from pdvi._base.checks import instance

if TYPE_CHECKING:
    from anndata import AnnData


def read_slide(path: str | os.PathLike, *, spatial_key: str = SPATIAL) -> AnnData:
    """Read an h5ad file, and check what can be checked before any work: spots, coordinates, unique gene names."""
    path = Path(instance("path", path, (str, os.PathLike), "the path of an h5ad file"))
    if not path.exists():
        msg = f"no file at {str(path)!r}; give the path of an h5ad file."
        raise FileNotFoundError(msg)
    import h5py
    from anndata import read_h5ad

    if path.is_dir() or not h5py.is_hdf5(path):
        msg = f"{str(path)!r} is not an h5ad file; write one with adata.write_h5ad(path)."
        raise ValueError(msg)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about old formats, and names that are checked below
        try:
            adata = read_h5ad(path)
        except MemoryError:
            raise
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            msg = f"{str(path)!r} is not an h5ad file, or it is damaged or truncated ({reason}); write it again."
            raise ValueError(msg) from error
    try:
        _check_slide(adata, spatial_key)
    except ValueError as error:
        msg = f"{str(path)!r}: {error}"
        raise ValueError(msg) from error
    return adata


def _check_slide(adata: AnnData, spatial_key: str) -> None:
    if adata.n_obs < 2:
        msg = f"a slide must have at least 2 spots, got {adata.n_obs}."
        raise ValueError(msg)
    if not adata.var_names.is_unique:
        names = adata.var_names[adata.var_names.duplicated()]
        msg = f"gene names must be unique, but {names[0]!r} is there twice; call adata.var_names_make_unique()."
        raise ValueError(msg)
    coordinates_of(adata, spatial_key)
