"""The report is one file that needs nothing else; what it says is what the slide holds."""

import base64
import gzip
import json
import re
import warnings

import numpy as np
import pandas as pd
import pytest
import scanpy as sc
import scipy.sparse as sp

import pdvi
from pdvi import report
from pdvi._anndata import blocks
from pdvi._anndata.lazy import open_lazily
from pdvi.report import spots
from pdvi.report.markers import find_markers
from pdvi.report.sections import call
from test_pl import slide

HOSTILE = '</script><img src=x onerror="window.hacked=1">&\'"'


def with_counts(adata, n_genes=12, seed=0):
    """The same slide with counts: gene k is high in domain k."""
    rng = np.random.default_rng(seed)
    codes = adata.obs["domain"].cat.codes.to_numpy()
    rates = np.ones((len(adata.obs["domain"].cat.categories), n_genes))
    rates[np.arange(len(rates)), np.arange(len(rates))] = 6.0
    new = type(adata)(sp.csr_matrix(rng.poisson(rates[codes]).astype(np.float32)), obs=adata.obs, obsm=adata.obsm)
    new.var_names = [f"Gene{k}" for k in range(n_genes)]
    new.uns.update(adata.uns)
    return new


@pytest.fixture
def adata():
    adata = with_counts(slide(n_domains=4))
    adata.uns["domain_colors"] = pdvi.pl.palette(4)
    adata.uns["domain"] |= {"elbo": -1234.5, "params": {"n_domains": 4, "sample_key": "", "config": {"max_epochs": 20}}}
    return adata


def meta_of(text):
    return json.loads(re.search(r'id="meta">(.*?)</script>', text, re.DOTALL).group(1))


def bytes_of(text):
    return gzip.decompress(base64.b64decode(re.search(r'id="spots">(.*?)</script>', text, re.DOTALL).group(1)))


def part(text, name):
    begin, length = meta_of(text)["parts"][name]
    return np.frombuffer(bytes_of(text), np.uint8)[begin : begin + length].astype(int)


def section(text, name):
    found = re.search(rf'<section id="{name}">(.*?)</section>', text, re.DOTALL)
    return found and found.group(1)


def test_a_report_holds_everything(adata, tmp_path):
    report.write(adata, tmp_path / "report.html", title="A & B")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"(src|href)\s*=\s*['\"](?!data:|#)", text)
    assert "default-src 'none'" in text
    assert "<h1>A &amp; B</h1>" in text
    for fact in ("<b>400</b><span>spots", "<b>12</b><span>genes", "<b>4</b><span>domains", "<b>-1,23"):
        assert fact in text
    for name in ("map", "domains", "markers", "contacts", "certainty", "fit", "cite"):
        assert section(text, name), name
    assert section(text, "views") is None
    assert section(text, "composition") is None
    assert re.search(r"<details>.*config.*<td>max_epochs</td><td>20</td>.*</details>", text, re.DOTALL)
    assert "pdvi.tl.domains(adata, 4)" in section(text, "fit")
    assert "Preconditioned Primal-Dual" in section(text, "cite")


def test_spots_come_as_they_are(adata):
    """Unpacked as the page does it: places, domains and samples are those of the slide."""
    text = report.page(adata, sample_key="slice")
    meta, n = meta_of(text), adata.n_obs
    assert meta["n"] == n
    xy = np.stack([(part(text, name)[:n] + 256 * part(text, name)[n:]).cumsum() % 65536 for name in "xy"], 1)
    domain, sample = part(text, "domain"), part(text, "sample")
    slices = adata.obs["slice"].astype(str).to_numpy()
    for k, name in enumerate(["high", "low"]):
        assert meta["samples"][k]["name"] == name
        mine, drawn = slices == name, sample == k
        box = np.array(meta["samples"][k]["box"])
        np.testing.assert_allclose(box, [*xy[drawn].min(0), *xy[drawn].max(0)], atol=1)
        here = adata.obsm["spatial"][mine] - adata.obsm["spatial"][mine].min(0)
        there = (xy[drawn] - box[:2]) * meta["step"]
        near = np.abs(there[:, None] - here).sum(-1).argmin(1)
        np.testing.assert_allclose(there, here[near], atol=2 * meta["step"])
        np.testing.assert_array_equal(domain[drawn], adata.obs["domain"].cat.codes.to_numpy()[mine][near])
    cell = (xy[:, 1] >> meta["shift"]) * (65536 >> meta["shift"]) + (xy[:, 0] >> meta["shift"])
    assert (np.diff(cell) >= 0).all()


def test_markers_are_those_of_scanpy(adata):
    codes = adata.obs["domain"].cat.codes.to_numpy().astype(int)
    markers = find_markers(adata, codes, 4)
    other = adata.copy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scanpy's own
        sc.pp.normalize_total(other)
        sc.pp.log1p(other)
        sc.tl.rank_genes_groups(other, "domain", method="t-test")
    for k in range(4):
        table = sc.get.rank_genes_groups_df(other, str(k + 1)).set_index("names")["scores"]
        np.testing.assert_allclose(markers.scores[k], table[markers.names], rtol=2e-3, atol=2e-3)
        assert markers.names[markers.best(k, 1)[0]] == table.index[0] == f"Gene{k}"
    for k in range(4):
        expressed = (adata.X[codes == k] > 0).mean(0)
        np.testing.assert_allclose(markers.shares[k], np.asarray(expressed).ravel(), rtol=1e-5)
    assert "Gene2" in section(report.page(adata), "markers")


def test_logarithms_are_not_taken_twice(adata):
    codes = adata.obs["domain"].cat.codes.to_numpy().astype(int)
    counts = find_markers(adata, codes, 4)
    logged = adata.copy()
    totals = np.asarray(adata.X.sum(1)).ravel()
    dense = np.log1p(adata.X.toarray() * (np.median(totals) / totals)[:, None]).astype(np.float32)
    for form in (np.asarray, sp.csr_matrix, sp.csc_matrix, sp.csr_array):
        logged.X = form(dense)
        np.testing.assert_allclose(find_markers(logged, codes, 4).scores, counts.scores, rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore:Writing zarr v2")  # anndata's, until its next release
@pytest.mark.parametrize("ending", ["h5ad", "zarr"])
def test_markers_of_a_slide_on_disk_are_read_in_blocks(adata, tmp_path, monkeypatch, ending):
    codes = adata.obs["domain"].cat.codes.to_numpy().astype(int)
    usual = find_markers(adata, codes, 4)
    path = tmp_path / f"slide.{ending}"
    getattr(adata, f"write_{ending}")(path)
    monkeypatch.setattr(blocks, "NUMBERS", 50 * adata.n_vars)
    lazy = open_lazily(path)
    read, own = [], blocks.Part.read

    def counted(part, begin, end):
        read.append(end - begin)
        return own(part, begin, end)

    monkeypatch.setattr(blocks.Part, "read", counted)
    found = find_markers(lazy, codes, 4)
    assert max(read) == 50
    np.testing.assert_allclose(found.scores, usual.scores, rtol=1e-3, atol=1e-3)  # sums in single precision
    np.testing.assert_array_equal(found.expression.columns([3, 1]), usual.expression.columns([3, 1]))


def test_without_counts_there_is_a_report_without_markers():
    adata = slide(n_domains=3)
    adata.uns["domain"] |= {"elbo": 0.0, "params": {"n_domains": 3}}
    text = report.page(adata)
    assert section(text, "markers") is None
    assert meta_of(text)["genes"] == []


def test_views_types_and_samples_are_shown_where_they_are(adata):
    adata.obs["domain_certainty"] = np.where(np.arange(400) % 4 == 0, 0.4, 1.0)
    adata.uns["domain"]["views"] = {
        "names": ["near", "far"],
        "agreement": np.array([[1, 0.83], [0.83, 1]]),
        "elbo": [-5.0, -7.0],
    }
    adata.obs["cell_type"] = pd.Categorical(np.where(adata.obs["domain"] == "1", "glia", "neuron"))
    text = report.page(adata, sample_key="slice")
    assert "0.83" in section(text, "views")
    assert "at its highest, 1.00, for 75 % of the spots, and below one half for 25 %" in section(text, "certainty")
    assert [each["name"] for each in meta_of(text)["measures"]] == ["certainty", "probability", "entropy"]
    types = section(text, "composition").split("Types in each domain")[1]
    assert re.search(r"</span>1</td><td><div class=\"stack\"><i style=\"width:100.00%[^>]*title=\"glia", types)
    assert section(text, "composition").count('title="1: ') == 2  # the share of domain 1 in both samples
    adata.uns["domain"]["types"] = {"names": ["a", "b"], "composition": np.tile([3.0, 1.0], (4, 1))}
    assert section(report.page(adata), "composition").count('title="a: 75.0 %"') == 4


def test_neighbors_are_counted(adata):
    """A chain of spots 1 1 2 2: each has a neighbor of its own domain, and those in the middle one of the other."""
    adata = adata[:4].copy()
    adata.obs["domain"] = pd.Categorical(["1", "1", "2", "2"])
    adata.obsp["potts_weights"] = sp.csr_matrix(np.eye(4, k=1) + np.eye(4, k=-1))
    rows = re.findall(r"<tr>(.*?)</tr>", section(report.page(adata), "contacts"))[1:]
    assert [re.findall(r'">(\d+)</td>', row) for row in rows] == [["67", "33"], ["33", "67"]]


def test_texts_from_the_data_are_texts(adata):
    adata.obs["domain"] = adata.obs["domain"].cat.rename_categories([HOSTILE, "2", "3", "4"])
    adata.obs["sample"] = adata.obs["slice"].astype(str) + HOSTILE
    adata.var_names = [HOSTILE, *adata.var_names[1:]]
    adata.uns["domain_colors"] = ["red;}</style><script>", "#12", "blue", "#009E73"]
    adata.uns["domain"]["params"] |= {HOSTILE: HOSTILE}
    text = report.page(adata, title=HOSTILE, sample_key="sample", command=HOSTILE)
    assert "<img" not in text
    assert text.count("</script>") == 3
    assert text.count("</style>") == 1
    assert meta_of(text)["domains"][0]["name"] == HOSTILE
    colors = [each["color"] for each in meta_of(text)["domains"]]
    assert colors == [pdvi.pl.palette(1)[0], pdvi.pl.palette(2)[1], "#0000ff", "#009e73"]


def test_an_empty_domain_and_missing_labels_are_no_trouble(adata):
    adata.obs["domain"] = adata.obs["domain"].cat.set_categories(["1", "2", "3", "4"]).where(lambda d: d != "4", "3")
    text = report.page(adata)
    assert "<td>0</td><td>0.0 %</td><td>none</td>" in text
    adata.obs.loc[adata.obs_names[:10], "domain"] = None
    assert meta_of(report.page(adata))["domains"][-1] == {
        "name": "not labelled",
        "color": "#D4D4D4",
        "size": 10,
        "genes": [],
    }


def test_genes_of_many_spots_are_means_over_squares(adata, monkeypatch):
    whole = part(report.page(adata), "gene0")
    monkeypatch.setattr(spots, "BINNED_ABOVE", 100)
    text = report.page(adata)
    assert meta_of(text)["bin_shift"] == 8
    bins = part(text, "gene0")
    assert len(bins) == 256 * 256
    assert abs(bins.sum() - whole.sum()) < 0.1 * whole.sum()  # few of so few spots share a square
    assert "means over small squares" in section(text, "map")


def test_of_more_spots_than_can_be_drawn_some_are(adata, monkeypatch):
    monkeypatch.setattr(spots, "MOST", 150)
    text = report.page(adata)
    assert meta_of(text)["n"] == 150
    assert "150 spots are drawn" in section(text, "map")
    assert "<b>400</b><span>spots" in text


def test_a_million_spots_stay_below_fifteen_megabytes():
    rng = np.random.default_rng(0)
    n, values = 1_000_000, rng.random(1_000_000)
    xy = rng.random((n, 2))
    measures = [spots.Measure(str(k), values, 0.0, 1.0) for k in range(3)]
    text, _ = spots.pack(xy, (xy[:, 0] * 20).astype(int), np.zeros(n, int), measures, measures * 20)
    assert len(text) < 14_500_000


def test_the_call_is_python():
    params = {"n_domains": np.int64(7), "beta": 1.0, "sample_key": "", "seed": 0, "config": {"x": 1}}
    assert call(params, "layers") == "pdvi.tl.domains(adata, 7, beta=1.0, seed=0, key_added='layers')"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key": "slice"}, "`key` must name a fit of pdvi.tl.domains in adata.uns, got 'slice'"),
        ({"type_key": "no"}, "'no' not in adata.obs"),
        ({"layer": "no"}, "'no' not in adata.layers"),
        ({"spatial_key": "no"}, "'no' not in adata.obsm"),
    ],
)
def test_what_is_missing_is_named(adata, options, message):
    with pytest.raises(ValueError, match=message):
        report.page(adata, **options)
