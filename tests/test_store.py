"""Stores: written whole or not at all, damage told by name, slides that need not be in memory."""

import json
import os
import subprocess
import sys

import dask.array
import numpy as np
import pytest
import scipy.sparse as sp
from anndata import AnnData

import pdvi
from models_for_tests import Regression, regression_shards
from pdvi.executors.disk import parse_bytes
from pdvi.mixtures import empirical_bayes, potts_mixture_problem
from pdvi.shards.partition import Layout, along_space, layout, median_cuts
from pdvi.shards.store import Store, StoreWriter

SPOTS, SHARD = 900, 150


def slide(seed=0):
    tissue = pdvi.datasets.tissue_features(SPOTS, n_features=6, n_domains=4, noise=0.6, patchiness=5, seed=seed)
    adata = AnnData(obs={"truth": tissue.labels.astype(str)})
    adata.obsm["X_pca"], adata.obsm["spatial"] = tissue.X, tissue.coordinates
    adata.obsp["potts_weights"] = pdvi.graphs.weights(pdvi.graphs.nearest(tissue.coordinates, 6), tissue.X)
    return adata


def written(path, data, **settings):
    pdvi.write_store(path, data, n_domains=4, beta=0.3, shard_size=SHARD, **settings)
    return pdvi.Problem.from_store(path)


def same(a, b):
    a, b = a.load(), b.load()
    np.testing.assert_array_equal(a.halo, b.halo)
    for name in a.shards:
        np.testing.assert_array_equal(a.shards[name], b.shards[name])
    for name, value in vars(a.model).items():
        np.testing.assert_array_equal(value, vars(b.model)[name])


def test_a_problem_survives_the_store(tmp_path):
    problem = pdvi.datasets.quadratic(n=7)
    pdvi.write_store(tmp_path / "store", problem)
    again = pdvi.Problem.from_store(tmp_path / "store")
    assert again.n_shards == 7
    assert again.blocks == problem.blocks
    assert again.model == problem.model
    for name, leaf in problem.shards.items():
        np.testing.assert_array_equal(again.load().shards[name], leaf)
    assert sorted(os.listdir(tmp_path)) == ["store"]


@pytest.mark.parametrize("n_spots", [SPOTS, SPOTS - 4])  # the second leaves empty slots
def test_a_slide_becomes_the_problem_it_would_be_in_memory(tmp_path, n_spots):
    adata = slide()[:n_spots].copy()
    stored = written(tmp_path / "store", adata)
    X, coordinates = np.asarray(adata.obsm["X_pca"]), np.asarray(adata.obsm["spatial"])
    where = layout(median_cuts(coordinates, 6), along_space(coordinates))
    graph = adata.obsp["potts_weights"]
    same(stored, potts_mixture_problem(X, graph, empirical_bayes(X, 4), where, beta=0.3))
    np.testing.assert_array_equal(stored.store.rows, where.rows)


@pytest.mark.filterwarnings("ignore:Writing zarr v2")
def test_slides_in_files_and_in_pieces_give_the_same_store(tmp_path, monkeypatch):
    monkeypatch.setattr("pdvi._anndata.at_hand.BLOCK", 97)  # several blocks, the last one shorter
    adata = slide()
    expected = written(tmp_path / "memory", adata)
    adata.write_h5ad(tmp_path / "slide.h5ad")
    adata.write_zarr(tmp_path / "slide.zarr")
    same(written(tmp_path / "h5ad", tmp_path / "slide.h5ad"), expected)
    same(written(tmp_path / "zarr", str(tmp_path / "slide.zarr")), expected)

    class Lazy:  # as AnnData is with arrays of dask
        obsm = {  # noqa: RUF012
            "X_pca": dask.array.from_array(np.asarray(adata.obsm["X_pca"]), chunks=(100, 6)),
            "spatial": adata.obsm["spatial"],
        }
        obsp = {  # noqa: RUF012
            "potts_weights": dask.array.map_blocks(
                sp.csr_matrix, dask.array.from_array(adata.obsp["potts_weights"].toarray(), chunks=(100, SPOTS))
            )
        }

    same(written(tmp_path / "dask", Lazy()), expected)
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".tmp")]


def test_labels_from_disk_fit_the_truth(tmp_path):
    adata = slide()
    problem = written(tmp_path / "store", adata)
    result = pdvi.fit(problem, pdvi.P2DVI(), executor=pdvi.Disk())
    labels = Layout(problem.store.rows).unshard(result.local_params).argmax(1)
    assert pdvi.metrics.ari(adata.obs["truth"].to_numpy(), labels) > 0.8


def damage(path, how):
    file = path / "shard-00002.bin"
    if how == "flipped":
        content = bytearray(file.read_bytes())
        content[17] ^= 1
        file.write_bytes(content)
    elif how == "short":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        file.unlink()


@pytest.mark.parametrize(
    ("how", "what"), [("flipped", "its checksum does not match"), ("short", "bytes instead of"), ("gone", "is missing")]
)
def test_a_damaged_shard_is_named_when_the_store_is_opened(tmp_path, how, what):
    pdvi.write_store(tmp_path / "store", pdvi.datasets.quadratic(n=5))
    damage(tmp_path / "store", how)
    with pytest.raises(ValueError, match=rf"damaged in 'shard-00002.bin': .*{what}"):
        pdvi.Problem.from_store(tmp_path / "store")


def test_without_verifying_damage_is_named_when_it_is_read(tmp_path):
    pdvi.write_store(tmp_path / "store", pdvi.datasets.quadratic(n=5))
    damage(tmp_path / "store", "flipped")
    problem = pdvi.Problem.from_store(tmp_path / "store", verify=False)
    with pytest.raises(ValueError, match=r"damaged in 'shard-00002.bin'"):
        pdvi.fit(problem, pdvi.P2DVI(), max_epochs=1)


def test_a_damaged_manifest_or_halo_is_named(tmp_path):
    written(tmp_path / "store", slide())
    halo = tmp_path / "store" / "halo.npy"
    content = halo.read_bytes()
    halo.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"damaged in 'halo.npy': its checksum"):
        Store(tmp_path / "store")
    manifest = tmp_path / "store" / "manifest.json"
    described = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**described, "format": 99}))
    with pytest.raises(ValueError, match="has format 99, this version reads 2"):
        Store(tmp_path / "store")
    manifest.write_text("{")
    with pytest.raises(ValueError, match=r"damaged in .manifest.json.: it is not JSON"):
        Store(tmp_path / "store")
    with pytest.raises(FileNotFoundError, match="no store at"):
        Store(tmp_path / "nothing")


def test_a_store_appears_whole_or_not_at_all(tmp_path):
    with StoreWriter(tmp_path / "store") as writer:
        writer.add({"x": np.zeros(3)})
        with pytest.raises(ValueError, match="'x' of shard 1 has NaN"):
            writer.add({"x": np.array([0.0, np.nan, 0.0])})
        with pytest.raises(ValueError, match="must have the same arrays"):
            writer.add({"x": np.zeros(4)})
        assert [name[:11] for name in os.listdir(tmp_path)] == [".tmp-store-"]
    assert os.listdir(tmp_path) == []


def test_nothing_is_overwritten_by_accident(tmp_path):
    problem = pdvi.datasets.quadratic(n=3)
    pdvi.write_store(tmp_path / "store", problem)
    with pytest.raises(ValueError, match="`path` must not exist yet"):
        pdvi.write_store(tmp_path / "store", problem)
    pdvi.write_store(tmp_path / "store", pdvi.datasets.quadratic(n=4), overwrite=True)
    assert pdvi.Problem.from_store(tmp_path / "store").n_shards == 4
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match="`path` must be a store to be overwritten"):
        pdvi.write_store(tmp_path / "folder", problem, overwrite=True)
    with pytest.raises(ValueError, match="in a folder that exists"):
        pdvi.write_store(tmp_path / "no" / "store", problem)


def test_a_model_of_ones_own_is_given_again(tmp_path):
    problem = pdvi.Problem(Regression(), regression_shards(np.random.default_rng(0), [5, 7, 6]))
    pdvi.write_store(tmp_path / "store", problem)
    with pytest.raises(ValueError, match="`model` must be given"):
        pdvi.Problem.from_store(tmp_path / "store")
    stored = pdvi.Problem.from_store(tmp_path / "store", Regression())
    expected = pdvi.fit(problem, pdvi.P2DVI(), max_epochs=20, tol=0)
    found = pdvi.fit(stored, pdvi.P2DVI(), max_epochs=20, tol=0)
    assert found.objective == pytest.approx(expected.objective, rel=1e-6)


def test_what_is_missing_in_a_slide_is_named(tmp_path):
    adata = slide()
    with pytest.raises(ValueError, match=r"'other' not in obsm of `data` \(it has \['X_pca', 'spatial'\]\)"):
        written(tmp_path / "store", adata, use_rep="other")
    with pytest.raises(ValueError, match=r"'other' not in obsp .* run pdvi.gr.knn_graph"):
        written(tmp_path / "store", adata, graph_key="other")
    with pytest.raises(ValueError, match="`n_domains` must be a whole number"):
        pdvi.write_store(tmp_path / "store", adata)
    with pytest.raises(FileNotFoundError, match="no file at"):
        written(tmp_path / "store", tmp_path / "nothing.h5ad")


@pytest.mark.parametrize(("text", "size"), [("4GB", 4e9), ("500 mb", 5e8), (1000, 1000), ("1.5GiB", 1.5 * 2**30)])
def test_sizes_are_read(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("wrong", ["many", "-1GB", 0, "4 parsecs", True])
def test_a_memory_limit_must_be_a_size(wrong):
    with pytest.raises(ValueError, match="`memory_limit` must be a positive number of bytes"):
        pdvi.Disk(wrong)


def test_a_limit_below_what_a_shard_needs_is_refused(tmp_path):
    pdvi.write_store(tmp_path / "store", pdvi.datasets.quadratic(n=3))
    with pytest.raises(
        ValueError, match=r"`memory_limit` must be at least .* give more, or write the store with smaller"
    ):
        pdvi.fit(pdvi.Problem.from_store(tmp_path / "store"), pdvi.P2DVI(), executor=pdvi.Disk("1MB"))


CHILD = """
import sys
from pathlib import Path
import pdvi
from pdvi.executors.disk import resident

problem = pdvi.Problem.from_store(sys.argv[1])
before = resident()
limit = before + float(sys.argv[2])
pdvi.fit(problem, pdvi.P2DVI(), batch_size=2, max_epochs=3, tol=0, executor=pdvi.Disk(limit))
status = Path("/proc/self/status").read_text().split()
print(1024 * float(status[status.index("VmHWM:") + 1]) - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="resident memory is read from /proc")
def test_memory_stays_below_the_limit(tmp_path):
    """Half a gigabyte of rows through 300 MB."""
    rows, shards = 25_000, 80
    rng = np.random.default_rng(0)
    X = rng.standard_normal((rows * shards, 64), np.float32)
    where = layout(np.repeat(np.arange(shards), rows))
    settings = empirical_bayes(X[:2_000], 3)
    problem = pdvi.mixtures.gaussian_mixture_problem(X, settings, where)
    pdvi.write_store(tmp_path / "store", problem)
    del problem
    used = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path / "store"), "300e6"], capture_output=True, text=True, check=True
    )
    assert float(used.stdout) < 300e6 < 0.6 * X.nbytes


def test_a_limit_that_cannot_be_kept_is_said_where_nobody_is_strict(tmp_path):
    problem = pdvi.datasets.mixture(200, dim=2, n_components=2, batch_size=50, seed=0).problem()
    pdvi.write_store(tmp_path / "store", problem)
    stored = pdvi.Problem.from_store(tmp_path / "store")
    with pytest.raises(ValueError, match="`memory_limit` must be at least"):
        pdvi.fit(stored, pdvi.P2DVI(), max_epochs=1, tol=0, executor=pdvi.Disk(1e6))
    with pytest.warns(UserWarning, match="going on with more than the memory limit"):
        result = pdvi.fit(stored, pdvi.P2DVI(), max_epochs=1, tol=0, executor=pdvi.Disk(1e6, strict=False))
    assert np.isfinite(result.objective)
