"""Spatial components against a dense eigendecomposition in double precision, and without a dense copy."""

import tracemalloc

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from scipy.spatial.distance import cdist

import pdvi
from pdvi.pp.spatial_components import Agreement, leading_eigenvectors, projected
from pdvi.pp.tiles import mean_of_others, neighbor_table


def slide(n=300, n_genes=40, seed=0, sparse=True):
    """Genes that follow a few smooth patterns, counts, two samples side by side."""
    rng = np.random.default_rng(seed)
    xy = rng.uniform(size=(n, 2))
    patterns = np.stack([np.sin(3 * xy[:, 0]), np.cos(4 * xy[:, 1]), xy[:, 0] * xy[:, 1]], 1)
    rates = np.exp(patterns @ rng.standard_normal((3, n_genes)) + rng.uniform(-1, 2, n_genes))
    counts = rng.poisson(rates).astype(np.float32)
    obs = pd.DataFrame({"sample": np.where(np.arange(n) % 2, "b", "a")}, index=np.arange(n).astype(str))
    var = pd.DataFrame(index=[f"gene{j}" for j in range(n_genes)])
    return ad.AnnData(sp.csr_matrix(counts) if sparse else counts, obs=obs, var=var, obsm={"spatial": xy})


def dense_reference(adata, n_components, n_neighbors=6, samples=None, log=True):
    """The same in a few lines of NumPy, nothing implicit."""
    samples = np.zeros(adata.n_obs, int) if samples is None else samples
    counts = adata.X.toarray().astype(float) if sp.issparse(adata.X) else np.asarray(adata.X, float)
    total = counts.sum(1, keepdims=True)
    X = counts / np.where(total > 0, total, 1) * np.median(total[total > 0])
    X = np.log1p(X) if log else X
    within = sum(np.mean(samples == s) * X[samples == s].var(0) for s in np.unique(samples))
    X = np.minimum(X / np.sqrt(within), 10)
    W = np.zeros((len(X), len(X)))
    for s in np.unique(samples):
        own = np.flatnonzero(samples == s)
        X[own] -= X[own].mean(0)
        distance = cdist(adata.obsm["spatial"][own], adata.obsm["spatial"][own])
        np.fill_diagonal(distance, np.inf)
        for i, near in zip(own, own[np.argsort(distance, axis=1)[:, :n_neighbors]]):
            W[i, near] = 1 / n_neighbors
    C = X.T @ W @ X
    values, vectors = np.linalg.eigh(C + C.T)
    values, vectors = values[::-1][:n_components], vectors[:, ::-1][:, :n_components]
    vectors = vectors * np.sign(vectors[np.abs(vectors).argmax(0), np.arange(n_components)])
    return values, vectors, X @ vectors


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("sample_key", [None, "sample"])
@pytest.mark.parametrize("log", [True, False])
def test_agrees_with_a_dense_eigendecomposition(sparse, sample_key, log):
    adata = slide(sparse=sparse)
    before = adata.X.copy()
    pdvi.pp.spatial_components(adata, n_components=4, sample_key=sample_key, log=log)
    samples = None if sample_key is None else (adata.obs["sample"] == "b").to_numpy().astype(int)
    values, vectors, components = dense_reference(adata, 4, samples=samples, log=log)
    found = adata.uns["X_spatial"]
    np.testing.assert_allclose(found["values"], values, rtol=1e-4)
    np.testing.assert_allclose(found["loadings"], vectors, atol=2e-3)
    np.testing.assert_allclose(adata.obsm["X_spatial"], components, atol=5e-3 * np.abs(components).max())
    assert adata.obsm["X_spatial"].dtype == np.float32
    assert abs(adata.X - before).sum() == 0


def test_lanczos_agrees_with_the_whole_matrix():
    """More genes than the whole matrix is made for."""
    adata = slide(n=400, n_genes=700)
    pdvi.pp.spatial_components(adata, n_components=3)
    values, _, components = dense_reference(adata, 3)
    np.testing.assert_allclose(adata.uns["X_spatial"]["values"], values, rtol=1e-4)
    np.testing.assert_allclose(adata.obsm["X_spatial"], components, atol=1e-2 * np.abs(components).max())


def test_the_same_seed_gives_the_same_answer_and_another_nearly_the_same():
    found = []
    for seed in (0, 0, 1):
        adata = slide(n=400, n_genes=700)
        pdvi.pp.spatial_components(adata, n_components=3, seed=seed)
        found.append(adata.obsm["X_spatial"])
    assert np.array_equal(found[0], found[1])
    np.testing.assert_allclose(found[2], found[0], atol=1e-3 * np.abs(found[0]).max())


@pytest.mark.parametrize("log", [True, False])
def test_what_was_made_projects_again(log):
    adata = slide()
    pdvi.pp.spatial_components(adata, n_components=5, sample_key="sample", log=log)
    made = adata.uns["X_spatial"]
    counts = adata[:, made["genes"]].X.toarray().astype(float)
    X = counts / counts.sum(1, keepdims=True) * made["target"]
    X = np.log1p(X) if log else X
    shift = made["mean"][(adata.obs["sample"] == "b").astype(int)] @ made["loadings"]
    np.testing.assert_allclose(projected(adata, made) - shift, adata.obsm["X_spatial"], atol=1e-3)
    X = np.minimum(X / made["scale"], made["params"]["clip"]) - made["mean"][(adata.obs["sample"] == "b").astype(int)]
    np.testing.assert_allclose(X @ made["loadings"], adata.obsm["X_spatial"], atol=1e-3)


def test_it_can_be_written(tmp_path):
    adata = slide()
    pdvi.pp.spatial_components(adata, sample_key="sample")
    adata.write_h5ad(tmp_path / "slide.h5ad")
    again = ad.read_h5ad(tmp_path / "slide.h5ad")
    np.testing.assert_array_equal(again.uns["X_spatial"]["loadings"], adata.uns["X_spatial"]["loadings"])
    assert again.uns["X_spatial"]["params"]["sample_key"] == "sample"


def test_differences_between_samples_are_no_component():
    """A gene-wise factor on one sample is variation that neighbors share, and not what is looked for."""
    adata = slide()
    second = (adata.obs["sample"] == "b").to_numpy()
    counts = adata.X.toarray()
    counts[second] *= np.random.default_rng(0).choice([1, 5], counts.shape[1])
    adata.X = sp.csr_matrix(counts)
    pdvi.pp.spatial_components(adata, n_components=3, sample_key="sample")
    centers = [adata.obsm["X_spatial"][second == s].mean(0) for s in (False, True)]
    np.testing.assert_allclose(centers, 0, atol=1e-3)
    pdvi.pp.spatial_components(adata, n_components=3)
    assert np.abs(adata.obsm["X_spatial"][second].mean(0)).max() > 0.1


def test_neighbors_are_of_the_same_sample_and_never_the_spot_itself():
    xy = np.array([[0.0, 0], [0, 0], [0, 0], [5, 5], [5, 6], [9, 9]])
    samples = np.array([0, 0, 0, 1, 1, 2])  # duplicates, a pair, a spot alone
    W = mean_of_others(neighbor_table(xy, samples, 2), 2).toarray()
    assert (np.diagonal(W) == 0).all()
    np.testing.assert_allclose(W.sum(1), [1, 1, 1, 1, 1, 0])
    assert (W[samples[:, None] != samples] == 0).all()


def test_sparse_expression_is_never_made_dense():
    n, n_genes = 20_000, 1_500
    X = sp.random_array((n, n_genes), density=0.01, format="csr", dtype=np.float32, rng=0)
    xy = np.random.default_rng(0).uniform(size=(n, 2))
    adata = ad.AnnData(X, obsm={"spatial": xy})
    tracemalloc.start()
    pdvi.pp.spatial_components(adata, n_components=10, normalize=False)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 0.5 * 4 * n * n_genes, "half of what expression would take in single precision, dense"


def test_few_columns_are_asked_for():
    """Lanczos steps see the matrix through products with single vectors: no genes x genes matrix is made."""
    n, n_genes = 500, 1_200
    X = sp.random_array((n, n_genes), density=0.05, format="csr", dtype=np.float32, rng=0)
    columns = []

    class Counted(Agreement):
        def __call__(self, V):
            columns.append(1 if V.ndim == 1 else V.shape[1])
            return super().__call__(V)

    xy = np.random.default_rng(0).uniform(size=(n, 2))
    samples = np.zeros(n, int)
    leading_eigenvectors(Counted(X, mean_of_others(neighbor_table(xy, samples, 6), 6), samples), 5, seed=0)
    assert set(columns) == {1}
    assert len(columns) < n_genes / 2


def test_empty_spots_and_constant_genes_do_no_harm():
    adata = slide(sparse=False)
    adata.X[:5] = 0
    adata.X[:, 3] = 0
    pdvi.pp.spatial_components(adata, n_components=3)
    assert np.isfinite(adata.obsm["X_spatial"]).all()
    assert "gene3" not in adata.uns["X_spatial"]["genes"]
    constant = slide(sparse=False)
    constant.X = np.log1p(constant.X)
    constant.X[:, 7] = 2.5
    pdvi.pp.spatial_components(constant, n_components=3, normalize=False)
    assert np.isfinite(constant.obsm["X_spatial"]).all()
    assert (np.abs(constant.uns["X_spatial"]["loadings"][7]) < 1e-6).all()


def test_wrong_arguments_are_told():
    adata = slide()
    with pytest.raises(ValueError, match="`n_neighbors` must be a whole number of at least 1, got 0"):
        pdvi.pp.spatial_components(adata, n_neighbors=0)
    with pytest.raises(ValueError, match="`clip` must be positive and finite, got -1"):
        pdvi.pp.spatial_components(adata, clip=-1)
    with pytest.raises(ValueError, match=r"'elsewhere' not in adata\.obsm"):
        pdvi.pp.spatial_components(adata, spatial_key="elsewhere")
