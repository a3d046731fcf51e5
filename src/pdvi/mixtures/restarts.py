"""Several starts at once: one compiled, vectorised run over all of them, the best one kept."""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from pdvi.core.problem import Problem
from pdvi.core.result import Point
from pdvi.executors.memory import Memory, stage
from pdvi.run.sampling import Reshuffled, batches, steps_per_epoch

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
    memory = Memory()
    memory.key = jax.random.key(seed)
    _, local = problem.init(memory.key)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(local)) + 4 * 3 * problem.n_shards * problem.n_global
    together = max(1, min(len(starts), MEMORY // size))
    steps = epochs * steps_per_epoch(problem.n_shards, batch_size)
    drawn = jnp.asarray(batches(Reshuffled(), seed, 0, steps, problem.n_shards, batch_size))
    objectives: list[float] = []
    best: Point | None = None
    for begin in range(0, len(starts), together):
        points = [jax.tree.map(jnp.asarray, start) for start in starts[begin : begin + together]]
        states = [solver.init(problem, problem.ravel(point), local, batch_size) for point in points]
        left = drawn
        while len(left):
            staged = [stage(problem, solver, state, batch_size, memory) for state in states]
            _, stepper, count = staged[0]
            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(state for state, _, _ in staged))
            stacked = _run_all(problem, stepper, stacked, left[:count])
            states = [jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in range(len(states))]
            left = left[count:] if count else left[:0]
        values = np.array([np.asarray(_losses(problem, state), float).sum() for state in states])
        values[~np.isfinite(values)] = np.inf
        winner = int(values.argmin())
        if best is None or values[winner] < min(objectives):
            best = Point(problem.unravel(states[winner].lam), states[winner].local)
        objectives += values.tolist()
    assert best is not None
    return Restarts(best, np.array(objectives))


@eqx.filter_jit
def _run_all(problem: Problem, solver: Any, states: Any, drawn: Array) -> Any:
    def run(state: Any) -> Any:
        return jax.lax.scan(lambda s, batch: (solver.step(problem, s, batch), None), state, drawn)[0]

    return jax.vmap(run)(states)


@eqx.filter_jit
def _losses(problem: Problem, state: Any) -> Array:
    return problem.evaluate(state.lam, state.local)[0]
