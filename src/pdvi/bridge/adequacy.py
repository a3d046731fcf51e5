"""Whether a fit with fixed draws had enough of them."""

from __future__ import annotations

import math

import jax
import numpy as np
import pandas as pd

from pdvi._base.checks import instance
from pdvi.bridge.build import with_draws
from pdvi.bridge.model import NumPyroModel
from pdvi.core.problem import Problem
from pdvi.core.result import Result
from pdvi.run.fit import fit
from pdvi.solvers.primal_dual.p2dvi import P2DVI


def check_draws(problem: Problem, result: Result, *, seed: int = 1) -> pd.DataFrame:
    """Return what twice as many draws, all of them new, change: fitted again from where ``result`` ended.

    One row for every unknown outside the plate, and one for each site inside it: ``shift``, how far the mean of q moves
    in standard deviations of q (for sites inside, the root of the mean square over rows), and ``sd_ratio``, by what the
    standard deviation is multiplied (for sites inside, the geometric mean). Shifts below 0.1 matter to no conclusion;
    where they are larger, give `pdvi.from_numpyro` more ``draws``.
    """
    model = instance("problem", problem, Problem, "a problem of pdvi.from_numpyro").model
    instance("problem.model", model, NumPyroModel, "a model of pdvi.from_numpyro", "other models have no draws")
    problem = problem.load()
    shards = {name: part for name, part in problem.shards.items() if name != "noise"}
    doubled = with_draws(
        model.density, jax.tree.map(np.asarray, shards), 2 * len(model.draws), np.random.default_rng(seed)
    )
    again = fit(doubled, P2DVI(), start=result.point)
    shift, log_ratio = _changes(result.global_params, again.global_params)
    names = [
        f"{site.name}[{', '.join(map(str, place))}]" if place else site.name
        for site in model.density.globals_
        for place in np.ndindex(*site.shape)
    ]
    rows = dict(zip(names, zip(np.abs(shift).tolist(), np.exp(log_ratio).tolist())))
    if model.density.locals_:
        there = np.asarray(problem.shards["weight"]) > 0
        shift, log_ratio = (change[there] for change in _changes(result.local_params, again.local_params))
    at = 0
    for site in model.density.locals_:
        part = slice(at, at + math.prod(site.by_row(model.density.plate)))
        at = part.stop
        rows[site.name] = (np.sqrt(np.mean(shift[:, part] ** 2)), np.exp(log_ratio[:, part].mean()))
    return pd.DataFrame.from_dict(rows, orient="index", columns=["shift", "sd_ratio"])


def _changes(before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """By how many standard deviations means moved, and the logarithm of what standard deviations were multiplied by."""
    shift = np.asarray(after["mean"] - before["mean"], float) / np.exp(np.asarray(before["log_sd"], float))
    return shift, np.asarray(after["log_sd"] - before["log_sd"], float)
