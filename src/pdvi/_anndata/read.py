"""Read slides from disk, with one clear message when it fails."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pdvi._anndata.checks import coordinates_of
from pdvi._anndata.keys import SPATIAL
from pdvi._anndata.spatialdata import TABLES, is_spatialdata, is_zarr, read_table
from pdvi._anndata.visium import is_visium, read_visium
from pdvi._base.checks import instance

if TYPE_CHECKING:
    from anndata import AnnData


def read_slide(path: str | os.PathLike, *, spatial_key: str = SPATIAL) -> AnnData:
    """Read a slide, and check what can be checked before any work: spots, coordinates, unique gene names.

    It is an h5ad file, a Visium folder, a SpatialData store with one table, or an AnnData in a zarr folder.
    """
    path = Path(instance("path", path, (str, os.PathLike), "the path of an h5ad file"))
    if not path.exists():
        msg = f"no file at {str(path)!r}; give the path of an h5ad file."
        raise FileNotFoundError(msg)
    reader = _reader(path, spatial_key)
    if reader is None:
        kinds = "a Visium folder, a SpatialData store or an AnnData in zarr" if path.is_dir() else "an h5ad file"
        msg = f"{str(path)!r} is not {kinds}; write one with adata.write_h5ad(path)."
        raise ValueError(msg)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about old formats, and names that are checked below
        try:
            adata = reader()
        except MemoryError:
            raise
        except Exception as error:
            if path.is_dir():
                msg = f"{str(path)!r} cannot be read: {error}"
                raise ValueError(msg) from error
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            msg = f"{str(path)!r} is not an h5ad file, or it is damaged or truncated ({reason}); write it again."
            raise ValueError(msg) from error
    return check_slide(adata, spatial_key, path)


def _reader(path: Path, spatial_key: str) -> Callable[[], AnnData] | None:
    """What reads such a path; None if nothing does."""
    import anndata
    import h5py

    if path.is_file():
        return (lambda: anndata.read_h5ad(path)) if h5py.is_hdf5(path) else None
    if is_visium(path):
        return lambda: read_visium(path)
    if is_spatialdata(path):
        return lambda: read_table(path, spatial_key=spatial_key)
    if path.parent.name == TABLES:  # one of several tables of a store
        return lambda: read_table(path.parent.parent, path.name, spatial_key=spatial_key)
    if is_zarr(path):
        return lambda: anndata.read_zarr(path)
    return None


def check_slide(adata: AnnData, spatial_key: str, path: Path) -> AnnData:
    """Return a slide if it has spots and coordinates, and no two of its genes have the same name."""
    try:
        if adata.n_obs < 2:
            msg = f"a slide must have at least 2 spots, got {adata.n_obs}."
            raise ValueError(msg)
        if not adata.var_names.is_unique:
            names = adata.var_names[adata.var_names.duplicated()]
            msg = f"gene names must be unique, but {names[0]!r} is there twice; call adata.var_names_make_unique()."
            raise ValueError(msg)
        coordinates_of(adata, spatial_key)
    except ValueError as error:
        msg = f"{str(path)!r}: {error}"
        raise ValueError(msg) from error
    return adata
