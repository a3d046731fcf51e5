"""List the methods compared: what of each is tuned, and how it looks in every figure."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pdvi
from pdvi.run.running import Run
from pdvi.run.tune import COARSE

PER_BLOCK = ("local_rate", "rate.*")  # locals first: the globals' best rate depends on theirs
DECAYING = {"rate": COARSE, "delay": (1.0, 1e2, 1e4)}


@dataclass(frozen=True)
class Method:
    """A solver, the settings of it that are tuned (None: it has none), and its line: colour, dashes, marker."""

    name: str
    solver: Any
    space: Any
    color: str
    line: Any = "-"
    marker: str = ""
    ours: bool = False  # the paper's own, and what this library adds to them

    @property
    def key(self) -> str:
        """Return the name as part of a file name."""
        return self.name.lower().replace(" ", "-").replace("(", "").replace(")", "")


# Dashes and markers differ too, and markers are filled for ours alone: colours are not told apart in grey.
METHODS = (
    Method("PD-VI", pdvi.PDVI(), ("eta",), "#0072B2", "-", "o", ours=True),
    Method("P2D-VI", pdvi.P2DVI(), ("eta.*",), "#D55E00", "-", "s", ours=True),
    Method("P2D-VI automatic", pdvi.P2DVI(), None, "#000000", "-", "D", ours=True),
    Method("SVI constant", pdvi.SVI(), ("rate",), "#009E73", "--", "^"),
    Method("SVI diminishing", pdvi.SVI(forgetting=0.7), DECAYING, "#56B4E9", "-.", "v"),
    Method("SGD", pdvi.SGD(), PER_BLOCK, "#CC79A7", ":", "x"),
    Method("RMSProp", pdvi.RMSProp(), PER_BLOCK, "#E69F00", (0, (2, 2)), "+"),
    Method("Adam", pdvi.Adam(), PER_BLOCK, "#691E0F", "-.", "P"),
    Method("CV", pdvi.ControlVariates(), ("rate.*",), "#787878", (0, (6, 1, 1, 1, 1, 1)), "d"),
    Method("memoized VB", pdvi.MemoizedVB(), None, "#B4A54B", (0, (4, 1)), "*"),
    # in the paper's table of rates, but not in its experiments
    Method("PG-SVI", pdvi.PGSVI(), ("rate",), "#69005A", (0, (7, 2)), "<"),
    Method("SNGVI", pdvi.SNGVI(forgetting=1.0), DECAYING, "#1E3C87", (0, (3, 1, 1, 1)), ">"),
    Method("PD-VI automatic", pdvi.PDVI(), None, "#0078F0", (0, (8, 2)), "h", ours=True),
    # as in textbooks: (t + 1)^-0.7
    Method("SVI diminishing untuned", pdvi.SVI(rate=1.0, forgetting=0.7), None, "#A587C3", (0, (5, 1, 1, 1)), "1"),
    Method("CAVI", pdvi.CAVI(), None, "#0F3C2D", (0, (1, 3)), "p"),
)
BY_NAME = {method.name: method for method in METHODS}
PAPER = (
    *("PD-VI", "P2D-VI", "SVI constant", "SVI diminishing", "SGD", "RMSProp", "Adam", "CV"),
    *("P2D-VI automatic", "memoized VB"),  # ours without tuning, and the strongest rival the paper leaves out
)
BASELINES = ("SVI constant", "SVI diminishing", "SGD", "RMSProp", "Adam", "CV")


def applicable(names: tuple[str, ...], problem: pdvi.Problem) -> list[Method]:
    """Return those of the methods that can serve a problem, and differ on it."""
    found = []
    for method in (BY_NAME[name] for name in names):
        if method.space == ("eta.*",) and len(problem.blocks) == 1:
            continue  # the same as one step size
        with suppress(ValueError):
            Run(problem, method.solver)
            found.append(method)
    return found


def spelled(settings: dict[str, float]) -> str:
    """Return tuned settings as text."""
    return ", ".join(f"{name} {value:.2g}" for name, value in settings.items()) or "-"
