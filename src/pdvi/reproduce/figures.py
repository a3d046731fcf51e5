"""Draw curves with bands, and write figures: the same line for a method in all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from pdvi._base.atomic import replacing
from pdvi.reproduce.methods import Method

FORMATS = ("png", "pdf")
MARKERS = 6  # on a line
POINTS = 200  # of a line over an axis that differs from seed to seed
SHADE = 0.4  # of all bands of a panel together, where they overlap; one alone has a tenth at most


def new(columns: int, rows: int = 1, *, width: float = 3.6, height: float = 3.0, legend: float = 1.7) -> Any:
    """Return a figure with a grid of axes, and room for one legend on the right."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        rows, columns, figsize=(columns * width + legend, rows * height), layout="constrained", squeeze=False
    )
    for each in axes.ravel():
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


def curves(ax: Any, trace: pd.DataFrame, x: str, y: pd.Series, methods: list[Method], *, log: bool = False) -> None:
    """Draw the mean over the seeds and one standard deviation, of logarithms on a logarithmic axis.

    ``x`` may differ from seed to seed (seconds): values are interpolated to common points up to where all runs are.
    """
    for number, method in enumerate(methods):
        chosen = (trace["method"] == method.name) & np.isfinite(y) & ((y > 0) | (not log))
        mine = trace[chosen].assign(y=y[chosen])
        if mine.empty:
            continue
        runs = [run.drop_duplicates(x, keep="last") for _, run in mine.groupby("seed")]
        at = runs[0][x].to_numpy(float)
        if any(len(run) != len(at) or not np.array_equal(run[x], at) for run in runs):
            at = np.linspace(max(run[x].min() for run in runs), min(run[x].max() for run in runs), POINTS)
        values = np.stack([np.interp(at, run[x], np.log10(run["y"]) if log else run["y"]) for run in runs])
        middle, spread = values.mean(0), values.std(0)
        low, high = (10**bound if log else bound for bound in (middle - spread, middle + spread))
        every = max(1, len(at) // MARKERS)
        ax.plot(
            at,
            10**middle if log else middle,
            color=method.color,
            linestyle=method.line,
            marker=method.marker,
            markevery=(number * every // (len(methods) + 1), every),  # shifted, so that they do not hide each other
            markersize=5,
            markerfacecolor=method.color if method.ours else "white",
            markeredgewidth=1.1,
            linewidth=1.4,
            label=method.name,
        )
        ax.fill_between(at, low, high, color=method.color, alpha=min(0.1, SHADE / len(methods)), linewidth=0)
    if log:
        ax.set_yscale("log")


def legend(figure: Any, axes: np.ndarray) -> None:
    """Draw one legend for all axes, each method once, on the right."""
    entries: dict[str, Any] = {}
    for each in axes.ravel():
        handles, names = each.get_legend_handles_labels()
        entries = dict(zip(names, handles)) | entries
    figure.legend(entries.values(), entries.keys(), loc="outside right center", frameon=False, handlelength=3.2)


def save(figure: Any, out: Path, name: str) -> None:
    """Write a figure among those of a folder, as PNG and PDF, and close it."""
    import matplotlib.pyplot as plt

    (out / "figures").mkdir(parents=True, exist_ok=True)
    for ending in FORMATS:
        with replacing(out / "figures" / f"{name}.{ending}") as temporary:
            figure.savefig(temporary, dpi=150)
    plt.close(figure)
