"""Refinement spot by spot: sharper where a domain is one cloud, kept away where it has several cell types."""

import dataclasses

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from sklearn.cluster import KMeans

import pdvi
from pdvi.mixtures.recipe import RECIPE
from pdvi.mixtures.refine import apart, are_torn, kurtosis, surprise


def clouds(n=10_000, n_domains=8, noise=3.0, seed=0):
    """Domains that are one normal cloud each, with so much noise that single spots show next to nothing."""
    tissue = pdvi.datasets.tissue_features(n, n_features=30, n_domains=n_domains, patchiness=10, seed=seed)
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((n_domains, 30)) * np.linspace(1.2, 0.2, 30)
    adata = ad.AnnData(obs=pd.DataFrame({"truth": tissue.labels.astype(str)}, index=np.arange(n).astype(str)))
    adata.obsm["X_pca"] = (centres[tissue.labels] + noise * rng.standard_normal((n, 30))).astype(np.float32)
    adata.obsm["spatial"] = tissue.coordinates
    return adata


def ari(adata, key="domain"):
    return pdvi.metrics.ari(adata.obs["truth"], adata.obs[key])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:made what was missing")
def test_noisy_clouds_are_refined_to_sharp_domains():
    adata = clouds()
    blind = KMeans(8, n_init=1, random_state=0).fit_predict(adata.obsm["X_pca"])
    assert pdvi.metrics.ari(adata.obs["truth"], blind) < 0.15
    pdvi.tl.domains(adata, 8)
    pdvi.tl.domains(adata, 8, refine=False, key_added="average")
    assert adata.uns["domain"]["refined"]
    assert not adata.uns["average"]["refined"]
    assert ari(adata) > 0.93
    assert ari(adata) > ari(adata, "average") + 0.01
    written = {f"{key}_{what}" for key in ("domain", "average") for what in ("probability", "posterior")}
    assert set(adata.obsm) == {"X_pca", "X_spatial", "X_neighborhood", "spatial"} | written
    assert set(adata.obsp) == {"potts_weights"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:made what was missing")
def test_domains_of_several_cell_types_are_left_whole():
    adata = pdvi.datasets.tissue(3_000, n_domains=8, seed=0)
    pdvi.tl.domains(adata, 8, n_init=1)
    assert not adata.uns["domain"]["refined"]
    whole = ari(adata)
    pdvi.tl.domains(adata, 8, n_init=1, refine=True, key_added="torn")
    assert adata.uns["torn"]["refined"]
    assert ari(adata, "torn") < whole - 0.2  # what the checks are for
    X, found = adata.obsm["X_spatial"], [adata.obsm[f"{key}_posterior"] for key in ("domain", "torn")]
    assert kurtosis(X, found[0]) > 1 + RECIPE.kurtosis_slack
    graph = adata.obsp["potts_weights"]
    assert surprise(X, found[0], graph) < surprise(X, found[1], graph) - RECIPE.surprise_slack


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:made what was missing")
def test_domains_that_would_be_scattered_are_left_whole():
    """The types of a domain may be so close that its spots look like one cloud, and are predicted well when torn."""
    adata = pdvi.datasets.tissue(10_000, features=20, n_domains=15, seed=6)
    pdvi.tl.domains(adata, 15)
    pdvi.tl.domains(adata, 15, refine=True, key_added="torn")
    assert not adata.uns["domain"]["refined"]
    X, found = adata.obsm["X_spatial"], [adata.obsm[f"{key}_posterior"] for key in ("domain", "torn")]
    assert abs(kurtosis(X, found[0]) - 1) < RECIPE.kurtosis_slack
    graph = pdvi.graphs.nearest(adata.obsm["spatial"], RECIPE.refine_neighbors)
    assert surprise(X, found[1], graph) < surprise(X, found[0], graph) + RECIPE.surprise_slack
    assert ari(adata) > ari(adata, "torn") + 0.05


def test_how_many_neighbours_have_another_label():
    chain = pdvi.graphs.within(np.arange(6.0)[:, None], 1.0)
    assert apart(np.eye(2)[[0, 0, 0, 1, 1, 1]], chain) == pytest.approx(1 / 5)
    assert apart(np.eye(2)[[0, 1, 0, 1, 0, 1]], chain) == 1
    assert apart(np.eye(2)[[0, 0, 0, 0, 0, 0]], chain) == 0


def test_domains_that_hang_together_may_move_but_not_scatter():
    rng = np.random.default_rng(0)
    places = np.stack(np.meshgrid(np.arange(40.0), np.arange(40.0)), -1).reshape(-1, 2)
    graph = pdvi.graphs.nearest(places, 8)

    def halves(border):
        return np.eye(2)[(places[:, 0] > border).astype(int)]

    X = 0.1 * rng.standard_normal((len(places), 3))  # tells nothing
    scattered = np.eye(2)[rng.integers(2, size=len(places))]
    assert not are_torn(X, halves(25.5), halves(19.5), graph)
    assert are_torn(X, scattered, halves(19.5), graph)
    assert surprise(X, scattered, graph) == pytest.approx(surprise(X, halves(19.5), graph), abs=RECIPE.surprise_slack)


def test_some_rows_tell_how_much_more_surprising_other_labels_are():
    data = pdvi.datasets.tissue_features(4_000, n_features=5, n_domains=4, patchiness=6, seed=0)
    graph, labels = pdvi.graphs.nearest(data.coordinates, 12), np.eye(4)[data.labels]
    blurred = graph @ labels / np.maximum(graph.sum(1), 1)[:, None]
    every, some = RECIPE, dataclasses.replace(RECIPE, whitening_rows=1_000)
    more = [surprise(data.X, blurred, graph, one) - surprise(data.X, labels, graph, one) for one in (every, some)]
    assert more[1] == pytest.approx(more[0], abs=RECIPE.surprise_slack / 2)
    assert more[1] != more[0]


def test_kurtosis_is_one_for_normal_clouds_of_any_shape():
    rng = np.random.default_rng(0)
    labels = np.arange(20_000) % 3
    X = rng.standard_normal((20_000, 5)) @ rng.standard_normal((5, 5)) + 10 * labels[:, None]
    assert kurtosis(X, np.eye(3)[labels]) == pytest.approx(1, abs=0.02)
    assert abs(kurtosis(X, np.ones((20_000, 1))) - 1) > 0.03  # three clouds taken for one


def test_two_domains_that_share_a_component_are_told_apart():
    """Of three components one is a sliver and one has two domains: an exchange mends that."""
    adata = clouds(4_000, 3, noise=2.0)
    truth = adata.obs["truth"].astype(int).to_numpy()
    poor = np.where(truth == 2, 1, truth)
    poor[np.flatnonzero(truth == 0)[:80]] = 2
    graph = pdvi.graphs.nearest(adata.obsm["spatial"], 12, mutual=False)
    rows = {"graph": graph, "coordinates": adata.obsm["spatial"], "start": np.eye(3)[poor]}
    fits = {
        exchange: pdvi.PottsMixture(3, beta=0.8, random_state=0).fit(adata.obsm["X_pca"], exchange=exchange, **rows)
        for exchange in (False, True)
    }
    assert pdvi.metrics.ari(truth, fits[True].labels_) > 0.95
    assert pdvi.metrics.ari(truth, fits[True].labels_) > pdvi.metrics.ari(truth, fits[False].labels_) + 0.1
    assert fits[True].elbo_ > fits[False].elbo_


# enough epochs for all rounds of a trial, or for some; one program, or patches
@pytest.mark.parametrize(("max_epochs", "patches"), [(100, None), (75, None), (100, 4)])
@pytest.mark.parametrize("learn_weights", [False, True])
def test_a_component_that_a_start_leaves_empty_is_put_to_use(max_epochs, patches, learn_weights):
    adata = clouds(4_000, 3, noise=0.7 if learn_weights else 2.0)
    X, truth = np.asarray(adata.obsm["X_pca"]), adata.obs["truth"].astype(int).to_numpy()
    graph = pdvi.graphs.nearest(adata.obsm["spatial"], 12, mutual=False)
    rows = {"graph": graph, "coordinates": adata.obsm["spatial"], "start": np.eye(3)[np.minimum(truth, 1)]}
    recipe = dataclasses.replace(RECIPE, known_epochs=7)
    how = {"beta": 0.8, "learn_weights": learn_weights, "n_patches": patches, "random_state": 0, "recipe": recipe}
    mixture = pdvi.PottsMixture(3, max_epochs=max_epochs, **how).fit(X, **rows)
    events = mixture.result_.trace["event"].tolist()
    begun = events.index("component 2 reseeded")
    assert any("re-estimated" in event for event in events[begun:])
    assert mixture.n_iter_ <= max_epochs
    assert pdvi.metrics.ari(truth, mixture.labels_) > 0.95
    # in the units of the rows, whatever the rounds have whitened them by; a brief trial has the noise of two domains
    own = np.stack([X[mixture.labels_ == k].mean(0) for k in range(3)])
    np.testing.assert_allclose(mixture.means_, own, atol=0.1 if max_epochs == 100 else 0.5)


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (np.ones((10, 2)), r"`start` must have rows of 3 probabilities for 4000 rows of X, got shape \(10, 2\)\."),
        (np.ones((4_000, 3)), "whose rows do not all add up to 1; divide each by its sum"),
    ],
)
def test_bad_starts_are_named(start, message):
    adata = clouds(4_000, 3)
    graph = pdvi.graphs.nearest(adata.obsm["spatial"], 4)
    with pytest.raises(ValueError, match=message):
        pdvi.PottsMixture(3).fit(adata.obsm["X_pca"], graph=graph, start=start)
