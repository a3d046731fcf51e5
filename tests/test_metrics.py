import numpy as np
import pytest

from pdvi import metrics

RNG = np.random.default_rng(0)


def test_one_gaussian_against_the_textbook():
    """In one dimension W2^2 = (m - m')^2 + (s - s')^2."""
    assert metrics.wasserstein_matched([[1.0]], [[4.0]], [[4.0]], [[1.0]]) == pytest.approx(np.sqrt(9 + 1))
    assert metrics.wasserstein_matched([[1.0]], [[[4.0]]], [[4.0]], [[[1.0]]]) == pytest.approx(np.sqrt(9 + 1))


def test_diagonal_and_full_covariances_agree():
    means, other = RNG.standard_normal((2, 3, 4))
    a, b = RNG.uniform(0.5, 2, (2, 3, 4))
    full = [np.array([np.diag(row) for row in c]) for c in (a, b)]
    np.testing.assert_allclose(
        metrics.bures(means, a, other, b), metrics.bures(means, full[0], other, full[1]), rtol=1e-8
    )


def test_full_covariances_that_do_not_commute():
    """Against the sampled definition: the optimal map between Gaussians is linear and symmetric."""
    a, b = (m @ m.T + np.eye(2) for m in RNG.standard_normal((2, 2, 2)))
    root = np.linalg.cholesky(a)
    values, vectors = np.linalg.eigh(root.T @ b @ root)
    inverse = np.linalg.inv(root)
    transport = inverse.T @ (vectors * np.sqrt(values)) @ vectors.T @ inverse
    np.testing.assert_allclose(transport @ a @ transport.T, b, rtol=1e-8)
    expected = np.trace(a) + np.trace(b) - 2 * np.trace(transport @ a)
    found = metrics.bures(np.zeros((1, 2)), a[None], np.zeros((1, 2)), b[None])
    np.testing.assert_allclose(found, [[expected]], rtol=1e-8)


def test_matching_ignores_the_order_of_components():
    means, variances = RNG.standard_normal((5, 3)), RNG.uniform(0.5, 2, (5, 3))
    order = RNG.permutation(5)
    assert metrics.wasserstein_matched(means, variances, means[order], variances[order]) == pytest.approx(0, abs=1e-7)
    assert metrics.matched_mean_error(means + np.array([0.3, 0, 0]), means[order]) == pytest.approx(0.3)


def test_transport_moves_weight_between_components():
    """Half of the mass travels a distance of 4."""
    means, variances = np.array([[0.0], [4.0]]), np.ones((2, 1))
    found = metrics.wasserstein_transport(means, variances, [1.0, 0.0], means, variances, [0.5, 0.5])
    assert found == pytest.approx(np.sqrt(0.5 * 16))


def test_transport_equals_matching_for_equal_weights():
    means, other = RNG.standard_normal((2, 4, 3))
    variances, others = RNG.uniform(0.5, 2, (2, 4, 3))
    equal = np.full(4, 0.25)
    assert metrics.wasserstein_transport(means, variances, equal, other, others, equal) == pytest.approx(
        metrics.wasserstein_matched(means, variances, other, others)
    )


def test_mixed_covariances_are_named():
    with pytest.raises(ValueError, match="both be variances or both be matrices, got 1 and 2 axes"):
        metrics.bures(np.zeros((1, 2)), np.ones((1, 2)), np.zeros((1, 2)), np.eye(2)[None])


def test_labels_are_compared_up_to_renaming():
    labels = RNG.integers(0, 4, 200)
    assert metrics.ari(labels, (labels + 1) % 4) == pytest.approx(1)
    assert metrics.nmi(labels, (labels + 1) % 4) == pytest.approx(1)
    assert abs(metrics.ari(labels, RNG.integers(0, 4, 200))) < 0.1
