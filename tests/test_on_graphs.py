"""Mixtures on a graph as estimators: the two-level mixture, and what both say of rows that they have not seen."""

import numpy as np
import pytest
from scipy.special import softmax

import pdvi
from pdvi import graphs, metrics
from pdvi.mixtures.graph_estimators import propagate_labels

TISSUE = pdvi.datasets.two_level_tissue(2_500, n_domains=4, n_types=6, separation=3.0, patchiness=6, seed=0)
PLACES = {"coordinates": TISSUE.coordinates}
MIXTURES = {
    "potts": pdvi.PottsMixture(4, random_state=0),
    "two levels": pdvi.TwoLevelMixture(4, n_types=6, random_state=0),
}


@pytest.fixture(scope="module")
def two_levels():
    return MIXTURES["two levels"].fit(TISSUE.X, **PLACES)


def test_domains_types_and_compositions_are_found(two_levels):
    assert metrics.ari(TISSUE.labels, two_levels.labels_) > 0.9
    assert metrics.ari(TISSUE.types, two_levels.types_) > 0.95
    domain, type_ = (
        np.array([np.bincount(true[found == k]).argmax() for k in range(found.max() + 1)])
        for true, found in ((TISSUE.labels, two_levels.labels_), (TISSUE.types, two_levels.types_))
    )
    counted = np.zeros((4, 6))
    np.add.at(counted, (TISSUE.labels, TISSUE.types), 1)
    expected = (counted / counted.sum(1, keepdims=True))[domain][:, type_]
    np.testing.assert_allclose(two_levels.compositions_, expected, atol=0.05)
    np.testing.assert_allclose(two_levels.compositions_.sum(1), 1)
    np.testing.assert_allclose(two_levels.weights_, np.bincount(two_levels.types_) / len(TISSUE.X), atol=0.02)
    centers = np.stack([TISSUE.X[TISSUE.types == t].mean(0) for t in type_])
    np.testing.assert_allclose(two_levels.means_, centers, atol=0.2)
    np.testing.assert_allclose(two_levels.covariances_, np.eye(10), atol=0.15)


def test_units_change_nothing_but_the_units(two_levels):
    scaled = pdvi.TwoLevelMixture(4, n_types=6, random_state=0).fit(1e6 * TISSUE.X + 3e6, **PLACES)
    assert metrics.ari(two_levels.labels_, scaled.labels_) > 0.99
    np.testing.assert_allclose(scaled.means_, 1e6 * two_levels.means_ + 3e6, rtol=1e-2, atol=5e4)
    assert scaled.elbo_ == pytest.approx(two_levels.elbo_ - TISSUE.X.size * np.log(1e6), abs=50)


@pytest.mark.parametrize("n_patches", [1, 20])
def test_other_patches_find_the_same(two_levels, n_patches):
    other = pdvi.TwoLevelMixture(4, n_types=6, random_state=0, n_patches=n_patches).fit(TISSUE.X, **PLACES)
    assert len(other.result_.local_params["domain"]) == n_patches
    assert metrics.ari(other.labels_, two_levels.labels_) > 0.95
    assert other.elbo_ == pytest.approx(two_levels.elbo_, rel=1e-3)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
@pytest.mark.parametrize("beta", [0.0, 0.3, 3.0])
def test_probabilities_of_a_fixed_mixture_satisfy_their_equation(beta, temperature):
    rng = np.random.default_rng(0)
    graph = graphs.nearest(rng.normal(size=(60, 2)), 5)
    logits = 2 * rng.normal(size=(60, 3))
    found = propagate_labels(lambda phi: logits, graph, (60, 3), beta=beta, temperature=temperature)
    np.testing.assert_allclose(
        found, softmax((logits + beta * graph.toarray() @ found) / temperature, axis=1), atol=1e-4
    )


@pytest.mark.parametrize("name", MIXTURES)
def test_the_rows_of_the_fit_keep_their_labels(name):
    mixture = MIXTURES[name].fit(TISSUE.X, **PLACES)
    assert (mixture.predict(TISSUE.X, **PLACES) == mixture.labels_).mean() > 0.97


def test_another_tissue_gets_the_domains_of_this_one():
    """The upper half is fitted, the lower one labeled."""
    upper = TISSUE.coordinates[:, 0] < 25
    mixture = MIXTURES["two levels"].fit(TISSUE.X[upper], coordinates=TISSUE.coordinates[upper])
    assert (
        metrics.ari(TISSUE.labels[~upper], mixture.predict(TISSUE.X[~upper], coordinates=TISSUE.coordinates[~upper]))
        > 0.7
    )


@pytest.mark.parametrize("mixture", [pdvi.PottsMixture(2), pdvi.TwoLevelMixture(2, n_types=2)])
def test_a_row_that_says_nothing_of_itself_follows_its_neighbors(mixture):
    rng = np.random.default_rng(0)
    places = np.stack(np.meshgrid(np.arange(20.0), np.arange(20.0)), -1).reshape(-1, 2)
    right = places[:, 0] >= 10
    X = np.where(right, 3.0, -3.0)[:, None] + rng.normal(size=(400, 2))
    mixture.set_params(random_state=0).fit(X, coordinates=places)
    for place in ([4, 10], [15, 10]):
        undecided = X.copy()
        undecided[(places == place).all(1)] = mixture.means_.mean(0)
        labels = mixture.predict(undecided, coordinates=places)
        assert metrics.ari(right, labels) == 1


@pytest.mark.parametrize(
    "mixture", [pdvi.PottsMixture(4, n_patches=9), pdvi.TwoLevelMixture(4, n_types=6, n_patches=9)]
)
def test_few_rows_are_labeled_by_a_mixture_of_many_patches(mixture):
    mixture.set_params(random_state=0).fit(TISSUE.X, **PLACES)
    for rows in (slice(0, 1), slice(0, 3)):
        found = mixture.predict_proba(TISSUE.X[rows], coordinates=TISSUE.coordinates[rows])
        assert found.shape == (rows.stop, 4)
        np.testing.assert_allclose(found.sum(1), 1)


def test_wrong_numbers_are_told():
    for settings, told in (({"n_types": 0}, "n_types"), ({"n_types": 10_000}, "n_types"), ({"beta": -1}, "beta")):
        with pytest.raises(ValueError, match=f"`{told}` must be"):
            pdvi.TwoLevelMixture(4, **settings).fit(TISSUE.X, **PLACES)
    for settings, told in (({"concentration": 0}, "concentration"), ({"n_neighbors": 0}, "n_neighbors")):
        with pytest.raises(ValueError, match=f"`{told}` must be"):
            pdvi.TwoLevelMixture(4, **settings).fit(TISSUE.X, **PLACES)
    fitted = pdvi.PottsMixture(2, random_state=0).fit(TISSUE.X[:100])
    with pytest.raises(ValueError, match="features"):
        fitted.predict(TISSUE.X[:, :3])
