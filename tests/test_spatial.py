"""The scverse facades: prepare, graph, domains."""

import importlib
from itertools import count

import anndata as ad
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import scanpy as sc
import scipy.sparse as sp
from scipy.stats import multivariate_normal

import pdvi
from pdvi.mixtures import Config
from pdvi.mixtures.fit_mixture import FitOptions
from pdvi.tl.choose import halves, held_out_log_density, held_out_scores


def layered(n=900, n_genes=60, seed=0):
    """Four horizontal layers of cells, each with its own marker genes."""
    rng = np.random.default_rng(seed)
    xy = rng.random((n, 2)) * 100
    layer = np.minimum((xy[:, 1] // 25).astype(int), 3)
    rate = np.full((n, n_genes), 0.4)
    for k in range(4):
        rate[np.ix_(layer == k, range(k, n_genes, 6))] = 1.6
    counts = rng.poisson(rate * rng.gamma(5, 0.2, (n, 1)))
    obs = pd.DataFrame({"truth": layer.astype(str)}, index=[f"cell{i}" for i in range(n)])
    adata = ad.AnnData(sp.csr_matrix(counts, dtype=np.float32), obs=obs)
    adata.obsm["spatial"] = xy
    return adata


@pytest.fixture(scope="module")
def fitted():
    adata = layered()
    with pytest.warns(UserWarning, match="made what was missing with pdvi.pp.spatial_components"):
        pdvi.tl.domains(adata, 4)
    return adata


def test_domains_are_found_and_written(fitted):
    assert pdvi.metrics.ari(fitted.obs["truth"], fitted.obs["domain"]) > 0.8
    assert fitted.obs["domain"].dtype == "category"
    sizes = fitted.obs["domain"].value_counts()[["1", "2", "3", "4"]].to_numpy()
    assert (np.diff(sizes) <= 0).all()
    probability = fitted.obsm["domain_probability"]
    np.testing.assert_allclose(probability.sum(1), 1, rtol=1e-4)
    entropy = fitted.obs["domain_entropy"]
    assert entropy.between(0, 1).all()
    edge = np.abs(fitted.obsm["spatial"][:, 1] % 25 - 12.5) > 10
    assert entropy[edge].mean() > entropy[~edge].mean()
    assert len(fitted.uns["domain_colors"]) == 4
    assert fitted.uns["domain"]["params"]["n_domains"] == 4
    assert {"epoch", "objective"} <= set(fitted.uns["domain"]["trace"])
    assert fitted.uns["domain"]["status"].startswith("CONVERGED")


def test_the_configuration_that_was_used_is_kept(fitted, tmp_path):
    assert Config(**fitted.uns["domain"]["params"]["config"]) == Config()
    adata = fitted.copy()
    other = Config(max_epochs=50, n_types=5)
    pdvi.tl.domains(adata, 4, views=2, config=other, key_added="other")
    assert adata.uns["other"]["types"]["composition"].shape[1] <= 5
    adata.write_h5ad(tmp_path / "out.h5ad")
    assert Config(**ad.read_h5ad(tmp_path / "out.h5ad").uns["other"]["params"]["config"]) == other


def test_large_slides_have_fewer_views():
    config = Config()
    assert [config.n_views(n) >= 5 for n in (500, 24_000, 24_001)] == [True, True, False]
    assert config.n_views(40_000) == 3
    assert config.n_views(config.group_above + 1) == 3  # of groups
    assert config.n_views(10**8) == 1
    assert [config.patches(n) for n in (2, 100, 10_000)] == [1, 3, 8]


def test_nothing_else_in_adata_changes(fitted):
    fresh = layered()
    assert (fitted.X != fresh.X).nnz == 0
    np.testing.assert_array_equal(fitted.obsm["spatial"], fresh.obsm["spatial"])
    assert set(fitted.obs) - set(fresh.obs) == {"domain", "domain_certainty", "domain_entropy"}
    made = {"X_spatial", "X_neighborhood", "domain_probability", "domain_posterior"}
    assert set(fitted.obsm) - set(fresh.obsm) == made
    assert set(fitted.uns) - set(fresh.uns) == {"domain", "domain_colors", "X_spatial", "X_neighborhood"}
    assert set(fitted.obsp) == {"potts_weights"}
    assert list(fitted.var) == list(fresh.var)


def test_the_same_seed_gives_the_same_labels(fitted):
    again = layered()
    for key in ("X_spatial", "X_neighborhood"):
        again.obsm[key], again.uns[key] = fitted.obsm[key], fitted.uns[key]
    again.obsp["potts_weights"] = fitted.obsp["potts_weights"]
    pdvi.tl.domains(again, 4)
    np.testing.assert_array_equal(again.obs["domain"].to_numpy(), fitted.obs["domain"].to_numpy())
    np.testing.assert_array_equal(again.obsm["domain_probability"], fitted.obsm["domain_probability"])


@pytest.mark.filterwarnings("ignore:.*set_bad:PendingDeprecationWarning")  # inside scanpy
def test_the_file_opens_in_scanpy_and_draws(fitted, tmp_path):
    import matplotlib

    matplotlib.use("Agg")
    fitted.write_h5ad(tmp_path / "out.h5ad")
    back = sc.read_h5ad(tmp_path / "out.h5ad")
    assert (back.obs["domain"] == fitted.obs["domain"]).all()
    axes = sc.pl.embedding(back, "spatial", color="domain", show=False)
    assert axes is not None
    matplotlib.pyplot.close("all")


def test_a_graph_from_elsewhere_is_accepted(fitted):
    """Such as squidpy's: plain connectivities."""
    other = layered()
    other.obsm["X_neighborhood"] = fitted.obsm["X_neighborhood"]
    other.obsp["spatial_connectivities"] = (fitted.obsp["potts_weights"] > 0).astype(float)
    pdvi.tl.domains(other, 4, graph_key="spatial_connectivities", beta=0.5)
    assert pdvi.metrics.ari(other.obs["truth"], other.obs["domain"]) > 0.8
    assert "potts_weights" not in other.obsp


@pytest.mark.slow
def test_samples_share_domains_but_no_edges():
    both = ad.concat({"a": layered(seed=0), "b": layered(seed=1)}, label="sample", index_unique="-")
    pdvi.pp.prepare(both)
    pdvi.pp.neighborhood(both, sample_key="sample")
    pdvi.gr.knn_graph(both, sample_key="sample")
    edges = sp.coo_array(both.obsp["potts_weights"])
    sample = both.obs["sample"].to_numpy()
    assert (sample[edges.row] == sample[edges.col]).all()
    pdvi.tl.domains(both, 4, sample_key="sample", n_init=2)
    assert pdvi.metrics.ari(both.obs["truth"], both.obs["domain"]) > 0.8
    table = pd.crosstab(both.obs["domain"], both.obs["sample"])
    assert (table.to_numpy() > 50).all()


@pytest.mark.slow
def test_the_number_of_domains_is_recommended():
    adata = layered()
    pdvi.pp.prepare(adata)
    pdvi.pp.neighborhood(adata)
    pdvi.gr.knn_graph(adata)
    before = adata.copy()
    found = pdvi.tl.choose_n_domains(adata, [2, 4, 7], n_seeds=2)
    table = adata.uns["n_domains"]
    assert found == table["recommended"] == 4
    assert table["held_out"][1] > table["held_out"][0]
    assert (list(adata.obs), list(adata.obsm), list(adata.obsp)) == (
        list(before.obs),
        list(before.obsm),
        ["potts_weights"],
    )
    np.testing.assert_array_equal(adata.obsm["X_neighborhood"], before.obsm["X_neighborhood"])
    assert table["n_domains"].tolist() == [2, 4, 7]
    assert table["stability"][1] > 0.8
    assert (np.diff(table["elbo"][:2]) > 0).all()
    stability, held_out, elbo = pdvi.pl.n_domains(adata)
    np.testing.assert_array_equal(stability.lines[0].get_xydata(), np.c_[table["n_domains"], table["stability"]])
    np.testing.assert_array_equal(held_out.lines[0].get_ydata(), table["held_out"])
    np.testing.assert_array_equal(elbo.lines[0].get_ydata(), table["elbo"])
    assert stability.lines[1].get_xdata()[0] == found
    plt.close(stability.figure)


@pytest.mark.slow
def test_without_components_stability_recommends():
    adata = layered(300, 40)
    pdvi.pp.prepare(adata, n_components=5)
    pdvi.pp.neighborhood(adata)
    pdvi.gr.knn_graph(adata)
    del adata.obsm["X_pca"]
    found = pdvi.tl.choose_n_domains(adata, [2, 4], n_seeds=2)
    table = adata.uns["n_domains"]
    assert "held_out" not in table
    assert table["stability"][table["n_domains"].tolist().index(found)] >= table["stability"].max() - 0.02
    axes = pdvi.pl.n_domains(adata)
    assert len(axes) == 2
    plt.close(axes[0].figure)
    with pytest.raises(
        ValueError, match=r"`candidates` must be numbers between 2 and half the number of spots \(150\)"
    ):
        pdvi.tl.choose_n_domains(adata, [2, 151])


def test_one_half_of_the_spots_does_not_tell_of_the_other():
    adata = layered(400, 40)
    adata.obs["slice"] = np.arange(400) < 101
    pdvi.pp.prepare(adata, n_components=5)
    components, places = adata.obsm["X_pca"], adata.obsm["spatial"]
    samples = (np.arange(400) < 101).astype(int)
    first, second = halves(samples)
    assert set(first) | set(second) == set(range(400))
    assert not set(first) & set(second)
    assert {int((rows < 101).sum()) for rows in (first, second)} == {50, 51}
    other = components.copy()
    other[second] += 100
    # the fit is the same, and far away is far less likely
    scores = [held_out_scores(each, places, samples, [2], FitOptions())[0] for each in (other, components)]
    assert scores[0] < scores[1] - 100


def test_the_held_out_score_is_the_density_of_the_mixture(x64):
    rng = np.random.default_rng(0)
    X, rows = rng.standard_normal((300, 3)) @ rng.standard_normal((3, 3)), rng.standard_normal((50, 3))
    labels = rng.integers(4, size=300)
    phi = np.eye(4)[labels]
    means = np.stack([X[labels == k].mean(0) for k in range(4)])
    covariance = (X - means[labels]).T @ (X - means[labels]) / 300
    expected = sum(
        share * multivariate_normal(mean, covariance).pdf(rows) for share, mean in zip(phi.mean(0), means, strict=True)
    )
    np.testing.assert_allclose(held_out_log_density(X, phi, rows), np.log(expected), rtol=1e-4)


def test_too_few_domains_lack_most_of_the_held_out_score():
    adata = layered(600, 40)
    pdvi.pp.prepare(adata, n_components=5)
    places, samples = adata.obsm["spatial"], np.zeros(600, int)
    two, four, _ = held_out_scores(adata.obsm["X_pca"], places, samples, [2, 4, 5], FitOptions())
    assert four > two  # four layers


@pytest.mark.slow
def test_a_recommendation_at_the_edge_is_said():
    adata = layered(300, 40)
    pdvi.pp.prepare(adata, n_components=5)
    pdvi.pp.neighborhood(adata)
    pdvi.gr.knn_graph(adata)
    with pytest.warns(UserWarning, match="is the largest candidate"):
        assert pdvi.tl.choose_n_domains(adata, [2, 3, 4], n_seeds=2) == 4


def test_a_plot_of_candidates_needs_candidates():
    with pytest.raises(ValueError, match=r"run pdvi.tl.choose_n_domains\(adata, candidates\) first"):
        pdvi.pl.n_domains(layered(100, 10))


def test_prepared_components_are_those_made_by_hand():
    """Dense, step by step."""
    adata = layered(300, 40)
    pdvi.pp.prepare(adata, n_components=5)
    X = adata.X.toarray().astype(float)
    totals = X.sum(1, keepdims=True)
    X = np.log1p(X / np.where(totals > 0, totals, 1) * np.median(totals[totals > 0]))
    X = np.minimum(X / X.std(0, ddof=1), 10)
    X -= X.mean(0)
    expected = np.linalg.svd(X, full_matrices=False)
    scores = expected[0][:, :5] * expected[1][:5]
    for column in range(5):
        assert abs(np.corrcoef(scores[:, column], adata.obsm["X_pca"][:, column])[0, 1]) > 0.999


@pytest.mark.parametrize("kind", ["csr", "csc", "dense", "int", "backed"])
def test_any_kind_of_matrix_will_do(kind, tmp_path):
    adata = layered(200, 30)
    reference = adata.copy()
    pdvi.pp.prepare(reference)
    if kind == "csc":
        adata.X = sp.csc_matrix(adata.X)
    elif kind == "dense":
        adata.X = adata.X.toarray()
    elif kind == "int":
        adata.X = adata.X.astype(np.int64)
    elif kind == "backed":
        adata.write_h5ad(tmp_path / "slide.h5ad")
        adata = ad.read_h5ad(tmp_path / "slide.h5ad", backed="r")
    pdvi.pp.prepare(adata)
    np.testing.assert_allclose(np.abs(adata.obsm["X_pca"]), np.abs(reference.obsm["X_pca"]), atol=1e-2)
    if kind == "backed":
        adata.file.close()


def test_normalized_data_is_noticed():
    adata = layered(200, 30)
    adata.X = np.log1p(adata.X.toarray() / 7)
    with pytest.warns(UserWarning, match="looks normalised already"):
        pdvi.pp.prepare(adata)


def test_empty_spots_and_genes_are_no_trouble():
    adata = layered(200, 30)
    dense = adata.X.toarray()
    dense[5] = 0
    dense[:, 3] = 0
    adata.X = sp.csr_matrix(dense)
    pdvi.pp.prepare(adata)
    assert np.isfinite(adata.obsm["X_pca"]).all()


def test_neighborhoods_are_means_of_the_nearest():
    adata = layered(100, 20)
    pdvi.pp.prepare(adata)
    pdvi.pp.neighborhood(adata, n_neighbors=4, n_components=3, own=0.5, gradient=1.0)
    features, xy = adata.obsm["X_pca"][:, :3], adata.obsm["spatial"]
    order = np.argsort(np.linalg.norm(xy[:, None] - xy[None], axis=-1), axis=1)[:, :5]
    found = adata.obsm["X_neighborhood"]
    assert found.shape == (100, 9)
    np.testing.assert_allclose(found[:, :3], 0.5 * features, rtol=1e-5)
    np.testing.assert_allclose(found[:, 3:6], features[order].mean(1), rtol=1e-4, atol=1e-5)
    assert (found[:, 6:] >= 0).all()


def test_radius_and_flow_graphs(fitted):
    adata = fitted.copy()
    pdvi.gr.radius_graph(adata, radius=8.0)
    assert adata.obsp["potts_weights"].nnz > 0
    pdvi.gr.flow(adata, labels_key="domain")
    inside = np.abs(adata.obsm["spatial"][:, 1] - 50) < 10
    assert np.median(np.abs(adata.obsm["flow"][inside, 0])) > 0.9
    pdvi.gr.flow_graph(adata, length=10.0, width=3.0)
    edges = sp.coo_array(adata.obsp["potts_weights"])
    step = np.abs(adata.obsm["spatial"][edges.row] - adata.obsm["spatial"][edges.col])
    assert step[:, 0].mean() > 1.5 * step[:, 1].mean()


def test_patches_are_written():
    adata = layered(100, 20)
    pdvi.gr.partition(adata, n_patches=7)
    assert np.ptp(adata.obs["patch"].value_counts()) <= 1
    pdvi.gr.partition(adata, cells=(2, 2))
    assert adata.obs["patch"].nunique() == 4


def broken(change):
    adata = layered(50, 20)
    change(adata)
    return adata


def _without_coordinates(adata):
    del adata.obsm["spatial"]


def _nan_coordinates(adata):
    adata.obsm["spatial"][3] = np.nan


def _nan_counts(adata):
    adata.X.data[0] = np.nan


def _all_zero(adata):
    adata.X = sp.csr_matrix(adata.shape, dtype=np.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without_coordinates, r"'spatial' not in adata.obsm \(it has \[\]\)"),
        (_nan_coordinates, r"adata.obsm\['spatial'\] must be finite: 1 of 50 spots are not; remove these spots"),
        (_nan_counts, "adata.X must be finite; it has 1 NaN"),
        (_all_zero, "must have at least one value that is not 0"),
    ],
)
def test_bad_slides_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        pdvi.tl.domains(broken(change), 3)


@pytest.mark.parametrize("n_domains", [1, 51, 2.5])
def test_bad_numbers_of_domains_are_named(n_domains):
    with pytest.raises(ValueError, match=r"`n_domains` must be between 2 and the number of spots \(50\), got"):
        pdvi.tl.domains(layered(50, 20), n_domains)


def test_one_spot_and_no_genes_are_named():
    with pytest.raises(ValueError, match="at least 2 spots, got 1"):
        pdvi.pp.prepare(layered(50, 20)[:1].copy())
    with pytest.raises(ValueError, match="at least one gene, got 0"):
        pdvi.pp.prepare(layered(50, 20)[:, :0].copy())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: pdvi.pp.neighborhood(a), r"'X_pca' not in adata.obsm .* run pdvi.pp.prepare\(adata\) first"),
        (lambda a: pdvi.gr.weights(a), r"'potts_weights' not in adata.obsp .* run pdvi.gr.knn_graph\(adata\) first"),
        (lambda a: pdvi.gr.flow(a, labels_key="domain"), "'domain' not in adata.obs"),
        (lambda a: pdvi.gr.knn_graph(a, sample_key="slide"), "'slide' not in adata.obs"),
        (lambda a: pdvi.pp.prepare(a, layer="counts"), "'counts' not in adata.layers"),
        (lambda a: pdvi.tl.domains(a, 3, graph_key="mine"), "'mine' not in adata.obsp"),
    ],
)
def test_missing_keys_say_what_makes_them(call, message):
    with pytest.raises(ValueError, match=message):
        call(layered(50, 20))


@pytest.mark.filterwarnings("ignore:made what was missing")
def test_seconds_tell_where_the_time_went(monkeypatch):
    """By a clock that moves by one whenever it is looked at from here."""
    ticks = count()
    monkeypatch.setattr(importlib.import_module("pdvi.tl.domains"), "perf_counter", lambda: float(next(ticks)))
    adata = pdvi.datasets.tissue(400, n_genes=40, n_domains=3)
    pdvi.tl.domains(adata, 3)
    assert adata.uns["domain"]["seconds"] == {"missing": 1.0, "fit": 1.0}
    assert adata.uns["domain"]["fit_seconds"] == 1.0


def test_planes_far_apart_are_not_joined():
    adata = layered(200, 10)
    depth = np.where(np.arange(200) < 100, 0.0, 1e4)
    adata.obsm["spatial"] = np.column_stack([adata.obsm["spatial"], depth])
    for make in (pdvi.gr.knn_graph, lambda a: pdvi.gr.radius_graph(a, radius=20)):
        make(adata)
        edges = sp.coo_array(adata.obsp["potts_weights"])
        assert edges.nnz
        assert (depth[edges.row] == depth[edges.col]).all()
    pdvi.gr.partition(adata, n_patches=2)
    assert {len(np.unique(depth[adata.obs["patch"] == patch])) for patch in (0, 1)} == {1}
    with pytest.warns(UserWarning, match=r"only the first two of 3 columns of obsm\['spatial'\] count here"):
        pdvi.gr.partition(adata, cells=(2, 2))


def test_averages_of_ones_own_across_samples_are_refused():
    both = ad.concat({"a": layered(100, 20), "b": layered(100, 20)}, label="sample", index_unique="-")
    pdvi.pp.prepare(both, n_components=4)
    pdvi.pp.neighborhood(both, n_neighbors=5)
    with pytest.raises(ValueError, match=r"was made without the samples of obs\['sample'\]; make it again"):
        pdvi.tl.domains(both, 3, sample_key="sample")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*joined samples")
def test_choosing_makes_averages_anew_for_samples():
    both = ad.concat({"a": layered(100, 20), "b": layered(100, 20)}, label="sample", index_unique="-")
    pdvi.pp.prepare(both, n_components=4)
    pdvi.pp.neighborhood(both)
    pdvi.gr.knn_graph(both)
    pdvi.tl.choose_n_domains(both, [2, 3], n_seeds=2, sample_key="sample")
    assert both.uns["X_neighborhood"]["params"]["sample_key"] == "sample"


def test_components_are_enough_where_the_counts_are_gone():
    prepared = layered(150, 20)
    pdvi.pp.prepare(prepared, n_components=6)
    without = ad.AnnData(obs=prepared.obs, obsm=dict(prepared.obsm), uns=dict(prepared.uns))
    with pytest.warns(UserWarning, match="made what was missing"):
        pdvi.tl.domains(without, 3, views=1)
    assert without.uns["X_spatial"]["params"]["use_rep"] == "X_pca"


@pytest.mark.slow
def test_a_graph_that_joins_samples_is_made_anew_and_it_is_said():
    adata = pdvi.datasets.tissue(600, n_genes=40, n_domains=3, n_samples=2)
    with pytest.warns(UserWarning, match="made what was missing"):
        pdvi.tl.domains(adata, 3)  # as if it were one slide
    with pytest.warns(UserWarning, match=r"\d+ edges of 'potts_weights' joined samples; made anew for each sample: "):
        pdvi.tl.domains(adata, 3, sample_key="sample")
    edges, samples = adata.obsp["potts_weights"].tocoo(), adata.obs["sample"].to_numpy()
    assert (samples[edges.row] == samples[edges.col]).all()
    pdvi.tl.domains(adata, 3, sample_key="sample")  # nothing to be said
    other = adata.obsp["potts_weights"].tolil()
    other[0, -1] = other[-1, 0] = 1.0
    adata.obsp["mine"] = other.tocsr()
    assert samples[0] != samples[-1]
    with pytest.raises(ValueError, match=r"obsp\['mine'\] has 2 edges between samples of obs\['sample'\]; make"):
        pdvi.tl.domains(adata, 3, graph_key="mine", sample_key="sample")


def test_colors_stay_with_domains_when_a_slide_is_fitted_again(fitted):
    adata = fitted.copy()
    adata.uns["domain_colors"] = ["#111111", "#222222", "#333333", "#444444"]
    pdvi.tl.domains(adata, 4, seed=5, key_added="again")
    table = pd.crosstab(adata.obs["again"], adata.obs["domain"])
    before = dict(zip(adata.obs["domain"].cat.categories, adata.uns["domain_colors"]))
    after = dict(zip(adata.obs["again"].cat.categories, adata.uns["again_colors"]))
    assert {after[name]: before[table.loc[name].idxmax()] for name in table.index} == {c: c for c in before.values()}


@pytest.mark.filterwarnings("ignore:made what was missing")
@pytest.mark.parametrize("on_disk", [False, True])
def test_logarithms_are_taken_of_several_samples_only(on_disk, tmp_path):
    """What differs between samples multiplies counts; within one the mean of counts is what a place has."""
    for sample_key, log in ((None, False), ("sample", True)):
        adata = pdvi.datasets.tissue(600, n_genes=60, n_domains=3, n_samples=2, seed=0)
        if on_disk:
            adata.write_h5ad(tmp_path / "slide.h5ad")
            adata = ad.read_h5ad(tmp_path / "slide.h5ad", backed="r")
        pdvi.tl.domains(adata, 3, sample_key=sample_key, views=1, seed=0)
        assert bool(adata.uns["X_spatial"]["params"]["log"]) is log
