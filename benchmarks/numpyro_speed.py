"""NumPyro models by P2D-VI and by NumPyro's own SVI: python benchmarks/numpyro_speed.py

    python benchmarks/numpyro_speed.py --groups 1000 --models logistic

Seconds of wall time, compilation and the building of the problem included, until the means of q of all globals are
within 0.1 standard deviations of q of the fixed point, at two checks in a row. The fixed point is that of P2D-VI with
128 draws, other ones, in a run of its own. SVI has AutoNormal, one draw a step, all data in every step, and Adam with
three step sizes, the best of which counts, besides 0.001, which most examples have. Checks are every 100 steps of SVI
and every epoch of P2D-VI. "Again" is a second fit of the same problem: nothing is compiled. On a machine that others
use, ``--processor`` counts the seconds of all cores that the process used instead.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from rich.console import Console
from rich.table import Table

import pdvi

NEAR = 0.1
RATES = (0.003, 0.01, 0.03)
USUAL = 0.001


def logistic(x: Any, y: Any = None) -> None:
    """Random intercepts."""
    b = numpyro.sample("b", dist.Normal(0, 2).expand([x.shape[-1]]).to_event(1))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    with numpyro.plate("data", x.shape[0], dim=-2):
        u = numpyro.sample("u", dist.Normal(0, tau))
        with numpyro.plate("obs", x.shape[1], dim=-1):
            numpyro.sample("y", dist.Bernoulli(logits=u + x @ b), obs=y)


def poisson(x: Any, y: Any = None) -> None:
    """Random intercepts and slopes."""
    b = numpyro.sample("b", dist.Normal(0, 2).expand([x.shape[-1]]).to_event(1))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0).expand([2]).to_event(1))
    with numpyro.plate("data", x.shape[0], dim=-2):
        u = numpyro.sample("u", dist.Normal(0, tau[0]))
        v = numpyro.sample("v", dist.Normal(0, tau[1]))
        with numpyro.plate("obs", x.shape[1], dim=-1):
            numpyro.sample("y", dist.Poisson(jax.numpy.exp(x @ b + u + v * x[..., 1])), obs=y)


def data_for(model: Any, groups: int) -> dict[str, np.ndarray]:
    """Ten observations a group, four predictors, the first of them 1."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((groups, 10, 4))
    x[..., 0] = 1
    eta = 0.7 * rng.standard_normal((groups, 1)) + x @ [-0.5, 1.0, -1.0, 0.5]
    if model is logistic:
        return {"x": x, "y": (rng.uniform(size=eta.shape) < 1 / (1 + np.exp(-eta))).astype(np.int32)}
    eta = 0.5 * eta + 0.3 * rng.standard_normal((groups, 1)) * x[..., 1]
    return {"x": x, "y": rng.poisson(np.exp(eta)).astype(np.int32)}


class Watch:
    """The first of two checks in a row that were near."""

    clock = staticmethod(time.perf_counter)

    def __init__(self, target: np.ndarray, sd: np.ndarray):
        self.target, self.sd, self.near = target, sd, 0.0
        self.began = self.clock()

    def seconds(self) -> float:
        """Return the seconds since the beginning."""
        return self.clock() - self.began

    def done(self, mean: Any) -> bool:
        """Return whether this check and the one before were near."""
        now = self.seconds()
        if not (np.abs(np.asarray(mean) - self.target) < NEAR * self.sd).all():
            self.near = 0.0
            return False
        found, self.near = bool(self.near), self.near or now
        return found


def ours(model: Any, data: dict[str, Any], watch: Watch) -> tuple[float, float]:
    """Return the seconds of the first fit, and of another."""
    problem = pdvi.from_numpyro(model, data)
    return fitted(problem, watch), fitted(problem, Watch(watch.target, watch.sd))


def fitted(problem: pdvi.Problem, watch: Watch) -> float:
    """Return the seconds of a fit."""
    pdvi.fit(problem, pdvi.P2DVI(), tol=0, callbacks=[lambda now: watch.done(now.global_params["mean"])])
    return watch.near or np.inf


def svi(model: Any, data: dict[str, Any], rate: float, watch: Watch, most: float) -> float:
    """Return the seconds of SVI; infinite if it does not arrive within ``most``."""
    guide = AutoNormal(model)
    method = SVI(model, guide, numpyro.optim.Adam(rate), Trace_ELBO())
    state = method.init(jax.random.key(0), **data)

    @jax.jit
    def some(state: Any) -> Any:
        return jax.lax.scan(lambda s, _: (method.update(s, **data)[0], None), state, length=100)[0]

    while watch.seconds() < most:
        state = jax.block_until_ready(some(state))
        params = method.get_params(state)
        if watch.done(np.concatenate([np.ravel(params[f"{name}_auto_loc"]) for name in ("b", "tau")])):
            return watch.near
    return np.inf


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--groups", type=int, nargs="+", default=[1_000, 5_000, 20_000])
    parser.add_argument("--models", nargs="+", default=["logistic", "poisson"])
    parser.add_argument("--most", type=float, default=120.0, help="seconds after which SVI is given up")
    parser.add_argument("--processor", action="store_true", help="seconds of the processor, not of the clock")
    options = parser.parse_args()
    if options.processor:
        Watch.clock = staticmethod(time.process_time)
    table = Table(
        "model", "groups", "P2D-VI", "again", *(f"SVI {rate}" for rate in (*RATES, USUAL)), "best SVI / P2D-VI"
    )
    for name in options.models:
        model = {"logistic": logistic, "poisson": poisson}[name]
        for groups in options.groups:
            data = data_for(model, groups)
            precise = pdvi.fit(pdvi.from_numpyro(model, data, draws=128, seed=1), pdvi.P2DVI(), tol=1e-8, max_epochs=40)
            target, sd = precise.global_params["mean"], np.exp(precise.global_params["log_sd"])
            jax.clear_caches()
            first, again = ours(model, data, Watch(target, sd))
            rates = []
            for rate in (*RATES, USUAL):
                jax.clear_caches()
                rates.append(svi(model, data, rate, Watch(target, sd), options.most))
            best = min(rates[: len(RATES)])
            numbers = [f"{seconds:.1f}" for seconds in (first, again, *rates)]
            table.add_row(name, f"{groups:,}", *numbers, f"{best / first:.2f}")
            print(name, groups, *numbers, flush=True)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
