"""Views of a tissue: what each is fitted from, two threads, groups of spots, and what all of them find."""

import dataclasses
import subprocess
import sys
from contextvars import ContextVar

import numpy as np
import pytest

import pdvi
from pdvi.mixtures import Config
from pdvi.mixtures.fit_mixture import FitOptions
from pdvi.pp.neighborhood import averages
from pdvi.spatial import views
from pdvi.spatial.consensus import agreement, certainty_of, votes
from pdvi.spatial.views import FEATURES, VIEWS, Tissue, View, ViewSettings

COUNTS = {view.n_neighbors for view in VIEWS if view.kind == "averages"}
FOUR = ViewSettings(4)


def tissue_of(X, coordinates, sample=None):
    labels = np.zeros(len(X), int) if sample is None else sample
    graph = pdvi.graphs.weights(pdvi.graphs.nearest(coordinates, 6), X).astype(float)
    return Tissue(X, averages(X, coordinates, labels, COUNTS), graph, coordinates, sample)


def stripes(n=1_200, shift=None, seed=0):
    """Four stripes; with a shift two samples side by side, of stripes of other widths, the second shifted."""
    rng = np.random.default_rng(seed)
    coordinates = rng.uniform(size=(n, 2))
    sample = np.arange(n) % 2
    ends = np.array([[0.25, 0.5, 0.75], [0.15, 0.55, 0.9]])[0 if shift is None else sample]
    truth = (coordinates[:, :1] > ends).sum(1)
    centers = np.array([[0, 0, 0], [2, 0, 0], [0, 2, 0], [0, 1, 2.0]])
    X = centers[truth] + rng.standard_normal((n, 3))
    if shift is None:
        return tissue_of(X.astype(np.float32), coordinates), truth
    coordinates[:, 0] += 3 * sample
    X += np.outer(sample, shift * np.array([1.0, -0.5, 0.3]))
    return tissue_of(X.astype(np.float32), coordinates, sample), truth


TISSUE, TRUTH = stripes()


# --------------------------------------------------------------------------------------------------------- one view


def test_a_view_uses_as_many_components_as_the_means_span():
    assert ViewSettings(4).n_features(30) == Config().n_components
    assert ViewSettings(15).n_features(30) == 14
    assert ViewSettings(4).n_features(5) == 5


def test_views_are_of_two_kinds_and_all_different():
    assert len(set(VIEWS)) == len(VIEWS) == 5
    assert {view.kind for view in VIEWS} == {"averages", "types"}
    assert str(VIEWS[0]) == "averages of 22 neighbors"


@pytest.mark.parametrize("view", [VIEWS[0], VIEWS[1], FEATURES], ids=str)
def test_a_view_finds_the_domains(view):
    tissue = TISSUE._replace(averages={**TISSUE.averages, 0: TISSUE.components})
    fitted = views.fit_view(tissue, view, views.shard_tissue(tissue, FOUR), FOUR)
    assert pdvi.metrics.ari(TRUTH, fitted.labels) > 0.7
    np.testing.assert_allclose(fitted.probabilities.sum(1), 1, rtol=1e-5)
    assert fitted.result.converged
    if view.kind == "types":
        np.testing.assert_allclose(fitted.types.sum(1), 1, rtol=1e-5)
        np.testing.assert_allclose(fitted.composition.sum(1), 1, rtol=1e-5)
        assert fitted.composition.shape == (4, fitted.types.shape[1])
    else:
        assert fitted.types is None
        assert fitted.composition is None


def test_a_view_goes_on_from_given_probabilities():
    graph = views.shard_tissue(TISSUE, FOUR)
    renamed = np.array([2, 3, 0, 1])[TRUTH]
    fitted = views.fit_view(TISSUE, VIEWS[0], graph, FOUR, np.eye(4, dtype=np.float32)[renamed])
    assert np.mean(fitted.labels == renamed) > 0.9  # and keeps their names


def test_of_several_starts_the_best_fit_is_kept():
    graph = views.shard_tissue(TISSUE, FOUR)
    fits = [views.fit_view(TISSUE, VIEWS[0], graph, dataclasses.replace(FOUR, n_init=n)) for n in (1, 3)]
    assert fits[1].objective <= fits[0].objective + 1e-3 * abs(fits[0].objective)


def test_a_domain_that_the_start_has_lost_is_found_again():
    graph = views.shard_tissue(TISSUE, FOUR)
    merged = np.eye(4, dtype=np.float32)[np.where(TRUTH == 3, 2, TRUTH)]
    fitted = views.fit_view(TISSUE, VIEWS[0], graph, FOUR, merged)
    assert len(np.unique(fitted.labels)) == 4
    assert pdvi.metrics.ari(TRUTH, fitted.labels) > 0.8


def test_there_are_no_more_types_than_different_spots():
    tissue = TISSUE._replace(components=np.eye(3, dtype=np.float32)[np.arange(300) % 3])
    with pytest.warns(Warning, match="distinct clusters"):  # scikit-learn's, of k-means
        types = views.types_of(tissue, ViewSettings(2))
    assert types.shape == (300, 3)


# -------------------------------------------------------------------------------------------------------- all views


def test_components_that_hardly_vary_are_left_out():
    constant = np.full((len(TRUTH), 1), 3.0, np.float32)
    tissue = TISSUE._replace(
        components=np.hstack([constant, TISSUE.components]),
        averages={count: np.hstack([constant, mean]) for count, mean in TISSUE.averages.items()},
    )
    found, without = (views.find_domains(one, VIEWS[:2], FOUR) for one in (tissue, TISSUE))
    np.testing.assert_array_equal(found.labels, without.labels)
    assert np.isfinite([fit.objective for fit in found.fits]).all()


def test_certainty_is_of_what_every_view_found():
    found = views.find_domains(TISSUE, VIEWS, FOUR)
    probability = votes(found.labelings, 4, found.labels)
    np.testing.assert_array_equal(found.probability, probability)
    np.testing.assert_array_equal(found.certainty, certainty_of(probability, found.labels, len(VIEWS)))
    np.testing.assert_array_equal(found.agreement, agreement(found.labelings, 4))


def test_the_same_seed_gives_the_same_labels_in_two_threads():
    first, again = (views.find_domains(TISSUE, VIEWS, FOUR) for _ in range(2))
    for one, other in zip(first.fits, again.fits):
        np.testing.assert_array_equal(one.probabilities, other.probabilities)
    np.testing.assert_array_equal(first.labels, again.labels)
    assert pdvi.metrics.ari(TRUTH, first.labels) > 0.8
    assert first.best is first.fits[first.medoid]


def test_a_view_that_went_wrong_is_outvoted(monkeypatch):
    inner = views.fit_view

    def spoiled(tissue, view, graph, settings, start=None, types=None):
        if view == VIEWS[0]:  # as if k-means had merged two domains and torn a third one
            torn = np.where(TRUTH == 1, 0, TRUTH)
            start = np.eye(4, dtype=np.float32)[np.where((TRUTH == 2) & (TISSUE.coordinates[:, 1] > 0.5), 1, torn)]
        return inner(tissue, view, graph, settings, start, types)

    monkeypatch.setattr(views, "fit_view", spoiled)
    found = views.find_domains(TISSUE, VIEWS, FOUR)
    assert pdvi.metrics.ari(TRUTH, found.labels) > 0.8
    assert pdvi.metrics.ari(TRUTH, found.labels) > pdvi.metrics.ari(TRUTH, found.labelings[0])
    assert found.best is found.fits[found.medoid]
    assert found.medoid != 0


@pytest.mark.parametrize("shift", [0.0, 3.0])
def test_samples_share_domains_whatever_they_are_shifted_by(shift):
    tissue, truth = stripes(shift=shift)
    found = views.find_domains(tissue, VIEWS, FOUR)
    assert pdvi.metrics.ari(truth, found.labels) > 0.75
    for fitted in found.fits:
        assert fitted.result.converged
        assert fitted.result.global_params["offset"].shape[0] == 2


def test_another_order_of_the_samples_changes_nothing_but_their_names():
    tissue, _ = stripes(shift=2.0)
    one, other = (
        views.find_domains(tissue._replace(sample=sample), VIEWS[:1], FOUR).labels
        for sample in (tissue.sample, 1 - tissue.sample)
    )
    assert pdvi.metrics.ari(one, other) > 0.99


# --------------------------------------------------------------------------------------------------- large tissues


def test_groups_of_spots_are_a_tissue():
    tissue, _ = stripes(1_001, shift=1.0)
    groups, group = views.group_tissue(tissue, 4)
    n_groups = group.max() + 1
    assert np.bincount(group).max() == 4
    assert groups.components.shape == (n_groups, 3)
    assert set(groups.averages) == COUNTS
    for count in COUNTS:
        np.testing.assert_allclose(
            groups.averages[count][7], tissue.averages[count][group == 7].mean(0), rtol=1e-4, atol=1e-5
        )
    assert groups.graph.shape == (n_groups, n_groups)
    apart = [len(np.unique(tissue.sample[group == g])) for g in range(n_groups)]
    assert np.mean(np.array(apart) > 1) < 0.02  # of samples that lie side by side
    assert views.group_tissue(TISSUE, 4)[0].sample is None


@pytest.mark.parametrize("shift", [None, 2.0])
def test_a_large_tissue_ends_where_a_small_one_does(shift):
    tissue, truth = stripes(2_400, shift=shift)
    large = dataclasses.replace(FOUR, options=FitOptions(config=Config(group_above=300, group_size=4)))
    three = tuple(view for view in VIEWS if view.kind == "averages")
    small, found = (views.find_domains(tissue, three, settings) for settings in (FOUR, large))
    assert len(found.fits[0].labels) < 300  # groups of groups
    assert len(found.best.labels) == len(found.labels) == 2_400
    np.testing.assert_array_equal(found.best.labels, found.labels)
    assert pdvi.metrics.ari(small.labels, found.labels) > 0.85
    assert pdvi.metrics.ari(truth, found.labels) > pdvi.metrics.ari(truth, small.labels) - 0.05
    assert found.certainty.min() >= 0.0
    assert found.certainty.max() <= 1.0


# --------------------------------------------------------------------------------------------------------- threads


def test_what_runs_in_threads_is_done_once_and_comes_back_in_order():
    done = []

    def work(number):
        done.append(number)
        return 10 * number

    assert views.map_threads(work, 6) == [0, 10, 20, 30, 40, 50]
    assert sorted(done) == list(range(6))
    assert views.map_threads(work, 0) == []


def test_threads_know_what_the_caller_knows():
    known = ContextVar("known", default=0)
    known.set(7)
    assert views.map_threads(lambda number: known.get() + number, 3) == [7, 8, 9]


def test_an_error_in_one_thread_is_raised():
    with pytest.raises(ZeroDivisionError):
        views.map_threads(lambda number: 1 / (number - 1), 3)


LOOKED_UP = """
import threading
import numpy as np
import threadpoolctl
from pdvi.spatial.views import map_threads

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

map_threads(work, 2)
told = threads_of_blas()
map_threads(work, 8)
assert threads_of_blas() == told, (told, threads_of_blas())
assert looked_up and all(looked_up), looked_up
"""


def run_alone(code):
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_only_the_first_thread_looks_for_libraries():
    """Another, while one imports a library, waits forever: each holds the lock that the other asks for."""
    run_alone(LOOKED_UP)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3))
def test_two_threads_of_a_new_process_do_not_wait_for_each_other(number):
    """The views import, compile and look for libraries at the same time; nothing is warm."""
    run_alone(
        "import warnings; warnings.simplefilter('ignore')\n"
        "import pdvi\n"
        f"adata = pdvi.datasets.tissue(300, n_genes=20, n_domains=3, seed={number})\n"
        "pdvi.tl.domains(adata, 3)\n"
        "assert adata.obs['domain'].notna().all()\n"
    )


def test_a_view_is_what_it_says():
    assert View("averages", 22) == VIEWS[0]
    assert FEATURES not in VIEWS
