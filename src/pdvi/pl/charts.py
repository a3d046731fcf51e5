"""Charts of a fit: how it went, what its domains are made of, and how many domains there should be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from pdvi._anndata.checks import MAKES_DOMAINS, check_adata, fit_of
from pdvi._anndata.keys import DOMAIN, N_DOMAINS
from pdvi._base.checks import one_of
from pdvi.pl.canvas import plain

if TYPE_CHECKING:
    from anndata import AnnData
    from matplotlib.axes import Axes

CURVES = {"objective": "objective (negative ELBO)", "grad_norm": "gradient norm"}
SCORES = {
    "stability": "agreement between fits (ARI)",
    "held_out": "log density of a held-out spot",
    "elbo": "ELBO",
}


def trace(adata: AnnData, *, key: str = DOMAIN, against: str = "epoch", ax: np.ndarray | None = None) -> np.ndarray:
    """Draw the objective and the norm of its gradient during the fit; dotted lines are events, such as new noise.

    A start far above the rest is left out of sight, or nothing else would be seen.

    Parameters
    ----------
    key
        of the fit in uns.
    against
        "epoch", "seconds" or "step".
    ax
        two axes to draw into; by default a new figure.

    Returns
    -------
    Array of two Axes.
    """
    fit = check_adata(adata).uns.get(key)
    if not isinstance(fit, Mapping) or "trace" not in fit:
        msg = f"adata.uns[{key!r}] has no trace; {MAKES_DOMAINS}."
        raise ValueError(msg)
    one_of("against", against, ("epoch", "seconds", "step"))
    record = {name: np.asarray(values) for name, values in fit["trace"].items()}
    axes = plain(len(CURVES), ax)
    marker = "o" if len(record[against]) <= 60 else ""
    events = record[against][record["event"] != ""] if "event" in record else ()
    for each, (name, title) in zip(axes, CURVES.items()):
        values = record[name].astype(float)
        good = np.isfinite(values) & ((values > 0) | (name == "objective"))
        each.plot(record[against][good], values[good], marker=marker, markersize=3, linewidth=1.2, color="#0072B2")
        for at in events:
            each.axvline(at, color="#999999", linewidth=0.8, linestyle=":")
        each.set_xlabel(against)
        each.set_title(title, fontsize="medium", loc="left")
    if (record["grad_norm"] > 0).any():
        axes[1].set_yscale("log")
    axes[0].ticklabel_format(axis="y", useOffset=False)
    drawn = np.asarray(axes[0].lines[0].get_ydata(), float)
    later = drawn[1:]
    room = np.ptp(later) if len(later) > 1 else 0.0
    if room > 0 and drawn[0] > later.max() + 5 * room:
        axes[0].set_ylim(later.min() - 0.1 * room, later.max() + 0.5 * room)
    return axes


def composition(adata: AnnData, *, key: str = DOMAIN, ax: Axes | None = None) -> Axes:
    """Draw the share of every type in every domain; types are sorted by the domain that has most of them.

    Types are numbered by how many spots they have; ``uns[key]["types"]["of_spot"]`` says which spots these are.

    Parameters
    ----------
    key
        of the domains.
    ax
        axes to draw into; by default a new figure.
    """
    from matplotlib import pyplot as plt

    types = fit_of(adata, key).get("types")
    if types is None:
        msg = f"adata.uns[{key!r}] has no types: no view of types was fitted; run pdvi.tl.domains with views=3 or more."
        raise ValueError(msg)
    shares = np.asarray(types["composition"])
    order = np.lexsort((-shares.max(0), shares.argmax(0)))
    if ax is None:
        _, ax = plt.subplots(figsize=(1.5 + 0.3 * shares.shape[1], 1.2 + 0.3 * len(shares)), layout="constrained")
    image = ax.imshow(shares[:, order], cmap="Blues", vmin=0, aspect="auto")
    ax.set_xticks(range(shares.shape[1]), [str(k + 1) for k in order], fontsize="small")
    ax.set_yticks(range(len(shares)), [str(name) for name in adata.obs[key].astype("category").cat.categories])
    ax.set_xlabel("cell type")
    ax.set_ylabel("domain")
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.figure.colorbar(image, ax=ax, label="share", shrink=0.8).outline.set_visible(False)
    return ax


def n_domains(adata: AnnData, *, key: str = N_DOMAINS, ax: np.ndarray | None = None) -> np.ndarray:
    """Draw stability, held-out score and ELBO of every candidate; the dashed line is the recommended number.

    Parameters
    ----------
    key
        of the table in uns.
    ax
        three axes to draw into, or two if there is no held-out score; by default a new figure.

    Returns
    -------
    Array of Axes.
    """
    table = check_adata(adata).uns.get(key)
    if not isinstance(table, dict) or "recommended" not in table:
        msg = f"adata.uns[{key!r}] has no candidates; run pdvi.tl.choose_n_domains(adata, candidates) first."
        raise ValueError(msg)
    panels = {name: title for name, title in SCORES.items() if name in table}
    axes = plain(len(panels), ax)
    candidates = np.asarray(table["n_domains"])
    for each, (name, title) in zip(axes, panels.items()):
        each.plot(candidates, np.asarray(table[name]), marker="o", markersize=4, linewidth=1.2, color="#0072B2")
        each.axvline(table["recommended"], color="#999999", linewidth=1, linestyle="--")
        each.set_xticks(candidates if len(candidates) <= 15 else candidates[:: len(candidates) // 10])
        each.set_xlabel("domains")
        each.set_title(title, fontsize="medium", loc="left")
    axes[0].set_ylim(top=1.02)
    for each in axes[1:]:
        each.ticklabel_format(axis="y", useOffset=False)
    return axes
