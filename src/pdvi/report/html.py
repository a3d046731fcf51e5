"""Write the page of a report: one HTML file with a map to explore, tables and charts, and nothing from elsewhere.

The map is a program of 15 kB that paints spots into a pixel buffer. Plotting libraries that draw as many spots are a
hundred times that (plotly's WebGL bundle 1.6 MB, deck.gl 2.1 MB), or need WebGL, which remote desktops often lack.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from pdvi._anndata import keys
from pdvi._anndata.image import microns_per_unit
from pdvi._anndata.keys import DOMAIN, SPATIAL
from pdvi.report import sections
from pdvi.report.spots import Measure, pack
from pdvi.report.subject import Subject

if TYPE_CHECKING:
    from anndata import AnnData

STATIC = Path(__file__).parent / "static"
ON_MAP, HOVERED = 4, 3  # marker genes of a domain
MOST_GENES = 96  # on the map
MENU = {
    "map": "Map",
    "domains": "Domains",
    "markers": "Marker genes",
    "composition": "Composition",
    "contacts": "Which domains touch",
    "certainty": "How sure it is",
    "views": "Agreement of views",
    "fit": "The fit",
    "cite": "How to cite",
}


def page(
    adata: AnnData,
    *,
    key: str = DOMAIN,
    sample_key: str | None = None,
    spatial_key: str = SPATIAL,
    type_key: str | None = None,
    layer: str | None = None,
    title: str = "Spatial domains",
    command: str | None = None,
) -> str:
    """Return the report on a fit of `tl.domains` as one HTML text; nothing is loaded from elsewhere.

    Parameters
    ----------
    key
        of the fit, as in `tl.domains`.
    sample_key
        a column of obs that tells samples apart; by default that of the fit.
    spatial_key
        coordinates in obsm.
    type_key
        a column of obs with cell types, whose shares are shown; by default "cell_type" if there is one.
    layer
        where the counts are that markers are found in; by default X.
    command
        what to show as the way to make it again; by default the call of `tl.domains`.
    """
    subject = Subject(adata, key, sample_key, spatial_key, type_key, layer)
    spots, meta = _pack(subject)
    found: dict[str, Any] = {
        "domains": sections.domains(subject),
        "markers": sections.markers(subject),
        "composition": sections.composition(subject),
        "contacts": sections.contacts(subject),
        "certainty": sections.certainty(subject),
        "views": sections.views(subject.fit.get("views")),
        "fit": sections.fit(subject, command),
    }
    # the only program that may run is ours, and no request can leave: a label that slipped through would do nothing
    script = (STATIC / "map.js").read_text(encoding="utf-8")
    mark = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src 'sha256-{mark}'"
    # whatever comes from the data is escaped by the template, but for what is marked up here
    template = Environment(autoescape=True, loader=FileSystemLoader(STATIC)).get_template("page.html")
    return template.render(
        title=title,
        menu={name: head for name, head in MENU.items() if found.get(name, True)},
        facts=sections.facts(subject),
        names=subject.names,
        colors=subject.colors,
        meta=meta,
        genes=sorted(meta["genes"], key=lambda gene: str(gene["name"]).lower()),
        script=Markup(script),
        style=Markup((STATIC / "report.css").read_text(encoding="utf-8")),
        policy=Markup(policy),
        meta_json=Markup(json.dumps(meta).replace("<", "\\u003c")),
        spots=Markup(spots),
        **found,
    )


def write(adata: AnnData, path: str | os.PathLike, **options: Any) -> None:
    """Write the report to ``path``; the other parameters are those of `page`."""
    Path(path).write_text(page(adata, **options), encoding="utf-8")


def _pack(subject: Subject) -> tuple[str, dict[str, Any]]:
    """All spots as one text, and what the map says about them."""
    measures = []
    if subject.certainty is not None:
        measures.append(Measure("certainty", subject.certainty, 0.0, 1.0))
    if subject.probability is not None:
        measures.append(Measure("probability", subject.probability.max(1), 0.0, 1.0))
    if keys.entropy(subject.key) in subject.adata.obs:
        entropy = subject.adata.obs[keys.entropy(subject.key)].to_numpy(float)
        measures.append(Measure("entropy", entropy, 0.0, max(float(np.quantile(entropy, 0.99)), 0.05)))
    # the first genes of all domains, then the second ones, and so on: none twice
    best = [subject.best(k, ON_MAP) for k in range(len(subject.names))]
    ranked = [genes[rank] for rank in range(ON_MAP) for genes in best if rank < len(genes)]
    shown = list(dict.fromkeys(ranked))[:MOST_GENES]
    spots, meta = pack(subject.coordinates, subject.codes, subject.samples, measures, _levels(subject, shown))
    scale = dict(zip(shown, meta["genes"]))
    sizes = np.bincount(subject.codes, minlength=len(subject.names))
    meta["domains"] = [
        {
            "name": name,
            "color": color,
            "size": int(sizes[k]),
            "genes": [scale[gene] for gene in subject.best(k, HOVERED) if gene in scale],
        }
        for k, (name, color) in enumerate(zip(subject.names, subject.colors))
    ]
    meta["samples"] = [{"name": name, "box": box} for name, box in zip(subject.sample_names, meta.pop("boxes"))]
    meta["sample_key"] = subject.sample_key or ""
    microns = microns_per_unit(subject.adata)
    meta["microns"] = microns and microns * meta["step"]
    return spots, meta


def _levels(subject: Subject, genes: list[int]) -> list[Measure]:
    """The expression of some genes."""
    if subject.markers is None or not genes:
        return []
    found = []
    for gene, values in zip(genes, subject.markers.expression.columns(genes).T):
        low, top = min(float(values.min()), 0.0), max(float(np.quantile(values, 0.995)), float(values.max()) * 0.2)
        found.append(Measure(str(subject.markers.names[gene]), values, low, max(top, low + 1e-6)))
    return found
