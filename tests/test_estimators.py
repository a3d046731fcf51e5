import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture as Reference
from sklearn.utils.estimator_checks import parametrize_with_checks

import pdvi
from pdvi import graphs, metrics
from pdvi.mixtures.checks import check_graph

DATA = pdvi.datasets.mixture(6_000, dim=4, n_components=3, batch_size=500, separation=3.0, seed=0)
TISSUE = pdvi.datasets.tissue_features(2_500, n_features=20, n_domains=4, noise=1.2, patchiness=8, seed=1)
GRAPH = graphs.weights(graphs.nearest(TISSUE.coordinates, 6), TISSUE.X)


# with a seed: rows without any groups, as some checks have them, need not converge from every start
@parametrize_with_checks([pdvi.GaussianMixture(n_components=2, random_state=0)])
def test_scikit_learn_accepts_the_estimator(estimator, check):
    check(estimator)


@pytest.mark.slow
@parametrize_with_checks(
    [
        pdvi.PottsMixture(2, random_state=0),
        pdvi.TwoLevelMixture(2, n_types=3, random_state=0),
        pdvi.GaussianMixture(2, covariance_type="full", random_state=0),
    ],
)
def test_scikit_learn_accepts_the_others_too(estimator, check):
    """Without a graph one is filled in."""
    check(estimator)


def test_one_component_is_enough():
    mixture = potts(n_components=1).fit(TISSUE.X, graph=GRAPH)
    assert not mixture.labels_.any()
    np.testing.assert_allclose(mixture.means_[0], TISSUE.X.mean(0), atol=0.1)
    np.testing.assert_allclose(pdvi.GaussianMixture().fit(DATA.X).means_[0], DATA.X.mean(0), atol=0.01)


def test_without_a_graph_the_nearest_rows_are_joined():
    by_place = potts().fit(TISSUE.X, coordinates=TISSUE.coordinates)
    assert metrics.ari(TISSUE.labels, by_place.labels_) > 0.8


@pytest.mark.parametrize("covariance", ["diagonal", "tied"])
def test_the_fit_is_as_likely_as_scikit_learns(covariance):
    """scikit-learn has no diagonal covariance shared by the components; the tied one is at least as likely."""
    fitted = pdvi.GaussianMixture(3, covariance=covariance, random_state=0).fit(DATA.X)
    rival = Reference(3, covariance_type="tied", random_state=0).fit(DATA.X)
    assert metrics.ari(DATA.labels, fitted.labels_) > metrics.ari(DATA.labels, rival.predict(DATA.X)) - 0.01
    assert metrics.matched_mean_error(fitted.means_, DATA.means) < 0.1
    np.testing.assert_allclose(fitted.weights_, 1 / 3, atol=0.05)
    assert fitted.score(DATA.X) > rival.score(DATA.X) - 2e-3
    if covariance == "tied":
        np.testing.assert_allclose(fitted.covariances_, rival.covariances_, atol=0.05)
    assert fitted.elbo_ < fitted.score(DATA.X) * len(DATA.X)


def test_probabilities_add_up_and_agree_with_labels():
    fitted = pdvi.GaussianMixture(3, random_state=0).fit(DATA.X)
    probabilities = fitted.predict_proba(DATA.X)
    np.testing.assert_allclose(probabilities.sum(1), 1, rtol=1e-6)
    np.testing.assert_array_equal(probabilities.argmax(1), fitted.predict(DATA.X))


def test_the_same_seed_gives_the_same_bits_and_no_data_is_changed():
    before = DATA.X.copy()
    one, two = (pdvi.GaussianMixture(3, random_state=7).fit(DATA.X) for _ in range(2))
    np.testing.assert_array_equal(one.means_, two.means_)
    np.testing.assert_array_equal(before, DATA.X)


def test_the_elbo_does_not_depend_on_the_units_of_the_data():
    """Up to the logarithm of the unit, once per row and feature."""
    one = pdvi.GaussianMixture(3, covariance="tied", random_state=0).fit(DATA.X)
    two = pdvi.GaussianMixture(3, covariance="tied", random_state=0).fit(100 * DATA.X + 1_000)
    shift = DATA.X.size * np.log(100)
    assert two.elbo_ + shift == pytest.approx(one.elbo_, rel=1e-3)
    np.testing.assert_allclose(two.means_, 100 * one.means_ + 1_000, rtol=0.02)


def test_more_starts_are_no_worse():
    X = DATA.X[:1_500]
    one = pdvi.GaussianMixture(6, random_state=3, estimate_noise=False, learn_weights=False).fit(X)
    many = pdvi.GaussianMixture(6, random_state=3, estimate_noise=False, learn_weights=False, n_init=6).fit(X)
    assert many.elbo_ >= one.elbo_ - 1e-4 * abs(one.elbo_)


def test_any_solver_can_be_used():
    ours = pdvi.GaussianMixture(3, random_state=0).fit(DATA.X)
    rival = pdvi.GaussianMixture(3, random_state=0, solver=pdvi.CAVI()).fit(DATA.X)
    assert rival.elbo_ == pytest.approx(ours.elbo_, rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_components": 0}, r"`n_components` must be between 1 and .*6000\), got 0"),
        ({"n_components": 7_000}, r"`n_components` must be between 1 and .*6000\), got 7000"),
        ({"n_components": 2.0}, r"`n_components` must be between .* got 2.0; give a whole number"),
        ({"covariance": "full"}, r"`covariance` must be one of \('diagonal', 'tied'\), got 'full'"),
        ({"n_init": 0}, "`n_init` must be between 1 and 10000, got 0"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        pdvi.GaussianMixture(**settings).fit(DATA.X)


def test_nan_is_named():
    with pytest.raises(ValueError, match="NaN"):
        pdvi.GaussianMixture(2).fit(np.array([[0.0], [np.nan], [1.0]]))


def potts(**settings):
    return pdvi.PottsMixture(**{"n_components": 4, "beta": 0.5, "random_state": 0, **settings})


@pytest.mark.slow
@pytest.mark.parametrize("covariance", ["diagonal", "tied"])
def test_domains_of_a_tissue_are_found(covariance):
    fitted = potts(covariance=covariance).fit(TISSUE.X, graph=GRAPH, coordinates=TISSUE.coordinates)
    smooth = metrics.ari(TISSUE.labels, fitted.labels_)
    plain = pdvi.GaussianMixture(4, covariance=covariance, random_state=0).fit(TISSUE.X)
    assert smooth > 0.85
    assert smooth > metrics.ari(TISSUE.labels, plain.labels_) + 0.1
    np.testing.assert_allclose(fitted.probabilities_.sum(1), 1, rtol=1e-4)
    assert fitted.converged_


def test_without_coordinates_rows_are_cut_as_they_come():
    fitted = potts().fit(TISSUE.X, graph=GRAPH)
    assert metrics.ari(TISSUE.labels, fitted.labels_) > 0.85


def test_noise_is_re_estimated_to_the_truth():
    fitted = potts(covariance="diagonal").fit(TISSUE.X, graph=GRAPH, coordinates=TISSUE.coordinates)
    np.testing.assert_allclose(fitted.covariances_, 1.2**2, rtol=0.1)
    fixed = potts(covariance="diagonal", estimate_noise=False)
    fixed.fit(TISSUE.X, graph=GRAPH, coordinates=TISSUE.coordinates)
    assert fixed.elbo_ < fitted.elbo_


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (GRAPH[:10, :10], r"`graph` must have a row and a column for each of the 2500 rows of X, got shape \(10, 10\)"),
        (-GRAPH, "`graph` must have finite weights of at least 0, got -0.9"),
        (GRAPH * np.nan, "`graph` must have finite weights of at least 0, got .*nan"),
    ],
)
def test_bad_graphs_are_named(graph, message):
    with pytest.raises(ValueError, match=message):
        potts().fit(TISSUE.X, graph=graph)


def test_asymmetric_weights_are_averaged_with_a_warning():
    lopsided = sp.csr_array(np.array([[5.0, 1.0, 0], [3.0, 0, 0], [0, 0, 0]]))
    with pytest.warns(UserWarning, match="not symmetric; the weights of both directions are averaged"):
        checked = check_graph(lopsided, 3)
    np.testing.assert_array_equal(checked.toarray(), [[0, 2, 0], [2, 0, 0], [0, 0, 0]])
    assert lopsided[0, 0] == 5  # the user's graph is left alone


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_components": 0}, "`n_components` must be between 1 and .*, got 0"),
        ({"beta": -1.0}, "`beta` must be at least 0 and finite, got -1.0"),
        ({"temperature": 0.0}, "`temperature` must be positive and finite, got 0.0"),
        ({"n_patches": 0}, "`n_patches` must be between 1 and the number of rows"),
    ],
)
def test_bad_potts_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        potts(**settings).fit(TISSUE.X, graph=GRAPH)


def test_bad_coordinates_are_named():
    broken = TISSUE.coordinates.copy()
    broken[3] = np.nan
    with pytest.raises(ValueError, match="`coordinates` must be finite: 1 of 2500 rows are not; remove"):
        potts().fit(TISSUE.X, graph=GRAPH, coordinates=broken)
    with pytest.raises(ValueError, match="`coordinates` must have one row for each of the 2500 rows"):
        potts().fit(TISSUE.X, graph=GRAPH, coordinates=broken[:5])


def test_duplicate_coordinates_are_no_trouble():
    fitted = potts().fit(TISSUE.X, graph=GRAPH, coordinates=np.zeros((2_500, 2)))
    assert np.isfinite(fitted.elbo_)


FEW = [
    (pdvi.GaussianMixture(3, random_state=0), {}),
    (pdvi.GaussianMixture(3, random_state=0, estimate_noise=False, learn_weights=False, n_init=3), {}),
    (pdvi.PottsMixture(4, random_state=0), {"graph": GRAPH}),
]


@pytest.mark.parametrize("max_epochs", [1, 3])
@pytest.mark.parametrize(("mixture", "more"), FEW, ids=["plain", "fixed", "on a graph"])
def test_max_epochs_bounds_the_whole_fit_and_warns(mixture, more, max_epochs):
    X = TISSUE.X if more else DATA.X
    with pytest.warns(ConvergenceWarning, match=rf"did not converge in {max_epochs} epochs: MAX_EPOCHS: .* increase"):
        fitted = clone(mixture).set_params(max_epochs=max_epochs).fit(X, **more)
    assert not fitted.converged_
    assert fitted.result_.trace["epoch"].iloc[-1] <= fitted.n_iter_ == max_epochs
