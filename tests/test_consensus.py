"""What views agree on: labels matched one to one, the medoid, certainty as the fraction of views that agree."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score

import pdvi
from pdvi.spatial.consensus import adjusted_rand, agreement, certainty_of, consensus, match, medoid, votes
from pdvi.spatial.views import VIEWS

FIRST = np.array([0, 0, 0, 1, 1, 1, 2, 2, 2])


def test_labels_are_matched_whatever_they_are_called():
    renamed = np.array([2, 0, 1])[FIRST]
    np.testing.assert_array_equal(match(renamed, FIRST, 3)[renamed], FIRST)


def test_a_label_that_no_row_has_is_matched_too():
    used = np.where(FIRST == 2, 1, FIRST)
    found = match(used, FIRST, 3)
    assert sorted(found) == [0, 1, 2]
    assert found[0] == 0


def test_the_most_votes_win_and_certainty_is_their_fraction():
    other = FIRST.copy()
    other[2] = 1
    labelings = [FIRST, np.array([1, 2, 0])[FIRST], np.array([2, 1, 0])[other]]
    np.testing.assert_array_equal(consensus(labelings, 3), FIRST)
    probability = votes(labelings, 3, FIRST)
    sure, less = (3 + 2 / 3) / 5, (2 + 2 / 3) / 5  # two undecided labelings added
    np.testing.assert_allclose(certainty_of(probability, FIRST, 3), [sure, sure, less, *[sure] * 6])
    np.testing.assert_allclose(probability.sum(1), 1)
    alike = agreement(labelings, 3)
    assert medoid(alike) in (0, 1)
    np.testing.assert_allclose(np.diag(alike), 1)


def test_where_votes_are_equal_the_medoid_decides():
    """Labelings of two rows differ; the first agrees most with all others."""
    one, two = FIRST.copy(), FIRST.copy()
    one[0], two[1] = 1, 2
    assert medoid(agreement([FIRST, one, two], 3)) == 0
    np.testing.assert_array_equal(consensus([FIRST, one, two], 3), FIRST)
    np.testing.assert_array_equal(consensus([FIRST, one], 3), FIRST)


def test_a_label_of_the_reference_that_no_labeling_gives_is_the_least_certain():
    reference = FIRST.copy()
    reference[0] = 2
    probability = votes([FIRST, FIRST], 3, reference)
    np.testing.assert_allclose(certainty_of(probability, reference, 2)[0], (2 / 3) / 4)


def test_agreement_is_that_of_scikit_learn():
    rng = np.random.default_rng(0)
    for n_labels in (1, 2, 7):
        for rows in (1, 2, 500):
            one, other = rng.integers(n_labels, size=(2, rows))
            assert adjusted_rand(one, other, n_labels) == pytest.approx(adjusted_rand_score(one, other), abs=1e-12)
            assert adjusted_rand(one, one, n_labels) == 1


@pytest.mark.parametrize("n_labelings", [3, 5])
def test_certainty_is_the_posterior_mean_of_how_often_a_labeling_is_right(n_labelings):
    """Rows draw how likely a labeling is right from the prior that certainty assumes, and labelings by it."""
    rng = np.random.default_rng(0)
    rows, n_labels = 200_000, 2
    right = rng.beta(1, 1, rows)  # two labelings, undecided between two labels
    drawn = [(rng.random(rows) >= right).astype(int) for _ in range(n_labelings)]
    certainty = certainty_of(votes(drawn, n_labels), np.zeros(rows, int), n_labelings)
    for level in np.unique(certainty):
        assert right[certainty == level].mean() == pytest.approx(level, abs=0.01)


# -------------------------------------------------------------------------------------------------------- tl.domains


def slide(n=600, seed=0):
    return pdvi.datasets.tissue(n, n_genes=60, n_domains=3, seed=seed)


@pytest.fixture(scope="module")
def fitted():
    adata = slide()
    with pytest.warns(UserWarning, match="made what was missing"):
        pdvi.tl.domains(adata, 3)
    return adata


def test_certainty_probability_and_views_are_written(fitted):
    probability = fitted.obsm["domain_probability"]
    labels = fitted.obs["domain"].cat.codes.to_numpy()
    fraction = probability[np.arange(len(labels)), labels]
    expected = (len(VIEWS) * fraction + 2 / 3) / (len(VIEWS) + 2)
    np.testing.assert_allclose(fitted.obs["domain_certainty"], expected, atol=1e-6)
    assert np.mean(fraction == probability.max(1)) > 0.95  # most views gave it alone, too
    views = fitted.uns["domain"]["views"]
    assert views["agreement"].shape == (len(VIEWS), len(VIEWS))
    assert views["kind"].tolist() == [view.kind for view in VIEWS]
    assert views["n_neighbors"].tolist() == [view.n_neighbors for view in VIEWS]
    assert np.isfinite(views["elbo"]).all()
    assert fitted.uns["domain"]["elbo"] == views["elbo"][views["medoid"]]
    types = fitted.uns["domain"]["types"]
    np.testing.assert_allclose(types["composition"].sum(1), 1, rtol=1e-5)
    assert types["of_spot"].max() < types["composition"].shape[1]


def test_the_posterior_is_that_of_the_most_typical_view(fitted):
    posterior = fitted.obsm["domain_posterior"]
    np.testing.assert_allclose(posterior.sum(1), 1, rtol=1e-4)
    assert np.mean(posterior.argmax(1) == fitted.obs["domain"].cat.codes) > 0.9


def test_spots_that_are_certain_are_right_more_often(fitted):
    """How far the two numbers are from each other depends on the tissue; `benchmarks` has it for real slides."""
    labels, truth = fitted.obs["domain"].cat.codes.to_numpy(), fitted.obs["truth"].cat.codes.to_numpy()
    right = match(labels, truth, 3)[labels] == truth
    certainty = fitted.obs["domain_certainty"].to_numpy()
    least = certainty < certainty.max()
    assert least.any()
    assert right[~least].mean() > right[least].mean() + 0.1
    assert certainty.mean() < right.mean() + 0.05  # never surer than right


def test_certainty_and_composition_are_drawn(fitted):
    axes = pdvi.pl.certainty(fitted)
    plt.close(axes.figure)
    axes = pdvi.pl.composition(fitted)
    fractions = fitted.uns["domain"]["types"]["composition"]
    drawn = np.asarray(axes.images[0].get_array())
    np.testing.assert_allclose(np.sort(drawn, axis=1), np.sort(fractions, axis=1), rtol=1e-6)
    plt.close(axes.figure)
    with pytest.raises(ValueError, match="must name a fit"):
        pdvi.pl.composition(slide(60))


def test_one_view_is_a_plain_fit():
    again = slide()
    with pytest.warns(UserWarning, match="made what was missing"):
        pdvi.tl.domains(again, 3, views=1)
    assert "views" not in again.uns["domain"]
    np.testing.assert_allclose(again.obs["domain_certainty"], again.obsm["domain_posterior"].max(1), atol=1e-6)
    np.testing.assert_array_equal(again.obsm["domain_probability"], again.obsm["domain_posterior"])


@pytest.mark.parametrize("views", [0, 99, 1.5])
def test_a_wrong_number_of_views_is_named(views):
    with pytest.raises(ValueError, match="`views` must be"):
        pdvi.tl.domains(slide(100), 3, views=views)


def test_features_of_ones_own_have_one_view(fitted):
    with pytest.raises(ValueError, match=r"`views` must be 1 for features that are fitted as they are"):
        pdvi.tl.domains(fitted.copy(), 3, use_rep="X_spatial", views=3)
