"""The public surface: these snippets are the contract and run as they stand."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import pdvi


def test_any_finite_sum_problem(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    problem = pdvi.datasets.quadratic(n=10_000, dim_local=5, dim_global=5, condition=1_000, seed=0)
    result = pdvi.fit(problem, pdvi.P2DVI(), batch_size=100, max_epochs=30, seed=0)
    assert set(result.global_params) == {"lam"}
    assert result.local_params.shape == (10_000, 5)
    assert isinstance(result.trace, pd.DataFrame)
    assert {"step", "epoch", "seconds", "objective", "grad_norm", "consensus"} <= set(result.trace)
    assert isinstance(result.converged, bool)
    assert "increase max_epochs" in str(result.status)
    result.save("run.zarr")
    again = pdvi.load_result("run.zarr")
    np.testing.assert_array_equal(again.global_params["lam"], result.global_params["lam"])


def test_solvers_with_step_sizes():
    pdvi.PDVI(eta=0.5)
    pdvi.P2DVI(eta={"mean": 0.02, "log_var": 0.2})
    data = pdvi.datasets.mixture(2_000, batch_size=200)
    solver = pdvi.P2DVI(eta={"mean": 0.02, "log_var": 0.2})
    trace = pdvi.fit(data.problem(), solver, max_epochs=5, tol=0).trace
    assert trace["objective"].iloc[-1] < trace["objective"].iloc[0]


def test_your_own_model():
    class Regression:
        def init_global(self, key):
            return {"slope": jnp.zeros(2)}

        def init_local(self, key, shard):
            return jnp.zeros(shard["y"].shape)

        def loss(self, local, globals_, shard):
            return jnp.sum((shard["y"] - local) ** 2 + (local - shard["x"] @ globals_["slope"]) ** 2)

    rng = np.random.default_rng(0)
    x = rng.standard_normal((20, 10, 2))
    shards = {"x": x, "y": x @ np.array([1.0, -2.0])}
    for form in (shards, [{name: value[b] for name, value in shards.items()} for b in range(20)]):
        problem = pdvi.Problem(Regression(), form)
        result = pdvi.fit(problem, pdvi.P2DVI(), max_epochs=50)
        np.testing.assert_allclose(result.global_params["slope"], [1, -2], atol=1e-2)


def test_mixtures():
    X = pdvi.datasets.mixture(3_000, batch_size=500).X
    gm = pdvi.GaussianMixture(n_components=5, random_state=0).fit(X)
    assert gm.means_.shape == (5, 10)
    assert gm.predict(X).shape == (3_000,)
    assert gm.predict_proba(X).shape == (3_000, 5)
    assert np.isfinite([gm.elbo_, gm.score(X)]).all()
    assert gm.n_iter_ >= 1
    assert gm.result_.trace is not None


@pytest.mark.parametrize(
    "name",
    ["PDVI", "P2DVI", "SVI", "PGSVI", "SNGVI", "SGD", "RMSProp", "Adam", "ControlVariates", "CAVI", "MemoizedVB"],
)
def test_every_solver_has_its_name(name):
    assert hasattr(pdvi.solvers, name)


def test_spatial_domains():
    import matplotlib

    matplotlib.use("Agg")
    adata = pdvi.datasets.tissue(n_spots=20_000, n_genes=500, n_domains=12, seed=0)
    pdvi.pp.prepare(adata)
    pdvi.pp.neighborhood(adata)
    pdvi.gr.knn_graph(adata)
    pdvi.tl.domains(adata, n_domains=12)
    assert {"domain", "domain_entropy"} <= set(adata.obs)
    assert adata.obsm["domain_probability"].shape == (20_000, 12)
    pdvi.pl.domains(adata)
    pdvi.pl.entropy(adata)
    pdvi.pl.trace(adata)
    matplotlib.pyplot.close("all")


def test_what_a_fit_does_not_need_is_imported_later():
    later = ("sklearn", "zarr", "scipy.stats", "optimistix", "anndata", "scanpy", "matplotlib", "distributed")
    code = f"""if True:
        import sys, pdvi
        assert "numpy" not in sys.modules
        pdvi.Problem, pdvi.fit, pdvi.tune, pdvi.load_result, pdvi.P2DVI, pdvi.Newton, pdvi.Memory, pdvi.Disk
        early = [name for name in {later} if name in sys.modules]
        assert not early, early"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_version_is_that_of_the_package():
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    assert pdvi.__version__ == project["version"]


def test_every_public_name_is_there_and_known_to_type_checkers():
    assert {name for name in pdvi.__all__ if hasattr(pdvi, name)} == set(pdvi.__all__) <= set(dir(pdvi))
    (block,) = (node for node in ast.parse(Path(pdvi.__file__).read_text()).body if isinstance(node, ast.If))
    seen = {alias.name: f"{node.module}.{alias.name}" for node in block.body for alias in node.names}
    assert seen == {name: where.replace(":", ".") for name, where in pdvi._LATER.items()}
    assert sorted(seen) == sorted(pdvi.__all__)
    with pytest.raises(AttributeError, match="module 'pdvi' has no attribute 'nothing'"):
        pdvi.nothing  # noqa: B018
