"""Models of a user's own, everything at its default: python benchmarks/own_models.py

    python benchmarks/own_models.py --cases "LDA" "factor analysis" --seeds 1
    python benchmarks/own_models.py --cases sorted --seeds 10     # cases whose names have the word

The models are in `users_models.py` and, those that no rule was chosen on, `unseen_models.py`. "Gap" is the objective,
evaluated in double precision, above that of an independent optimum: L-BFGS (scipy) in double precision on all variables
at once, the lower of its runs from the model's own start and from where the fit ended. "Polish" is how far the latter
alone still went down: what a fit that says CONVERGED has left to gain, so more than 0.1 nats there is a false
CONVERGED. "Epochs" are those of the trace until it is within 0.1 nats of that optimum; "first" are the Newton steps
before them, each of which reads all shards (once, and again where it has to be shorter). The sorted mixture is compared
with memoized VB from the same start: k-means, rows at random, or rows at random with the local variables that fit them;
"first" is the pass after which shards agree, and the last column says where sorted and shuffled batches end: at the
same objective (to 1e-5), at a lower one, or HIGHER.
"""

from __future__ import annotations

import argparse
import re
import time
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize
from jax.flatten_util import ravel_pytree
from rich.console import Console
from rich.table import Table

import pdvi
from pdvi.core.model import Bounded, offers
from pdvi.core.result import Point
from unseen_models import UNSEEN
from users_models import CASES as SEEN

NEAR = 0.1  # nats
ALIKE = 1e-5  # of the objective: two ends of the sorted mixture are one optimum
CASES = SEEN | UNSEEN
SORTED = {f"sorted {bias}, {start}": (bias, start) for bias in (0.95, 1.0) for start in ("k-means", "rows", "known")}


def lowest(problem, lam, local, steps=1_000, rounds=4):
    """The objective at a point, and what L-BFGS comes to from there, in double precision.

    Each round works in units of the curvature's diagonal where the last one ended: without them badly scaled predictors
    stall L-BFGS too.
    """
    flat, unflatten = ravel_pytree((lam, local))
    bound = problem.model.lower_bound() if offers(problem.model, Bounded) else -np.inf

    @jax.jit
    def objective(x):
        lam, local = unflatten(x)
        return jax.vmap(lambda phi, shard: problem.loss(phi, lam, shard))(local, problem.shards).sum()

    gradient = jax.jit(jax.value_and_grad(objective))
    probes = jax.random.rademacher(jax.random.key(0), (32, flat.size), flat.dtype)
    bends = jax.jit(lambda x: jax.lax.map(lambda z: z * jax.jvp(jax.grad(objective), (x,), (z,))[1], probes).mean(0))
    x, best = flat, float(objective(flat))
    first = best
    for _ in range(rounds):
        size = np.asarray(1 / jnp.sqrt(jnp.maximum(jnp.abs(bends(x)), 1e-12)))

        def scaled(z: Any, size: Any = size) -> Any:
            value, slope = gradient(jnp.asarray(z * size))
            possible = np.isfinite(value) and value >= bound  # in logs of parameters it may run off to rounding noise
            return (float(value), np.asarray(slope) * size) if possible else (1e300, np.zeros_like(z))

        options: Any = {"maxiter": steps, "maxfun": steps, "ftol": 0, "gtol": 1e-6, "maxcor": 30}
        found = scipy.optimize.minimize(scaled, np.asarray(x) / size, jac=True, method="L-BFGS-B", options=options)
        improved, best, x = best - found.fun, min(best, found.fun), jnp.asarray(found.x * size)
        if improved < 1e-4:
            break
    return first, best


def fitted(case, solver, seed, epochs, **settings):
    """A row of the table."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        began = time.perf_counter()
        result = pdvi.fit(case.problem(), solver, seed=seed, max_epochs=epochs, **settings)
        seconds = time.perf_counter() - began
    with jax.enable_x64(True):
        problem = case.problem()
        wide = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf, float)), result.point)
        here, polished = lowest(problem, problem.ravel(wide.global_params), wide.local_params)
        other = (case.easier or case).problem()
        _, reference = lowest(other, *other.init(jax.random.key(seed)))
    best = min(polished, reference)
    near = result.trace["epoch"][result.trace["objective"] < best + NEAR]
    arrived = f"{near.min():g}" if len(near) else "-"
    steps = re.search(r"(\d+) Newton steps", " ".join(result.trace["event"]))
    false = "FALSE" if result.converged and here - polished > NEAR else ""
    return [
        f"{here - best:.3g}",
        f"{here - polished:.3g}",
        steps[1] if steps else "0",
        arrived,
        result.status.name,
        false,
        f"{seconds:.1f}",
    ], result


def sorted_mixture(seed, solver, epochs, n=100_000, bias=0.95, start="k-means"):
    """The paper's mixture, shards in the order of their components, against memoized VB from the same start."""
    data = pdvi.datasets.mixture(n, batch_size=n // 100, bias=bias, seed=seed)
    problem = data.problem(seed=seed)
    own = [np.bincount(data.labels[data.batch == b], minlength=5).argmax() for b in range(problem.n_shards)]
    order = pdvi.sampling.Fixed(tuple(int(b) for b in np.argsort(own, kind="stable")))
    point: dict[str, Any] = {}
    if start != "k-means":
        rows = np.random.default_rng(seed).choice(n, 5, replace=False)
        globals_ = dict(problem.unravel(problem.init(jax.random.key(seed))[0]))
        globals_["mean"] = jnp.asarray(data.X[rows], jnp.float32)
        point = {"start": globals_}
    if start == "known":
        local = jax.vmap(lambda phi, shard: problem.model.local_step(phi, globals_, shard))(
            problem.init(jax.random.key(seed))[1], problem.shards
        )
        point = {"start": Point(globals_, local)}
    rival = pdvi.fit(problem, pdvi.MemoizedVB(), seed=seed, max_epochs=epochs, tol=0, sampling=order, **point)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        began = time.perf_counter()
        result = pdvi.fit(problem, solver, seed=seed, max_epochs=epochs, sampling=order, **point)
        seconds = time.perf_counter() - began
        shuffled = pdvi.fit(problem, solver, seed=seed, max_epochs=epochs, **point)
    best, slack = rival.objective, ALIKE * abs(rival.objective)
    near = [trace["epoch"][trace["objective"] < best + slack] for trace in (result.trace, shuffled.trace)]
    arrived = " / ".join(f"{found.min():g}" if len(found) else "-" for found in near)
    gaps = [found.objective - best for found in (result, shuffled)]
    ends = " / ".join("same" if abs(gap) <= slack else "lower" if gap < 0 else "HIGHER" for gap in gaps)
    passes = str(int(result.trace["event"].str.contains("consensus initialization").sum()))
    return [*(f"{gap:.3g}" for gap in gaps), passes, arrived, result.status.name, ends, f"{seconds:.1f}"], result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", nargs="+", default=[*CASES, *SORTED])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--solver", default="P2DVI", choices=["P2DVI", "PDVI"])
    arguments = parser.parse_args()
    cases = [name for name in (*CASES, *SORTED) if any(part in name for part in arguments.cases)]
    if not cases:
        parser.error(f"--cases must be words of {[*CASES, *SORTED]}, got {arguments.cases}")
    solver = {"P2DVI": pdvi.P2DVI, "PDVI": pdvi.PDVI}[arguments.solver]()
    console = Console(width=130)
    table = Table(
        "model", "seed", "gap", "polish", "first", "epochs", "status", "false", "seconds", title=f"{solver!r:.60}"
    )
    for name in cases:
        for seed in range(arguments.seeds):
            if name in SORTED:
                bias, start = SORTED[name]
                row, _ = sorted_mixture(seed, solver, arguments.epochs, bias=bias, start=start)
            else:
                row, _ = fitted(CASES[name](seed), solver, seed, arguments.epochs)
            print(name, seed, *row, flush=True)
            table.add_row(name, str(seed), *row)
    console.print(table)
    console.print('For "sorted": gap and, as "polish", gap of shuffled batches to memoized VB; epochs of both.')


if __name__ == "__main__":
    main()
