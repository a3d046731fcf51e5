"""The contents of a report's sections, as `static/page.html` takes them; None where there is nothing to show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from pdvi.pl.colors import palette
from pdvi.report.charts import line_chart
from pdvi.report.subject import Subject, shares

LISTED = 6  # marker genes of a domain, in the table
CURVES = ("objective", "Objective (negative ELBO)", False), ("grad_norm", "Norm of its gradient", True)


def facts(subject: Subject) -> dict[str, str]:
    """Return the numbers at the top of the page."""
    adata = subject.adata
    found = {"spots": f"{adata.n_obs:,}", "genes": f"{adata.n_vars:,}", "domains": f"{len(subject.names)}"}
    if len(subject.sample_names) > 1:
        found["samples"] = f"{len(subject.sample_names)}"
    if subject.certainty is not None:
        found["mean certainty"] = f"{np.nanmean(subject.certainty):.2f}"
    return {**found, "ELBO": f"{float(subject.fit['elbo']):,.0f}"}


def domains(subject: Subject) -> dict[str, Any]:
    """Return the table of the domains."""
    measures = {} if subject.probability is None else {"mean probability": subject.probability.max(1)}
    if subject.certainty is not None:
        measures["mean certainty"] = subject.certainty
    titles = ["domain", "spots", "share", *measures]
    rows: list[dict[str, Any]] = []
    for k, (name, color) in enumerate(zip(subject.names, subject.colors)):
        mine = subject.codes == k
        cells = [f"{mine.sum():,}", f"{100 * mine.mean():.1f} %"]
        cells += [f"{np.nanmean(values[mine]):.3f}" if mine.any() else "none" for values in measures.values()]
        rows.append({"name": name, "color": color, "cells": cells})
        if subject.markers is not None:
            best = ", ".join(subject.markers.names[gene] for gene in subject.best(k, LISTED))
            rows[-1]["genes"] = best or "none"
    if subject.markers is not None:
        titles.append("markers, clearest first")
    return {"titles": titles, "rows": rows}


def markers(subject: Subject) -> dict[str, Any] | None:
    """Return the clearest genes, and per domain their shares of spots that express them and levels from 0 to 1."""
    each = 3 if len(subject.names) <= 16 else 2
    genes = list(dict.fromkeys(gene for k in range(len(subject.names)) for gene in subject.best(k, each)))
    if subject.markers is None or not genes:
        return None
    means = subject.markers.means[:, genes]
    levels = (means - means.min(0)) / np.maximum(np.ptp(means, axis=0), 1e-12)
    rows = [[*zip(*row)] for row in zip(subject.markers.shares[:, genes].tolist(), levels.tolist())]
    return {"each": each, "genes": [str(subject.markers.names[gene]) for gene in genes], "rows": rows}


def composition(subject: Subject) -> dict[str, Any] | None:
    """Return which domains each sample has, and which types each domain."""
    found: dict[str, Any] = {}
    if len(subject.sample_names) > 1:
        rows = shares(subject.samples, subject.codes, len(subject.sample_names), len(subject.names))
        parts = [[*zip(subject.names, subject.colors, row)] for row in rows]
        found["samples"] = [(name, "", part) for name, part in zip(subject.sample_names, parts)]
    if (types := subject.types()) is not None:
        names, rows = types
        found["legend"] = [*zip(names, palette(len(names)))]
        parts = [[*zip(names, palette(len(names)), row)] for row in rows]
        found["types"] = [*zip(subject.names, subject.colors, parts)]
    return found or None


def contacts(subject: Subject) -> list[list[tuple[str, str]]] | None:
    """Return which domains are neighbors."""
    return None if len(subject.names) < 2 else heat((100 * subject.contacts()).tolist(), ".0f")


def certainty(subject: Subject) -> dict[str, Any] | None:
    """Return what is known about how sure the labels are."""
    found: dict[str, Any] = {"charts": []}
    if subject.certainty is not None:
        views, highest = subject.certainty, np.max(subject.certainty)
        found["charts"].append(("Spots by certainty", "share of views that agree", _counts(views)))
        found["views"] = f"{highest:.2f}", 100 * np.mean(views >= highest), 100 * np.mean(views < 0.5)
    if subject.probability is not None:
        best = subject.probability.max(1)
        found["charts"].append(("Spots by probability of their label", "probability", _counts(best)))
        found["model"] = 100 * np.mean(best > 0.9), 100 * np.mean(best < 0.5)
    return found if found["charts"] else None


def views(noted: Any) -> dict[str, Any] | None:
    """Return how far views agree; None if there was but one."""
    if not isinstance(noted, Mapping) or "agreement" not in noted:
        return None
    matrix = np.asarray(noted["agreement"], float)
    if matrix.ndim != 2 or not matrix.size:
        return None
    names = [str(name) for name in noted.get("names", range(1, len(matrix) + 1))]
    elbo = np.atleast_1d(np.asarray(noted.get("elbo", []), float))
    listed = [*zip(names, elbo)] if len(elbo) == len(names) else []
    return {"names": names, "agreement": heat(matrix.tolist(), ".2f"), "elbo": listed}


def fit(subject: Subject, command: str | None) -> dict[str, Any]:
    """Return the trace, the call and all settings."""
    noted = subject.fit
    record = {name: np.asarray(values) for name, values in noted["trace"].items()}
    epoch = record.get("epoch", np.arange(len(next(iter(record.values()), []))))
    events = epoch[record["event"] != ""].tolist() if "event" in record else []
    params, seconds = dict(noted["params"]), noted.get("seconds")
    config = params.pop("config", {})
    if isinstance(seconds, Mapping):
        params |= {f"seconds, {name}": float(value) for name, value in seconds.items()}
    drawn = [
        line_chart(epoch, record[name].astype(float), title, log=log, events=events)
        for name, title, log in CURVES
        if name in record
    ]
    return {
        "status": noted["status"],
        "charts": [chart for chart in drawn if chart is not None],
        "command": command or call(noted["params"], subject.key),
        "settings": {name: _short(value) for name, value in params.items()},
        "config": {name: _short(value) for name, value in config.items()},
        "versions": versions(),
    }


def call(params: Mapping[str, Any], key: str) -> str:
    """Return the call that makes the same fit, as far as its settings tell."""
    plain = {name: value.item() if isinstance(value, np.generic) else value for name, value in params.items()}
    n_domains = plain.pop("n_domains", "?")
    shown = {name: value for name, value in plain.items() if isinstance(value, str | int | float) and value != ""}
    settings = "".join(f", {name}={value!r}" for name, value in shown.items())
    named = "" if key == "domain" else f", key_added={key!r}"
    return f"pdvi.tl.domains(adata, {n_domains}{settings}{named})"


def versions() -> dict[str, str]:
    """Return the versions of what a fit rests on, on this machine."""
    found = {}
    for name in ("pdvi", "jax", "numpy", "scipy", "scikit-learn", "anndata", "scanpy", "matplotlib"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def heat(matrix: Sequence[Sequence[float]], form: str) -> list[list[tuple[str, str]]]:
    """Return a square of numbers, each with the strength of its ground and its text.

    The diagonal has no ground: its numbers are the largest as a rule, and would leave all others pale.
    """
    values = np.maximum(matrix, 0) * (1 - np.eye(len(matrix)))
    strength = 0.7 * values / (values.max(initial=0.0) or 1.0)
    texts = [[f"{value:{form}}" for value in row] for row in matrix]
    return [
        [(f"{each:.2f}", "" if float(text) == 0 else text) for each, text in zip(*rows)]
        for rows in zip(strength, texts)
    ]


def _counts(values: np.ndarray) -> list[int]:
    """How many spots have which value, in 20 bins between 0 and 1."""
    return np.histogram(np.clip(values, 0, 1), 20, (0.0, 1.0))[0].tolist()


def _short(value: object) -> object:
    if isinstance(value, str) and not value:
        return "none"
    return f"{value:.6g}" if isinstance(value, float) else value
