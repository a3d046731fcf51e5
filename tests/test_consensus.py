"""What views agree on: labels matched one to one, the medoid, certainty as the share of views; and slides annotated."""

import subprocess
import sys

import anndata as ad
import matplotlib.pyplot as plt
import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score

import pdvi
from pdvi.mixtures.consensus import adjusted_rand, consensus, match
from pdvi.mixtures.recipe import RECIPE
from pdvi.mixtures.task import Task
from pdvi.mixtures.views import VIEWS, Seen, Tissue, _settled, _side_by_side

FIRST = np.array([0, 0, 0, 1, 1, 1, 2, 2, 2])


def test_labels_are_matched_whatever_they_are_called():
    renamed = np.array([2, 0, 1])[FIRST]
    np.testing.assert_array_equal(match(renamed, FIRST, 3)[renamed], FIRST)


def test_the_most_votes_win_and_certainty_is_their_share():
    other = FIRST.copy()
    other[2] = 1
    agreed = consensus([FIRST, np.array([1, 2, 0])[FIRST], np.array([2, 1, 0])[other]], 3)
    np.testing.assert_array_equal(agreed.labels, FIRST)
    sure, less = (3 + 2 / 3) / 5, (2 + 2 / 3) / 5  # two undecided labellings added
    np.testing.assert_allclose(agreed.certainty, [sure, sure, less, *[sure] * 6])
    np.testing.assert_allclose(agreed.probability.sum(1), 1)
    assert agreed.medoid in (0, 1)
    np.testing.assert_allclose(np.diag(agreed.agreement), 1)


def test_with_a_reference_its_labels_are_kept():
    reference = FIRST.copy()
    reference[0] = 2
    agreed = consensus([FIRST, FIRST], 3, reference)
    np.testing.assert_array_equal(agreed.labels, reference)
    np.testing.assert_allclose(agreed.certainty[0], (2 / 3) / 4)


def test_views_use_as_many_components_as_the_means_span():
    first = VIEWS[0]
    assert first.components(4, 30, RECIPE) == RECIPE.view_components
    assert first.components(15, 30, RECIPE) == 14
    assert first.components(4, 5, RECIPE) == 5


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


def test_certainty_probability_and_views_are_written(fitted):
    probability = fitted.obsm["domain_probability"]
    labels = fitted.obs["domain"].cat.codes.to_numpy()
    share = probability[np.arange(len(labels)), labels]
    expected = (len(VIEWS) * share + 2 / 3) / (len(VIEWS) + 2)
    np.testing.assert_allclose(fitted.obs["domain_certainty"], expected, atol=1e-6)
    views = fitted.uns["domain"]["views"]
    assert views["agreement"].shape == (len(VIEWS), len(VIEWS))
    types = fitted.uns["domain"]["types"]
    np.testing.assert_allclose(types["composition"].sum(1), 1, rtol=1e-5)
    assert types["of_spot"].max() < types["composition"].shape[1]


def test_certainty_and_composition_are_drawn(fitted):
    axes = pdvi.pl.certainty(fitted)
    plt.close(axes.figure)
    axes = pdvi.pl.composition(fitted)
    shares = fitted.uns["domain"]["types"]["composition"]
    drawn = np.asarray(axes.images[0].get_array())
    np.testing.assert_allclose(np.sort(drawn, axis=1), np.sort(shares, axis=1), rtol=1e-6)
    plt.close(axes.figure)
    with pytest.raises(ValueError, match="must name a fit"):
        pdvi.pl.composition(slide(60))


def test_one_view_is_a_plain_fit(fitted):
    again = slide()
    with pytest.warns(UserWarning, match="made what was missing"):
        pdvi.tl.domains(again, 3, views=1)
    assert "views" not in again.uns["domain"]
    np.testing.assert_allclose(again.obs["domain_certainty"], again.obsm["domain_posterior"].max(1), atol=1e-6)


@pytest.mark.parametrize("views", [0, 99, 1.5])
def test_a_wrong_number_of_views_is_named(views):
    with pytest.raises(ValueError, match="`views` must be"):
        pdvi.tl.domains(slide(100), 3, views=views)


def test_features_of_ones_own_have_one_view(fitted):
    with pytest.raises(ValueError, match=r"`views` must be 1 for features that are fitted as they are"):
        pdvi.tl.domains(fitted.copy(), 3, use_rep="X_spatial", views=3)


@pytest.mark.slow
def test_another_slide_gets_the_fitted_names(fitted):
    other = slide(500, seed=0, shift=0.3)
    before = other.X.copy()
    pdvi.tl.annotate(other, fitted)
    np.testing.assert_array_equal(other.X, before)
    assert pdvi.metrics.ari(other.obs["truth"], other.obs["domain"]) > 0.6
    assert list(other.obs["domain"].cat.categories) == ["1", "2", "3"]
    assert other.obs["domain_certainty"].between(0, 1).all()


def test_a_slide_that_does_not_fit_is_said(fitted):
    other = slide(500)
    other.X = other.X[:, np.random.default_rng(0).permutation(other.n_vars)]
    with pytest.warns(UserWarning, match="does not fit the domains"):
        pdvi.tl.annotate(other, fitted)


@pytest.mark.slow
def test_a_fit_that_was_written_annotates_too(fitted, tmp_path):
    fitted.write_h5ad(tmp_path / "fitted.h5ad")
    first, second = slide(300), slide(300)
    pdvi.tl.annotate(first, fitted)
    pdvi.tl.annotate(second, ad.read_h5ad(tmp_path / "fitted.h5ad"))
    np.testing.assert_array_equal(first.obs["domain"].to_numpy(), second.obs["domain"].to_numpy())
    assert set(first.obsm) - {"spatial"} == {"domain_probability"}


def test_annotation_needs_genes_and_a_model(fitted):
    other = slide(100)
    other.var_names = [f"other{i}" for i in range(other.n_vars)]
    with pytest.raises(ValueError, match="must have the genes of the fitted slide"):
        pdvi.tl.annotate(other, fitted)
    with pytest.raises(ValueError, match="must name a fit of"):
        pdvi.tl.annotate(other, ad.AnnData(np.ones((3, 3))))


def test_agreement_is_scikit_learns():
    rng = np.random.default_rng(0)
    for n_labels in (1, 2, 7):
        for rows in (1, 2, 500):
            one, other = rng.integers(n_labels, size=(2, rows))
            assert adjusted_rand(one, other, n_labels) == pytest.approx(adjusted_rand_score(one, other), abs=1e-12)
            assert adjusted_rand(one, one, n_labels) == 1


@pytest.mark.parametrize("groups", [[[0, 2], [1, 3, 4, 5]], [[0, 1, 2, 3, 4, 5], []], [[5, 4, 3], [2, 1, 0]]])
def test_what_runs_side_by_side_is_done_once_and_comes_back_in_order(groups):
    done = []

    def work(i):
        done.append(i)
        return 10 * i

    assert _side_by_side(groups, work) == [0, 10, 20, 30, 40, 50]
    assert sorted(done) == list(range(6))


def test_an_error_in_one_thread_is_raised():
    with pytest.raises(ZeroDivisionError):
        _side_by_side([[0, 1], [2]], lambda i: 1 / (i - 1))


LOOKED_UP = """
import threading
import numpy as np
import threadpoolctl
from pdvi.mixtures.views import _side_by_side

looked_up = []
before = threadpoolctl.ThreadpoolController.__init__

def recorded(self, *args):
    looked_up.append(threading.current_thread() is threading.main_thread())
    before(self, *args)

threadpoolctl.ThreadpoolController.__init__ = recorded

def work(i):
    from sklearn.cluster import KMeans
    return KMeans(3, n_init=2, random_state=i).fit(np.random.default_rng(i).normal(size=(500, 4))).inertia_

def threads_of_blas():
    found = threadpoolctl.threadpool_info()
    return sorted(library["num_threads"] for library in found if library["user_api"] == "blas")

_side_by_side([[0], [1]], work)
told = threads_of_blas()
_side_by_side([[0, 1, 2, 3], [4, 5, 6, 7]], work)
assert threads_of_blas() == told, (told, threads_of_blas())
assert looked_up and all(looked_up), looked_up
"""


def test_only_the_first_thread_looks_for_libraries():
    """Another, while one imports a library, waits for ever: each holds the lock that the other asks for."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", LOOKED_UP], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("right", [0, 1, 2])
def test_where_views_disagree_the_best_for_the_first_is_kept(right):
    """Two views of three have merged two strips and torn a third, and votes would follow them."""
    rng = np.random.default_rng(0)
    places = np.stack(np.meshgrid(np.arange(60.0), np.arange(50.0)), -1).reshape(-1, 2)
    strips = (places[:, 0] // 10).astype(int)
    X = (rng.standard_normal((6, 5))[strips] + 0.4 * rng.standard_normal((3_000, 5))).astype(np.float32)
    graph = pdvi.graphs.nearest(places, 8).astype(float)
    tissue = Tissue(X, {VIEWS[0].n_neighbors: X}, graph, places)

    merged = np.where(strips == 1, 0, strips)
    labellings = [np.where((strips == 2) & (places[:, 1] > 25), 1, merged)] * 3
    labellings[right] = strips
    seen = [Seen(VIEWS[0], 5, np.eye(6)[labels], None, 0.0) for labels in labellings]
    task = Task(6, beta=0.2, learn_weights=True, reseed=False, random_state=0)  # else each would mend itself
    found = _settled(tissue, seen, task).argmax(1)
    assert adjusted_rand_score(strips, found) > 0.95
    assert adjusted_rand_score(strips, consensus(labellings, 6).labels) < 0.95
