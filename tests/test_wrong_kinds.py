"""Values of the wrong kind: each is told with the argument, what is wanted and what was given; names are understood."""

import dataclasses
import re
from functools import cache

import jax
import numpy as np
import pytest
from anndata import AnnData

import pdvi
from pdvi import Status, report
from pdvi.executors import Disk, Memory
from pdvi.run.settings import executor_for, solver_for

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 3))


@cache
def problem():
    return pdvi.datasets.quadratic(n=12, condition=20, seed=0)


def fit(**settings):
    solver = settings.pop("solver", pdvi.P2DVI())
    return pdvi.fit(problem(), solver, **{"batch_size": 3, "max_epochs": 2, "tol": 0, **settings})


def slide(**obsm):
    return AnnData(np.ones((40, 5), np.float32), obsm={"spatial": RNG.normal(size=(40, 2)), **obsm})


class SpatialData:
    """Named as the class of the library of that name."""


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: pdvi.fit(None, pdvi.P2DVI()), TypeError, "`problem` must be a pdvi.Problem, got NoneType None"),
        (lambda: fit(sampling=5), TypeError, "`sampling` must be a way to draw shards such as .*Uniform.*, got int 5"),
        (lambda: fit(sampling=pdvi.sampling.Uniform), TypeError, "`sampling` must be .*, got Uniform itself"),
        (lambda: fit(checkpoint=5), TypeError, "`checkpoint` must be a path, or a Checkpoint, got int 5"),
        (lambda: fit(checkpoint=pdvi.Checkpoint(5)), TypeError, "`path` must be the path of a file, got int 5"),
        (lambda: fit(checkpoint=pdvi.Checkpoint("x", "1")), TypeError, "`every_seconds` must be .*, got str '1'"),
        (lambda: fit(tol="a"), ValueError, "`tol` must be at least 0 and finite, got 'a'"),
        (lambda: fit(seed=2**63), ValueError, f"`seed` must be between 0 and {2**32 - 1}, got {2**63}"),
        (lambda: fit(max_steps=1.5), ValueError, "`max_steps` must be a whole number of at least 1, got 1.5"),
        (lambda: fit(max_epochs="3"), ValueError, "`max_epochs` must be positive and finite, got '3'"),
        (lambda: fit(callbacks=print), TypeError, r"`callbacks` must be a list .*; give it as \[function\]"),
        (lambda: fit(callbacks=[3]), TypeError, r"`callbacks` must be a list of functions .*, got \[3\]"),
        (lambda: fit(solver="p3dvi"), ValueError, r"`solver` must be one of \('pdvi', 'p2dvi', .*\), .* got 'p3dvi'"),
        (lambda: fit(solver=pdvi.P2DVI), TypeError, r"`solver` must be .*, got P2DVI itself; call it: P2DVI\(\)"),
        (lambda: fit(executor="moon"), ValueError, r"`executor` must be one of \('memory', 'disk', 'dask'\), .*'moon'"),
        (lambda: fit(executor=Memory), TypeError, r"`executor` must be .*, got Memory itself; call it: Memory\(\)"),
        (lambda: fit(executor=0), TypeError, "`executor` must be an executor such as .*, got int 0"),
        (lambda: fit(executor=""), ValueError, "`executor` must be one of .*, got ''"),
        (lambda: fit(executor=False), TypeError, "`executor` must be an executor such as .*, got bool False"),
        (lambda: fit(executor="dask"), ValueError, "`executor='dask'` needs a client.*; give pdvi.Dask"),
        (lambda: pdvi.tune(None, pdvi.SVI(), ("rate",)), TypeError, "`problem` must be a pdvi.Problem, got NoneType"),
        (lambda: pdvi.tune(problem(), 3, ("rate",)), TypeError, "`solver` must be a solver .*, got int 3"),
        (lambda: mixture(solver=3), TypeError, "`solver` must be a solver such as .*, got int 3"),
        (lambda: mixture(tol="a"), ValueError, "`tol` must be at least 0 and finite, got 'a'"),
        (lambda: mixture(max_epochs=1.5), ValueError, "`max_epochs` must be a whole number of at least 1, got 1.5"),
        (lambda: mixture(config={}), TypeError, "`config` must be a .*Config, got dict"),
        (lambda: potts(beta="1"), ValueError, "`beta` must be at least 0 and finite, got '1'"),
        (lambda: potts(temperature="2"), ValueError, "`temperature` must be positive.*, got '2'"),
        (lambda: potts(n_patches=2.5), ValueError, "`n_patches` must be between 1 and .*, got 2.5; give a"),
        (lambda: pdvi.tl.domains(slide(), 4.0), ValueError, "`n_domains` must be between 2 and .*, got 4.0; give"),
        (lambda: pdvi.tl.domains(slide(), 4, seed=2**63), ValueError, "`seed` must be between 0 and"),
        (lambda: pdvi.tl.domains(slide(), 4, seed="a"), ValueError, "`seed` must be between 0 and .*, got 'a'"),
        (lambda: pdvi.tl.domains(slide(), 4, config=None), TypeError, "`config` must be a pdvi.mixtures.Config"),
        (lambda: pdvi.tl.domains(slide(), 4, graph_key=["a"]), TypeError, "`graph_key` must be the name of an"),
        (lambda: report.page(slide(), key=["a"]), TypeError, "`key` must be the name of an entry, got list"),
        (lambda: pdvi.gr.knn_graph(slide(), tau=1e300), ValueError, r"`tau` must be at most 1e\+15, got 1e\+300"),
        (lambda: potts(temperature=1e300), ValueError, r"`temperature` must be at most 1e\+15, got 1e\+300"),
        (lambda: potts(graph="a"), ValueError, "`graph` must be a matrix of edge weights, .*; give a sparse matrix"),
        (lambda: mixture(random_state=[]), ValueError, r"`random_state` must be a whole number, .*, got \[\]"),
        (lambda: mixture(n_init=2**63), ValueError, "`n_init` must be between 1 and 10000, got"),
        (lambda: pdvi.tl.domains(SpatialData(), 4), TypeError, "`adata` must be an AnnData, .*; give its table"),
        (lambda: pdvi.tl.choose_n_domains(slide(), 5), TypeError, "`candidates` must be a list .*, got int 5"),
        (lambda: pdvi.tl.choose_n_domains(slide(), "ab"), ValueError, "`candidates` must be whole .*, got 'ab'"),
        (lambda: pdvi.tl.choose_n_domains(slide(), [2.5]), ValueError, r"`candidates` must be whole .*, got \[2.5\]"),
        (lambda: pdvi.pp.spatial_components(slide(), seed="a"), ValueError, "`seed` must be between 0 and"),
        (lambda: pdvi.write_store("x", SpatialData(), n_domains=2), TypeError, "`data` must be .*; give its table"),
        (lambda: pdvi.write_store("x", 5, n_domains=2), TypeError, "`data` must be .*, got int 5"),
    ],
)  # fmt: skip
def test_a_wrong_kind_is_named(call, kind, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kind, match=f"^{message}") as raised:
        call()
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir())


def mixture(**settings):
    return pdvi.GaussianMixture(**{"n_components": 2, "random_state": 0, **settings}).fit(X)


def potts(**settings):
    graph = settings.pop("graph", np.eye(40, k=1) + np.eye(40, k=-1))
    return pdvi.PottsMixture(**{"n_components": 2, "random_state": 0, **settings}).fit(X, graph=graph)


@pytest.mark.parametrize("name", ["PDVI", "p2dvi", "P2D-VI", "svi", "cavi", "memoized", "MemoizedVB", "adam"])
def test_solvers_have_names(name):
    assert type(solver_for(name)).__name__.lower().startswith(name.lower().replace("-", ""))


def test_executors_have_names():
    assert isinstance(executor_for("memory", problem()), Memory)
    assert isinstance(executor_for("Disk", problem()), Disk)


def test_a_run_by_names_is_the_same_run(tmp_path):
    pdvi.write_store(tmp_path / "store", problem())
    stored = pdvi.Problem.from_store(tmp_path / "store")
    by_name = pdvi.fit(stored, "p2dvi", executor="disk", batch_size=3, max_epochs=2)
    by_hand = pdvi.fit(stored, pdvi.P2DVI(), executor=Disk(), batch_size=3, max_epochs=2)
    assert by_name.objective == by_hand.objective
    assert mixture(solver="cavi").elbo_ == mixture(solver=pdvi.CAVI()).elbo_


@pytest.mark.parametrize("answer", [True, np.True_])
def test_a_callback_ends_a_run_with_either_true(answer):
    assert fit(callbacks=[lambda progress: answer]).status is Status.STOPPED


@pytest.mark.parametrize("answer", [None, 1, np.False_, np.ones(3)])
def test_a_callback_that_returns_something_else_does_not(answer):
    assert fit(callbacks=[lambda progress: answer]).status is Status.MAX_EPOCHS


def with_nan(array):
    array = np.array(array)
    array.flat[-1] = np.nan
    return array


def test_nan_in_a_state_is_refused_at_once():
    done = fit()
    floats = [name for name, value in done.state.items() if np.asarray(value).dtype.kind == "f" and np.size(value)]
    assert len(floats) >= 3
    for name in floats:
        broken = dataclasses.replace(done, state={**done.state, name: with_nan(done.state[name])})
        with pytest.raises(ValueError, match=rf"`start` must be free of NaN: '{re.escape(name)}' has 1 of .*; give"):
            fit(start=broken, max_epochs=4)
    broken = dataclasses.replace(done, local_params=jax.tree.map(with_nan, done.local_params))
    for start in (broken, broken.point):
        with pytest.raises(ValueError, match="`start` must be free of NaN: 'local_params' has 1 of"):
            fit(start=start, max_epochs=4)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (with_nan(X), "'X_pca' in obsm must be finite: 1 of 120 values are NaN or infinite"),
        (X.astype(str), "'X_pca' in obsm must hold numbers"),
    ],
)
def test_a_store_refuses_what_memory_refuses(features, message, tmp_path):
    adata = slide(X_pca=features)
    adata.obsp["potts_weights"] = np.eye(40, k=1) + np.eye(40, k=-1)
    with pytest.raises(ValueError, match=message):
        pdvi.write_store(tmp_path / "store", adata, n_domains=2)
    assert not list(tmp_path.iterdir())


def test_a_store_has_no_more_domains_than_spots_and_takes_dense_graphs(tmp_path):
    adata = slide(X_pca=X)
    adata.obsp["potts_weights"] = np.eye(40, k=1) + np.eye(40, k=-1)
    with pytest.raises(ValueError, match=r"`n_domains` must be between 1 and the number of spots \(40\), got 50"):
        pdvi.write_store(tmp_path / "store", adata, n_domains=50)
    with pytest.raises(ValueError, match=f"`seed` must be between 0 and {2**32 - 1}, got -1"):
        pdvi.write_store(tmp_path / "store", adata, n_domains=2, seed=-1)
    pdvi.write_store(tmp_path / "store", adata, n_domains=2)
    assert pdvi.Problem.from_store(tmp_path / "store").n_shards == 1
