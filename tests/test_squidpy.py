"""Our graph under squidpy's names."""

import numpy as np
import pytest
import scipy.sparse as sp

import pdvi


def chain():
    adata = pdvi.datasets.tissue(300, n_genes=20, n_domains=4, seed=0)
    pdvi.gr.knn_graph(adata, n_neighbors=5)
    return adata


def test_the_names_are_squidpys():
    adata = chain()
    copied = pdvi.gr.to_squidpy(adata, copy=True)
    assert "spatial_connectivities" not in adata.obsp
    graph, lengths = copied.obsp["spatial_connectivities"], copied.obsp["spatial_distances"]
    assert set(graph.data) == {1}
    assert (graph != (sp.csr_matrix(adata.obsp["potts_weights"]) != 0)).nnz == 0
    i, j = lengths.nonzero()
    np.testing.assert_allclose(
        np.asarray(lengths[i, j]).ravel(), np.linalg.norm(adata.obsm["spatial"][i] - adata.obsm["spatial"][j], axis=1)
    )
    noted = copied.uns["spatial_neighbors"]
    assert {noted["connectivities_key"], noted["distances_key"]} == {"spatial_connectivities", "spatial_distances"}
    with pytest.raises(ValueError, match=r"'no' not in adata.obsp .* run pdvi.gr.knn_graph"):
        pdvi.gr.to_squidpy(adata, key="no")


@pytest.mark.filterwarnings("ignore")  # of libraries
def test_squidpy_takes_it():
    sq = pytest.importorskip("squidpy", reason="squidpy is not installed")
    adata = chain()
    pdvi.gr.to_squidpy(adata)
    sq.gr.interaction_matrix(adata, "truth")
    counted = np.asarray(adata.uns["truth_interactions"], float)
    codes = adata.obs["truth"].astype("category").cat.codes.to_numpy()
    edges = sp.coo_array(adata.obsp["potts_weights"])
    expected = np.zeros_like(counted)
    np.add.at(expected, (codes[edges.row], codes[edges.col]), 1)
    np.testing.assert_array_equal(counted, expected)
    sq.gr.nhood_enrichment(adata, "truth", n_perms=20, show_progress_bar=False)
    assert (np.diag(adata.uns["truth_nhood_enrichment"]["zscore"]) > 0).all()
