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

    Each comes to the state that `Run.advance` would bring it to, up to rounding. Stages that end elsewhere in some of
    them are run one by one.
    """
    one = runs[0]
    stop = min(last, (one.step // one.stride + 1) * one.stride)
    drawn = batches(one.sampling, one.seed, one.step, stop, one.problem.n_shards, one.batch_size)
    while len(drawn):
        stages = [run.turned() for run in runs]
        count = stages[0].steps
        if any(stage.steps != count for stage in stages):
            msg = "runs side by side must have their stages in step."
            raise ValueError(msg)
        states = run_side_by_side(
            one.problem,
            side_by_side([stage.solver for stage in stages]),
            stacked([run.state for run in runs]),
            jnp.asarray(drawn[:count]),
        )
        for number, run in enumerate(runs):
            run.state = jax.tree.map(lambda leaf, i=number: leaf[i], states)
        drawn = drawn[count:] if count else drawn[:0]
    for run in runs:
        run.step = stop


def objectives(runs: Sequence[Run]) -> np.ndarray:
    """Return the objectives of runs in memory, infinity where one is not finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        found = [np.asarray(_losses(run.problem, run.state), float).sum() for run in runs]
    return np.where(np.isfinite(found), found, np.inf)


@eqx.filter_jit
def _losses(problem: Problem, state: State) -> Array:
    return problem.evaluate(state.lam, state.local)[0]
