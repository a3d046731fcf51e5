"""Several runs of one problem on the same draws, side by side: vmap around the one compiled loop."""

from __future__ import annotations

from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from pdvi._base.types import Array
from pdvi.core.problem import Problem
from pdvi.core.solver import State
from pdvi.executors.steps import run_side_by_side, side_by_side, stacked
from pdvi.run.running import Run
from pdvi.run.sampling import batches


def advance_together(runs: Sequence[Run], last: int) -> None:
    """Advance runs in memory that differ in their start and in real-valued settings of one solver only.

    Each comes to the state that `Run.advance` would bring it to, up to rounding. Segments that end elsewhere in some of
    them are run one by one.
    """
    one = runs[0]
    stop = min(last, (one.step // one.stride + 1) * one.stride)
    drawn = batches(one.sampling, one.seed, one.step, stop, one.problem.n_shards, one.batch_size)
    while len(drawn):
        segments = [run.next_segment() for run in runs]
        count = segments[0].n_steps
        if any(segment.n_steps != count for segment in segments):
            msg = "runs side by side must have their segments in step."
            raise ValueError(msg)
        states = run_side_by_side(
            one.problem,
            side_by_side([segment.solver for segment in segments]),
            stacked([run.state for run in runs]),
            jnp.asarray(drawn[:count]),
        )
        for number, run in enumerate(runs):
            run.state = jax.tree.map(lambda leaf, i=number: leaf[i], states)
        done = len(drawn) if count is None else min(len(drawn), count)
        drawn = drawn[done:]
        for run in runs:
            run.step += done


def objectives(runs: Sequence[Run]) -> np.ndarray:
    """Return the objectives of runs in memory, infinity where one is not finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        found = [np.asarray(_losses(run.problem, run.state), float).sum() for run in runs]
    return np.where(np.isfinite(found), found, np.inf)


@eqx.filter_jit
def _losses(problem: Problem, state: State) -> Array:
    return problem.evaluate(state.lam, state.local)[0]
