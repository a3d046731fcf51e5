"""Several starts at once: one compiled, vectorised run over all of them, the best one kept."""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from pdvi.problem import Problem
from pdvi.result import Point
from pdvi.sampling import Reshuffled, batches, steps_per_epoch

Array = jax.Array

MEMORY = 2**31  # bytes of states that may be alive at once; more starts than that run in turns


class Restarts(NamedTuple):
    """The best point, and what every start reached."""

    best: Point
    objectives: np.ndarray


def best_of(
    problem: Problem, solver: Any, starts: list[dict[str, Any]], *, epochs: int, batch_size: int, seed: int = 0
) -> Restarts:
    """Run ``solver`` from every start (dicts of blocks) for ``epochs`` on the same draws; keep the best objective."""
    _, local = problem.init(jax.random.key(seed))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(local)) + 4 * 3 * problem.n_shards * problem.n_global
    together = max(1, min(len(starts), MEMORY // size))
    steps = epochs * steps_per_epoch(problem.n_shards, batch_size)
    drawn = jnp.asarray(batches(Reshuffled(), seed, 0, steps, problem.n_shards, batch_size))
    objectives: list[float] = []
    best: Point | None = None
    for begin in range(0, len(starts), together):
        points = [jax.tree.map(jnp.asarray, start) for start in starts[begin : begin + together]]
        states = [solver.init(problem, problem.ravel(point), local, batch_size) for point in points]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
        lam, locals_, losses = _run_all(problem, solver, stacked, drawn)
        values = np.asarray(losses, float).sum(1)
        values[~np.isfinite(values)] = np.inf
        winner = int(values.argmin())
        if best is None or values[winner] < min(objectives):
            best = Point(problem.unravel(lam[winner]), jax.tree.map(lambda leaf, w=winner: leaf[w], locals_))
        objectives += values.tolist()
    assert best is not None
    return Restarts(best, np.array(objectives))


@eqx.filter_jit
def _run_all(problem: Problem, solver: Any, states: Any, drawn: Array) -> tuple[Array, Any, Array]:
    def run(state: Any) -> tuple[Array, Any, Array]:
        state = jax.lax.scan(lambda s, batch: (solver.step(problem, s, batch), None), state, drawn)[0]
        return state.lam, state.local, problem.evaluate(state.lam, state.local)[0]

    return jax.vmap(run)(states)
