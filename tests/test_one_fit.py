"""Domains are found by calls of `fit` alone, whatever the size and wherever the rows are; nothing loops around it."""

import anndata as ad
import numpy as np
import pytest

import pdvi
from pdvi.core.result import Status
from pdvi.mixtures import Config, fit_mixture
from pdvi.spatial import streaming
from pdvi.spatial.views import VIEWS

pytestmark = pytest.mark.filterwarnings("ignore:made what was missing", "ignore:this slide does not fit")
IN_GROUPS = Config(group_above=300, group_size=4)


class Calls(list):
    """What `fit` was called with, and what it returned."""

    def watch(self, fit):
        def watched(problem, solver, **settings):
            result = fit(problem, solver, **settings)
            if settings["max_epochs"] > 1:  # one epoch: a program is compiled ahead
                self.append((problem, solver, settings, result))
            return result

        return watched

    @property
    def solvers(self):
        return {type(solver) for _, solver, _, _ in self}

    @property
    def statuses(self):
        return {result.status for *_, result in self}

    @property
    def rows(self):
        """How many rows each call saw."""
        return [round(float(problem.model.n_rows)) for problem, *_ in self]


@pytest.fixture
def calls(monkeypatch):
    found = Calls()
    for module in (fit_mixture,):
        monkeypatch.setattr(module, "fit", found.watch(module.fit))
    return found


def slide(n=500, **settings):
    return pdvi.datasets.tissue(n, n_genes=40, n_domains=3, seed=0, **settings)


def test_every_view_is_a_call_of_fit_with_p2dvi(calls):
    adata = slide()
    pdvi.tl.domains(adata, 3)
    assert len(VIEWS) <= len(calls) <= 6 * len(VIEWS)
    assert set(calls.rows) == {500}
    assert calls.solvers == {pdvi.P2DVI}
    assert all(problem.n_shards > 1 for problem, *_ in calls)  # patches
    kept = {result.objective for *_, result in calls}
    assert {-elbo for elbo in adata.uns["domain"]["views"]["elbo"]} <= kept


def test_a_single_view_is_one_call_for_each_start(calls):
    pdvi.tl.domains(slide(), 3, views=1, n_init=2)
    assert 2 <= len(calls) <= 6
    assert calls.solvers == {pdvi.P2DVI}


def test_a_large_tissue_is_seen_in_groups_and_then_fitted_by_one_more_call(calls):
    pdvi.tl.domains(slide(1_000), 3, views=2, config=IN_GROUPS)
    assert calls.rows.count(250) >= 2  # groups of four, by two views
    assert set(calls.rows) == {250, 1_000}
    assert calls.rows[-1] == 1_000
    assert calls.solvers == {pdvi.P2DVI}


def test_rows_in_blocks_and_from_a_store_are_fitted_by_the_same_calls(calls, tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "SHARD_ROWS", 100)  # a store of ten shards
    slide(1_000).write_h5ad(tmp_path / "slide.h5ad")
    in_blocks = ad.read_h5ad(tmp_path / "slide.h5ad", backed="r")
    pdvi.tl.domains(in_blocks, 3, views=1, n_init=1)
    assert set(calls.rows) == {1_000}
    assert calls.solvers == {pdvi.P2DVI}
    calls.clear()
    from_store = ad.read_h5ad(tmp_path / "slide.h5ad", backed="r")
    pdvi.tl.domains(from_store, 3, views=1, n_init=1, config=IN_GROUPS, executor=pdvi.Disk())
    assert calls.solvers == {pdvi.P2DVI}
    problem, _, settings, result = calls[-1]
    assert problem.store is not None
    assert problem.n_shards == 10
    assert isinstance(settings["executor"], pdvi.Disk)
    assert calls.rows[-1] == 1_000
    assert result.status is Status.CONVERGED
    labels = [np.asarray(one.obs["domain"]).astype(str) for one in (in_blocks, from_store)]
    assert pdvi.metrics.ari(*labels) > 0.9


@pytest.mark.parametrize(("solver", "kind"), [("cavi", pdvi.CAVI), (pdvi.MemoizedVB(), pdvi.MemoizedVB)])
def test_the_solver_is_that_of_the_user(calls, solver, kind):
    adata = slide()
    pdvi.tl.domains(adata, 3, views=2, solver=solver)
    assert calls.solvers == {kind}
    if kind.full_batch:
        assert all(settings["batch_size"] == problem.n_shards for problem, _, settings, _ in calls)
    assert pdvi.metrics.ari(adata.obs["truth"], adata.obs["domain"]) > 0.5


def test_other_solvers_find_the_same_domains():
    found = {}
    for solver in ("p2dvi", "cavi", "memoized"):
        adata = slide()
        pdvi.tl.domains(adata, 3, views=1, n_init=1, solver=solver)
        found[solver] = adata.uns["domain"]["elbo"], adata.obs["domain"]
    best = max(elbo for elbo, _ in found.values())
    for elbo, labels in found.values():
        assert elbo == pytest.approx(best, rel=5e-3)
        assert pdvi.metrics.ari(found["p2dvi"][1], labels) > 0.9


@pytest.mark.parametrize("seed", [0, 1])
def test_with_samples_every_view_converges(calls, seed):
    adata = pdvi.datasets.tissue(800, n_genes=60, n_domains=3, n_samples=2, seed=seed)
    pdvi.tl.domains(adata, 3, sample_key="sample")
    fit = adata.uns["domain"]
    assert fit["status"] == str(Status.CONVERGED)
    assert np.isfinite(fit["elbo"])
    assert fit["views"]["converged"].all()
    assert np.isfinite(fit["views"]["elbo"]).all()
    assert calls.statuses == {Status.CONVERGED}
    offsets = [result.global_params["offset"] for *_, result in calls]
    assert all(offset.shape[0] == 2 and np.isfinite(offset).all() for offset in offsets)


def test_another_slide_is_labeled_by_one_call_for_each_view_of_averages(calls):
    fitted, other = slide(), slide(300)
    pdvi.tl.domains(fitted, 3)
    calls.clear()
    pdvi.tl.annotate(other, fitted)
    assert len(calls) == sum(view.kind == "averages" for view in VIEWS)
    assert calls.solvers == {pdvi.P2DVI}
    assert calls.statuses == {Status.CONVERGED}
