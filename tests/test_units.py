"""Valid data of any size and shape gets an answer, the same in all units."""

import re
import warnings

import numpy as np
import pytest
import scipy.sparse as sp
from anndata import AnnData

import pdvi
from pdvi.mixtures.init import center, unit_of

pytestmark = pytest.mark.slow

RNG = np.random.default_rng(0)
TWO_CLOUDS = np.concatenate([RNG.normal(size=(100, 3)), RNG.normal(size=(100, 3)) + 5])
BINARY = (RNG.random((200, 3)) < 0.5).astype(float)


def with_outlier():
    rows = TWO_CLOUDS.copy()
    rows[0] = 1e10
    return rows


def line(n):
    return sp.csr_array(np.eye(n, k=1) + np.eye(n, k=-1))


HARD = {
    "two rows, 100 times each": (np.repeat(RNG.normal(size=(2, 3)), 100, axis=0), 2),
    "as many components as rows": (TWO_CLOUDS[:5], 5),
    "noisy binary features": (BINARY + 1e-3 * RNG.normal(size=BINARY.shape), 2),
    "binary features": (BINARY, 2),
    "an outlier of 1e10": (with_outlier(), 2),
    "a constant feature": (TWO_CLOUDS * [1, 0, 1] + [0, 0.1, 0], 2),
    "constant rows": (np.full((200, 3), 0.1), 2),
    "zeros": (np.zeros((200, 3)), 2),
    "far from the origin": (TWO_CLOUDS + 1e6, 2),
    "1e-20": (TWO_CLOUDS * 1e-20, 2),
    "1e18": (TWO_CLOUDS * 1e18, 2),
    "1e100": (TWO_CLOUDS * 1e100, 2),
}


def fitted(kind, X, k, **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fewer distinct rows than components: k-means says so
        if kind == "potts":
            return pdvi.PottsMixture(k, random_state=0, **settings).fit(X, graph=line(len(X)))
        return pdvi.GaussianMixture(k, random_state=0, **settings).fit(X)


@pytest.mark.parametrize("covariance", ["diagonal", "tied"])
@pytest.mark.parametrize("kind", ["plain", "potts"])
@pytest.mark.parametrize("name", HARD)
def test_hard_but_valid_rows_get_an_answer(name, kind, covariance):
    X, k = HARD[name]
    before = X.copy()
    mixture = fitted(kind, X, k, covariance=covariance)
    for values in (mixture.means_, mixture.covariances_, mixture.weights_, mixture.elbo_):
        assert np.isfinite(values).all()
    assert (np.abs(mixture.means_ - X.mean(0)) <= 1.01 * np.ptp(X, axis=0) + 1e-6 * np.abs(X).max()).all()
    assert set(mixture.labels_) <= set(range(k))
    np.testing.assert_array_equal(X, before)


@pytest.mark.parametrize("kind", ["plain", "potts"])
def test_an_outlier_is_alone(kind):
    labels = fitted(kind, with_outlier(), 2).labels_
    assert (labels != labels[0]).sum() == 199


@pytest.mark.parametrize("covariance", ["diagonal", "tied"])
@pytest.mark.parametrize("kind", ["plain", "potts"])
def test_the_answer_is_the_same_in_all_units(kind, covariance):
    reference = fitted(kind, TWO_CLOUDS, 3, covariance=covariance)
    for factor in (1e-20, 1e5, 1e18):
        mixture = fitted(kind, factor * TWO_CLOUDS, 3, covariance=covariance)
        # one cloud is split in two, and a row halfway between them may be in either: rounding decides
        assert np.count_nonzero(mixture.labels_ != reference.labels_) <= 1
        np.testing.assert_allclose(mixture.means_ / factor, reference.means_, rtol=5e-3, atol=5e-3)
        np.testing.assert_allclose(mixture.covariances_ / factor / factor, reference.covariances_, rtol=1e-2, atol=1e-3)
        shift = TWO_CLOUDS.size * np.log(factor)
        assert mixture.elbo_ + shift == pytest.approx(reference.elbo_, rel=1e-4)
        if kind == "plain":
            assert mixture.score(factor * TWO_CLOUDS) + shift / 200 == pytest.approx(
                reference.score(TWO_CLOUDS), rel=1e-4
            )


@pytest.mark.parametrize("X", [TWO_CLOUDS * 1e-160, TWO_CLOUDS * 1e200])
def test_where_squares_leave_the_doubles_it_is_said(X):
    message = "`X` must vary by 1e-150 to 1e+150, since variances are squares, got "
    with pytest.raises(ValueError, match=f"^{re.escape(message)}.*; give it in other units"):
        fitted("plain", X, 2)


def test_usual_rows_are_left_as_they_are_and_others_lose_no_digit():
    rows = TWO_CLOUDS - TWO_CLOUDS.mean(0)
    assert unit_of(TWO_CLOUDS, rows) == 1
    np.testing.assert_array_equal(center(TWO_CLOUDS), rows)
    small = TWO_CLOUDS * 2.0**-70
    unit = unit_of(small, rows * 2.0**-70)
    assert unit < 1e-10
    assert np.log2(unit) % 1 == 0
    np.testing.assert_array_equal(center(small) * unit, rows * 2.0**-70)


def slide(features, coordinates):
    return AnnData(np.ones((len(features), 2), np.float32), obsm={"X_neighborhood": features, "spatial": coordinates})


@pytest.mark.parametrize("n_spots", [5, 200])
@pytest.mark.parametrize("place", ["line", "one place"])
@pytest.mark.parametrize("factor", [1e-20, 1e18])
def test_domains_of_small_and_odd_slides(n_spots, place, factor):
    features = TWO_CLOUDS[np.linspace(0, 199, n_spots).astype(int)]
    coordinates = np.zeros((n_spots, 2)) if place == "one place" else np.column_stack([np.arange(n_spots)] * 2) * 1.0
    adata = slide(features * factor, coordinates)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what was made
        pdvi.tl.domains(adata, 2)
    probability = adata.obsm["domain_probability"]
    np.testing.assert_allclose(probability.sum(1), 1, rtol=1e-5)
    assert np.isfinite(adata.uns["domain"]["elbo"])
    if place == "line" and n_spots == 200:
        assert pdvi.metrics.ari(adata.obs["domain"], np.arange(200) >= 100) > 0.95
