"""Any shapes, sizes, types and arguments: a finite, valid answer, or one clear error.

``make fuzz`` looks at more of them. Shapes that are compiled for come from short lists, so that it does not take hours.
"""

import warnings

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import scipy.sparse as sp
from anndata import AnnData
from hypothesis import given, settings
from hypothesis import strategies as st

import pdvi
from pdvi import graphs
from pdvi._base import checks
from pdvi.shards.partition import along_curve, layout, median_cuts
from pdvi.shards.stacking import stack

pytestmark = pytest.mark.slow

COMPILED = settings(max_examples=max(4, settings().max_examples // 5))  # what is compiled for takes longer
SHAPES = [(2, 1), (40, 3)]
BUDGETS = ["batch_size", "max_epochs", "max_steps", "tol", "grad_tol", "seed", "log_every", "max_seconds"]
odd = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 5),
    st.sampled_from([2**31, 2**63, -(2**63)]),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([object, np.float32(2), np.int8(3), np.nan, np.array([1, 2]), {}]),
)


def attempted(call, *names):
    """Return the answer; None if it was refused, with a message of one line that names one of the arguments."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return call()
    except (ValueError, TypeError) as error:
        text = str(error)
        assert any(name in text for name in names), text
        return None


@st.composite
def matrices(draw, shapes=SHAPES):
    """Rows of any unit and type: spread out, repeated, constant, with an outlier."""
    shape = draw(st.sampled_from(shapes))
    rows = np.random.default_rng(draw(st.integers(0, 2**32 - 1))).normal(size=shape)
    kind = draw(st.sampled_from(["plain", "repeated", "constant", "binary", "outlier", "far"]))
    if kind == "repeated":
        rows = rows[np.arange(len(rows)) % 2]
    elif kind == "constant":
        rows[:, -1] = 0.1
    elif kind == "binary":
        rows = (rows > 0).astype(float)
    elif kind == "outlier":
        rows[0] = 1e8
    elif kind == "far":
        rows += 1e5
    rows = rows * 10.0 ** draw(st.integers(-20, 18))
    return rows.astype(draw(st.sampled_from([np.float64, np.float32])))


@given(value=odd, least=st.integers(-2, 3), most=st.one_of(st.none(), st.integers(3, 9)))
def test_checks_return_what_is_right_or_say_what_is_wrong(value, least, most):
    found = attempted(lambda: checks.whole("count", value, least=least, most=most), "`count` must be")
    assert found is None or (type(found) is int and found >= least and (most is None or found <= most))
    for check in (checks.positive, checks.at_least, checks.share):
        found = attempted(lambda check=check: check("size", value), "`size` must be")
        assert found is None or (np.isfinite(found) and found >= 0)
    attempted(lambda: checks.wholes("cells", value, n=2), "`cells` must be")
    attempted(lambda: checks.seed("seed", value), "`seed` must be")


@given(
    coordinates=hnp.arrays(
        st.sampled_from([np.float64, np.float32]),
        st.tuples(st.integers(1, 30), st.integers(2, 3)),
        elements=st.floats(-1e6, 1e6, width=32),
    ),
    k=st.integers(-1, 12),
    mutual=st.booleans(),
    radius=st.floats(),
)
def test_graphs_are_symmetric_without_loops(coordinates, k, mutual, radius):
    for graph in (
        attempted(lambda: graphs.nearest(coordinates, k, mutual=mutual), "`k`", "`coordinates`"),
        attempted(lambda: graphs.within(coordinates, radius), "`radius`", "`coordinates`"),
    ):
        if graph is not None:
            assert graph.shape == (len(coordinates),) * 2
            assert (graph != graph.T).nnz == 0
            assert not graph.diagonal().any()
            assert (graph.data > 0).all()


@given(n_rows=st.integers(1, 200), n_patches=st.integers(-1, 40), same=st.booleans(), seed=st.integers(0, 99))
def test_patches_are_a_partition(n_rows, n_patches, same, seed):
    coordinates = np.random.default_rng(seed).normal(size=(n_rows, 2)) * (not same)
    patch = attempted(lambda: median_cuts(coordinates, n_patches), "`n_patches`")
    if patch is not None:
        sizes = np.bincount(patch, minlength=n_patches)
        assert np.ptp(sizes) <= 1
        where = layout(patch, along_curve(coordinates))
        values = np.arange(n_rows)
        np.testing.assert_array_equal(where.unshard(where.shard(values)), values)


@given(sizes=st.lists(st.integers(0, 5), max_size=5), value=st.sampled_from([0.0, np.nan, np.inf]))
def test_shards_of_any_sizes_are_masked_or_refused(sizes, value):
    shards = [{"x": np.full((size, 2), 1.0)} for size in sizes]
    if shards and sizes[-1]:
        shards[-1]["x"][-1, 0] += value
    stacked = attempted(lambda: stack(shards), "shard")
    if stacked is not None:
        arrays, rows = stacked
        assert np.isfinite(arrays["x"]).all()
        assert rows is None or np.asarray(arrays["mask"]).sum() == sum(sizes)


@COMPILED
@given(
    X=matrices(),
    k=st.integers(1, 4),
    covariance=st.sampled_from(["diagonal", "tied"]),
    kind=st.sampled_from([None, None, "full", "diag", "spherical"]),
)
def test_a_mixture_of_any_rows(X, k, covariance, kind):
    mixture = pdvi.GaussianMixture(k, covariance=covariance, covariance_type=kind, max_epochs=8, random_state=0)
    check_mixture(attempted(lambda: mixture.fit(X), "n_components", "X"), X, k)


@COMPILED
@given(X=matrices(), k=st.integers(1, 3), beta=st.sampled_from([0.0, 1.0, 1e6]), seed=st.integers(0, 99))
def test_a_potts_mixture_of_any_rows_and_graph(X, k, beta, seed):
    dense = np.triu(np.random.default_rng(seed).random((len(X), len(X))) < 0.2, 1).astype(float)
    mixture = pdvi.PottsMixture(k, beta=beta, max_epochs=8, random_state=0)
    check_mixture(attempted(lambda: mixture.fit(X, graph=sp.csr_array(dense + dense.T)), "n_components", "X"), X, k)


def check_mixture(mixture, X, k):
    if mixture is None:
        assert k > len(X)
        return
    assert set(mixture.labels_) <= set(range(k))
    for values in (mixture.means_, mixture.covariances_, mixture.weights_, mixture.elbo_):
        assert np.isfinite(values).all()


@given(
    name=st.sampled_from(
        ["batch_size", "max_epochs", "max_steps", "tol", "grad_tol", "seed", "log_every", "max_seconds"]
    ),
    value=odd,
)
def test_a_fit_with_any_argument(name, value):
    problem = pdvi.datasets.quadratic(n=6, dim_local=2, dim_global=2, condition=5, seed=0)
    call = {"batch_size": 2, "max_epochs": 1, "executor": "memory", name: value}
    if name == "max_epochs" and isinstance(value, float | int) and value > 9:
        return  # would be right, and take long
    result = attempted(lambda: pdvi.fit(problem, "pdvi", **call), f"`{name}`")
    assert result is None or np.isfinite(result.objective)


FACADES = {
    "n_neighbors": pdvi.gr.knn_graph,
    "tau": pdvi.gr.knn_graph,
    "radius": pdvi.gr.radius_graph,
    "n_patches": pdvi.gr.partition,
    "cells": pdvi.gr.partition,
    "own": pdvi.pp.neighborhood,
    "gradient": pdvi.pp.neighborhood,
    "n_components": pdvi.pp.neighborhood,
    "clip": pdvi.pp.prepare,
    "n_genes": pdvi.pp.prepare,
}


@given(name=st.sampled_from(list(FACADES)), value=odd, seed=st.integers(0, 9))
def test_a_facade_with_any_argument(name, value, seed):
    rng = np.random.default_rng(seed)
    adata = AnnData(rng.poisson(3.0, size=(12, 6)).astype(np.float32))
    adata.obsm.update({"spatial": rng.uniform(size=(12, 2)), "X_pca": rng.normal(size=(12, 3))})
    before = {name: array.copy() for name, array in adata.obsm.items()}

    def call():
        FACADES[name](adata, **{name: value})
        return adata

    answer = attempted(call, f"`{name}`", "`n_patches`")  # whose default is more than these spots
    if answer is None:
        assert set(adata.obsm) == set(before)
        assert not adata.obsp
    else:
        assert all(np.isfinite(np.asarray(part, float)).all() for part in answer.obsm.values())
    for kept in ("spatial", *(["X_pca"] if FACADES[name] is not pdvi.pp.prepare else [])):
        np.testing.assert_array_equal(adata.obsm[kept], before[kept])


@pytest.mark.parametrize("score", [pdvi.metrics.ari, pdvi.metrics.nmi])
@given(labels=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=30))
def test_agreement_is_symmetric_and_at_most_one(score, labels):
    a, b = np.array(labels).T
    assert score(a, b) == pytest.approx(score(b, a), abs=1e-9)
    assert score(a, b) <= 1 + 1e-9
    assert score(a, a) == pytest.approx(1)
