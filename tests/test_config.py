"""The config: few numbers, and each of them changes what is done."""

import dataclasses
import inspect
import re
import sys
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from anndata import AnnData, read_h5ad

import pdvi
from pdvi.mixtures import CONFIG, Config, graph_estimators
from pdvi.mixtures import config as module
from pdvi.mixtures.fit_mixture import FitOptions, fit_mixture
from pdvi.mixtures.init import one_hot
from pdvi.mixtures.sharded_graph import ShardedGraph

FIELDS = [field.name for field in dataclasses.fields(Config)]
PACKAGE = Path(pdvi.__file__).parent
ELSEWHERE = "".join(file.read_text() for file in PACKAGE.rglob("*.py") if file != Path(inspect.getfile(module)))


def test_there_are_at_most_fifteen_numbers():
    assert len(FIELDS) <= 15
    assert all(type(getattr(CONFIG, name)) in (int, float) for name in FIELDS)


@pytest.mark.parametrize("name", FIELDS)
def test_every_number_is_explained_where_it_is_defined(name):
    assert re.search(rf"^    {name}: (int|float) = \S+  # \w.{{5,}}", inspect.getsource(module), re.MULTILINE)


def test_params_are_the_numbers_by_name():
    other = dataclasses.replace(CONFIG, tol=0.5)
    assert other.as_params() == {**CONFIG.as_params(), "tol": 0.5}
    assert list(other.as_params()) == FIELDS


@pytest.mark.parametrize(
    ("n_rows", "views", "patches"),
    [(2, 60_000, 1), (100, 1_200, 3), (3_000, 40, 8), (80_000, 1, 8), (80_001, 3, 8), (400_000, 2, 8), (10**7, 1, 8)],
)
def test_numbers_that_follow_the_number_of_rows(n_rows, views, patches):
    assert (Config().n_views(n_rows), Config().patches(n_rows)) == (views, patches)


def test_a_larger_budget_has_more_views_and_larger_groups_cost_less():
    assert dataclasses.replace(CONFIG, budget=10_000).n_views(5_000) == 2
    assert dataclasses.replace(CONFIG, group_above=1_000, budget=1_000, group_size=4).n_views(2_000) == 2
    assert dataclasses.replace(CONFIG, n_patches=3).patches(10_000) == 3


# -------------------------------------------------------------------------------- each number changes what is done


def clouds(n=400):
    rng = np.random.default_rng(0)
    places = rng.uniform(size=(n, 2))
    X = np.column_stack([3 * (places[:, 0] > 0.5), 2 * (places[:, 1] > 0.6)]) + rng.normal(size=(n, 2))
    return X, places


def potts(**changed):
    X, places = clouds()
    config = dataclasses.replace(CONFIG, **changed)
    return pdvi.PottsMixture(3, random_state=0, config=config).fit(X, coordinates=places)


def by_patches(value):
    return len(potts(n_patches=value).result_.local_params)


def by_types(value):
    X, places = clouds()
    mixture = pdvi.TwoLevelMixture(2, random_state=0, config=dataclasses.replace(CONFIG, n_types=value))
    return len(mixture.fit(X, coordinates=places).means_)


def by_epochs(value):
    X, places = clouds()
    start = one_hot(np.arange(len(X)) % 3, 3)
    options = FitOptions(config=dataclasses.replace(CONFIG, **value))
    graph = pdvi.graphs.nearest(places, 6).astype(float)
    fitted = fit_mixture(X, ShardedGraph(len(X), graph, places, n_shards=4), start, options)
    return float(fitted.result.trace["epoch"].iloc[-1])


def test_the_number_of_patches_is_that_of_the_shards():
    assert [by_patches(value) for value in (2, 5)] == [2, 5]


def test_the_number_of_types_is_that_of_a_hierarchical_mixture():
    assert [by_types(value) for value in (4, 7)] == [4, 7]


def test_a_fit_ends_when_the_epochs_do_or_where_it_gains_too_little():
    assert by_epochs({"max_epochs": 3, "tol": 0.0}) == 3
    assert by_epochs({"tol": 1e-1}) < by_epochs({"tol": 1e-6}) <= CONFIG.max_epochs


def test_above_its_limit_a_tissue_begins_with_groups_of_the_given_size(monkeypatch):
    sizes = []

    def told(X, graph, places, size):
        sizes.append((len(X), size))
        return coarsen(X, graph, places, size)

    coarsen = graph_estimators.coarsen
    monkeypatch.setattr(graph_estimators, "coarsen", told)
    potts()
    assert not sizes
    potts(group_above=100, group_size=5)
    assert sizes == [(400, 5)]  # 80 groups are few enough


# What `tl.domains` and its relatives use is looked up: fits of their own for each number would take minutes.
@pytest.mark.parametrize("name", FIELDS)
def test_every_number_is_read_outside_its_own_file(name):
    """By its name, or by a method of the config that reads it."""
    methods = {method: inspect.getsource(getattr(Config, method)) for method in ("n_views", "patches")}
    called = [method for method, source in methods.items() if re.search(rf"self\.{name}\b", source)]
    assert any(re.search(rf"\bconfig\.{one}\b", ELSEWHERE) for one in (name, *called))


@pytest.mark.slow
def test_the_config_that_was_used_is_kept_in_the_file(tmp_path):
    tissue = pdvi.datasets.tissue_features(400, n_features=5, n_domains=3, patchiness=5, seed=0)
    adata = AnnData(obs={"truth": tissue.labels.astype(str)})
    adata.obsm["X_neighborhood"], adata.obsm["places"] = tissue.X, tissue.coordinates
    adata.obsp["mine"] = pdvi.graphs.nearest(tissue.coordinates, 6)
    config = dataclasses.replace(CONFIG, max_epochs=50, budget=800)
    how = {"graph_key": "mine", "spatial_key": "places", "config": config}
    copied = pdvi.tl.domains(adata, 3, copy=True, **how)
    assert list(adata.obs) == ["truth"]
    assert not adata.uns
    assert list(copied.obs["domain"].cat.categories) == ["1", "2", "3"]
    copied.write_h5ad(tmp_path / "out.h5ad")
    params = read_h5ad(tmp_path / "out.h5ad").uns["domain"]["params"]
    assert {name: np.asarray(value).item() for name, value in params["config"].items()} == config.as_params()
    assert params["n_init"] == 2  # the budget over the rows
    assert params["spatial_key"] == "places"
    assert pdvi.tl.domains(adata, 3, **how) is None
    np.testing.assert_array_equal(adata.obs["domain"], copied.obs["domain"])


class Told(Config):
    """A config that remembers which of its numbers were asked for."""

    asked: ClassVar[set[str]] = set()

    def __getattribute__(self, name):
        if name in FIELDS and sys._getframe(1).f_code.co_name not in (
            "as_params",
            "_asdict_inner",
            "replace",
            "_replace",
            "__hash__",
            "__eq__",
        ):
            Told.asked.add(name)
        return super().__getattribute__(name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:made what was missing")
def test_the_views_of_a_slide_ask_for_their_numbers():
    tissue = pdvi.datasets.tissue(600, n_domains=3, seed=0)
    Told.asked.clear()
    pdvi.tl.domains(tissue, 3, config=Told(budget=3_000))
    few = {"max_epochs", "tol", "n_patches", "kmeans_runs", "budget", "n_components", "group_above"}
    assert few <= Told.asked
    assert "held_out_gain" not in Told.asked  # the number of domains is given
    pdvi.tl.domains(tissue, 3, config=Told(group_above=300, group_size=2), key_added="grouped")
    assert "group_size" in Told.asked


def test_groups_have_at_least_two_rows():
    with pytest.raises(ValueError, match="`group_size` must be a whole number of at least 2, got 1"):
        Config(group_size=1)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_groups_are_never_fewer_than_domains():
    adata = pdvi.datasets.tissue(200, n_genes=30, n_domains=3, seed=0)
    pdvi.tl.domains(adata, 30, views=1, n_init=1, config=Config(group_above=20, max_epochs=3))
    assert adata.obs["domain"].cat.categories.size == 30
