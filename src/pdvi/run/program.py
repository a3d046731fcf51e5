"""A run's side of the compiled program (`pdvi.executors.fit_program`): what it gets, and rows from what it writes."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pdvi.core.problem import Problem
from pdvi.executors.fit_program import LONG_AGO, History, Outcome, Rules, Watch, as_pair, rows_of_batches
from pdvi.executors.steps import NOTES
from pdvi.run.safeguard import Safeguard

MAX_CALL_SECONDS = 2.0  # of a call, which cannot be interrupted
LARGE_STATE = 2**27  # bytes of a state from which on no copy of it is kept in the program: a call is one row then
MIN_ROW_SECONDS = 1e-3  # of a log point, from which on its evaluation is told apart from its steps
SMALL_SIZE = 2**26  # numbers of data that are worked through in a first call, of which nothing is known

MAX_STEPS = 2**30  # that a 32-bit integer counts

TraceRows = list[dict[str, Any]]


class Tolerances(NamedTuple):
    """The tolerances of `pdvi.fit`."""

    tol: float = 0.0
    abs_tol: float = 0.0
    grad_tol: float = 0.0


def rules_for(
    rows: TraceRows,
    tolerances: Tolerances,
    *,
    step: int,
    last: int,
    stride: int,
    max_rows: int,
    at_start: bool,
    hook_done: bool,
    has_event: bool,
    lower_bound: float,
    may_rise: bool,
) -> Rules:
    """Return what ends a run as numbers of the types that the program takes."""
    values = np.array([row["objective"] for row in rows])
    finite = values[np.isfinite(values)]
    real = np.dtype(jnp.result_type(float))
    with np.errstate(over="ignore"):
        return Rules(
            step=np.asarray(step, np.int32),
            last=np.asarray(min(last, MAX_STEPS), np.int32),
            stride=np.asarray(stride, np.int32),
            max_rows=np.asarray(max_rows, np.int32),
            at_start=np.asarray(at_start),
            hook_done=np.asarray(hook_done),
            has_event=np.asarray(has_event),
            tol=np.asarray(tolerances.tol, real),
            abs_tol=np.asarray(tolerances.abs_tol, real),
            grad_tol=np.asarray(tolerances.grad_tol, real),
            first_norm=np.asarray(rows[0]["grad_norm"] if rows else 0, real),
            low=np.asarray(finite.min(initial=np.inf), real),
            high=np.asarray(finite.max(initial=-np.inf), real),
            lower_bound=np.asarray(lower_bound, real),
            may_rise=np.asarray(may_rise),
            slack=np.asarray(Safeguard.slack, real),
            max_streak=np.asarray(Safeguard.rises, np.int32),
        )


def history_of(rows: TraceRows, steps_per_epoch: int, stride: int) -> History:
    """Return the newest rows of the trace, as many as the stopping rule looks at."""
    room = 1 << (2 * -(-steps_per_epoch // stride)).bit_length()
    real = np.dtype(jnp.result_type(float))
    counts, objective = np.tile(np.array([LONG_AGO, 1, 0], np.int32), (room, 1)), np.zeros((room, 2), real)
    newest = rows[-room:]
    for i, row in enumerate(newest, start=room - len(newest)):
        counts[i, :2], objective[i] = (row["step"], bool(row["event"])), as_pair(row["objective"], real)
    return History(counts, objective)


def watch_of(safeguard: Safeguard, steps_per_epoch: int) -> Watch:
    """Return the state of the safeguard."""
    real = np.dtype(jnp.result_type(float))
    return Watch(
        np.asarray(safeguard.streak, np.int32),
        np.asarray(round(safeguard.good_epoch * steps_per_epoch), np.int32),
        np.stack([as_pair(value, real) for value in (safeguard.first, safeguard.best, safeguard.previous)]),
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
    problem: Problem, batch_size: int, stride: int, max_rows: int, row_seconds: float | None, left: float | None
) -> int:
    """Return for how many log points the program may run: not for long, nor far beyond the budget.

    ``row_seconds``: of a log point, None if it is not known yet; ``left``: seconds of the budget.
    """
    most = min(max_rows, rows_of_batches(stride, batch_size))
    if row_seconds is None:
        numbers = sum(leaf.size for leaf in jax.tree.leaves(problem.shards))
        work = numbers * most * max(1.0, stride * batch_size / problem.n_shards)
        return most if work <= SMALL_SIZE and left is None else 1
    seconds = MAX_CALL_SECONDS if left is None else min(MAX_CALL_SECONDS, 0.5 * left)
    return int(min(most, max(1.0, seconds / row_seconds)))
