"""Another slide labeled by a fitted one: the same domains, whatever differs between slides."""

import anndata as ad
import numpy as np
import pytest

import pdvi
from pdvi.mixtures import Config
from pdvi.mixtures.init import about_mean
from pdvi.mixtures.sharded_graph import ShardedGraph
from pdvi.spatial.transfer import keep_mixtures, label_by_mixture
from pdvi.spatial.views import VIEWS, Tissue, ViewSettings


def slide(n=600, seed=0, shift=0.0):
    adata = pdvi.datasets.tissue(n, n_genes=60, n_domains=3, seed=seed)
    if shift:
        rng = np.random.default_rng(9)
        adata.X = rng.poisson(np.asarray(adata.X.todense()) * np.exp(rng.normal(0, shift, adata.n_vars)))
        adata.X = adata.X.astype(np.float32)
    return adata


@pytest.fixture(scope="module")
def fitted():
    adata = slide()
    with pytest.warns(UserWarning, match="made what was missing"):
        pdvi.tl.domains(adata, 3)
    return adata


def test_another_slide_gets_the_fitted_names(fitted):
    other = slide(500, seed=0, shift=0.3)
    before = other.X.copy()
    pdvi.tl.annotate(other, fitted)
    np.testing.assert_array_equal(other.X, before)
    assert pdvi.metrics.ari(other.obs["truth"], other.obs["domain"]) > 0.6
    assert list(other.obs["domain"].cat.categories) == ["1", "2", "3"]
    assert other.obs["domain_certainty"].between(0, 1).all()
    np.testing.assert_array_equal(other.uns["domain_colors"], fitted.uns["domain_colors"])
    assert (other.uns["domain"]["farther"], other.uns["domain"]["explained"]) == pytest.approx((1.0, 1.0), abs=0.5)


def test_the_fitted_slide_gets_its_own_labels(fitted):
    same = slide()
    pdvi.tl.annotate(same, fitted, key_added="again")
    assert pdvi.metrics.ari(fitted.obs["domain"], same.obs["again"]) > 0.9
    assert "domain" not in same.obs
    assert same.uns["again"]["farther"] == pytest.approx(1.0, abs=0.1)
    assert same.uns["again"]["explained"] == pytest.approx(1.0, abs=0.1)


def test_two_samples_have_offsets_of_their_own(fitted):
    both = ad.concat({"a": slide(400), "b": slide(400, shift=0.5)}, label="sample", index_unique="-")
    pdvi.tl.annotate(both, fitted, sample_key="sample")
    for name in "ab":
        part = both.obs[both.obs["sample"] == name]
        assert pdvi.metrics.ari(part["truth"], part["domain"]) > 0.5


def test_a_slide_that_does_not_fit_is_said(fitted):
    other = slide(500)
    other.X = other.X[:, np.random.default_rng(0).permutation(other.n_vars)]
    with pytest.warns(UserWarning, match="does not fit the domains"):
        pdvi.tl.annotate(other, fitted)


def test_when_that_is_said_is_a_number_of_the_configuration(fitted):
    with pytest.warns(UserWarning, match="does not fit the domains"):
        pdvi.tl.annotate(slide(), fitted, config=Config(max_distance=0.1))


def test_a_fit_that_was_written_annotates_too(fitted, tmp_path):
    fitted.write_h5ad(tmp_path / "fitted.h5ad")
    first, second = slide(300), slide(300)
    pdvi.tl.annotate(first, fitted)
    pdvi.tl.annotate(second, ad.read_h5ad(tmp_path / "fitted.h5ad"))
    np.testing.assert_array_equal(first.obs["domain"].to_numpy(), second.obs["domain"].to_numpy())
    assert set(first.obsm) - {"spatial"} == {"domain_probability"}
    assert not first.obsp


def test_annotation_needs_genes_and_a_model(fitted):
    other = slide(100)
    other.var_names = [f"other{i}" for i in range(other.n_vars)]
    with pytest.raises(ValueError, match="must have the genes of the fitted slide"):
        pdvi.tl.annotate(other, fitted)
    with pytest.raises(ValueError, match="must name a fit of"):
        pdvi.tl.annotate(other, ad.AnnData(np.ones((3, 3))))
    of_features = fitted.copy()
    pdvi.tl.domains(of_features, 3, use_rep="X_spatial")
    with pytest.raises(ValueError, match="must have domains that were found from counts"):
        pdvi.tl.annotate(slide(100), of_features)


# ------------------------------------------------------------------------------------------------------ from arrays

TISSUE = pdvi.datasets.tissue_features(1_500, n_features=8, n_domains=4, noise=0.5, patchiness=6, seed=0)
GRAPH = pdvi.graphs.weights(pdvi.graphs.nearest(TISSUE.coordinates, 6), TISSUE.X)


def kept():
    seen = {view.n_neighbors: TISSUE.X for view in VIEWS if view.kind == "averages"}
    tissue = Tissue(TISSUE.X, seen, GRAPH, TISSUE.coordinates)
    return keep_mixtures(tissue, TISSUE.labels, VIEWS, ViewSettings(4))


def test_a_mixture_is_kept_for_every_view_of_averages():
    mixtures = kept()
    assert mixtures["n_neighbors"].tolist() == [view.n_neighbors for view in VIEWS if view.kind == "averages"]
    X = about_mean(TISSUE.X, None)
    means = np.stack([X[TISSUE.labels == k].mean(0) for k in range(4)])
    np.testing.assert_allclose(mixtures["means"][0], means, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(mixtures["shares"].sum(1), 1)
    residuals = X - means[TISSUE.labels]
    noise = mixtures["scale"][0] @ mixtures["scale"][0].T
    np.testing.assert_allclose(noise, residuals.T @ residuals / len(X), rtol=1e-2, atol=1e-3)


def test_views_of_types_leave_no_mixture():
    tissue = Tissue(TISSUE.X, {}, GRAPH, TISSUE.coordinates)
    assert keep_mixtures(tissue, TISSUE.labels, (VIEWS[1],), ViewSettings(4)) is None


@pytest.mark.parametrize("moved", [0.0, 0.7])
def test_rows_are_labeled_wherever_their_sample_lies(moved):
    """One of two halves lacks a domain, so that its mean is not where its offset is."""
    half = (TISSUE.coordinates[:, 0] > np.median(TISSUE.coordinates[:, 0])).astype(int)
    keep = ~((TISSUE.labels == 0) & (half == 1))
    X = about_mean(TISSUE.X[keep] + moved * half[keep, None], half[keep])
    graph = ShardedGraph(
        len(X), GRAPH[keep][:, keep], TISSUE.coordinates[keep], n_shards=4, sample=half[keep], beta=1.0
    )
    probabilities, farther, explained = label_by_mixture(kept(), 0, X, graph)
    assert pdvi.metrics.ari(TISSUE.labels[keep], probabilities.argmax(1)) > 0.9
    assert farther == pytest.approx(1.0, abs=0.2)
    assert explained == pytest.approx(1.0, abs=0.3)
