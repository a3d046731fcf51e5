"""Several starts at once: one compiled, vectorised run over all of them, the best one kept."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from pdvi.core.problem import Problem
from pdvi.core.result import Point
from pdvi.core.solver import Solver
from pdvi.run.running import Run
from pdvi.run.together import advance_together, objectives

ALIVE = 2**31  # bytes of states that may be alive at once; more starts than that run in turns


class Restarts(NamedTuple):
    """The best point, and what every start reached."""

    best: Point
    objectives: np.ndarray


def best_of(
    problem: Problem, solver: Solver, starts: list[dict[str, Any]], *, epochs: int, batch_size: int, seed: int = 0
) -> Restarts:
    """Run ``solver`` from every start (dicts of blocks) for ``epochs`` on the same draws; keep the best objective."""

    def begun(some: list[dict[str, Any]]) -> list[Run]:
        return [Run(problem, solver, batch_size=batch_size, seed=seed, start=one, log_every=epochs) for one in some]

    runs = begun(starts[:1])  # the first tells how many fit
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(runs[0].state))
    together = max(1, min(len(starts), ALIVE // max(size, 1)))
    runs += begun(starts[1:together])
    found: list[float] = []
    best: Point | None = None
    while runs:
        advance_together(runs, epochs * runs[0].steps_per_epoch)
        values = objectives(runs)
        winner = int(values.argmin())
        if best is None or values[winner] < min(found):
            best = Point(problem.unravel(runs[winner].state.lam), runs[winner].state.local)
        found += values.tolist()
        runs = begun(starts[len(found) : len(found) + together])
    assert best is not None
    return Restarts(best, np.array(found))
