"""Mixed logistic regression: pdvi at sizes up to 100,000 groups, beside what one would take instead.

    python benchmarks/mixed_glm.py --groups 1000 100000 --statsmodels 1000 --numpyro 100000

That is the variational fit of statsmodels, where it can, and NumPyro's SVI: AutoNormal, Adam with step size 0.01, 3,000
steps with all data. Prints seconds (compilation included), those of the processor besides, which do not depend on what
else the machine does, epochs, and the estimates beside the truth: intercept, two slopes, and the standard deviation of
the random intercepts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import pdvi

Estimates = tuple[str, Any, float]  # a note, coefficients, the standard deviation of the intercepts


def line(name: str, groups: int, fit: Callable[[], Estimates]) -> None:
    wall, processor = time.perf_counter(), time.process_time()
    note, coef, sd = fit()
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    words = " ".join(f"{value:8.4f}" for value in (*np.asarray(coef, float), sd))
    print(f"{name + note:40} {groups:8d} {wall:8.1f} {processor:9.1f}  {words}", flush=True)


def truth(data: Any) -> Estimates:
    """Return what the data were made with."""
    return "", data.coef, float(np.sqrt(data.covariance[0, 0]))


def pdvi_fit(table: Any) -> Estimates:
    """Return the posterior means, everything at its default."""
    found = pdvi.MixedGLM("y ~ x1 + x2 + (1 | group)", family="bernoulli").fit(table)
    note = f", {found.n_iter_} epochs, {found.result_.status.name}"
    return note, found.coef_, float(np.sqrt(found.covariance_.to_numpy()[0, 0]))


def numpyro_fit(table: Any, steps: int = 3_000) -> Estimates:
    """Return the posterior medians that NumPyro's SVI finds, with wide priors."""
    import jax
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoNormal

    x = np.column_stack([np.ones(len(table)), table[["x1", "x2"]]])
    y = table["y"].to_numpy(float)
    names, group = np.unique(table["group"], return_inverse=True)

    def model(x: Any, y: Any, group: Any) -> None:
        coef = numpyro.sample("coef", dist.Normal(0, 10).expand([3]).to_event(1))
        sd = numpyro.sample("sd", dist.HalfNormal(5.0))
        with numpyro.plate("groups", len(names)):
            effect = numpyro.sample("effect", dist.Normal(0, 1))
        with numpyro.plate("data", len(y)):
            numpyro.sample("y", dist.Bernoulli(logits=x @ coef + sd * effect[group]), obs=y)

    guide = AutoNormal(model)
    method = SVI(model, guide, numpyro.optim.Adam(0.01), Trace_ELBO())
    found = guide.median(method.run(jax.random.key(0), steps, x, y, group, progress_bar=False).params)
    return "", found["coef"], float(found["sd"])


def statsmodels_fit(table: Any) -> Estimates:
    """Return the posterior means that statsmodels' mean-field approximation finds."""
    from statsmodels.genmod.bayes_mixed_glm import BinomialBayesMixedGLM

    model = BinomialBayesMixedGLM.from_formula("y ~ x1 + x2", {"group": "0 + C(group)"}, table)
    found = model.fit_vb()
    return "", found.fe_mean, float(np.exp(found.vcp_mean[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, nargs="+", default=[1_000, 10_000])
    parser.add_argument("--statsmodels", type=int, default=1_000, help="the most groups that statsmodels is given")
    parser.add_argument("--size", type=float, default=10, help="observations of a group")
    parser.add_argument("--numpyro", type=int, default=10_000, help="the most groups that NumPyro is given")
    options = parser.parse_args()
    print(f"{'':40} {'groups':>8} {'seconds':>8} {'processor':>9}  intercept, x1, x2, sd of the intercepts")
    for groups in options.groups:
        data = pdvi.datasets.grouped(groups, size=options.size, family="bernoulli", seed=1)
        line("truth", groups, partial(truth, data))
        line("pdvi", groups, partial(pdvi_fit, data.table))
        if groups <= options.statsmodels:
            line("statsmodels BinomialBayesMixedGLM", groups, partial(statsmodels_fit, data.table))
        if groups <= options.numpyro:
            line("NumPyro SVI", groups, partial(numpyro_fit, data.table))


if __name__ == "__main__":
    main()
