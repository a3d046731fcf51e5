"""The simulated slide."""

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp
from scipy.spatial import cKDTree
from scipy.stats import nbinom
from sklearn.cluster import KMeans
from sklearn.mixture import GaussianMixture

import pdvi
from pdvi.datasets.tissue.counts import negative_binomial


@pytest.fixture(scope="module")
def slide():
    return pdvi.datasets.tissue(3_000, n_genes=200, n_domains=8, seed=1)


def same(a, b):
    """Whether two slides have the same counts, places and labels."""
    same_places = np.array_equal(a.obsm["spatial"], b.obsm["spatial"])
    return (a.X != b.X).nnz == 0 and same_places and a.obs.equals(b.obs)


def test_a_slide_has_what_is_asked_for(slide):
    assert slide.shape == (3_000, 200)
    assert sp.issparse(slide.X)
    assert slide.X.dtype == np.float32
    assert (slide.X.data > 0).all()
    assert (slide.X.data == np.round(slide.X.data)).all()
    assert slide.X.has_canonical_format
    assert slide.obsm["spatial"].shape == (3_000, 2)
    assert slide.obs["truth"].dtype == "category"
    assert slide.obs["truth"].value_counts().min() > 30
    assert list(slide.obs["truth"].cat.categories[[0, 2, -1]]) == ["layer 1", "region 1", "nucleus 1"]
    assert slide.obs["cell_type"].nunique() == 8 + 3
    assert slide.var["gradient"].any()
    assert slide.uns["tissue"]["params"]["n_domains"] == 8


def test_the_same_seed_gives_the_same_slide(slide):
    assert same(slide, pdvi.datasets.tissue(3_000, n_genes=200, n_domains=8, seed=1))
    assert not same(slide, pdvi.datasets.tissue(3_000, n_genes=200, n_domains=8, seed=2))


def test_the_outline_is_not_a_square_and_domains_are_regions(slide):
    xy = slide.obsm["spatial"]
    box = np.prod(np.ptp(xy, axis=0))
    near = cKDTree(xy).query(xy, k=2)[1][:, 1]
    area = len(xy) * 100  # square micrometres, about one cell in each 10 by 10
    assert 0.4 < area / box < 0.9
    codes = slide.obs["truth"].cat.codes.to_numpy()
    assert (codes == codes[near]).mean() > 0.85


def test_counts_are_negative_binomial():
    rng = np.random.default_rng(0)
    mean, shape = np.array([0.05, 0.8, 4.0, 20.0], np.float32), np.array([1.0, 3.0, 2.0, 5.0], np.float32)
    for dropout in (0.0, 0.3):
        row, column, value = negative_binomial(np.tile(mean, (200_000, 1)), shape, dropout, rng)
        counts = np.zeros((200_000, 4))
        counts[row, column] = value
        for g in range(4):
            expected = (1 - dropout) * nbinom(shape[g], shape[g] / (shape[g] + mean[g])).pmf(np.arange(60))
            expected[0] += dropout
            found = np.bincount(counts[:, g].astype(int), minlength=60)[:60] / len(counts)
            np.testing.assert_allclose(found, expected, atol=0.005)


def test_dropout_and_depth_change_the_counts():
    depth = pdvi.datasets.tissue(500, n_genes=100, n_domains=4, depth=50, dropout=0).X.sum(1).mean()
    assert 40 < depth < 75
    thin = pdvi.datasets.tissue(500, n_genes=100, n_domains=4, depth=50, dropout=0.5).X.sum(1).mean()
    np.testing.assert_allclose(thin / depth, 0.5, atol=0.1)


def test_spots_lie_on_a_grid_and_mix_cells():
    spots = pdvi.datasets.tissue(1_000, n_genes=50, n_domains=6, cells_per_spot=9)
    distance = cKDTree(spots.obsm["spatial"]).query(spots.obsm["spatial"], k=2)[0][:, 1]
    np.testing.assert_allclose(distance, np.median(distance), rtol=1e-3)
    assert 25 < np.median(distance) < 40  # about 10 micrometres for a cell, three times that for nine
    cells = pdvi.datasets.tissue(1_000, n_genes=50, n_domains=6)
    distance = cKDTree(cells.obsm["spatial"]).query(cells.obsm["spatial"], k=2)[0][:, 1]
    assert distance.std() > 0.1 * distance.mean()


def test_samples_share_domains_and_do_not_overlap():
    two = pdvi.datasets.tissue(2_001, n_genes=50, n_domains=6, n_samples=2)
    first, second = (two[two.obs["sample"] == name] for name in ("1", "2"))
    assert {first.n_obs, second.n_obs} == {1_000, 1_001}
    assert first.obs["truth"].nunique() == second.obs["truth"].nunique() == 6
    assert first.obsm["spatial"][:, 0].max() < second.obsm["spatial"][:, 0].min()
    assert not np.allclose(np.ptp(first.obsm["spatial"], axis=0), np.ptp(second.obsm["spatial"], axis=0), rtol=0.01)


def test_features_stand_in_for_counts():
    slide = pdvi.datasets.tissue(2_000, n_domains=5, features=20)
    assert slide.X is None
    assert slide.obsm["X_pca"].shape == (2_000, 20)
    assert slide.obsm["X_pca"].dtype == np.float32
    small = pdvi.datasets.embryo(2_300, features=5)
    assert small.obs["truth"].nunique() == 23
    assert small.uns["tissue"]["params"]["cells_per_spot"] == 4


@pytest.mark.parametrize("settings", [{}, {"cells_per_spot": 8}, {"features": 30}], ids=str)
def test_k_means_finds_the_domains_in_part_and_neighbors_help(settings):
    """A test bed: neither solved without space, nor hopeless with it."""
    slide = pdvi.datasets.tissue(6_000, n_genes=300, seed=0, **settings)
    if "features" not in settings:
        pdvi.pp.prepare(slide, n_components=20)
    parts = slide.obsm["X_pca"]
    plain = KMeans(12, n_init=2, random_state=0).fit_predict(parts)
    near = cKDTree(slide.obsm["spatial"]).query(slide.obsm["spatial"], k=20)[1]
    around = GaussianMixture(12, covariance_type="tied", random_state=0).fit_predict(parts[near].mean(1)[:, :15])
    truth = slide.obs["truth"]
    assert 0.2 < pdvi.metrics.ari(truth, plain) < 0.6
    assert pdvi.metrics.ari(truth, around) > pdvi.metrics.ari(truth, plain) + 0.2


@pytest.mark.parametrize("n_domains", [1, 2, 3, 23])
def test_any_number_of_domains(n_domains):
    slide = pdvi.datasets.tissue(1_000, n_genes=5, n_domains=n_domains, seed=3)
    assert slide.obs["truth"].nunique() == n_domains


def test_a_slide_survives_the_disk(slide, tmp_path):
    slide.write_h5ad(tmp_path / "slide.h5ad")
    assert same(slide, ad.read_h5ad(tmp_path / "slide.h5ad"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_spots": 10}, r"`n_spots` must be at least 50 for each of 1 sample\(s\), got 10"),
        ({"n_spots": 80, "n_samples": 2, "n_domains": 2}, "`n_spots` must be at least 50 for each of 2"),
        ({"n_domains": 0}, r"`n_domains` must be between 1 and a tenth of a sample's spots \(50\), got 0"),
        ({"n_domains": 51}, "`n_domains` must be between 1 and"),
        ({"n_genes": 0}, "`n_genes` must be a whole number of at least 1, got 0"),
        ({"features": 0}, "`features` must be a whole number of at least 1, got 0"),
        ({"cells_per_spot": 0}, "`cells_per_spot` must be a whole number of at least 1, got 0"),
        ({"mixing": 1.5}, "`mixing` must be between 0 and 1, got 1.5"),
        ({"dropout": 1}, "`dropout` must be at least 0 and below 1, got 1"),
        ({"depth": 0}, "`depth` must be positive and finite, got 0"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        pdvi.datasets.tissue(**{"n_spots": 500, **settings})
