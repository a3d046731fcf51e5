"""The sections of a report: each is made from the subject, and is '' where there is nothing to show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from pdvi.pl.colors import palette
from pdvi.report import charts, words
from pdvi.report.markup import dot, heat, settings, stack, table, text
from pdvi.report.spots import Packed
from pdvi.report.subject import Subject

LISTED = 6  # marker genes of a domain, in the table


def explorer(subject: Subject, packed: Packed) -> str:
    """Return the map, with what it is coloured by, its legend and its buttons."""
    meta = packed.meta
    measures = "".join(f'<option value="{each["part"]}">{text(each["name"])}</option>' for each in meta["measures"])
    genes = sorted(meta["genes"], key=lambda each: str(each["name"]).lower())
    listed = "".join(f'<option value="{each["part"]}">{text(each["name"])}</option>' for each in genes)
    samples = ""
    if len(subject.sample_names) > 1:
        options = "".join(f'<option value="{k}">{text(name)}</option>' for k, name in enumerate(subject.sample_names))
        samples = f'<label>Sample <select id="sample"><option value="-1">all</option>{options}</select></label>'
    legend = "".join(
        f'<li><label><input type="checkbox" checked>{dot(each["color"])}<span>{text(each["name"])}</span>'
        f"<small>{each['size']:,}</small></label></li>"
        for each in meta["domains"]
    )
    notes = ["Click the map, then scroll to zoom; drag to move; arrow keys, + and - and 0 do the same."]
    if meta["bin_shift"] and listed:
        notes.append("With so many spots, genes are shown as means over small squares.")
    if meta["left_out"]:
        notes.append(f"{meta['n']:,} spots are drawn, chosen at random; the tables count all.")
    return f"""<div class="tools"><label>Colour by <select id="colour"><option value="domain">domain</option>{measures}
{f'<optgroup label="Marker genes">{listed}</optgroup>' if listed else ""}</select></label>{samples}
<button id="closer" type="button" aria-label="Zoom in">+</button>
<button id="wider" type="button" aria-label="Zoom out">&minus;</button>
<button id="whole" type="button">Whole</button><button id="save" type="button">Save picture</button></div>
<div class="stage"><div><div class="map"><canvas id="tissue" tabindex="0" role="application"
 aria-label="Map of the domains: arrow keys move, plus and minus zoom, 0 shows all"></canvas>
<div id="tip" class="tip" hidden></div><div id="bar" class="bar" hidden></div></div>
<p id="hint" class="soft">{" ".join(notes)}</p><p id="spoken" class="soft" aria-live="polite" hidden></p>
<noscript><p>The map needs JavaScript. All numbers are in the tables below.</p></noscript></div>
<div><div id="ramp" class="ramp" hidden><span id="low"></span><canvas id="strip"></canvas><span id="high"></span></div>
<div class="tools"><button id="all" type="button">All domains</button>
<button id="none" type="button">None</button></div>
<ul id="legend" class="legend">{legend}</ul></div></div>"""


def domains(subject: Subject) -> str:
    """Return a table of the domains."""
    titles = ["domain", "spots", "share"]
    known = {"mean probability": None if subject.probability is None else subject.probability.max(1)}
    known["mean certainty"] = subject.certainty
    measures = {name: values for name, values in known.items() if values is not None}
    titles += [*measures, *(["markers, clearest first"] if subject.markers is not None else [])]

    def rows() -> Iterator[list[str]]:
        for k, (name, color) in enumerate(zip(subject.names, subject.colors)):
            mine = subject.codes == k
            row = [dot(color) + text(name), f"{mine.sum():,}", f"{100 * mine.mean():.1f} %"]
            row += [f"{np.nanmean(values[mine]):.3f}" if mine.any() else "none" for values in measures.values()]
            if subject.markers is not None:
                best = ", ".join(text(subject.markers.names[gene]) for gene in subject.best(k, LISTED))
                row.append(f'<td class="names">{best or "none"}</td>')
            yield row

    return table(titles, rows(), kind="listed" if subject.markers is not None else "")


def markers(subject: Subject) -> str:
    """Return a dot plot of the clearest genes."""
    if subject.markers is None:
        return ""
    each = 3 if len(subject.names) <= 16 else 2
    genes = list(dict.fromkeys(gene for k in range(len(subject.names)) for gene in subject.best(k, each)))
    if not genes:
        return ""
    means = subject.markers.means[:, genes]
    levels = (means - means.min(0)) / np.maximum(np.ptp(means, axis=0), 1e-12)
    names = [str(subject.markers.names[gene]) for gene in genes]
    plot = charts.dot_plot(subject.markers.shares[:, genes], levels, subject.names, names, subject.colors)
    return (
        f"<p>The {each} clearest genes of every domain, by Welch's t test against all other spots on log expression "
        "(the statistic of scanpy's rank_genes_groups). Size: share of the spots that express the gene. Strength: mean "
        "expression, from the lowest to the highest domain. The domains were found from the same counts, so the test "
        f"orders genes; it does not prove that they differ.</p>{plot}"
    )


def composition(subject: Subject) -> str:
    """Return which domains each sample has, and which types each domain."""
    parts = []
    if len(subject.sample_names) > 1:
        shares = subject.shares(subject.samples, len(subject.sample_names))
        rows = (
            [text(name), stack(zip(subject.names, subject.colors, row))]
            for name, row in zip(subject.sample_names, shares)
        )
        parts += ["<h3>Domains in each sample</h3>", table(("sample", "domains"), rows, kind="bars")]
    if (found := subject.types()) is not None:
        names, shares = found
        colors = palette(len(names))
        rows = (
            [dot(color) + text(name), stack(zip(names, colors, row))]
            for name, color, row in zip(subject.names, subject.colors, shares)
        )
        legend = " ".join(f'<span class="key">{dot(color)}{text(name)}</span>' for name, color in zip(names, colors))
        parts += ["<h3>Types in each domain</h3>", table(("domain", "types"), rows, kind="bars")]
        parts.append(f'<p class="soft">{legend}</p>')
    return "".join(parts)


def contacts(subject: Subject) -> str:
    """Return which domains are neighbours."""
    if len(subject.names) < 2:
        return ""
    shares = 100 * subject.contacts()
    told = (
        "<p>Of all neighbours of a row's spots, the percentage in each column's domain; none where it is below 0.5.</p>"
    )
    return told + heat(shares.tolist(), subject.names, subject.colors, "from", ".0f")


def certainty(subject: Subject) -> str:
    """Return what is known about how sure the labels are."""
    said = words.certainty(subject.probability, subject.certainty)
    if not said:
        return ""
    drawn = []
    if subject.certainty is not None:
        drawn.append(charts.histogram(subject.certainty, "Spots by certainty", "share of views that agree"))
    if subject.probability is not None:
        drawn.append(charts.histogram(subject.probability.max(1), "Spots by probability of their label", "probability"))
    return f'<p>{text(said)}</p><div class="two">{"".join(drawn)}</div>'


def views(noted: Any) -> str:
    """Return how far views agree; '' if there was but one."""
    if not isinstance(noted, Mapping) or "agreement" not in noted:
        return ""
    matrix = np.asarray(noted["agreement"], float)
    if matrix.ndim != 2 or not matrix.size:
        return ""
    names = [str(name) for name in noted.get("names", range(1, len(matrix) + 1))]
    elbo = np.atleast_1d(np.asarray(noted.get("elbo", []), float))
    listed = ""
    if len(elbo) == len(names):
        listed = table(("view", "ELBO"), ((text(name), f"{value:,.0f}") for name, value in zip(names, elbo)))
    told = "<p>How far every two views agree on the labels (adjusted Rand index; 1 is the same).</p>"
    return told + heat(matrix.tolist(), names, [""] * len(names), "view", ".2f") + listed


def fit(subject: Subject, command: str | None) -> str:
    """Return the trace, the call and all settings."""
    noted = subject.fit
    record = {name: np.asarray(values) for name, values in noted["trace"].items()}
    epoch = record.get("epoch", np.arange(len(next(iter(record.values()), []))))
    happened = epoch[record["event"] != ""].tolist() if "event" in record else []
    drawn = "".join(
        charts.line_chart(epoch, record[name].astype(float), title, "epoch", log=log, events=happened)
        for name, title, log in (
            ("objective", "Objective (negative ELBO)", False),
            ("grad_norm", "Norm of its gradient", True),
        )
        if name in record
    )
    params = {name: value for name, value in noted["params"].items() if name != "config"}
    seconds = noted.get("seconds")
    timed = (
        {f"seconds, {name}": float(value) for name, value in seconds.items()} if isinstance(seconds, Mapping) else {}
    )
    config = noted["params"].get("config", {})
    return "".join(
        (
            f'<div class="two">{drawn}</div>',
            f"<h3>To make it again</h3><pre>{text(command or words.call(noted['params'], subject.key))}</pre>",
            f"<details open><summary>Settings</summary>{settings({**params, **timed})}</details>",
            f"<details><summary>The configuration: every number behind it</summary>{settings(config)}</details>",
            f"<details><summary>Versions, when this page was made</summary>{settings(words.versions())}</details>",
        )
    )
