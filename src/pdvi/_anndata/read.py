"""Read slides from disk, with one clear message when it fails."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from pdvi._anndata.checks import coordinates_of
from pdvi._anndata.keys import SPATIAL
from pdvi._anndata.spatialdata import TABLES, is_spatialdata, is_zarr, read_table
from pdvi._base.checks import instance

if TYPE_CHECKING:
    from anndata import AnnData

# a Visium folder, as Space Ranger writes it
COUNTS = "filtered_feature_bc_matrix"
PLACES = ("tissue_positions.csv", "tissue_positions_list.csv", "tissue_positions.parquet")
COLUMNS = ["in_tissue", "array_row", "array_col", "pxl_row_in_fullres", "pxl_col_in_fullres"]
IMAGES = {"hires": "tissue_hires_image.png", "lowres": "tissue_lowres_image.png"}
SCALES = "scalefactors_json.json"


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
    if _is_visium(path):
        return lambda: _read_visium(path)
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


def _is_visium(folder: Path) -> bool:
    """Return whether a folder looks like Space Ranger's: counts, and a folder with the places of spots."""
    return folder.is_dir() and _counts(folder) is not None and _places(folder) is not None


def _read_visium(folder: Path) -> AnnData:
    """Return the spots that lie on tissue; coordinates are pixels of the full image, across and down."""
    import scanpy

    counts, places = _counts(folder), _places(folder)
    if counts is None or places is None:
        msg = f"{str(folder)!r} must have {COUNTS}(.h5) and spatial/{PLACES[0]}, as Space Ranger's outs has."
        raise ValueError(msg)
    adata = scanpy.read_10x_mtx(counts) if counts.is_dir() else scanpy.read_10x_h5(counts)
    adata.var_names_make_unique()  # some symbols stand for several genes
    table = _table(places)
    if lost := int((~adata.obs_names.isin(table.index)).sum()):
        msg = f"{str(places)!r} has no place for {lost} of {adata.n_obs} spots in {counts.name!r}; take both of a run."
        raise ValueError(msg)
    table = table.loc[adata.obs_names]
    adata.obs[COLUMNS[:3]] = table[COLUMNS[:3]]
    adata.obsm[SPATIAL] = table[["pxl_col_in_fullres", "pxl_row_in_fullres"]].to_numpy(float)
    adata.uns[SPATIAL] = {folder.resolve().name: _pictures(folder / "spatial")}
    return adata[adata.obs["in_tissue"] == 1].copy()


def _counts(folder: Path) -> Path | None:
    found = [*sorted(folder.glob(f"*{COUNTS}.h5")), folder / COUNTS]
    return next((path for path in found if path.exists()), None)


def _places(folder: Path) -> Path | None:
    return next((path for name in PLACES if (path := folder / "spatial" / name).exists()), None)


def _table(path: Path) -> pd.DataFrame:
    if path.suffix == ".parquet":
        return pd.read_parquet(path).set_index("barcode")
    with open(path, encoding="utf-8") as file:
        titled = file.readline().startswith("barcode")  # since Space Ranger 2
    table = pd.read_csv(path, header=0 if titled else None, index_col=0)
    table.columns = pd.Index(COLUMNS)
    return table


def _pictures(folder: Path) -> dict[str, Any]:
    from matplotlib.image import imread

    images = {name: np.asarray(imread(folder / file)) for name, file in IMAGES.items() if (folder / file).exists()}
    scales = folder / SCALES
    return {"images": images, "scalefactors": json.loads(scales.read_text()) if scales.exists() else {}}
