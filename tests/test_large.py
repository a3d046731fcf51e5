"""Slides that stay on disk: what is read in blocks comes to what is read whole, and a killed command goes on."""

import importlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import warnings

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp
from scipy.spatial import cKDTree
from sklearn.metrics import adjusted_rand_score

import pdvi
from pdvi._anndata.blocks import Blocks, Part
from pdvi._base.stages import Stages
from pdvi._base.work_dir import WorkDir
from pdvi.cli.app import main
from pdvi.mixtures import Config
from pdvi.mixtures.fit_mixture import FitOptions, fit_mixture
from pdvi.mixtures.init import about_mean
from pdvi.mixtures.sharded_graph import ShardedGraph
from pdvi.pp import blocked
from pdvi.pp.normalise import expression_of
from pdvi.pp.tiles import averaged, mean_of_others, nearest_by_tiles, nearest_others, neighbor_table
from pdvi.spatial import streaming
from pdvi.spatial.streaming import Storage, StoredGraph

counts = importlib.import_module("pdvi.datasets.tissue.counts")  # a function of the package has the same name
QUIET = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module")
def slide(tmp_path_factory):
    """The path of a slide, and the slide itself."""
    path = tmp_path_factory.mktemp("large") / "slide.h5ad"
    adata = pdvi.datasets.tissue(1_500, n_genes=60, n_domains=4, seed=3)
    adata.write_h5ad(path)
    return path, adata


def run(*arguments):
    with pytest.raises(SystemExit) as done:
        main([str(argument) for argument in arguments])
    return done.value.code


# -------------------------------------------------------------------------------------------------------- neighbors


@pytest.mark.parametrize(("dim", "block"), [(2, 50), (3, 7), (2, 10_000)])
def test_neighbors_of_blocks_are_those_of_all_rows(dim, block, monkeypatch):
    monkeypatch.setattr("pdvi.pp.tiles.BLOCK", block)
    rng = np.random.default_rng(dim)
    coordinates = rng.standard_t(2, (900, dim))  # dense in the middle, far apart outside
    samples = (rng.random(900) < 0.3).astype(int)
    table = np.empty((900, 13), np.int32)
    nearest_by_tiles(coordinates, samples, table)
    for sample in (0, 1):
        rows = np.flatnonzero(samples == sample)
        wanted, index = cKDTree(coordinates[rows]).query(coordinates[rows], k=13)
        found = np.linalg.norm(coordinates[table[rows]] - coordinates[rows][:, None], axis=2)
        np.testing.assert_allclose(found, wanted, rtol=1e-12)
        np.testing.assert_array_equal(table[rows], rows[index])


def test_duplicates_and_small_samples_have_the_neighbors_they_can_have():
    coordinates = np.zeros((7, 2))
    coordinates[5:] = [[3.0, 0.0], [4.0, 0.0]]
    samples = np.array([0, 0, 0, 0, 0, 1, 1])
    table = np.empty((7, 4), np.int32)
    nearest_by_tiles(coordinates, samples, table)
    assert table[5].tolist() == [5, 6, -1, -1]
    edges = nearest_others(table, 3)
    assert np.diff(edges.indptr).tolist() == [3] * 5 + [1, 1]
    assert not edges.diagonal().any()
    features = np.arange(7, dtype=np.float32)[:, None]
    mean = np.empty((7, 1), np.float32)
    averaged(table, 3, features, mean)
    assert mean[5:].ravel().tolist() == [5.5, 5.5]


# ------------------------------------------------------------------------------------------------------- components


class InMemory(Stages):
    """Stages in a folder of a test, of one piece of work."""

    def __init__(self, folder):
        super().__init__(WorkDir(folder), "test")


def in_blocks(adata, folder, n_genes, monkeypatch):
    """Genes and scaled expression, in blocks that do not divide the rows evenly."""
    monkeypatch.setattr("pdvi._anndata.blocks.MOST_ROWS", 317)
    samples = np.unique(adata.obs["sample"], return_inverse=True)[1]
    blocks, stages = Blocks([Part(adata.X)], adata.n_vars), InMemory(folder)
    chosen = stages("genes", lambda draft: blocked.choose_genes(draft, blocks, samples, n_genes, None))
    written = stages("expression", lambda draft: blocked.write_expression(draft, blocks, samples, chosen, log=True))
    return stages, samples, chosen, blocked.Scaled(written, 10.0)


@pytest.mark.parametrize("dense", [False, True])
def test_genes_totals_and_logarithms_in_blocks_are_those_of_the_whole(dense, tmp_path, monkeypatch):
    adata = pdvi.datasets.tissue(800, n_genes=120, n_domains=4, n_samples=2, seed=1)
    X = adata.X.toarray()
    X[:, 7] = 0
    adata.X = X if dense else sp.csr_matrix(X)
    if not dense:
        adata.X.data[::50] = 0  # zeros may be stored, too
    _, samples, chosen, X = in_blocks(adata, tmp_path, 50, monkeypatch)
    whole = expression_of(adata, layer=None, n_genes=50, normalize=None, samples=samples)
    np.testing.assert_array_equal(chosen["genes"], whole.genes)
    assert float(chosen["target"]) == whole.target
    found = sp.vstack([block for _, block in X]).toarray()
    wanted = whole.X.toarray() if sp.issparse(whole.X) else whole.X
    np.testing.assert_allclose(found, np.clip(wanted / np.asarray(X.written["scale"]), -10, 10), rtol=2e-6)


def test_components_in_blocks_are_those_of_the_whole(tmp_path, monkeypatch):
    adata = pdvi.datasets.tissue(3_000, n_genes=150, n_domains=5, n_samples=2, seed=2)
    stages, samples, _, X = in_blocks(adata, tmp_path, 2_000, monkeypatch)
    W = mean_of_others(neighbor_table(adata.obsm["spatial"], samples, 6), 6)
    found = blocked.leading_components(stages, X, sp.csr_array(W + W.T), samples, 30, 0)
    pdvi.pp.spatial_components(adata, sample_key="sample")
    whole = adata.uns["X_spatial"]
    signal = 6  # five domains and a gradient: the others are noise, and as good as any
    np.testing.assert_allclose(found["values"][:signal], whole["values"][:signal], rtol=1e-3)
    np.testing.assert_allclose(found["mean"], whole["mean"], atol=1e-4)
    cosines = np.abs((np.asarray(found["loadings"]) * whole["loadings"]).sum(0))[:signal]
    assert cosines.min() > 0.999
    components = found["components"][:, :signal]
    np.testing.assert_allclose(components, adata.obsm["X_spatial"][:, :signal], atol=0.05 * components.std())


def test_logarithms_are_left_as_they_are(tmp_path, monkeypatch):
    adata = pdvi.datasets.tissue(400, n_genes=30, n_domains=3, seed=1)
    adata.X = adata.X.log1p()
    with pytest.warns(UserWarning, match="looks normalised already"):
        _, _, chosen, _ = in_blocks(adata, tmp_path, 2_000, monkeypatch)
    assert len(chosen["factors"]) == 0


# ----------------------------------------------------------------------------------------------------------- domains


@QUIET
@pytest.mark.parametrize("how", ["backed", "lazy"])
def test_domains_of_a_slide_on_disk_are_those_in_memory(slide, how):
    path, adata = slide
    on_disk = ad.read_h5ad(path, backed="r") if how == "backed" else ad.experimental.read_lazy(path)
    pdvi.tl.domains(on_disk, 4, views=2)
    in_memory = pdvi.tl.domains(adata, 4, views=2, copy=True)
    labels = np.asarray(on_disk.obs["domain"].to_numpy()).astype(str)
    assert adjusted_rand_score(labels, in_memory.obs["domain"]) > 0.97
    assert set(on_disk.obsm) >= {"domain_probability", "domain_posterior", "X_spatial"}
    assert {"genes", "loadings", "target"} <= set(on_disk.uns["X_spatial"])


@pytest.mark.parametrize("sampled", [False, True])
def test_rows_fitted_from_a_store_are_those_fitted_in_memory(tmp_path, monkeypatch, sampled):
    monkeypatch.setattr(streaming, "SHARD_ROWS", 250)  # ten shards
    rng = np.random.default_rng(0)
    places = rng.random((2_500, 2))
    truth = (places > 0.5) @ [1, 2]
    X = (rng.standard_normal((4, 6)) * 2)[truth] + rng.standard_normal((2_500, 6)) @ rng.standard_normal((6, 6))
    sample = (places[:, 0] + places[:, 1] > 1).astype(int) if sampled else None
    X = about_mean(X + (0 if sample is None else 2.0 * sample[:, None]), sample).astype(np.float32)
    graph = pdvi.graphs.nearest(places, 8, mutual=False).astype(float)
    known = np.eye(4, dtype=np.float32)[np.where(rng.random(2_500) < 0.15, 0, truth)]
    whole = fit_mixture(X, ShardedGraph(2_500, graph, places, n_shards=4, beta=0.3, sample=sample), known, FitOptions())
    in_store = StoredGraph(
        2_500, graph, places, Storage(pdvi.Disk(), WorkDir(tmp_path), 1_000), n_shards=4, beta=0.3, sample=sample
    )
    stored = fit_mixture(X, in_store, known, FitOptions())
    assert stored.result.converged
    assert len(stored.result.local_params) == 10
    assert adjusted_rand_score(whole.labels, truth) > (0.8 if sampled else 0.9)
    assert adjusted_rand_score(whole.labels, stored.labels) > 0.97
    assert stored.objective == pytest.approx(whole.objective, rel=0.01)
    assert stored.probabilities.shape == (2_500, 4)
    assert not list(tmp_path.glob("*.store"))  # it is gone


@QUIET
def test_a_slide_fitted_from_a_store_has_the_labels_of_one_in_memory(slide, tmp_path):
    path, adata = slide
    config = Config(group_above=500, group_size=4)
    found = []
    for executor in (None, pdvi.Disk()):
        on_disk = ad.read_h5ad(path, backed="r")
        pdvi.tl.domains(on_disk, 4, views=2, config=config, executor=executor, stages=tmp_path / str(executor is None))
        found.append(np.asarray(on_disk.obs["domain"].to_numpy()).astype(str))
        assert on_disk.uns["domain"]["status"].startswith("CONVERGED")
        assert len(on_disk.obs["domain_certainty"]) == adata.n_obs
    assert adjusted_rand_score(*found) > 0.97
    in_memory = pdvi.tl.domains(adata, 4, views=2, config=config, copy=True)
    assert adjusted_rand_score(found[0], in_memory.obs["domain"]) > 0.95


# ------------------------------------------------------------------------------------------------------------ stages


def test_a_stage_is_made_once_unless_it_is_damaged_or_of_other_work(tmp_path):
    made = []

    def make(draft):
        made.append(1)
        draft["numbers"] = np.arange(5)
        draft.array("more", np.float32, (3, 2))[:] = 7

    for _ in range(2):
        found = Stages(WorkDir(tmp_path), "one")("first", make)
        assert found["numbers"].tolist() == [0, 1, 2, 3, 4]
        assert (found["more"] == 7).all()
    assert len(made) == 1
    file = tmp_path / "first.more.npy"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    Stages(WorkDir(tmp_path), "one")("first", make)
    assert len(made) == 2
    WorkDir(tmp_path).file("half.done.npy").write_bytes(b"")  # by a process that was killed
    (tmp_path / "my.array.npy").write_bytes(b"mine")
    other = Stages(WorkDir(tmp_path), "two")
    assert not other.found
    assert [file.name for file in tmp_path.glob("*.npy")] == ["my.array.npy"]  # not on the list
    with pytest.raises(ValueError, match="was not written by pdvi"):
        other("my", lambda draft: draft.__setitem__("array", np.arange(3)))
    assert (tmp_path / "my.array.npy").read_bytes() == b"mine"
    (tmp_path / "stages.json").write_text("{")
    assert not Stages(WorkDir(tmp_path), "one").found


def test_two_processes_do_not_share_a_folder(tmp_path):
    folder, same = WorkDir(tmp_path / "stages"), WorkDir(tmp_path / "stages")
    with folder.lock(), pytest.raises(ValueError, match="another process works in"), same.lock():
        pass


# ------------------------------------------------------------------------------------------------------ command line


def test_counts_written_as_they_are_drawn_are_those_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(counts, "AT_ONCE", 2)
    monkeypatch.setattr(counts, "ENTRIES", 3_000)
    whole = pdvi.datasets.tissue(500, n_genes=30, n_domains=3, seed=4)
    for name in ("slide.h5ad", "slide.zarr"):
        returned = pdvi.datasets.tissue(500, n_genes=30, n_domains=3, seed=4, path=tmp_path / name)
        assert returned.X is None
        read = ad.read_h5ad(tmp_path / name) if name.endswith("h5ad") else ad.read_zarr(tmp_path / name)
        assert abs(read.X - whole.X).sum() == 0
        assert read.obs.equals(whole.obs)
        np.testing.assert_array_equal(read.obsm["spatial"], whole.obsm["spatial"])


@pytest.mark.parametrize(("kind", "other"), [("h5ad", "zarr"), ("zarr", "zarr"), ("h5ad", "h5ad")])
def test_a_slide_that_would_not_fit_is_read_in_blocks(slide, tmp_path, tmp_path_factory, capsys, kind, other):
    path, adata = slide
    if kind == "zarr":
        path = tmp_path_factory.mktemp("zarr") / "slide.zarr"
        with warnings.catch_warnings(action="ignore"):
            adata.write_zarr(path)
    output = tmp_path / f"out.{other}"
    assert run("domains", path, "-o", output, "--n-domains", 4, "--memory-limit", "400MB") == 0
    said = capsys.readouterr().out
    assert said.count("reading in blocks, within 0.4 GB") == 1
    found = ad.read_zarr(output) if other == "zarr" else ad.read_h5ad(output)
    assert abs(found.X - adata.X).sum() == 0
    assert adjusted_rand_score(found.obs["domain"], adata.obs["truth"]) > 0.8
    assert {"domain_certainty", "domain_entropy", "truth"} <= set(found.obs)
    assert os.listdir(tmp_path) == [output.name]  # the stages are gone


@pytest.mark.slow
@QUIET
def test_several_files_are_samples_of_one_analysis(tmp_path, capsys):
    adata = pdvi.datasets.tissue(2_000, n_genes=120, n_domains=4, n_samples=2, seed=5)
    parts = [adata[adata.obs["sample"] == name].copy() for name in ("1", "2")]
    parts[1] = parts[1][:, ::-1].copy()  # genes in another order
    for name, part in zip("ab", parts):
        part.write_h5ad(tmp_path / f"{name}.h5ad")
    out = tmp_path / "out"
    arguments = ["domains", tmp_path / "a.h5ad", tmp_path / "b.h5ad", "--out", out, "--n-domains", 4, "--json"]
    assert run(*arguments) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["n_spots"] == 2_000
    found = [ad.read_h5ad(out / f"{name}.h5ad") for name in "ab"]
    assert [list(one.var_names) for one in found] == [list(part.var_names) for part in parts]
    labels = np.concatenate([one.obs["domain"].to_numpy().astype(str) for one in found])
    pdvi.tl.domains(adata, 4, sample_key="sample")
    assert adjusted_rand_score(labels, adata.obs["domain"]) > 0.97
    assert sorted(os.listdir(tmp_path)) == ["a.h5ad", "b.h5ad", "out"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scheduler", "tcp://localhost:1"], "`--scheduler` is for --executor dask"),
        (["--memory-limit", "much"], "`memory_limit` must be a positive number of bytes"),
    ],
)
def test_what_does_not_go_together_is_said(slide, tmp_path, capsys, arguments, message):
    assert run("domains", slide[0], "-o", tmp_path / "out.h5ad", "--n-domains", 4, *arguments) == 1
    assert message in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_a_killed_command_goes_on_to_the_same_labels(slide, tmp_path):
    """Killed a few times at random moments; `benchmarks/large.py` does so more often, on more."""
    path, _ = slide
    environment = {**os.environ, "PDVI_CACHE": str(tmp_path / "compiled")}

    def start(output):
        command = ["domains", path, "-o", output, "--n-domains", 4, "--executor", "memory", "-q"]
        return subprocess.Popen([sys.executable, "-m", "pdvi", *map(str, command)], env=environment)

    whole, output = tmp_path / "whole.h5ad", tmp_path / "out.h5ad"
    began = time.perf_counter()
    assert start(whole).wait() == 0
    took = time.perf_counter() - began
    moments = random.Random(0)
    for _ in range(3):
        child = start(output)
        time.sleep(moments.uniform(0.3, 0.9) * took)
        child.kill()
        assert child.wait() in (-signal.SIGKILL, 0)
    assert start(output).wait() == 0
    labels = [ad.read_h5ad(file).obs["domain"] for file in (whole, output)]
    assert adjusted_rand_score(*labels) > 0.99
    assert set(os.listdir(tmp_path)) - {"compiled"} == {"out.h5ad", "whole.h5ad"}  # stages are gone
