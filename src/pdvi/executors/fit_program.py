"""A fit in memory as one compiled program: from log point to log point until its stopping rule says stop.

The program ends where the rule holds, where a hook needs the host, or after some log points. It writes the rows of the
trace into a buffer, the objective as two numbers (`precise_sum`), so that the host adds them in double precision. What
it decides is decided again by the host, from the rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from pdvi._base import programs
from pdvi._base.types import Array
from pdvi.core.problem import Problem
from pdvi.core.solver import Solver, State
from pdvi.executors.steps import TracedShards, compile_options, precise_sum, steps

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
    """The newest rows of the trace before this call, the last one at the end."""

    counts: Any  # (rows, 3): step, whether there is an event, notes
    objective: Any  # (rows, 2): a sum of two numbers


class Watch(NamedTuple):
    """The state of the safeguard (`pdvi.run.safeguard`)."""

    streak: Any
    good_step: Any
    objectives: Any  # (3, 2): first, best and previous, each a sum of two numbers


class Rows(NamedTuple):
    """Log points that the program has written."""

    step: np.ndarray
    notes: np.ndarray
    objective: np.ndarray
    norms: np.ndarray
    metrics: dict[str, np.ndarray]


class Log(NamedTuple):
    """All that changes at a log point only; rows are those of the history and those of this call."""

    n_rows: Array
    counts: Array  # as in `History`
    numbers: Array  # objective (2), norms of the gradient by block, metrics
    watch: Watch
    low: Array
    high: Array
    is_good: Array  # the safeguard has nothing against the state
    stop: Array


class Carry(NamedTuple):
    """What the loop carries on."""

    state: State
    good: State | None
    step: Array
    is_first: Array  # nothing has been done in this call
    notes: Array
    log: Log
    needs_host: Array


class Outcome(NamedTuple):
    """Where a call has ended."""

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
    arguments = (problem, solver, state, good, jax.random.key_data(key), padded, rules, history, watch)
    arrays, rest = eqx.partition(arguments, lambda leaf: isinstance(leaf, jax.Array | np.ndarray))
    others, structure = jax.tree.flatten(rest)
    fixed, options = (tuple(others), structure), compile_options(arrays)
    found = programs.run(_program, fixed, arrays, options, keep=_is_own((problem.model, solver)))
    state, good = (jax.tree.unflatten(jax.tree.structure(old), new) for old, new in zip((state, good), found["states"]))
    ends, counts, numbers, metrics = jax.device_get(
        (found["ends"], found["counts"], found["numbers"], found["metrics"])
    )
    step, needs_host, n_rows = (int(value) for value in ends)
    rows = Rows(
        step=counts[:n_rows, 0],
        notes=counts[:n_rows, 2],
        objective=numbers[:n_rows, :2],
        norms=numbers[:n_rows, 2:],
        metrics={name: values[:n_rows] for name, values in metrics.items()},
    )
    return Outcome(state, good, step, bool(needs_host), rows)


def _is_own(value: Any) -> bool:
    """Return whether a model or a solver is this library's through and through: the source of others may change."""
    if isinstance(value, eqx.Module):
        return type(value).__module__.startswith("pdvi.") and all(map(_is_own, vars(value).values()))
    return all(map(_is_own, value)) if isinstance(value, tuple) else not callable(value)


def _program(fixed: tuple[Any, ...], arrays: Any) -> dict[str, Any]:
    """Return arrays by name: a process that has not traced the program knows no other containers."""
    others, structure = fixed
    problem, solver, state, good, key, *rest = eqx.combine(arrays, jax.tree.unflatten(structure, others))
    state, good, found = _run(problem, solver, state, good, jax.random.wrap_key_data(key), *rest)
    return {**found, "states": (jax.tree.leaves(state), jax.tree.leaves(good))}


def _run(
    problem: Problem,
    solver: Solver,
    state: State,
    good: State | None,
    key: Array,
    batches: Array,
    rules: Rules,
    history: History,
    watch: Watch,
) -> tuple[State, State | None, dict[str, Any]]:
    rules, history, watch = jax.tree.map(jnp.asarray, (rules, history, watch))
    batch_size, n_before, dtype = batches.shape[1], history.counts.shape[0], state.lam.dtype
    per_epoch = problem.steps_per_epoch(batch_size)

    def metrics_of(state: State) -> dict[str, Any]:
        return solver.log_metrics(problem, TracedShards(problem, state))

    names = tuple(jax.eval_shape(metrics_of, state))

    def measure(state: State) -> tuple[Array, Array, Array]:
        """Return the objective, all numbers of a row, and the norm of the whole gradient."""
        losses, gradient = problem.evaluate(state.lam, state.local)
        norms = [_norm(gradient[part]) for part in problem.block_slices.values()]
        metrics = metrics_of(state)
        numbers = [*precise_sum(losses), *norms, *(metrics[name] for name in names)]
        row = jnp.stack([jnp.asarray(value, dtype) for value in numbers])
        return row[:2], row, _norm(row[2 : 2 + len(norms)])

    def write(operands: tuple[State, Array, Array, Log]) -> Log:
        """Evaluate a state, write its row, and judge it."""
        state, step, notes, log = operands
        objective, row, norm = measure(state)
        has_event = (rules.has_event & (log.n_rows == n_before)) | (notes != 0) | solver.is_warmup
        counts = jax.lax.dynamic_update_index_in_dim(
            log.counts, jnp.stack([step, has_event.astype(jnp.int32), notes]), log.n_rows, 0
        )
        numbers = jax.lax.dynamic_update_index_in_dim(log.numbers, row, log.n_rows, 0)
        is_finite = jnp.isfinite(objective[0])
        low, high = (
            jax.lax.select(is_finite, choose(old, objective[0]), old)
            for choose, old in ((jnp.minimum, log.low), (jnp.maximum, log.high))
        )
        before = _watch_anew(log.watch) if solver.is_warmup else log.watch
        new_watch, trouble = _judge(before, step, objective, per_epoch, rules)
        wrong = ~is_finite | (objective[0] < rules.lower_bound)
        first_norm = jax.lax.select(
            rules.at_start, _norm(numbers[n_before, 2 : 2 + len(problem.blocks)]), rules.first_norm
        )
        stop = (
            wrong
            | (trouble & ~rules.may_rise)
            | _settled(counts, numbers, log.n_rows, per_epoch, rules)
            | (_is_flat(counts, numbers, log.n_rows, high - low, rules) & (norm < rules.grad_tol * first_norm))
            | (step >= rules.last)
            | (log.n_rows + 1 - n_before >= rules.max_rows)
        )
        is_good = ~wrong & (new_watch.streak == 0)
        return Log(log.n_rows + 1, counts, numbers, new_watch, low, high, is_good, stop)

    def body(c: Carry) -> Carry:
        at_start, hook_done = c.is_first & rules.at_start, c.is_first & rules.hook_done
        shards = TracedShards(problem, c.state, key, ~(at_start | hook_done), c.notes)
        segment = solver.on_segment_end(problem, shards, c.step, batch_size)
        log_at = jnp.minimum(rules.last, (jax.lax.div(c.step, rules.stride) + 1) * rules.stride)
        n_steps = log_at - c.step
        if segment.n_steps is not None:
            n_steps = jnp.minimum(n_steps, segment.n_steps)
        n_steps = n_steps * ~(at_start | shards.needs_host)
        state = steps(problem, solver, shards.state, batches, n_steps, c.step - rules.step)
        step = c.step + n_steps
        is_log_point = at_start | (~shards.needs_host & (step == log_at))
        log = jax.lax.cond(
            is_log_point,
            write,
            lambda operands: operands[3]._replace(is_good=jnp.asarray(False)),
            (state, step, shards.notes, c.log),
        )
        good = c.good
        if good is not None:
            good = jax.tree.map(lambda new, old: jax.lax.select(log.is_good, new, old), state, good)
        notes = shards.notes * ~is_log_point
        return Carry(state, good, step, jnp.asarray(False), notes, log, shards.needs_host)

    width = 2 + len(problem.blocks) + len(names)
    counts = jnp.concatenate([history.counts, jnp.zeros((MAX_ROWS, 3), jnp.int32)])
    numbers = jnp.zeros((n_before + MAX_ROWS, width), dtype).at[:n_before, :2].set(history.objective)
    no = jnp.asarray(False)
    log = Log(jnp.asarray(n_before, jnp.int32), counts, numbers, watch, rules.low, rules.high, no, no)
    first = Carry(state, good, rules.step, jnp.asarray(True), jnp.asarray(0, jnp.int32), log, no)
    end = jax.lax.while_loop(lambda c: ~(c.log.stop | c.needs_host), body, first)
    ends = jnp.stack([end.step, end.needs_host.astype(jnp.int32), end.log.n_rows - n_before])
    counts, numbers = end.log.counts[n_before:], end.log.numbers[n_before:]
    metrics = {name: numbers[:, i - len(names)] for i, name in enumerate(names)}
    return (
        end.state,
        end.good,
        {"ends": ends, "counts": counts, "numbers": numbers[:, : width - len(names)], "metrics": metrics},
    )


def _watch_anew(watch: Watch) -> Watch:
    """Return the safeguard's state before any row."""
    nothing = jnp.zeros_like(watch.objectives).at[:, 0].set(jnp.inf)
    return Watch(jnp.zeros_like(watch.streak), jnp.zeros_like(watch.good_step), nothing)


def _norm(x: Array) -> Array:
    """Return the norm of a vector; large entries do not overflow."""
    size = jnp.abs(x).max(initial=jnp.finfo(x.dtype).tiny)
    return size * jnp.sqrt(jnp.sum((x / size) ** 2))


def _difference(a: Array, b: Array) -> Array:
    return (a[0] - b[0]) + (a[1] - b[1])


def _judge(watch: Watch, step: Array, objective: Array, per_epoch: int, rules: Rules) -> tuple[Watch, Array]:
    """As `pdvi.run.safeguard.Safeguard.judge`."""
    first, best, previous = watch.objectives
    first = jax.lax.select(jnp.isinf(first[0]), objective, first)
    best = jax.lax.select(_difference(objective, best) < 0, objective, best)
    rounding = rules.slack * jnp.abs(previous[0]) + 1e-12 * jnp.abs(first[0])
    rising = _difference(objective, previous) > rounding
    lost = _difference(objective, best) > 0.5 * _difference(first, best) + 1e-3 * jnp.abs(best[0])
    is_bad, is_finite = rising | lost, jnp.isfinite(objective[0])
    streak = (watch.streak + 1) * is_bad
    good_step = jax.lax.select(is_bad, watch.good_step, step)
    trouble = (streak >= rules.max_streak) & (step - good_step >= rules.max_streak * per_epoch)
    new = Watch(streak, good_step, jnp.stack([first, best, objective]))
    return jax.tree.map(lambda a, b: jax.lax.select(is_finite, a, b), new, watch), trouble & is_finite


def _settled(counts: Array, numbers: Array, newest: Array, per_epoch: int, rules: Rules) -> Array:
    """As `pdvi.run.stopping.settled`."""
    step, has_event, index = counts[:, 0], counts[:, 1], jnp.arange(counts.shape[0])

    def an_epoch_before(i: Array) -> Array:
        return jnp.max((index + 1) * ((index < i) & (step[i] - step >= per_epoch))) - 1

    middle = an_epoch_before(newest)
    oldest = an_epoch_before(middle)  # -1: there is none
    is_quiet = ~jnp.any((has_event != 0) & (index >= oldest) & (index <= newest))
    values = numbers[:, :2][jnp.stack([newest, middle, oldest])]
    change = jnp.abs((values[:-1] - values[1:]).sum(1))
    is_small = (change < rules.tol * jnp.abs(values[1:, 0]) + rules.abs_tol).all()
    return (oldest >= 0) & is_quiet & is_small


def _is_flat(counts: Array, numbers: Array, newest: Array, span: Array, rules: Rules) -> Array:
    """As `pdvi.run.stopping.flat`, the gradient left out."""
    is_known = (newest > 0) & (counts[newest - 1, 0] != LONG_AGO)
    change = jnp.abs(_difference(numbers[newest, :2], numbers[newest - 1, :2]))
    return is_known & (change <= rules.grad_tol * span)
