"""A run's side of the compiled program (`pdvi.executors.fit_program`): what it gets, and rows from what it writes."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pdvi.core.problem import Problem
from pdvi.executors.fit_program import Outcome, Rules, as_pair, rows_of_batches
from pdvi.executors.steps import NOTES
from pdvi.run.safeguard import Safeguard

MAX_CALL_SECONDS = 2.0  # of a call, which cannot be interrupted
LARGE_STATE = 2**27  # bytes of a state from which on no copy of it is kept in the program: a call is one row then
MIN_ROW_SECONDS = 1e-3  # of a log point, from which on its evaluation is told apart from its steps
SMALL_SIZE = 2**26  # numbers of data that are worked through in a first call, of which nothing is known

MAX_STEPS = 2**30  # that a 32-bit integer counts
WIDER = 1 + 1e-5  # times: the program's tolerances, whose rounding must not decide

TraceRows = list[dict[str, Any]]


class Tolerances(NamedTuple):
    """The tolerances of `pdvi.fit`."""

    tol: float = 0.0
    abs_tol: float = 0.0
    grad_tol: float = 0.0

    def of(self, objective: float) -> float:
        """Return how much an objective may change from one log point to the next when a run has settled."""
        return self.tol * abs(objective) + self.abs_tol


def rules_for(
    rows: TraceRows,
    safeguard: Safeguard,
    tolerances: Tolerances,
    *,
    step: int,
    last: int,
    stride: int,
    max_rows: int,
    hook_done: bool,
    lower_bound: float,
    may_rise: bool,
) -> Rules:
    """Return what ends a call, in the types that the program takes; without ``rows`` it starts with that of the start.

    The program looks at changes from one row to the next.
    """
    real = np.dtype(jnp.result_type(float))
    previous = rows[-1]["objective"] if rows else np.nan
    is_small = len(rows) > 1 and abs(previous - rows[-2]["objective"]) < tolerances.of(rows[-2]["objective"])
    whole = {"step": step, "last": min(last, MAX_STEPS), "stride": stride, "max_rows": max_rows, "n_small": is_small}
    values = {
        "tol": WIDER * tolerances.tol,
        "abs_tol": WIDER * tolerances.abs_tol,
        "grad_tol": WIDER * tolerances.grad_tol,
        "grad_limit": WIDER * tolerances.grad_tol * rows[0]["grad_norm"] if rows else 0.0,
        "best": safeguard.best,
        "lower_bound": lower_bound,
        "slack": 0.5 * Safeguard.slack,
    }
    with np.errstate(over="ignore"):
        return Rules(
            **{name: np.asarray(value, np.int32) for name, value in whole.items()},
            **{name: np.asarray(value, real) for name, value in values.items()},
            at_start=np.asarray(not rows),
            hook_done=np.asarray(hook_done),
            may_rise=np.asarray(may_rise),
            previous=as_pair(previous, real),
        )


def numbers_of(problem: Problem, end: Outcome, i: int) -> dict[str, float]:
    """Return the numbers of a row that the program has written; the objective in double precision."""
    norms = [float(value) for value in end.rows.norms[i]]
    return {
        "objective": float(end.rows.objective[i].astype(float).sum()),
        "grad_norm": float(np.hypot.reduce(norms)),
        **{f"grad_norm_{name}": value for (name, _), value in zip(problem.blocks, norms)},
        **{name: float(values[i]) for name, values in end.rows.metrics.items()},
    }


def notes_of(end: Outcome, i: int) -> list[str]:
    """Return the notes of a row that the program has written."""
    return [text for bit, text in enumerate(NOTES) if int(end.rows.notes[i]) >> bit & 1]


def rows_at_once(
    problem: Problem,
    batch_size: int,
    stride: int,
    tolerances: Tolerances,
    row_seconds: float | None,
    left: float | None,
) -> int:
    """Return for how many log points the program may run: not for long, nor far beyond the budget.

    ``row_seconds``: of a log point, None if it is not known yet; ``left``: seconds of the budget. The program compares
    rows with the one before; where rows are less than an epoch apart only the host knows which to compare.
    """
    if stride < problem.steps_per_epoch(batch_size) and any(tolerances):
        return 1
    most = rows_of_batches(stride, batch_size)
    if row_seconds is None:
        numbers = sum(leaf.size for leaf in jax.tree.leaves(problem.shards))
        work = numbers * most * max(1.0, stride * batch_size / problem.n_shards)
        return most if work <= SMALL_SIZE and left is None else 1
    seconds = MAX_CALL_SECONDS if left is None else min(MAX_CALL_SECONDS, 0.5 * left)
    return int(min(most, max(1.0, seconds / row_seconds)))
