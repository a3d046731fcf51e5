import numpy as np
import pytest

import pdvi


def test_the_quadratic_has_the_condition_number_asked_for(x64):
    problem = pdvi.datasets.quadratic(n=20, condition=500)
    np.testing.assert_allclose(np.linalg.cond(problem.shards["Q"]), 500, rtol=1e-6)


def test_heterogeneity_spreads_the_curvature_of_the_globals(x64):
    def spread(heterogeneity):
        problem = pdvi.datasets.quadratic(n=400, heterogeneity=heterogeneity)
        curvature = np.diagonal(np.asarray(problem.shards["Q"]).mean(0))[5:]
        return curvature.max() / curvature.min()

    assert spread(0.99) > 100
    assert spread(0.0) < 2


@pytest.mark.parametrize("bias", [0.0, 0.5, 0.95, 1.0])
def test_mixture_batches_are_as_biased_as_asked(bias):
    data = pdvi.datasets.mixture(20_000, batch_size=500, bias=bias)
    assert np.bincount(data.batch).tolist() == [500] * 40
    top = [np.bincount(data.labels[data.batch == b]).max() / 500 for b in range(40)]
    expected = bias + (1 - bias) / 5
    np.testing.assert_allclose(np.mean(top), expected, atol=0.05)


def test_mixture_has_equal_weights_and_unit_noise():
    data = pdvi.datasets.mixture(50_000)
    assert np.ptp(np.bincount(data.labels)) <= 1
    residual = data.X - data.means[data.labels]
    np.testing.assert_allclose(residual.var(0), 1, atol=0.03)


def test_tissue_domains_are_regions():
    tissue = pdvi.datasets.tissue_features(10_000, n_domains=5, patchiness=10)
    image = tissue.labels.reshape(100, 100)
    same = (image[1:] == image[:-1]).mean()
    assert same > 0.9
    assert len(np.unique(tissue.labels)) == 5


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pdvi.datasets.quadratic(0), "`n` must be a whole number of at least 1, got 0"),
        (lambda: pdvi.datasets.quadratic(5, heterogeneity=2), "`heterogeneity` must be between 0 and 1, got 2"),
        (lambda: pdvi.datasets.quadratic(5, condition=0.5), "`condition` must be at least 1 and finite, got 0.5"),
        (lambda: pdvi.datasets.mixture(10, batch_size=20), r"`batch_size` must be between 1 and .* \(10\), got 20"),
        (lambda: pdvi.datasets.mixture(bias=2), "`bias` must be between 0 and 1, got 2"),
    ],
)
def test_bad_settings_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
