"""A fit in memory as one compiled program: from log point to log point until its stopping rule says stop.

The program ends where the rule holds, where a hook needs the host, or after some log points. It writes the rows of the
trace into a buffer, the objective as two numbers (`precise_sum`), so that the host adds them in double precision. What
it decides is decided again by the host, from the rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pdvi._base.types import Array
from pdvi.core.problem import Problem
from pdvi.core.solver import Solver, State
from pdvi.executors.steps import TracedShards, precise_sum, quickly, steps

MAX_ROWS = 32  # of the trace in one call
MAX_DRAWN = 2**22  # numbers of shards that are drawn for one call
LONG_AGO = -(2**30)  # a step
FEW_STEPS = 256  # room for batches: at least so many steps, and then powers of two


class Rules(NamedTuple):
    """What ends a run, and where it is; numbers, so that one program serves all."""

    step: Any  # steps made
    last: Any  # the step at which the budget ends
    stride: Any  # steps between log points
    max_rows: Any  # log points of this call
    at_start: Any  # the first row is that of the state as it is
    hook_done: Any  # the host has called `on_segment_end`
    has_event: Any  # the next row has an event already
    tol: Any
    abs_tol: Any
    grad_tol: Any
    first_norm: Any  # of the gradient in the first row
    low: Any  # least and largest objective so far
    high: Any
    lower_bound: Any
    may_rise: Any  # a rising objective is no reason to stop: the method cannot be more careful
    slack: Any  # of the objective: a smaller rise is rounding
    max_streak: Any  # rises in a row that are too many


class History(NamedTuple):
    """The newest rows of the trace before this call, the last one at the end: step, objective in two parts, events."""

    step: Any
    objective: Any
    has_event: Any


class Watch(NamedTuple):
    """The state of the safeguard (`pdvi.run.safeguard`): objectives are pairs."""

    streak: Any
    good_step: Any
    first: Any
    best: Any
    previous: Any


class Rows(NamedTuple):
    """Log points: those of the history, then those of this call."""

    step: Array
    objective: Array
    has_event: Array
    notes: Array
    norms: Array
    metrics: dict[str, Array]


class Carry(NamedTuple):
    """What the loop carries on."""

    state: State
    good: State | None
    rules: Rules
    watch: Watch
    rows: Rows
    n_rows: Array
    notes: Array
    needs_host: Array
    done: Array


class Outcome(NamedTuple):
    """Where a call has ended; rows are those it has written."""

    state: State
    good: State | None
    step: int
    needs_host: bool
    rows: Rows


def rows_of_batches(stride: int, batch_size: int) -> int:
    """Return for how many log points batches are drawn at most: the room for them is a part of what is compiled."""
    return min(MAX_ROWS, max(1, MAX_DRAWN // (stride * batch_size)))


def as_pair(value: float, dtype: Any) -> np.ndarray:
    """Return a number as the sum of two of this type."""
    with np.errstate(over="ignore", invalid="ignore"):
        high = np.asarray(value, dtype)
        low = np.asarray(value - np.asarray(high, float), dtype) if np.isfinite(high) else np.zeros((), dtype)
    return np.stack([high, low])


def run_to_stop(
    problem: Problem,
    solver: Solver,
    state: State,
    good: State | None,
    key: Array,
    batches: np.ndarray,
    rules: Rules,
    history: History,
    watch: Watch,
) -> Outcome:
    """Run a fit until something stops it; ``batches`` are those of the steps from ``rules.step`` on.

    ``good`` None: the last good state is not kept up, for large states and one row.
    """
    most = int(rules.stride) * rows_of_batches(int(rules.stride), batches.shape[1])
    room = max(FEW_STEPS, 1 << (most - 1).bit_length())
    padded = np.zeros((room, *batches.shape[1:]), batches.dtype)
    padded[: len(batches)] = batches
    end = _program(problem, solver, state, good, key, jnp.asarray(padded), rules, history, watch)
    state, good, step, needs_host, n_rows, rows = end
    n_rows, step, needs_host, rows = jax.device_get((n_rows, step, needs_host, rows))
    return Outcome(state, good, int(step), bool(needs_host), jax.tree.map(lambda leaf: leaf[: int(n_rows)], rows))


@quickly
def _program(
    problem: Problem,
    solver: Solver,
    state: State,
    good: State | None,
    key: Array,
    batches: Array,
    rules: Rules,
    history: History,
    watch: Watch,
) -> tuple[Any, ...]:
    rules, history, watch = jax.tree.map(jnp.asarray, (rules, history, watch))
    batch_size, first_step, n_before = batches.shape[1], rules.step, history.step.shape[0]
    dtype = state.lam.dtype

    def metrics_of(state: State) -> dict[str, Array]:
        metrics = solver.log_metrics(problem, TracedShards(problem, state))
        return {name: jnp.asarray(value, dtype) for name, value in metrics.items()}

    def measure(state: State) -> tuple[Array, Array, dict[str, Array]]:
        losses, gradient = problem.evaluate(state.lam, state.local)
        norms = [_norm(gradient[part]) for part in problem.block_slices.values()]
        objective = jnp.stack(precise_sum(losses))
        return objective.astype(dtype), jnp.stack(norms).astype(dtype), metrics_of(state)

    no_metrics = {name: jnp.zeros((), dtype) for name in jax.eval_shape(metrics_of, state)}
    blank = jnp.zeros(2, dtype), jnp.zeros(len(problem.blocks), dtype), no_metrics

    def body(c: Carry) -> Carry:
        rules = c.rules
        shards = TracedShards(problem, c.state, key, ~rules.at_start & ~rules.hook_done, c.notes)
        segment = solver.on_segment_end(problem, shards, rules.step, batch_size)
        log_at = jnp.minimum(rules.last, (rules.step // rules.stride + 1) * rules.stride)
        n_steps = log_at - rules.step
        if segment.n_steps is not None:
            n_steps = jnp.minimum(n_steps, segment.n_steps)
        n_steps = jnp.where(rules.at_start | shards.needs_host, 0, n_steps)
        state = steps(problem, solver, shards.state, batches, n_steps, rules.step - first_step)
        step = rules.step + n_steps
        log = rules.at_start | (~shards.needs_host & (step == log_at))
        objective, norms, metrics = jax.lax.cond(log, measure, lambda _: blank, state)
        has_event = rules.has_event | (shards.notes != 0) | solver.is_warmup
        row = Rows(step, objective, has_event, shards.notes, norms, metrics)
        at = jnp.where(log, c.n_rows, n_before + MAX_ROWS)  # one more, which is dropped at the end
        rows = jax.tree.map(
            lambda buffer, value: jax.lax.dynamic_update_index_in_dim(buffer, value, at, 0), c.rows, row
        )
        n_rows = c.n_rows + log
        norm = _norm(norms)
        rules = rules._replace(
            step=step,
            at_start=jnp.asarray(False),
            hook_done=jnp.asarray(False),
            has_event=rules.has_event & ~log,
            first_norm=jnp.where(rules.at_start, norm, rules.first_norm),
            low=jnp.where(log, jnp.fmin(rules.low, objective[0]), rules.low),
            high=jnp.where(
                log, jnp.fmax(rules.high, jnp.where(jnp.isfinite(objective[0]), objective[0], jnp.nan)), rules.high
            ),
        )
        start_watch = watch_from_start(dtype) if solver.is_warmup else c.watch
        new_watch, trouble = _judge(start_watch, step, objective, problem.steps_per_epoch(batch_size), rules)
        wrong = ~jnp.isfinite(objective[0]) | (objective[0] < rules.lower_bound)
        stop = (
            wrong
            | (trouble & ~rules.may_rise)
            | _settled(rows, n_rows - 1, problem.steps_per_epoch(batch_size), rules)
            | _flat(rows, n_rows - 1, n_before, norm, rules)
            | (step >= rules.last)
            | (n_rows - n_before >= rules.max_rows)
        )
        is_good = log & ~wrong & (new_watch.streak == 0)
        return Carry(
            state=state,
            good=None if good is None else jax.tree.map(lambda new, old: jnp.where(is_good, new, old), state, c.good),
            rules=rules,
            watch=jax.tree.map(lambda new, old: jnp.where(log, new, old), new_watch, c.watch),
            rows=rows,
            n_rows=n_rows,
            notes=jnp.where(log, 0, shards.notes),
            needs_host=shards.needs_host,
            done=shards.needs_host | (log & stop),
        )

    def buffer(shape: Any, dtype: Any, known: Any = 0) -> Array:
        after = jnp.zeros((MAX_ROWS + 1, *shape), dtype)
        return jnp.concatenate([jnp.broadcast_to(jnp.asarray(known, dtype), (n_before, *shape)), after])

    objective, norms, metrics = blank
    rows = Rows(
        buffer((), jnp.int32, history.step),
        buffer(objective.shape, objective.dtype, history.objective),
        buffer((), bool, history.has_event),
        buffer((), jnp.int32),
        buffer(norms.shape, norms.dtype),
        {name: buffer((), value.dtype) for name, value in metrics.items()},
    )
    no = jnp.asarray(False)
    count = jnp.asarray(n_before, jnp.int32)
    first = Carry(state, good, rules, watch, rows, count, jnp.asarray(0, jnp.int32), no, no)
    end = jax.lax.while_loop(lambda c: ~c.done, body, first)
    written = jax.tree.map(lambda leaf: leaf[n_before:], end.rows)
    return end.state, end.good, end.rules.step, end.needs_host, end.n_rows - n_before, written


def watch_from_start(dtype: Any) -> Watch:
    """Return the safeguard's state before any row."""
    nothing = np.array([np.inf, 0.0], dtype)
    return Watch(np.int32(0), np.int32(0), nothing, nothing, nothing)


def _norm(x: Array) -> Array:
    """Return the norm of a vector; large entries do not overflow."""
    size = jnp.abs(x).max(initial=0)
    return jnp.where(size > 0, size * jnp.linalg.norm(x / jnp.where(size > 0, size, 1)), size)


def _difference(a: Array, b: Array) -> Array:
    return (a[0] - b[0]) + (a[1] - b[1])


def _judge(watch: Watch, step: Array, objective: Array, per_epoch: int, rules: Rules) -> tuple[Watch, Array]:
    """As `pdvi.run.safeguard.Safeguard.judge`."""
    first = jnp.where(jnp.isinf(watch.first[0]), objective, watch.first)
    best = jnp.where(_difference(objective, watch.best) < 0, objective, watch.best)
    rounding = rules.slack * jnp.abs(watch.previous[0]) + 1e-12 * jnp.abs(first[0])
    rising = _difference(objective, watch.previous) > rounding
    lost = _difference(objective, best) > 0.5 * _difference(first, best) + 1e-3 * jnp.abs(best[0])
    bad = rising | lost
    streak = jnp.where(bad, watch.streak + 1, 0)
    good_step = jnp.where(bad, watch.good_step, step)
    trouble = (streak >= rules.max_streak) & (step - good_step >= rules.max_streak * per_epoch)
    new = Watch(streak, good_step, first, best, objective)
    finite = jnp.isfinite(objective[0])
    return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, jax.tree.map(jnp.asarray, watch)), trouble & finite


def _settled(rows: Rows, newest: Array, per_epoch: int, rules: Rules) -> Array:
    """As `pdvi.run.stopping.settled`."""
    index = jnp.arange(rows.step.shape[0])

    def an_epoch_before(i: Array) -> Array:
        return jnp.where((index < i) & (rows.step[i] - rows.step >= per_epoch), index, -1).max()

    middle = an_epoch_before(newest)
    oldest = jnp.where(middle < 0, -1, an_epoch_before(middle))
    quiet = ~jnp.any(rows.has_event & (index >= oldest) & (index <= newest))

    def small(i: Array, j: Array) -> Array:
        least = rules.tol * jnp.abs(rows.objective[j][0]) + rules.abs_tol
        return jnp.abs(_difference(rows.objective[i], rows.objective[j])) < least

    return (oldest >= 0) & quiet & small(newest, middle) & small(middle, oldest)


def _flat(rows: Rows, newest: Array, n_before: int, norm: Array, rules: Rules) -> Array:
    """As `pdvi.run.stopping.flat`."""
    known = (newest > 0) & (rows.step[newest - 1] != LONG_AGO)
    change = jnp.abs(_difference(rows.objective[newest], rows.objective[newest - 1]))
    return known & (norm < rules.grad_tol * rules.first_norm) & (change <= rules.grad_tol * (rules.high - rules.low))
