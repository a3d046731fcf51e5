"""Read the table of a SpatialData store, with the places of what it annotates."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pdvi._anndata.keys import SPATIAL

if TYPE_CHECKING:
    from anndata import AnnData

TABLES = "tables"
ATTRIBUTES = "spatialdata_attrs"


def is_spatialdata(folder: Path) -> bool:
    """Return whether a folder is a store that has tables."""
    return (folder / TABLES).is_dir()


def is_zarr(folder: Path) -> bool:
    """Return whether a folder is one of zarr."""
    return any((folder / name).exists() for name in (".zgroup", "zarr.json"))


def table_folder(folder: Path, name: str | None = None) -> Path:
    """Return the folder of a table of a store, by default of the only one."""
    names = sorted(path.name for path in (folder / TABLES).iterdir() if path.is_dir())
    if name is None and len(names) == 1:
        name = names[0]
    if name not in names:
        msg = f"{str(folder)!r} has the tables {names}; give the path of one of them, such as {folder / TABLES!s}/NAME."
        raise ValueError(msg)
    return folder / TABLES / str(name)


def read_table(folder: Path, name: str | None = None, *, spatial_key: str = SPATIAL) -> AnnData:
    """Return a table (by default the only one); places come from its obsm, else from the shapes that it annotates."""
    from anndata import read_zarr

    adata = read_zarr(table_folder(folder, name))
    if spatial_key not in adata.obsm:
        adata.obsm[spatial_key] = _centroids(folder, adata)
    return adata


def _centroids(folder: Path, adata: AnnData) -> np.ndarray:
    try:
        from spatialdata import get_centroids, read_zarr
    except ImportError as error:
        msg = (
            f"the table has no coordinates in obsm ({sorted(adata.obsm)}), and reading shapes needs spatialdata; "
            "install it, or put the coordinates into obsm['spatial']."
        )
        raise ValueError(msg) from error
    attributes = adata.uns.get(ATTRIBUTES, {})
    region, instance = attributes.get("region_key"), attributes.get("instance_key")
    if region not in adata.obs or instance not in adata.obs:
        msg = f"the table annotates no shapes (uns[{ATTRIBUTES!r}]); put the coordinates into obsm['spatial']."
        raise ValueError(msg)
    data = read_zarr(folder)
    places = np.full((adata.n_obs, 2), np.nan)
    for element in adata.obs[region].unique():
        rows = np.flatnonzero(adata.obs[region] == element)
        centres = get_centroids(data[str(element)]).compute()
        places[rows] = centres.loc[adata.obs[instance].to_numpy()[rows], ["x", "y"]].to_numpy(float)
    return places
