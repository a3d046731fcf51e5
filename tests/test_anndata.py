"""What the facades ask of an AnnData, where they look, and what they refuse."""

import anndata as ad
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

import pdvi
from pdvi import report
from pdvi._anndata import keys
from pdvi._anndata.checks import fit_of
from pdvi._anndata.read import read_slide

NAN = float("nan")


def slide(n=60, seed=0):
    """A slide with coordinates, components and labels, and coordinates under another name."""
    rng = np.random.default_rng(seed)
    adata = ad.AnnData(rng.poisson(2.0, (n, 12)).astype(np.float32))
    adata.obs_names = np.arange(n).astype(str)
    adata.obs["label"] = pd.Categorical(np.where(np.arange(n) % 2, "a", "b"))
    adata.obsm["spatial"] = rng.random((n, 2)) * 10
    adata.obsm["aligned"] = rng.random((n, 2)) * 10
    adata.obsm["X_pca"] = rng.standard_normal((n, 5)).astype(np.float32)
    adata.obsm["flow"] = rng.standard_normal((n, 2))
    return adata


# every facade with arguments that it takes
FACADES = {
    "prepare": lambda a, **o: pdvi.pp.prepare(a, **{"n_components": 3, "normalize": True} | o),
    "neighborhood": lambda a, **o: pdvi.pp.neighborhood(a, **{"n_neighbors": 4} | o),
    "knn_graph": lambda a, **o: pdvi.gr.knn_graph(a, **{"n_neighbors": 3} | o),
    "radius_graph": lambda a, **o: pdvi.gr.radius_graph(a, **{"radius": 2.0} | o),
    "flow_graph": lambda a, **o: pdvi.gr.flow_graph(a, **{"length": 3.0, "width": 1.0} | o),
    "flow": lambda a, **o: pdvi.gr.flow(a, **{"labels_key": "label", "n_neighbors": 10} | o),
    "partition": lambda a, **o: pdvi.gr.partition(a, **{"n_patches": 4} | o),
}
WRITES = {"prepare": "X_pca", "neighborhood": "X_neighborhood", "flow": "flow", "partition": "patch"}


def written(adata, name):
    key = WRITES.get(name, "potts_weights")
    place = adata.obs if key == "patch" else adata.obsp if key == "potts_weights" else adata.obsm
    found = place[key]
    return found.toarray() if hasattr(found, "toarray") else np.asarray(found)


@pytest.mark.parametrize("name", FACADES)
def test_a_copy_is_changed_in_place_of_the_slide(name):
    adata, untouched = slide(), slide()
    changed = FACADES[name](adata, copy=True)
    assert isinstance(changed, ad.AnnData)
    assert (set(adata.obs), set(adata.obsm), set(adata.obsp)) == (
        set(untouched.obs),
        set(untouched.obsm),
        set(untouched.obsp),
    )
    for key in untouched.obsm:
        np.testing.assert_array_equal(adata.obsm[key], untouched.obsm[key])
    assert FACADES[name](adata) is None
    np.testing.assert_array_equal(written(adata, name), written(changed, name))


def test_weights_of_a_copy():
    adata = slide()
    pdvi.gr.knn_graph(adata, n_neighbors=3)
    before = adata.obsp["potts_weights"].copy()
    changed = pdvi.gr.weights(adata, tau=3.0, copy=True)
    np.testing.assert_allclose(changed.obsp["potts_weights"].toarray(), 3 * before.toarray(), rtol=1e-5)
    assert (adata.obsp["potts_weights"] != before).nnz == 0


@pytest.mark.parametrize("name", [name for name in FACADES if name != "prepare"])
def test_coordinates_may_have_another_name(name):
    adata, renamed = slide(), slide()
    renamed.obsm["spatial"] = renamed.obsm["aligned"]
    FACADES[name](adata, spatial_key="aligned")
    FACADES[name](renamed)
    np.testing.assert_array_equal(written(adata, name), written(renamed, name))
    with pytest.raises(
        ValueError, match=r"'nowhere' not in adata.obsm \(it has .*\); put the spots' coordinates there"
    ):
        FACADES[name](adata, spatial_key="nowhere")


def test_maps_of_coordinates_with_another_name():
    adata = slide()
    ax = pdvi.pl.domains(adata, key="label", spatial_key="aligned")
    np.testing.assert_array_equal(ax.collections[0].get_offsets(), adata.obsm["aligned"])
    assert ax.get_ylim()[0] > ax.get_ylim()[1]  # downwards, as on an image
    plt.close(ax.figure)


class SpatialData:
    """A stand-in: only the name of the class is looked at."""


WRONG_KINDS = {
    "SpatialData": (SpatialData(), r"got SpatialData .*; give its table, sdata.tables\[name\]"),
    "path": ("slide.h5ad", r"got str 'slide.h5ad'; read the file first with anndata.read_h5ad\(path\)"),
    "table": (pd.DataFrame({"x": [1.0]}), r"got DataFrame .*; make one with anndata.AnnData\(counts"),
    "nothing": (None, "got NoneType None; make one with"),
    "class": (ad.AnnData, "got AnnData itself"),
}
READERS = {
    **FACADES,
    "weights": lambda a: pdvi.gr.weights(a),
    "domains": lambda a: pdvi.pl.domains(a),
    "entropy": lambda a: pdvi.pl.entropy(a),
    "probabilities": lambda a: pdvi.pl.probabilities(a),
    "trace": lambda a: pdvi.pl.trace(a),
    "n_domains": lambda a: pdvi.pl.n_domains(a),
    "report": lambda a: report.page(a),
}


@pytest.mark.parametrize("kind", WRONG_KINDS)
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_slide_is_told_with_the_way_to_one(name, kind):
    given, message = WRONG_KINDS[kind]
    with pytest.raises(TypeError, match=f"`adata` must be an AnnData, {message}"):
        READERS[name](given)


@pytest.mark.parametrize(
    ("name", "option", "message"),
    [
        ("prepare", {"n_components": 0}, "`n_components` must be a whole number of at least 1, got 0"),
        ("prepare", {"n_genes": 2.5}, "`n_genes` must be a whole number of at least 1, got 2.5"),
        ("prepare", {"clip": -1.0}, "`clip` must be positive and finite, got -1.0"),
        ("prepare", {"seed": 2**63}, "`seed` must be between 0 and 4294967295, got 9223372036854775808"),
        ("prepare", {"layer": "raw"}, r"'raw' not in adata.layers \(it has \[\]\); name the layer with the counts"),
        ("neighborhood", {"n_neighbors": -1}, "`n_neighbors` must be a whole number of at least 0, got -1"),
        ("neighborhood", {"n_components": 0}, "`n_components` must be a whole number of at least 1, got 0"),
        ("neighborhood", {"own": -0.1}, "`own` must be at least 0 and finite, got -0.1"),
        ("neighborhood", {"own": NAN}, "`own` must be at least 0 and finite, got nan"),
        ("neighborhood", {"gradient": NAN}, "`gradient` must be at least 0 and finite, got nan"),
        ("neighborhood", {"gradient": -2}, "`gradient` must be at least 0 and finite, got -2"),
        ("knn_graph", {"n_neighbors": -1}, "`n_neighbors` must be a whole number of at least 1, got -1"),
        ("knn_graph", {"n_neighbors": 0}, "`n_neighbors` must be a whole number of at least 1, got 0"),
        ("knn_graph", {"tau": -1.0}, "`tau` must be at least 0 and finite, got -1.0"),
        ("knn_graph", {"tau": NAN}, "`tau` must be at least 0 and finite, got nan"),
        ("radius_graph", {"radius": 0}, "`radius` must be positive and finite, got 0"),
        ("radius_graph", {"radius": NAN}, "`radius` must be positive and finite, got nan"),
        ("radius_graph", {"tau": NAN}, "`tau` must be at least 0 and finite, got nan"),
        ("flow_graph", {"length": -3}, "`length` must be positive and finite, got -3"),
        ("flow_graph", {"width": 0.0}, "`width` must be positive and finite, got 0.0"),
        ("flow_graph", {"tau": "1"}, "`tau` must be at least 0 and finite, got '1'"),
        ("flow", {"n_neighbors": 0}, "`n_neighbors` must be a whole number of at least 1, got 0"),
        ("partition", {"cells": (0, 1)}, r"`cells` must be 2 whole numbers of at least 1, got \(0, 1\)"),
        ("partition", {"cells": 3}, "`cells` must be 2 whole numbers of at least 1, got 3"),
        ("partition", {"n_patches": 0}, r"`n_patches` must be between 1 and the number of spots \(60\), got 0"),
        ("partition", {"n_patches": 61}, r"`n_patches` must be between 1 and the number of spots \(60\), got 61"),
    ],
)
def test_a_bad_argument_is_refused_before_anything_changes(name, option, message):
    adata = slide()
    with pytest.raises(ValueError, match=message):
        FACADES[name](adata, **option)
    assert not adata.obsp
    assert set(adata.obsm) == set(slide().obsm)
    assert set(adata.obs) == {"label"}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: pdvi.gr.weights(a, tau=-1.0), "`tau` must be at least 0 and finite, got -1.0"),
        (lambda a: pdvi.pl.domains(a, key="label", size=-1.0), "`size` must be positive and finite, got -1.0"),
        (lambda a: pdvi.graphs.weights(None, None, tau=NAN), "`tau` must be at least 0 and finite, got nan"),
        (lambda a: pdvi.graphs.within(a.obsm["spatial"], 0), "`radius` must be positive and finite, got 0"),
        (
            lambda a: pdvi.graphs.nearest([1.0, 2.0], 1),
            r"`coordinates` must have a row for each spot, got shape \(2,\)",
        ),
        (lambda a: pdvi.graphs.nearest([[1.0, NAN], [0, 0]], 1), "`coordinates` must be finite: 1 of 4 values"),
        (lambda a: pdvi.graphs.flow_direction(a.obsm["spatial"], np.zeros(60), n_neighbors=0), "`n_neighbors` must be"),
    ],
)
def test_bad_numbers_are_told(call, message):
    with pytest.raises(ValueError, match=message):
        call(slide())


def test_a_report_is_on_a_fit_of_ours():
    adata = slide()
    adata.obs["leiden"] = adata.obs["label"]
    adata.uns["leiden"] = {"params": {"resolution": 1.0}}  # as scanpy has it
    told = r"`key` must name a fit of pdvi.tl.domains in adata.uns, got 'leiden'; "
    with pytest.raises(ValueError, match=told + r"run pdvi.tl.domains\(adata, n_domains\) first"):
        report.page(adata, key="leiden")
    adata.uns["mine"] = {"params": {}, "status": "CONVERGED", "elbo": 0.0, "trace": {}}
    with pytest.raises(ValueError, match=told + r"give one of \['mine'\]"):
        report.page(adata, key="leiden")
    assert fit_of(adata, "mine") is not None
    with pytest.raises(ValueError, match=r"'mine' not in adata\.obs"):
        report.page(adata, key="mine")


def test_a_slide_is_read_from_a_path(tmp_path):
    with pytest.raises(TypeError, match="`path` must be the path of an h5ad file, got int 3"):
        read_slide(3)
    adata = slide()
    del adata.obsm["spatial"]
    adata.write_h5ad(tmp_path / "slide.h5ad")
    assert read_slide(tmp_path / "slide.h5ad", spatial_key="aligned").n_obs == 60
    with pytest.raises(ValueError, match=r"'spatial' not in adata\.obsm"):
        read_slide(tmp_path / "slide.h5ad")


def test_names_that_belong_together():
    assert (keys.probability("d"), keys.entropy("d"), keys.colors("d")) == ("d_probability", "d_entropy", "d_colors")
