"""`GaussianMixture` is what users of scikit-learn's class of that name expect."""

import numpy as np
import pytest
from sklearn.mixture import GaussianMixture as Reference

import pdvi

pytestmark = pytest.mark.slow

RNG = np.random.default_rng(0)
X = np.concatenate(
    [
        RNG.multivariate_normal([0, 0], [[1, 0.8], [0.8, 1]], 1_000),
        RNG.normal([4, -4], 0.3, size=(500, 2)),
        RNG.normal([0, 7], [2, 0.2], size=(500, 2)),
    ]
)
TYPES = ["full", "tied", "diag", "spherical"]


def fitted(rows=X, k=3, *, weight=None, **settings):
    return pdvi.GaussianMixture(k, random_state=0, **settings).fit(rows, sample_weight=weight)


@pytest.mark.parametrize("kind", TYPES)
def test_every_covariance_type_is_as_likely_as_scikit_learns(kind):
    ours, theirs = fitted(covariance_type=kind), Reference(3, covariance_type=kind, random_state=0, n_init=3).fit(X)
    order = ours.predict(theirs.means_)
    assert sorted(order) == [0, 1, 2]
    np.testing.assert_allclose(ours.means_[order], theirs.means_, atol=0.05)
    for name in ("covariances_", "precisions_"):
        mine, his = getattr(ours, name), getattr(theirs, name)
        assert mine.shape == his.shape
        np.testing.assert_allclose(mine if kind == "tied" else mine[order], his, rtol=0.06, atol=0.06)
    assert ours.score(X) == pytest.approx(theirs.score(X), abs=1e-3)
    assert ours.bic(X) == pytest.approx(theirs.bic(X), abs=4)
    assert ours.aic(X) == pytest.approx(theirs.aic(X), abs=4)
    assert ours.lower_bound_ == pytest.approx(theirs.lower_bound_, abs=0.03)  # less the posterior of the means
    assert ours.lower_bound_ < ours.score(X)
    assert (ours.predict(X) == order[theirs.predict(X)]).mean() > 0.99
    assert ours.converged_


def test_probabilities_are_those_of_the_fit():
    mixture = fitted(covariance_type="full")
    np.testing.assert_allclose(mixture.predict_proba(X).sum(1), 1, rtol=1e-9)
    np.testing.assert_array_equal(mixture.predict(X), mixture.labels_)


@pytest.mark.parametrize("kind", [*TYPES, None])
def test_samples_look_like_the_rows(kind):
    mixture = fitted(covariance_type=kind)
    rows, labels = mixture.sample(4_000)
    assert rows.shape == (4_000, 2)
    assert (mixture.predict(rows) == labels).mean() > 0.95
    np.testing.assert_allclose(rows.mean(0), X.mean(0), atol=0.3)
    np.testing.assert_allclose(np.bincount(labels) / 4_000, mixture.weights_, atol=0.03)
    np.testing.assert_allclose(mixture.score(rows), mixture.score(X), atol=0.25)


def test_too_few_samples_are_named():
    with pytest.raises(ValueError, match="`n_samples` must be a whole number of at least 1, got 0"):
        fitted().sample(0)


@pytest.mark.parametrize("kind", [None, "full"])
def test_single_precision_stays(kind):
    mixture = fitted(X.astype(np.float32), covariance_type=kind)
    for name in ("weights_", "means_", "covariances_", "precisions_"):
        assert getattr(mixture, name).dtype == np.float32
    assert mixture.predict_proba(X.astype(np.float32)).dtype == np.float32
    small = fitted((1e-25 * X).astype(np.float32), covariance_type=kind)
    assert small.means_.dtype == np.float32
    assert (small.covariances_[..., 0, 0] > 0).all() if kind == "full" else (small.covariances_ > 0).all()


def test_weights_count_as_rows():
    """Whole ones by repetition, to the bit; others in the model."""
    count = np.random.default_rng(1).integers(0, 4, size=len(X))
    np.testing.assert_array_equal(fitted(np.repeat(X, count, axis=0)).means_, fitted(weight=count).means_)
    half, whole = fitted(weight=0.5 * count, covariance_type="full"), fitted(weight=count, covariance_type="full")
    order = whole.predict(half.means_)
    np.testing.assert_allclose(half.means_, whole.means_[order], atol=0.02)
    np.testing.assert_allclose(half.weights_, whole.weights_[order], atol=0.005)
    np.testing.assert_allclose(half.covariances_, whole.covariances_[order], atol=0.02)
    assert half.lower_bound_ == pytest.approx(whole.lower_bound_, abs=0.02)


def test_too_few_weights_are_named():
    with pytest.raises(ValueError, match="`sample_weight` must be above 0 for at least 2 rows, got 1"):
        fitted(weight=np.r_[1.0, np.zeros(len(X) - 1)])


def test_the_order_of_the_rows_does_not_matter():
    np.testing.assert_array_equal(fitted(X[::-1]).means_, fitted().means_)


@pytest.mark.parametrize("kind", [None, "full"])
def test_a_start_can_be_given(kind):
    means = np.array([[0, 7], [0, 0], [4, -4]])
    mixture = fitted(means_init=means, weights_init=[0.25, 0.5, 0.25], covariance_type=kind)
    np.testing.assert_allclose(mixture.means_, means, atol=0.2)  # in the order that was given
    np.testing.assert_allclose(mixture.weights_, [0.25, 0.5, 0.25], atol=0.02)
    only = fitted(weights_init=[0.25, 0.5, 0.25], covariance_type=kind)
    assert only.score(X) == pytest.approx(mixture.score(X), abs=1e-3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"means_init": np.ones((2, 2))}, r"`means_init` must have 3 rows of 2 numbers, got shape \(2, 2\)"),
        ({"means_init": np.full((3, 2), np.nan)}, "`means_init` must be finite"),
        ({"weights_init": [1, 2, 3]}, "`weights_init` must be 3 numbers of at least 0 that add up to 1, got"),
        ({"weights_init": "abc"}, "`weights_init` must be 3 numbers"),
        ({"covariance_type": "round"}, "`covariance_type` must be one of .*'spherical'.*, got 'round'"),
        ({"reg_covar": -1.0}, "`reg_covar` must be at least 0 and finite, got -1.0"),
    ],
)
def test_bad_starts_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        fitted(**settings)


@pytest.mark.parametrize("kind", [None, "full"])
def test_a_warm_start_goes_on_with_new_rows(kind):
    mixture = pdvi.GaussianMixture(3, random_state=0, warm_start=True, covariance_type=kind).fit(X[::4])
    before = mixture.means_.copy()
    mixture.fit(X)
    np.testing.assert_allclose(mixture.means_, before, atol=0.3)  # the same components, in the same order
    assert mixture.score(X) == pytest.approx(fitted(covariance_type=kind).score(X), abs=1e-3)
    with pytest.raises(ValueError, match=r"`warm_start` must go on with .* \(\(3, 2\)\), got \(3, 1\)"):
        mixture.fit(X[:, :1])


def test_reg_covar_is_added():
    plain, ridged = fitted(covariance_type="diag"), fitted(covariance_type="diag", reg_covar=0.5)
    order = plain.predict(ridged.means_)
    np.testing.assert_allclose(ridged.covariances_, plain.covariances_[order] + 0.5, rtol=0.1)


def test_verbose_prints_the_course(capsys):
    fitted(verbose=1)
    assert "objective" in capsys.readouterr().out
    fitted()
    assert not capsys.readouterr().out


@pytest.mark.parametrize("max_epochs", [1, 2, 3])
def test_the_budget_holds_for_all_types(max_epochs):
    with pytest.warns(UserWarning, match="did not converge"):
        mixture = fitted(covariance_type="full", max_epochs=max_epochs)
    assert mixture.n_iter_ <= max_epochs
