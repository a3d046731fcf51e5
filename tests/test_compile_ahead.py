"""Programs that are compiled while features are made are those that the fits need."""

import anndata
import numpy as np
import pytest

import pdvi
from pdvi._base import programs
from pdvi.spatial import compile_ahead

pytestmark = pytest.mark.filterwarnings("ignore:made what was missing")


@pytest.fixture
def prepared(monkeypatch):
    """Programs that are prepared from here on, as if the process were new."""
    found = []
    once = programs._CompiledOnce

    def count(lowered):
        found.append(lowered)
        return once(lowered)

    monkeypatch.setattr(programs, "_ready", {})
    monkeypatch.setattr(programs, "_CompiledOnce", count)
    monkeypatch.setattr(compile_ahead, "_started", set())
    return found


def slide(samples=1):
    parts = [pdvi.datasets.tissue(n_spots=400, n_genes=40, n_domains=4, seed=seed) for seed in range(samples)]
    adata = parts[0] if samples == 1 else anndata.concat(parts, index_unique="-")
    adata.obs["sample"] = np.repeat([f"s{number}" for number in range(samples)], 400)
    return adata


@pytest.mark.parametrize("samples", [1, 2])
def test_no_program_is_compiled_beside_those_of_the_views(prepared, samples):
    adata = slide(samples)
    key = "sample" if samples > 1 else None
    pdvi.tl.domains(adata, 4, sample_key=key)
    assert len(prepared) == 2  # views of averages, views of types
    labels = adata.obs["domain"].copy()
    again = slide(samples)
    pdvi.tl.domains(again, 4, sample_key=key)
    assert len(prepared) == 2
    assert (again.obs["domain"] == labels).all()


def test_features_of_the_user_and_other_solvers(prepared):
    adata = slide()
    adata.obsm["mine"] = np.random.default_rng(0).standard_normal((400, 5))
    pdvi.tl.domains(adata, 4, use_rep="mine")
    assert len(prepared) == 1
    pdvi.tl.domains(adata, 4, use_rep="mine", solver=pdvi.solvers.CAVI())
    assert len(prepared) == 2  # that of the fit alone


def test_what_goes_wrong_is_left_to_the_fit(prepared, monkeypatch):
    monkeypatch.setattr(compile_ahead, "fit_from", lambda *_: 1 / 0)
    adata = slide()
    pdvi.tl.domains(adata, 4)
    assert adata.obs["domain"].nunique() == 4


def test_a_tissue_in_groups_ends_with_a_program_that_is_there(prepared):
    adata = slide()
    config = pdvi.mixtures.Config(group_above=300, group_size=4)
    pdvi.tl.domains(adata, 4, config=config)
    assert len(prepared) == 2  # all spots and groups of them, by averages
