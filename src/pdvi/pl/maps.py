"""Maps of a slide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import numpy as np
import pandas as pd

from pdvi._anndata import keys
from pdvi._anndata.checks import MAKES_DOMAINS, check_adata, coordinates_of, samples_of
from pdvi._anndata.image import microns_per_unit, tissue_image
from pdvi._anndata.keys import DOMAIN, SPATIAL
from pdvi._base.checks import key_in, positive, whole
from pdvi.pl import canvas, furniture
from pdvi.pl.colors import MISSING, colors_of

if TYPE_CHECKING:
    from anndata import AnnData
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap

BESIDE_TISSUE = 0.9  # of the spacing: spots on an image leave some of it to be seen


class MapOptions(TypedDict, total=False):
    """The parameters that all maps take; `domains` says what they are."""

    spatial_key: str
    basis: str | None
    sample_key: str | None
    size: float | None
    image: bool
    ax: Axes | np.ndarray | None


def domains(
    adata: AnnData,
    *,
    key: str = DOMAIN,
    spatial_key: str = SPATIAL,
    basis: str | None = None,
    sample_key: str | None = None,
    size: float | None = None,
    image: bool = True,
    legend: bool = True,
    title: str | None = None,
    ax: Axes | np.ndarray | None = None,
) -> Axes | np.ndarray:
    """Draw a map of the domains, or of any column of labels.

    Parameters
    ----------
    key
        column of obs; colors come from ``uns[key_colors]`` if they are there, otherwise from `palette`.
    spatial_key
        coordinates in obsm.
    basis
        draw an embedding in obsm ("umap", "X_umap") instead of the coordinates.
    sample_key
        a column of obs: one panel for each sample.
    size
        diameter of a spot in units of the coordinates; by default spots just touch.
    image
        draw the tissue beneath, where ``uns["spatial"]`` has its image (one for each sample by its name).
    legend
        draw it, outside on the right; a new figure grows with it.
    title
        of a single map; by default the key. Maps of samples have their names.
    ax
        axes to draw into, one for each panel; by default a new figure.

    A bar shows the scale where the slide tells the size of its pixels, as Visium's do.

    Returns
    -------
    Axes, or an array of them with ``sample_key``.
    """
    column = _column(adata, key)
    column = column if isinstance(column.dtype, pd.CategoricalDtype) else column.astype("string").astype("category")
    names = [str(name) for name in column.cat.categories]
    codes = column.cat.codes.to_numpy()
    colors = colors_of(adata, key, len(names))

    def draw(spots: canvas.Spots, each: Axes, rows: Any) -> None:
        spots.labels(each, codes[rows], [*colors, MISSING])

    where: MapOptions = {"spatial_key": spatial_key, "basis": basis, "sample_key": sample_key}
    where |= {"size": size, "image": image, "ax": ax}
    axes = _draw(adata, draw, title=key if title is None else title, **where)
    if legend and names:
        entries = [*zip(names, colors), *([("not labelled", MISSING)] if (codes < 0).any() else [])]
        last = axes[min(len(axes), 4) - 1 if ax is None else -1]
        width, height = last.figure.canvas.figure.get_size_inches()
        made = furniture.legend(last, entries, height)
        if ax is None:
            last.set_anchor("W")  # room that equal aspect leaves over goes to the legend's side
            furniture.make_room(made, width, height)
    return axes[0] if sample_key is None else axes


def probabilities(
    adata: AnnData,
    *,
    key: str = DOMAIN,
    domains: Sequence[str] | None = None,
    spatial_key: str = SPATIAL,
    basis: str | None = None,
    sample_key: str | None = None,
    size: float | None = None,
    ncols: int = 4,
    ax: Axes | np.ndarray | None = None,
) -> np.ndarray:
    """Draw a small map of the probability of each domain.

    Parameters
    ----------
    domains
        which ones; by default all.
    sample_key
        a column of obs; its samples are drawn side by side in every panel.
    ncols
        panels in a row.
    key, spatial_key, basis, size, ax
        as in `pl.domains`; ``ax`` has one axes for each domain.

    Returns
    -------
    Array of Axes.
    """
    from matplotlib.colors import Normalize

    if size is not None:
        positive("size", size)
    whole("ncols", ncols, least=1)
    column = _column(adata, key)
    key_in(adata.obsm, keys.probability(key), "adata.obsm", MAKES_DOMAINS)
    probability = np.asarray(adata.obsm[keys.probability(key)])
    names = [str(name) for name in column.astype("category").cat.categories]
    if len(names) != probability.shape[1]:
        names = [str(k + 1) for k in range(probability.shape[1])]  # somebody removed empty categories
    chosen = names if domains is None else [str(name) for name in domains]
    for name in chosen:
        if name not in names:
            msg = f"`domains` must be among {names}, got {name!r}."
            raise ValueError(msg)
    xy, flip = _coordinates(adata, spatial_key, basis)
    xy, right = xy.copy(), 0.0
    for rows in _samples(adata, sample_key)[1]:  # side by side
        xy[rows] += [right - xy[rows, 0].min(), -xy[rows, 1].min()]
        right = 1.1 * float(xy[rows, 0].max())
    axes = canvas.panels(len(chosen), xy, ax=ax, extra=0.8, ncols=ncols, height=2.2)
    spots, norm = canvas.Spots(xy, size, small=True), Normalize(0, 1)
    for each, name in zip(axes, chosen):
        canvas.frame(each, xy, flip=flip)
        numbers = probability[:, names.index(name)]
        mappable = spots.values(each, numbers, cmap=_fading(), norm=norm)
        each.set_title(name, fontsize="medium", parse_math=False)
    bar = axes[0].figure.colorbar(mappable, ax=list(axes), shrink=0.6, fraction=0.05, pad=0.02, label="probability")
    bar.outline.set_visible(False)
    return axes


def entropy(adata: AnnData, *, key: str = DOMAIN, **options: Unpack[MapOptions]) -> Axes | np.ndarray:
    """Draw a map of how uncertain each spot's domain is: 0 is certain, 1 is all domains equally likely.

    Parameters are those of `pl.domains`, without ``legend`` and ``title``. The colors reach from 0 to what all but one
    spot in a hundred stay below.
    """
    numbers = _column(adata, keys.entropy(key)).to_numpy(float)
    top = max(float(np.quantile(numbers, 0.99)), 0.05)
    return _draw_numbers(adata, numbers, top, {"label": "entropy", "extend": "max"}, options)


def certainty(adata: AnnData, *, key: str = DOMAIN, **options: Unpack[MapOptions]) -> Axes | np.ndarray:
    """Draw a map of how certain each spot's domain is: the share of views that agree on it; doubt is dark.

    Parameters are those of `pl.domains`, without ``legend`` and ``title``.
    """
    doubt = 1 - _column(adata, keys.certainty(key)).to_numpy(float)
    return _draw_numbers(adata, doubt, 1.0, {"label": "doubt: 1 - certainty"}, options)


def _draw_numbers(
    adata: AnnData, numbers: np.ndarray, top: float, bar: dict[str, Any], options: MapOptions
) -> Axes | np.ndarray:
    """Draw maps of numbers from 0 to ``top``, with a color bar."""
    from matplotlib.colors import Normalize

    norm, mappables = Normalize(0, top, clip=True), []

    def draw(spots: canvas.Spots, each: Axes, rows: Any) -> None:
        mappables.append(spots.values(each, numbers[rows], cmap=_fading(), norm=norm))

    axes = _draw(adata, draw, extra=1.0, **options)
    drawn = axes[0].figure.colorbar(mappables[-1], ax=list(axes), shrink=0.6, fraction=0.05, pad=0.02, **bar)
    drawn.outline.set_visible(False)
    return axes[0] if options.get("sample_key") is None else axes


def _draw(
    adata: AnnData,
    draw: Callable[[canvas.Spots, Axes, Any], None],
    *,
    spatial_key: str = SPATIAL,
    basis: str | None = None,
    sample_key: str | None = None,
    size: float | None = None,
    image: bool = True,
    ax: Axes | np.ndarray | None = None,
    title: str = "",
    extra: float = 0.0,
) -> np.ndarray:
    """Draw a map of the slide, or one of each sample, on the image of the tissue; ``draw`` colors the spots."""
    if size is not None:
        positive("size", size)
    names, parts = _samples(adata, sample_key)
    xy, flip = _coordinates(adata, spatial_key, basis)
    axes = canvas.panels(len(parts), xy[parts[0]], ax=ax, extra=extra)
    of_tissue = spatial_key == SPATIAL and basis in (None, SPATIAL)
    microns = microns_per_unit(adata) if of_tissue else None
    for each, name, rows in zip(axes, names, parts):
        tissue = tissue_image(adata, name or None) if of_tissue and image else None
        canvas.frame(each, xy[rows], flip=flip)
        diameter = BESIDE_TISSUE * canvas.spacing(xy[rows]) if size is None and tissue is not None else size
        draw(canvas.Spots(xy[rows], diameter), each, rows)
        if tissue is not None:
            furniture.tissue(each, tissue)
        if microns is not None:
            furniture.scale_bar(each, microns)
        each.set_title(title if sample_key is None else name, fontsize="large", parse_math=False)
    return axes


def _column(adata: AnnData, key: str) -> pd.Series:
    return check_adata(adata).obs[key_in(adata.obs, key, "adata.obs", MAKES_DOMAINS)]


def _coordinates(adata: AnnData, spatial_key: str, basis: str | None) -> tuple[np.ndarray, bool]:
    """Two columns, and whether the second points downwards, as on an image of a slide."""
    if basis is None or basis == spatial_key:
        return coordinates_of(adata, spatial_key)[:, :2], True
    if basis not in adata.obsm and f"X_{basis}" in adata.obsm:
        basis = f"X_{basis}"
    return coordinates_of(adata, basis)[:, :2], basis.startswith(SPATIAL)


def _samples(adata: AnnData, key: str | None) -> tuple[list[str], list[Any]]:
    """Titles and rows of the panels."""
    if key is None:
        return [""], [slice(None)]
    numbers = samples_of(adata, key)
    names = adata.obs[key].astype(str).to_numpy()
    rows = [np.flatnonzero(numbers == number) for number in range(numbers.max() + 1)]
    return [str(names[row[0]]) for row in rows], rows


def _fading() -> Colormap:
    """From a light gray, so that the tissue is seen where there is nothing, to a dark blue."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("fading", ["#E8E8E8", "#9CC9DF", "#2C7FB8", "#08306B"])
