"""One builder of shards: a store holds the bits that memory has, and refuses what memory refuses."""

import os

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp

import pdvi
from pdvi._anndata.at_hand import graph_at_hand
from pdvi.mixtures import empirical_bayes, potts_mixture_problem
from pdvi.mixtures.checks import check_coordinates
from pdvi.shards.partition import along_space, layout, median_cuts

SPOTS, SHARD = 331, 60
TISSUE = pdvi.datasets.tissue_features(SPOTS, n_features=5, n_domains=3, patchiness=5, seed=0)
GRAPH = sp.csr_array(pdvi.graphs.weights(pdvi.graphs.nearest(TISSUE.coordinates, 6), TISSUE.X), dtype=np.float64)
GRAPH.data /= 7  # numbers that single precision does not have
ONE_WAY = sp.csr_array(sp.triu(GRAPH) * 2 + sp.diags_array(np.ones(SPOTS)))  # with self-loops


def slide(graph=GRAPH, X=TISSUE.X, coordinates=TISSUE.coordinates):
    adata = ad.AnnData(obs={"truth": np.zeros(SPOTS)})
    adata.obsm["X_pca"], adata.obsm["spatial"], adata.obsp["potts_weights"] = X, coordinates, sp.csr_matrix(graph)
    return adata


def in_memory(graph=GRAPH, X=TISSUE.X, coordinates=TISSUE.coordinates, **how):
    coordinates = check_coordinates(coordinates, len(X))
    where = layout(median_cuts(coordinates, -(-SPOTS // SHARD)), along_space(coordinates))
    return potts_mixture_problem(X, graph, empirical_bayes(X, 3), where, **{"beta": 0.3, **how})


def in_store(folder, graph=GRAPH, X=TISSUE.X, coordinates=TISSUE.coordinates, *, file=True, **how):
    data = slide(graph, X, coordinates)
    if file:
        data.write_h5ad(folder / "slide.h5ad")
        data = folder / "slide.h5ad"
    pdvi.write_store(folder / "store", data, n_domains=3, shard_size=SHARD, **{"beta": 0.3, **how})
    return pdvi.Problem.from_store(folder / "store").load()


def assert_same_bits(one, two):
    assert set(one.shards) == set(two.shards) == {"x", "fraction", "square", "mask", "table", "weight"}
    for name in one.shards:
        np.testing.assert_array_equal(one.shards[name], two.shards[name])
    np.testing.assert_array_equal(one.halo, two.halo)
    for name, value in vars(one.model).items():
        np.testing.assert_array_equal(value, vars(two.model)[name])


@pytest.mark.parametrize("file", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_store_has_the_bits_of_memory(tmp_path, monkeypatch, file, dtype):
    monkeypatch.setattr("pdvi._anndata.at_hand.BLOCK", 50)
    rows = TISSUE.X.astype(dtype) / 3
    assert_same_bits(in_store(tmp_path, X=rows, file=file, beta=20.0), in_memory(X=rows, beta=20.0))
    assert in_memory(beta=20.0).model.damping > 0  # is compared too
    assert {name.split("-")[0] for name in os.listdir(tmp_path / "store")} == {
        "halo.npy",
        "manifest.json",
        "rows.npy",
        "shard",
    }


def test_what_is_built_is_what_a_checked_problem_would_be():
    built = in_memory()
    checked = pdvi.Problem(built.model, built.shards, halo=built.halo)
    assert built.blocks == checked.blocks
    assert built.fingerprint() == checked.fingerprint()


@pytest.mark.parametrize("file", [False, True])
def test_one_way_edges_are_averaged_in_both(tmp_path, monkeypatch, file):
    monkeypatch.setattr("pdvi._anndata.at_hand.BLOCK", 50)
    with pytest.warns(UserWarning, match="not symmetric; the weights of both directions are averaged"):
        stored = in_store(tmp_path, ONE_WAY, file=file)
    with pytest.warns(UserWarning, match="not symmetric; the weights of both directions are averaged"):
        kept = in_memory(ONE_WAY)
    assert_same_bits(stored, kept)
    assert_same_bits(kept, in_memory(GRAPH))


@pytest.mark.parametrize("graph", [ONE_WAY, GRAPH * 0, GRAPH], ids=["one way", "empty", "symmetric"])
@pytest.mark.filterwarnings("ignore:`graph` is not symmetric")
def test_a_graph_on_disk_is_the_dense_average(tmp_path, monkeypatch, graph):
    monkeypatch.setattr("pdvi._anndata.at_hand.BLOCK", 50)
    dense = graph.toarray()
    checked = graph_at_hand(dense, SPOTS, tmp_path)  # sliced by rows, as a lazy array is
    expected = 0.5 * (dense + dense.T)
    np.fill_diagonal(expected, 0)
    np.testing.assert_array_equal(checked.toarray(), expected)


def _with_one(value):
    graph = GRAPH.copy()
    graph.data[17] = value
    return graph


def _nowhere():
    places = TISSUE.coordinates.copy()
    places[3] = np.nan
    return places


@pytest.mark.parametrize("kind", ["memory", "slide", "file"])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"graph": _with_one(-0.5)}, "`graph` must have finite weights of at least 0, got -0.5"),
        ({"graph": _with_one(np.nan)}, "`graph` must have finite weights of at least 0, got nan"),
        ({"graph": _with_one(np.inf)}, "`graph` must have finite weights of at least 0, got inf"),
        ({"coordinates": _nowhere()}, "`coordinates` must be finite: 1 of 331 rows are not; remove"),
        ({"beta": -1.0}, "`beta` must be at least 0 and finite, got -1.0"),
        ({"beta": np.inf}, "`beta` must be at least 0 and finite, got inf"),
        ({"damping": -0.1}, "`damping` must be at least 0 and finite, got -0.1"),
        ({"damping": np.nan}, "`damping` must be at least 0 and finite, got nan"),
    ],
)
def test_memory_and_store_refuse_the_same(tmp_path, kind, wrong, message):
    with pytest.raises(ValueError, match=message):
        in_memory(**wrong) if kind == "memory" else in_store(tmp_path, file=kind == "file", **wrong)
    assert not (tmp_path / "store").exists()


def test_a_graph_of_other_rows_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"`graph` must have a row and a column for each of the 331 rows"):
        in_memory(GRAPH[:10, :10])
    with pytest.raises(ValueError, match=r"`graph` must have a row and a column for each of the 331 rows"):
        graph_at_hand(GRAPH[:10, :10].toarray(), SPOTS, tmp_path)
