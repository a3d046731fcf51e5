"""Colors for many categories."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd
from scipy.optimize import linear_sum_assignment

from pdvi._anndata import keys
from pdvi._anndata.checks import is_fit
from pdvi._base.checks import whole

if TYPE_CHECKING:
    from anndata import AnnData

# Okabe and Ito's seven, then what a maximin search in CIELAB added: each colour as far as can be from all before it,
# from white and from the grey of missing labels, in normal vision and as a deuteranope and a protanope see it, with
# chroma at most 75. The least distance between any two is 22, and 13 and 11 as the colour-blind see them.
COLORS = (
    *("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#691E0F"),
    *("#1E3CB4", "#87F078", "#69005A", "#B4E1A5", "#F0D2FF", "#694B5A", "#784B00", "#B4A54B"),
    *("#1E3C87", "#0F3C2D", "#0078F0", "#E1A5A5", "#784B87", "#B487FF", "#008787", "#69873C"),
    *("#785A3C", "#E1A578", "#A5D24B", "#A587C3", "#870F3C", "#87C3D2", "#4B961E", "#D26969"),
)
MISSING = "#D4D4D4"


def palette(n: int) -> list[str]:
    """Return ``n`` colours as hex, the same first ones for every n, safe for the colour-blind; after 32 they repeat."""
    return [COLORS[i % len(COLORS)] for i in range(whole("n", n))]


def colors_of(adata: AnnData, key: str, n: int) -> list[str]:
    """Return the colours of the ``n`` labels in ``obs[key]``: those in uns if they are enough, else a palette."""
    given = [str(color) for color in adata.uns.get(keys.colors(key), [])]
    return given[:n] if len(given) >= n else palette(n)


def kept_colors(adata: AnnData, key: str, labels: pd.Series) -> list[str]:
    """Return colours for new labels of a slide: those of an earlier fit on it, so that what is alike looks alike.

    The earlier fit is the one under the same key, else the last that `tl.domains` wrote; without one, a palette.
    """
    uns = adata.uns
    fits = [name for name in uns if is_fit(uns[name]) and name in adata.obs and keys.colors(name) in uns]
    earlier = key if key in fits else fits[-1] if fits else None
    if earlier is None:
        return palette(len(labels.cat.categories))
    others = adata.obs[earlier].astype("category")
    return matching_colors(labels, others, colors_of(adata, earlier, len(others.cat.categories)))


def matching_colors(labels: pd.Series, others: pd.Series, colors: Sequence[str]) -> list[str]:
    """Return a colour for each of the labels: that of the other label it shares most spots with, one to one.

    Both are categorical, ``colors`` are those of ``others``; labels that are left over get colours of their own.
    """
    rows, columns = range(len(labels.cat.categories)), range(len(others.cat.categories))
    table = pd.crosstab(labels.cat.codes, others.cat.codes).reindex(index=rows, columns=columns, fill_value=0)
    matched: dict[int, int] = dict(zip(*linear_sum_assignment(table.to_numpy(), maximize=True)))
    taken = {str(colors[int(k)]).upper() for k in matched.values()}
    spare = iter([*(color for color in COLORS if color.upper() not in taken), *palette(len(rows))])
    return [str(colors[int(matched[k])]) if k in matched else next(spare) for k in rows]
