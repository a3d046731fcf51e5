"""Write the page of a report."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from pdvi import pl
from pdvi._anndata import keys
from pdvi._anndata.checks import MAKES_DOMAINS, fit_of
from pdvi._anndata.keys import DOMAIN, SPATIAL
from pdvi._base.checks import key_in
from pdvi.pl.colors import colors_of
from pdvi.pl.figures import write_figure

if TYPE_CHECKING:
    from anndata import AnnData
    from matplotlib.axes import Axes

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 60em; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.6em } h2 { font-size: 1.2em; margin-top: 2em }
table { border-collapse: collapse } td, th { padding: .2em 1em .2em 0; text-align: right }
td:first-child, th:first-child { text-align: left } tr { border-bottom: 1px solid #ddd }
img { max-width: 100% } i { display: inline-block; width: .8em; height: .8em; border-radius: .4em; margin-right: .5em }
"""
FEW = 32  # domains; more small multiples than that are not readable


def page(
    adata: AnnData,
    *,
    key: str = DOMAIN,
    sample_key: str | None = None,
    spatial_key: str = SPATIAL,
    title: str = "Spatial domains",
) -> str:
    """Return the report on a fit of `tl.domains` as one HTML text; nothing is loaded from elsewhere.

    Parameters
    ----------
    key
        of the fit, as in `tl.domains`.
    sample_key
        a column of obs: maps have one panel for each sample.
    spatial_key
        coordinates in obsm.
    """
    fit = fit_of(adata, key)
    where: dict[str, Any] = {"key": key, "sample_key": sample_key, "spatial_key": spatial_key}
    labels = adata.obs[key_in(adata.obs, key, "adata.obs", MAKES_DOMAINS)].astype("category")
    n_domains = len(labels.cat.categories)
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{adata.n_obs:,} spots, {adata.n_vars:,} genes, {n_domains} domains. {escape(str(fit['status']))}. "
        f"ELBO {fit['elbo']:,.0f}. Made by pdvi {version('pdvi')}.</p>",
        "<h2>Domains</h2>",
        _figure(pl.domains(adata, **where), "map of the domains"),
        _table(("domain", "spots", "share", "mean probability"), _sizes(adata, key, labels)),
        "<h2>How sure it is</h2>",
        _figure(pl.entropy(adata, **where), "map of the entropy"),
        _probabilities(adata, where) if n_domains <= FEW else "",
        "<h2>The fit</h2>",
        _figure(pl.trace(adata, key=key), "objective and gradient norm during the fit"),
        _settings({name: value for name, value in fit["params"].items() if name != "recipe"}),
        "<details><summary>The recipe: every number behind it</summary>",
        _settings(fit["params"].get("recipe", {})),
        "</details>",
    ]
    head = f"<meta charset='utf-8'><title>{escape(title)}</title><style>{STYLE}</style>"
    return "\n".join(["<!doctype html>", f"<html lang='en'><head>{head}</head><body>", *parts, "</body></html>\n"])


def write(
    adata: AnnData,
    path: str | os.PathLike,
    *,
    key: str = DOMAIN,
    sample_key: str | None = None,
    spatial_key: str = SPATIAL,
    title: str = "Spatial domains",
) -> None:
    """Write the report to ``path``; the parameters are those of `page`."""
    text = page(adata, key=key, sample_key=sample_key, spatial_key=spatial_key, title=title)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def _sizes(adata: AnnData, key: str, labels: pd.Series) -> Iterable[tuple[str, ...]]:
    codes = labels.cat.codes.to_numpy()
    colors = colors_of(adata, key, len(labels.cat.categories))
    certain = np.asarray(adata.obsm[keys.probability(key)]).max(1)
    for k, name in enumerate(labels.cat.categories):
        mine = codes == k
        color = escape(colors[k], quote=True)
        mean = f"{certain[mine].mean():.3f}" if mine.any() else "none"
        dot = f"<i style='background:{color}'></i>"
        yield dot + escape(str(name)), f"{mine.sum():,}", f"{100 * mine.mean():.1f} %", mean


def _probabilities(adata: AnnData, where: dict[str, Any]) -> str:
    """Two wide maps in a row, where samples are side by side: of four, the titles would be too small on the page."""
    ncols = 4 if where["sample_key"] is None else 2
    return _figure(pl.probabilities(adata, **where, ncols=ncols), "probability of each domain")


def _settings(values: Mapping[str, object]) -> str:
    return _table(("setting", "value"), ((escape(name), escape(str(value))) for name, value in values.items()))


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _figure(axes: Axes | np.ndarray, what: str) -> str:
    picture = io.BytesIO()
    write_figure(axes, picture, form="png", dpi=130)
    text = base64.b64encode(picture.getvalue()).decode()
    return f"<p><img alt='{escape(what, quote=True)}' src='data:image/png;base64,{text}'></p>"
