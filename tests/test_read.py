"""Slides on disk: Visium folders, SpatialData stores, zarr, and what is wrong with those that cannot be read."""

import json

import anndata as ad
import h5py
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from pdvi._anndata.image import microns_per_unit, tissue_image
from pdvi._anndata.read import read_slide

pytestmark = pytest.mark.filterwarnings("ignore:Writing zarr v2")  # anndata's, until its next release


@pytest.fixture
def counts():
    return np.random.default_rng(0).poisson(1.0, (6, 4)).astype(np.int32)


def write_visium(folder, counts, *, titled=True):
    """A folder as Space Ranger writes it: six spots with counts, seven places, the last spot off the tissue."""
    (folder / "spatial").mkdir(parents=True)
    matrix = sp.csc_matrix(counts.T)  # genes are rows there
    barcodes = [f"AAAC{k}-1" for k in range(len(counts))]
    genes = [f"Gene{k}" for k in range(counts.shape[1])]
    with h5py.File(folder / "filtered_feature_bc_matrix.h5", "w") as file:
        group = file.create_group("matrix")
        for name in ("data", "indices", "indptr"):
            group[name] = getattr(matrix, name)
        group["shape"], group["barcodes"] = matrix.shape, np.array(barcodes, "S")
        features = group.create_group("features")
        features["id"], features["name"] = np.array([f"ENSG{g}" for g in genes], "S"), np.array(genes, "S")
        features["feature_type"] = np.array(["Gene Expression"] * len(genes), "S")
        features["genome"] = np.array(["GRCh38"] * len(genes), "S")
    rows = [[name, int(k != 5), k, k + 1, 100 * k, 200 + 10 * k] for k, name in enumerate([*barcodes, "TTTT-1"])]
    columns = ["barcode", "in_tissue", "array_row", "array_col", "pxl_row_in_fullres", "pxl_col_in_fullres"]
    name = "tissue_positions.csv" if titled else "tissue_positions_list.csv"
    shuffled = pd.DataFrame(rows, columns=columns).iloc[::-1]
    shuffled.to_csv(folder / "spatial" / name, index=False, header=titled)
    scales = {"tissue_hires_scalef": 0.1, "spot_diameter_fullres": 130.0}
    (folder / "spatial" / "scalefactors_json.json").write_text(json.dumps(scales))
    plt.imsave(folder / "spatial" / "tissue_hires_image.png", np.ones((8, 9, 3)))
    return folder


@pytest.mark.parametrize("titled", [True, False], ids=["tissue_positions", "tissue_positions_list"])
def test_a_visium_folder(tmp_path, counts, titled):
    adata = read_slide(write_visium(tmp_path / "brain", counts, titled=titled))
    assert adata.shape == (5, 4)
    np.testing.assert_array_equal(adata.X.toarray(), counts[:5])
    np.testing.assert_array_equal(adata.obsm["spatial"], [[200 + 10 * k, 100 * k] for k in range(5)])
    assert list(adata.obs["array_row"]) == list(range(5))
    assert list(adata.var_names) == [f"Gene{k}" for k in range(4)]
    assert microns_per_unit(adata) == 0.5
    assert tissue_image(adata).pixels.shape[:2] == (8, 9)


def test_places_of_another_run_are_noticed(tmp_path, counts):
    folder = write_visium(tmp_path / "brain", counts)
    places = folder / "spatial" / "tissue_positions.csv"
    places.write_text(places.read_text().replace("AAAC2", "GGGG2"))
    with pytest.raises(ValueError, match=r"has no place for 1 of 6 spots .* take both of a run"):
        read_slide(folder)


def test_an_anndata_in_zarr_and_a_folder_that_is_nothing(tmp_path, counts):
    adata = ad.AnnData(sp.csr_matrix(counts, dtype=np.float32), obsm={"spatial": np.eye(6)[:, :2]})
    adata.write_zarr(tmp_path / "slide.zarr")
    np.testing.assert_array_equal(read_slide(tmp_path / "slide.zarr").X.toarray(), counts)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="is not a Visium folder, a SpatialData store or an AnnData in zarr"):
        read_slide(tmp_path / "empty")


def test_tables_of_a_store(tmp_path, counts):
    """The layout of a SpatialData store is an AnnData in zarr for every table; with places in obsm that is enough."""
    adata = ad.AnnData(sp.csr_matrix(counts, dtype=np.float32), obsm={"spatial": np.eye(6)[:, :2]})
    (tmp_path / "store.zarr" / "tables").mkdir(parents=True)
    adata.write_zarr(tmp_path / "store.zarr" / "tables" / "cells")
    np.testing.assert_array_equal(read_slide(tmp_path / "store.zarr").X.toarray(), counts)
    adata[:3].copy().write_zarr(tmp_path / "store.zarr" / "tables" / "nuclei")
    with pytest.raises(ValueError, match=r"has the tables \['cells', 'nuclei'\]; give the path of one of them"):
        read_slide(tmp_path / "store.zarr")
    assert read_slide(tmp_path / "store.zarr" / "tables" / "nuclei").n_obs == 3


@pytest.mark.filterwarnings("ignore")  # of libraries
def test_places_come_from_the_shapes_that_a_table_annotates(tmp_path, counts):
    spatialdata = pytest.importorskip("spatialdata", reason="spatialdata is not installed")
    xy = np.random.default_rng(1).random((6, 2))
    shapes = spatialdata.models.ShapesModel.parse(xy, geometry=0, radius=0.1, index=np.arange(10, 16))
    obs = pd.DataFrame({"region": pd.Categorical(["spots"] * 6), "id": np.arange(15, 9, -1)}, index=list("abcdef"))
    table = ad.AnnData(sp.csr_matrix(counts, dtype=np.float32), obs=obs)
    table = spatialdata.models.TableModel.parse(table, region="spots", region_key="region", instance_key="id")
    spatialdata.SpatialData(shapes={"spots": shapes}, tables={"table": table}).write(tmp_path / "store.zarr")
    np.testing.assert_allclose(read_slide(tmp_path / "store.zarr").obsm["spatial"], xy[::-1])


def test_a_table_without_places_says_what_to_do(tmp_path, counts, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "spatialdata", None)
    (tmp_path / "store.zarr" / "tables").mkdir(parents=True)
    ad.AnnData(sp.csr_matrix(counts, dtype=np.float32)).write_zarr(tmp_path / "store.zarr" / "tables" / "cells")
    with pytest.raises(ValueError, match=r"no coordinates in obsm .* install it, or put the coordinates into obsm"):
        read_slide(tmp_path / "store.zarr")
