"""Plots: what is drawn where, in which colors, and what stays as it was."""

import subprocess
import sys
import warnings
from itertools import pairwise

import matplotlib as mpl

mpl.use("Agg")

import anndata as ad
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import EllipseCollection
from matplotlib.colors import to_rgba, to_rgba_array

import pdvi
from pdvi.pl import canvas, colors


@pytest.fixture(autouse=True)
def unchanged_settings():
    before = dict(mpl.rcParams)
    yield
    plt.close("all")
    assert dict(mpl.rcParams) == before


def slide(n=400, n_domains=3, seed=0):
    """Vertical stripes on a random scatter, with everything that `tl.domains` writes."""
    rng = np.random.default_rng(seed)
    xy = rng.random((n, 2)) * [300, 200]
    code = np.minimum((xy[:, 0] / 300 * n_domains).astype(int), n_domains - 1)
    names = [str(k + 1) for k in range(n_domains)]
    probability = np.full((n, n_domains), 0.1 / n_domains, np.float32)
    probability[np.arange(n), code] += 0.9
    adata = ad.AnnData(obs=pd.DataFrame(index=np.arange(n).astype(str)))
    adata.obs["domain"] = pd.Categorical.from_codes(code, names)
    adata.obs["domain_entropy"] = rng.random(n)
    adata.obs["slice"] = pd.Categorical(np.where(xy[:, 1] < 100, "low", "high"))
    adata.obsm["spatial"] = xy
    adata.obsm["X_umap"] = rng.standard_normal((n, 2))
    adata.obsm["domain_probability"] = probability
    epoch = np.arange(6.0)
    trace = {
        "step": epoch * 10,
        "epoch": epoch,
        "seconds": epoch / 50,
        "objective": 10 - epoch,
        "grad_norm": 0.1**epoch,
    }
    adata.uns["domain"] = {"status": "CONVERGED", "trace": {**trace, "event": ["", "", "noise", "", "", ""]}}
    return adata


def drawn(axes):
    """Draws the figure, so that everything lazy happens, and returns its pixels."""
    figure = np.ravel(np.asarray(axes, dtype=object))[0].figure
    figure.canvas.draw()
    return np.asarray(figure.canvas.buffer_rgba())


def ink(ax):
    """The share of the pixels within the axes that are not white."""
    pixels = drawn(ax)[::-1, :, :3]  # rows from below, as boxes count them
    box = ax.get_window_extent()
    return (pixels[int(box.y0) : int(box.y1), int(box.x0) : int(box.x1)] != 255).any(-1).mean()


def test_a_map_of_domains():
    adata = slide()
    before = adata.copy()
    ax = pdvi.pl.domains(adata)
    drawn(ax)
    (discs,) = ax.collections
    assert isinstance(discs, EllipseCollection)
    colors = to_rgba_array(pdvi.pl.palette(3))
    np.testing.assert_allclose(discs.get_facecolors(), colors[adata.obs["domain"].cat.codes])
    assert ax.yaxis_inverted()
    assert ax.get_aspect() == 1
    assert list(ax.get_xticks()) == list(ax.get_yticks()) == []
    legend = ax.get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["1", "2", "3"]
    assert legend.get_window_extent().x0 >= ax.get_window_extent().x1 - 1
    assert legend.get_window_extent().x1 <= ax.figure.bbox.x1
    assert list(adata.uns) == list(before.uns)
    assert adata.obs.equals(before.obs)


@pytest.mark.parametrize("shape", [(300, 200), (100, 400), (500, 100)], ids=str)
def test_a_long_legend_stays_on_the_page(shape):
    adata = slide(n_domains=20)
    adata.obsm["spatial"] *= np.array(shape) / [300, 200]
    adata.obs["domain"] = adata.obs["domain"].cat.rename_categories(
        lambda name: f"internal capsule caudoputamen {name}"
    )
    ax = pdvi.pl.domains(adata)
    drawn(ax)
    drawn(ax)
    assert ax.get_legend().get_window_extent().x1 <= ax.figure.bbox.x1 + 1
    assert ax.get_window_extent().width > 50


@pytest.mark.parametrize("n_domains", [1, 11, 32, 60])
@pytest.mark.parametrize("shape", [(300, 200), (100, 1000), (2000, 100)], ids=str)
def test_every_entry_of_the_legend_is_on_the_page(n_domains, shape):
    adata = slide(n_domains=n_domains)
    adata.obsm["spatial"] *= np.array(shape) / [300, 200]
    ax = pdvi.pl.domains(adata)
    drawn(ax)
    page = ax.figure.bbox
    texts = ax.get_legend().get_texts()
    assert len(texts) == n_domains
    boxes = [text.get_window_extent() for text in texts]
    for box in boxes:
        assert page.x0 <= box.x0 <= box.x1 <= page.x1
        assert page.y0 <= box.y0 <= box.y1 <= page.y1
    places = sorted((round(box.x0), box.y0) for box in boxes)
    assert all(a[0] != b[0] or b[1] - a[1] > 8 for a, b in pairwise(places))  # none on another


def test_dollars_are_text():
    adata = slide()
    names = ["$x_1$", "a$b", "$$"]
    adata.obs["domain"] = adata.obs["domain"].cat.rename_categories(names)
    adata.obs["slice"] = adata.obs["slice"].cat.rename_categories(["$\\frac$", "low"])
    axes = pdvi.pl.domains(adata, sample_key="slice")
    drawn(axes)  # would fail on the mathematics
    texts = [*axes[-1].get_legend().get_texts(), axes[0].title, *(ax.title for ax in pdvi.pl.probabilities(adata))]
    assert [text.get_text() for text in texts] == [*names, "$\\frac$", *names]
    assert not any(text.get_parse_math() for text in texts)


def visium(adata, *, shape=(120, 160)):
    """An image of half the resolution of the coordinates, red but for a white corner, and spots of 65 micrometres."""
    pixels = np.zeros((*shape, 3), np.float32)
    pixels[..., 0] = 1
    pixels[:20, :20] = 1
    factors = {"tissue_hires_scalef": 0.5, "spot_diameter_fullres": 13.0}
    adata.uns["spatial"] = {"library": {"images": {"hires": pixels}, "scalefactors": factors}}
    return adata


def test_a_scale_bar_where_units_are_known():
    assert not pdvi.pl.domains(slide()).lines
    ax = pdvi.pl.domains(visium(slide()))
    (bar,) = ax.lines
    assert np.ptp(bar.get_xdata()) == pytest.approx(200 / 5)  # five micrometres a unit; 300 units are 1,500 of them
    assert [text.get_text() for text in ax.texts] == ["200 µm"]
    drawn(ax)
    x, y = ax.transData.transform(np.stack(bar.get_data(), 1)).T
    assert (x < ax.bbox.x0 + 0.5 * ax.bbox.width).all()
    assert (y < ax.bbox.y0 + 0.1 * ax.bbox.height).all()
    assert not pdvi.pl.domains(visium(slide()), basis="umap").lines


def test_the_tissue_is_beneath_the_spots():
    adata = visium(slide(100))
    ax = pdvi.pl.domains(adata)
    (image,) = ax.images
    assert image.get_zorder() < ax.collections[0].get_zorder()
    pixels = drawn(ax)[..., :3]

    def seen(x, y):
        across, up = ax.transData.transform((x, y))
        return tuple(pixels[int(len(pixels) - up), int(across)])

    clear = np.stack(np.meshgrid(np.arange(5, 295, 3.0), np.arange(5, 180, 3.0)), -1).reshape(-1, 2)
    away = np.abs(clear[:, None] - adata.obsm["spatial"]).max(-1).min(1) > 0.5 * canvas.spacing(adata.obsm["spatial"])
    corner = (clear < 36).all(1)
    assert {seen(*place) for place in clear[away & corner]} == {(255, 255, 255)}
    assert {seen(*place) for place in clear[away & (clear > 44).any(1)]} == {(255, 0, 0)}
    assert not pdvi.pl.domains(adata, image=False).images
    assert not pdvi.pl.domains(adata, basis="umap").images
    adata.uns["spatial"]["high"] = adata.uns["spatial"].pop("library")
    assert [len(each.images) for each in pdvi.pl.entropy(adata, sample_key="slice")] == [1, 0]


@pytest.mark.parametrize("with_image", [False, True])
def test_the_axes_point_as_scanpys_do(with_image):
    import scanpy as sc

    adata = visium(slide()) if with_image else slide()
    adata.uns["domain_colors"] = pdvi.pl.palette(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own deprecation
        (theirs,) = sc.pl.spatial(adata, color="domain", spot_size=10, show=False)
    ours = pdvi.pl.domains(adata)
    assert ours.yaxis_inverted()
    assert theirs.yaxis_inverted()
    assert not ours.xaxis_inverted()
    assert not theirs.xaxis_inverted()


def test_colors_stay_with_domains():
    adata = slide(n_domains=3)
    adata.uns["domain"] |= {"elbo": 0.0, "params": {}}
    adata.uns["domain_colors"] = ["#111111", "#222222", "#333333"]
    again = adata.obs["domain"].cat.rename_categories(["3", "1", "2"]).cat.reorder_categories(["1", "2", "3"])
    for key in ("domain", "another"):
        assert colors.kept_colors(adata, key, again) == ["#222222", "#333333", "#111111"]
    more = again.cat.add_categories("4")
    more.iloc[:5] = "4"
    found = colors.kept_colors(adata, "domain", more)
    assert found[:3] == ["#222222", "#333333", "#111111"]
    assert found[3] in pdvi.pl.palette(32)
    del adata.uns["domain"]
    assert colors.kept_colors(adata, "domain", again) == pdvi.pl.palette(3)


def test_given_colors_and_axes_are_used():
    adata = slide()
    adata.uns["domain_colors"] = np.array(["#ff0000", "#00ff00", "#0000ff"])
    figure, mine = plt.subplots()
    ax = pdvi.pl.domains(adata, ax=mine, legend=False, size=2.0)
    assert ax is mine
    assert ax.figure is figure
    assert ax.get_legend() is None
    assert {tuple(color) for color in ax.collections[0].get_facecolors()} == {(1, 0, 0, 1), (0, 1, 0, 1), (0, 0, 1, 1)}


def test_an_embedding_points_upwards():
    for basis in ("umap", "X_umap"):
        assert not pdvi.pl.domains(slide(), basis=basis).yaxis_inverted()


def test_missing_labels_are_gray_and_text_will_do():
    adata = slide()
    adata.obs["mine"] = adata.obs["domain"].astype(object)
    adata.obs.loc[adata.obs_names[:5], "mine"] = None
    ax = pdvi.pl.domains(adata, key="mine")
    assert (ax.collections[0].get_facecolors()[:5] == to_rgba("#D4D4D4")).all()
    assert ax.get_legend().get_texts()[-1].get_text() == "not labelled"


def test_a_panel_for_each_sample():
    axes = pdvi.pl.domains(slide(), sample_key="slice")
    assert [ax.get_title() for ax in axes] == ["high", "low"]
    drawn(axes)
    _figure, mine = plt.subplots(1, 2)
    assert list(pdvi.pl.entropy(slide(), sample_key="slice", ax=mine)) == list(mine)
    with pytest.raises(ValueError, match="`ax` must be 2 axes, one for each panel, got 1"):
        pdvi.pl.domains(slide(), sample_key="slice", ax=mine[0])


def test_many_spots_become_an_image(monkeypatch):
    monkeypatch.setattr(canvas, "RASTER_ABOVE", 1_000)
    adata = slide(30_000)
    ax = pdvi.pl.domains(adata)
    assert not ax.collections
    (image,) = ax.images
    pixels = image.get_array()
    assert max(pixels.shape) <= canvas.PIXELS
    assert (pixels[..., 3] == 1).mean() > 0.98  # the rectangle is full, holes are closed
    colors = to_rgba_array(pdvi.pl.palette(3))
    columns = pixels.shape[1]
    for k in range(3):
        middle = pixels[:, round((k + 0.3) / 3 * columns) : round((k + 0.7) / 3 * columns)]
        assert (middle[middle[..., 3] == 1] == colors[k]).all()
    assert ax.yaxis_inverted()
    shown = drawn(ax)
    assert (shown != 255).any()


def test_a_pixel_takes_the_majority_and_the_mean(monkeypatch):
    monkeypatch.setattr(canvas, "RASTER_ABOVE", 0)
    xy = np.repeat([[0.0, 0.0], [10.0, 10.0]], [3, 2], axis=0)
    _figure, ax = plt.subplots()
    canvas.frame(ax, xy, flip=False)
    canvas.Spots(xy, 1.0).labels(ax, np.array([0, 1, 1, 0, 0]), ["#ff0000", "#00ff00"])
    image = ax.images[0].get_array()
    assert tuple(image[0, 0]) == (0, 1, 0, 1)
    assert tuple(image[10, 10]) == (1, 0, 0, 1)
    assert image[5, 5, 3] == 0
    shown = canvas.Spots(xy, 1.0).values(ax, np.array([1.0, 2, 6, 4, 4]), cmap="viridis", norm=None).get_array()
    assert shown[0, 0] == 3
    assert shown[10, 10] == 4
    assert shown.mask[5, 5]


def test_probabilities_are_small_multiples(monkeypatch):
    adata = slide()
    axes = pdvi.pl.probabilities(adata)
    drawn(axes)
    assert [ax.get_title() for ax in axes] == ["1", "2", "3"]
    np.testing.assert_allclose(axes[1].collections[0].get_array(), adata.obsm["domain_probability"][:, 1])
    assert len(pdvi.pl.probabilities(adata, domains=["2"])) == 1
    _figure, mine = plt.subplots(1, 3)
    assert list(pdvi.pl.probabilities(adata, ax=mine)) == list(mine)
    monkeypatch.setattr(canvas, "RASTER_ABOVE", 1_000)
    assert all(ax.images for ax in pdvi.pl.probabilities(adata))
    with pytest.raises(ValueError, match=r"`domains` must be among \['1', '2', '3'\], got '9'"):
        pdvi.pl.probabilities(adata, domains=["9"])


def test_entropy_has_a_color_bar(monkeypatch):
    adata = slide()
    ax = pdvi.pl.entropy(adata)
    drawn(ax)
    np.testing.assert_array_equal(ax.collections[0].get_array(), adata.obs["domain_entropy"])
    assert [other.get_ylabel() for other in ax.figure.axes if other is not ax] == ["entropy"]
    monkeypatch.setattr(canvas, "RASTER_ABOVE", 100)
    assert pdvi.pl.entropy(adata).images


@pytest.mark.parametrize("against", ["epoch", "seconds", "step"])
def test_the_trace(against):
    adata = slide()
    axes = pdvi.pl.trace(adata, against=against)
    drawn(axes)
    x, y = axes[0].lines[0].get_data()
    np.testing.assert_array_equal(x, adata.uns["domain"]["trace"][against])
    np.testing.assert_array_equal(y, adata.uns["domain"]["trace"]["objective"])
    assert axes[1].get_yscale() == "log"
    assert len(axes[0].lines) == 2  # the event
    _figure, mine = plt.subplots(1, 2)
    del adata.uns["domain"]["trace"]["event"]
    assert list(pdvi.pl.trace(adata, ax=mine)) == list(mine)


def test_samples_in_the_same_place_are_drawn_apart():
    adata = slide()
    adata.obsm["spatial"][:, 1] %= 100
    axes = pdvi.pl.probabilities(adata, sample_key="slice")
    x = axes[0].collections[0].get_offsets()[:, 0]
    low = (adata.obs["slice"] == "low").to_numpy()
    assert x[~low].max() < x[low].min()


def test_a_start_far_above_does_not_hide_the_rest():
    adata = slide()
    assert pdvi.pl.trace(adata)[0].get_ylim()[1] > 10
    adata.uns["domain"]["trace"]["objective"] = np.array([1e4, 5.0, 4.0, 3.5, 3.2, 3.1])
    low, high = pdvi.pl.trace(adata)[0].get_ylim()
    assert low < 3.1
    assert 5 < high < 7


@pytest.mark.parametrize("n", [1, 2, 5])
def test_a_few_spots(n):
    adata = slide(20)[:n].copy()
    assert 0 < ink(pdvi.pl.domains(adata)) < 0.5
    assert 0 < ink(pdvi.pl.entropy(adata)) < 0.5


def test_spots_in_one_place_or_on_a_line():
    adata = slide(30)
    adata.obsm["spatial"][:] = 5
    assert 0 < ink(pdvi.pl.domains(adata)) < 0.5
    adata.obsm["spatial"][:, 0] = np.arange(30)
    assert ink(pdvi.pl.domains(adata)) > 0


def test_discs_just_touch_on_a_grid():
    grid = np.stack(np.meshgrid(np.arange(40), np.arange(40)), -1).reshape(-1, 2) * 7.0
    assert 6 < canvas.Spots(grid).size < 9


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: pdvi.pl.domains(a, key="no"), r"'no' not in adata.obs \(it has .*\); run pdvi.tl.domains"),
        (lambda a: pdvi.pl.domains(a, basis="no"), "'no' not in adata.obsm"),
        (lambda a: pdvi.pl.domains(a, sample_key="no"), "'no' not in adata.obs"),
        (lambda a: pdvi.pl.entropy(a, key="no"), "'no_entropy' not in adata.obs"),
        (lambda a: pdvi.pl.probabilities(a, key="slice"), "'slice_probability' not in adata.obsm"),
        (lambda a: pdvi.pl.trace(a, key="no"), r"adata.uns\['no'\] has no trace; run pdvi.tl.domains"),
        (lambda a: pdvi.pl.trace(a, against="no"), "`against` must be one of .*, got 'no'"),
        (lambda a: pdvi.pl.trace(a, ax=plt.subplots()[1]), "`ax` must be 2 axes, one for each panel, got 1"),
        (lambda a: pdvi.pl.palette(-1), "`n` must be a whole number of at least 0, got -1"),
    ],
)
def test_what_is_missing_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(slide())


# Machado, Oliveira, Fernandes (2009), severity 1, on linear RGB
VISION = {
    "normal": (np.eye(3), 20),
    "deuteranopia": (
        np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]),
        12,
    ),
    "protanopia": (
        np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
        11,
    ),
}


def lab(rgb, vision):
    """CIELAB of sRGB colors as someone with this vision sees them."""
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    linear = np.clip(linear @ vision.T, 0, 1)
    to_xyz = np.array(
        [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
    )
    x = linear @ to_xyz.T / [0.95047, 1, 1.08883]
    f = np.where(x > 216 / 24389, np.cbrt(x), (24389 / 27 * x + 16) / 116)
    return np.stack([116 * f[:, 1] - 16, 500 * (f[:, 0] - f[:, 1]), 200 * (f[:, 1] - f[:, 2])], -1)


@pytest.mark.parametrize("who", VISION)
def test_all_colors_are_told_apart(who):
    matrix, least = VISION[who]
    colors = to_rgba_array([*pdvi.pl.palette(32), "#FFFFFF"])[:, :3]
    points = lab(colors, matrix)
    distance = np.linalg.norm(points[:, None] - points, axis=-1)[np.triu_indices(33, 1)]
    assert distance.min() > least


def test_the_palette_begins_alike_and_goes_on():
    assert len(set(pdvi.pl.palette(32))) == 32
    assert pdvi.pl.palette(5) == pdvi.pl.palette(32)[:5]
    assert pdvi.pl.palette(40)[32:] == pdvi.pl.palette(8)
    assert pdvi.pl.palette(0) == []


def test_matplotlib_waits_until_it_is_needed():
    code = "import sys, pdvi.pl; pdvi.pl.palette(3); sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
