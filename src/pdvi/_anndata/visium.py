"""Read a Visium folder as Space Ranger writes it: counts, places of the spots, images and their scales."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from pdvi._anndata.keys import SPATIAL

if TYPE_CHECKING:
    from anndata import AnnData

COUNTS = "filtered_feature_bc_matrix"
PLACES = ("tissue_positions.csv", "tissue_positions_list.csv", "tissue_positions.parquet")
COLUMNS = ["in_tissue", "array_row", "array_col", "pxl_row_in_fullres", "pxl_col_in_fullres"]
IMAGES = {"hires": "tissue_hires_image.png", "lowres": "tissue_lowres_image.png"}
SCALES = "scalefactors_json.json"


def is_visium(folder: Path) -> bool:
    """Return whether a folder looks like Space Ranger's: counts, and a folder with the places of spots."""
    return folder.is_dir() and _counts(folder) is not None and _places(folder) is not None


def read_visium(folder: Path) -> AnnData:
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
