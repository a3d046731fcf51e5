"""Mixed logistic regression: pdvi at sizes up to 100,000 groups, and statsmodels' variational fit where it can.

    python benchmarks/mixed_glm.py --groups 1000 100000 --statsmodels 1000

Prints seconds (compilation included), epochs, and the estimates beside the truth: intercept, two slopes, and the
standard deviation of the random intercepts.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

import pdvi


def line(name: str, groups: int, seconds: float, coef: Any, sd: float) -> None:
    words = " ".join(f"{value:8.4f}" for value in (*np.asarray(coef, float), sd))
    print(f"{name:36} {groups:8d} {seconds:8.1f}  {words}", flush=True)


def statsmodels_fit(table: Any) -> tuple[Any, float]:
    """Return the posterior means that statsmodels' mean-field approximation finds."""
    from statsmodels.genmod.bayes_mixed_glm import BinomialBayesMixedGLM

    model = BinomialBayesMixedGLM.from_formula("y ~ x1 + x2", {"group": "0 + C(group)"}, table)
    found = model.fit_vb()
    return found.fe_mean, float(np.exp(found.vcp_mean[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, nargs="+", default=[1_000, 10_000])
    parser.add_argument("--statsmodels", type=int, default=1_000, help="the most groups that statsmodels is given")
    parser.add_argument("--size", type=float, default=10, help="observations of a group")
    options = parser.parse_args()
    print(f"{'':36} {'groups':>8} {'seconds':>8}  intercept, x1, x2, sd of the intercepts")
    for groups in options.groups:
        data = pdvi.datasets.grouped(groups, size=options.size, family="bernoulli", seed=1)
        line("truth", groups, 0.0, data.coef, float(np.sqrt(data.covariance[0, 0])))
        began = time.perf_counter()
        ours = pdvi.MixedGLM("y ~ x1 + x2 + (1 | group)", family="bernoulli").fit(data.table)
        sd = float(np.sqrt(ours.covariance_.to_numpy()[0, 0]))
        state = f"{ours.n_iter_} epochs, {ours.result_.status.name}"
        line(f"pdvi, {state}", groups, time.perf_counter() - began, ours.coef_, sd)
        if groups <= options.statsmodels:
            began = time.perf_counter()
            coef, sd = statsmodels_fit(data.table)
            line("statsmodels BinomialBayesMixedGLM", groups, time.perf_counter() - began, coef, sd)


if __name__ == "__main__":
    main()
