"""The recipe: every number is used, explained, and kept with the answer."""

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import pdvi
from pdvi.mixtures import RECIPE, Recipe, kinds
from pdvi.mixtures.task import Task

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/how-domains-decides.md").read_text()
SOURCES = "".join(file.read_text() for file in Path(pdvi.__file__).parent.rglob("*.py"))
FIELDS = [field.name for field in dataclasses.fields(Recipe)]


@pytest.mark.parametrize("name", FIELDS)
def test_every_number_is_on_the_page_with_its_value(name):
    said = re.search(rf"`{name}`[\s,]*\(?([\d.,e-]*\d( %)?)", PAGE)
    assert said, f"docs/how-domains-decides.md does not say `{name}` (value)"
    text = said.group(1)
    value = float(text.removesuffix(" %").replace(",", "")) / (100 if text.endswith("%") else 1)
    assert value == pytest.approx(getattr(RECIPE, name))


@pytest.mark.parametrize("name", FIELDS)
def test_every_number_is_used(name):
    assert re.search(rf"(recipe|self|RECIPE)\.{name}\b", SOURCES)


def test_the_links_of_the_page_lead_somewhere():
    targets = re.findall(r"\]\(([^)]+)\)", PAGE)
    assert targets
    for target in targets:
        assert (ROOT / "docs" / target).resolve().exists(), target


@pytest.mark.parametrize(
    ("n_rows", "starts", "patches", "shards"),
    [(2, 6, 1, 1), (3_639, 6, 32, 7), (50_000, 2, 32, 100), (10**6, 1, 32, 100)],
)
def test_numbers_that_follow_the_number_of_rows(n_rows, starts, patches, shards):
    assert (RECIPE.starts(n_rows), RECIPE.patches(n_rows), RECIPE.shards(n_rows)) == (starts, patches, shards)


@pytest.mark.parametrize(
    ("n_rows", "views"),
    [(3_000, 40), (15_000, 8), (80_000, 1), (80_001, 3), (154_000, 3), (400_000, 2), (10_000_000, 1)],
)
def test_a_tissue_that_is_seen_in_groups_has_a_few_views(n_rows, views):
    assert Recipe().views(n_rows) == views


def test_params_are_flat_numbers():
    assert list(RECIPE.as_params()) == FIELDS
    assert all(type(value) in (int, float) for value in RECIPE.as_params().values())


def test_the_recipe_that_was_used_is_kept_in_the_file(tmp_path):
    tissue = pdvi.datasets.tissue_features(400, n_features=5, n_domains=3, patchiness=5, seed=0)
    from anndata import AnnData, read_h5ad

    adata = AnnData(obs={"truth": tissue.labels.astype(str)})
    adata.obsm["X_neighborhood"], adata.obsm["places"] = tissue.X, tissue.coordinates
    adata.obsp["mine"] = pdvi.graphs.nearest(tissue.coordinates, 6)
    recipe = dataclasses.replace(RECIPE, round_epochs=5, most_starts=2)
    copied = pdvi.tl.domains(adata, 3, graph_key="mine", spatial_key="places", recipe=recipe, copy=True)
    assert list(adata.obs) == ["truth"]
    assert not adata.uns
    assert list(copied.obs["domain"].cat.categories) == ["1", "2", "3"]
    copied.write_h5ad(tmp_path / "out.h5ad")
    params = read_h5ad(tmp_path / "out.h5ad").uns["domain"]["params"]
    assert {name: np.asarray(value).item() for name, value in params["recipe"].items()} == recipe.as_params()
    assert params["n_init"] == 2
    assert params["spatial_key"] == "places"
    assert pdvi.tl.domains(adata, 3, graph_key="mine", spatial_key="places", recipe=recipe) is None
    np.testing.assert_array_equal(adata.obs["domain"], copied.obs["domain"])


@pytest.mark.parametrize(
    ("n_rows", "n_domains", "runs", "rows"),
    [
        (3_600, 7, RECIPE.kmeans_runs, 7 * RECIPE.kmeans_view_rows),  # all runs: some rows a domain
        (3_600, 100, RECIPE.kmeans_runs, RECIPE.kmeans_rows),  # many domains: no more than ever
        (19_300, 7, 2, RECIPE.kmeans_rows),  # few runs: each looks at all
    ],
)
def test_k_means_of_a_view_looks_at_few_rows_only_where_it_has_all_its_runs(monkeypatch, n_rows, n_domains, runs, rows):
    class Asked(Exception):
        pass

    def asked(X, n_components, *, seed, recipe, runs, subsample):
        raise Asked(runs, subsample)

    monkeypatch.setattr(kinds, "empirical_bayes", asked)
    tries = SimpleNamespace(features=[np.zeros((n_rows, 2))], task=Task(n_domains))
    with pytest.raises(Asked) as found:
        kinds.OfAverages(tries, 0, seed=0).begin()
    assert found.value.args == (runs, rows)
