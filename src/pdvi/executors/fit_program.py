"""A fit in memory as one compiled program: from log point to log point until its stopping rule says stop.

It ends where the rule holds, where a hook needs the host, or after some log points. It writes rows of the trace into a
buffer, the objective as two numbers (`precise_sum`) which the host adds in double precision. The host decides again
what it decides, from the rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from pdvi._base import programs
from pdvi._base.types import Array
from pdvi.core.executor import row_of
from pdvi.core.problem import Problem
from pdvi.core.solver import Solver, State
from pdvi.executors.steps import NOTES, TracedShards, compile_options, precise_sum, steps, with_room

MAX_ROWS = 32  # of the trace in one call
MAX_DRAWN = 2**22  # numbers of shards that are drawn for one call


class Rules(NamedTuple):
    """When a call ends, and where the run is; arrays in the program, so that one serves all.

    A call ends wherever the host has something to decide, and a little more often: each rule here is at least as wide
    as that of `pdvi.run.stopping` or `pdvi.run.safeguard`, which look at more rows.
    """

    step: Any  # steps made
    last: Any  # the step at which the budget ends
    stride: Any  # steps between log points
    max_rows: Any  # log points of this call
    at_start: Any  # the first row is that of the state as it is
    hook_done: Any  # the host has called `on_segment_end`
    tol: Any
    abs_tol: Any
    grad_tol: Any
    grad_limit: Any  # a smaller gradient may end the run; not known at the start
    previous: Any  # the objective of the newest row, as a sum of two numbers
    n_small: Any  # of the newest changes of the objective, how many were within the tolerances
    best: Any  # the least objective
    lower_bound: Any
    slack: Any  # of the objective: half of a rise that is more than rounding
    may_rise: Any  # a rising objective is nothing to act on: the method has no penalty to increase


class Log(NamedTuple):
    """All that changes at a log point only."""

    n_rows: Array
    counts: Array  # (rows, 2): step, notes
    numbers: Array  # (rows, ...): objective (2), norms of the gradient by block, metrics
    previous: Array  # from here on as in `Rules`
    n_small: Array
    best: Array
    grad_limit: Array
    is_good: Array  # nothing speaks against the state
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
    rows: list[tuple[int, dict[str, float], list[str]]]  # of each log point: step, numbers of the trace, notes


def rows_of_batches(stride: int, batch_size: int) -> int:
    """Return for how many log points batches are drawn at most: the room for them is a part of what is compiled."""
    return min(MAX_ROWS, max(1, MAX_DRAWN // (stride * batch_size)))


def run_to_stop(
    problem: Problem,
    solver: Solver,
    state: State,
    good: State | None,
    key: Array,
    batches: np.ndarray,
    rules: Rules,
) -> Outcome:
    """Run a fit until something stops it; ``batches`` are those of the steps from ``rules.step`` on.

    ``good`` None: the last good state is not kept up, for large states and one row.
    """
    most = rules.stride * rows_of_batches(rules.stride, batches.shape[1])
    padded = with_room(batches, most)
    arguments = (problem, solver, state, good, jax.random.key_data(key), padded, _as_arrays(rules))
    arrays, rest = eqx.partition(arguments, lambda leaf: isinstance(leaf, jax.Array | np.ndarray))
    others, structure = jax.tree.flatten(rest)
    fixed, options = (tuple(others), structure), compile_options(arrays)
    found = programs.run(_program, fixed, arrays, options, keep=_is_own((problem.model, solver)))
    state, good = (jax.tree.unflatten(jax.tree.structure(old), new) for old, new in zip((state, good), found["states"]))
    ends, counts, numbers, metrics = jax.device_get(
        (found["ends"], found["counts"], found["numbers"], found["metrics"])
    )
    step, needs_host, n_rows = (int(value) for value in ends)
    rows = []
    for i in range(n_rows):
        high, low, *norms = numbers[i].astype(float).tolist()
        row = row_of(problem, high + low, norms, {name: values[i] for name, values in metrics.items()})
        rows.append((int(counts[i, 0]), row, [text for bit, text in enumerate(NOTES) if int(counts[i, 1]) >> bit & 1]))
    return Outcome(state, good, step, bool(needs_host), rows)


def _as_arrays(rules: Rules) -> Rules:
    """Return rules in the types that the program takes, the newest objective as the sum of two numbers."""
    real = np.dtype(jnp.result_type(float))

    def typed(value: float) -> np.ndarray:
        return np.asarray(value, bool if isinstance(value, bool) else np.int32 if isinstance(value, int) else real)

    with np.errstate(over="ignore", invalid="ignore"):
        high = typed(rules.previous)
        low = typed(rules.previous - float(high)) if np.isfinite(high) else typed(0.0)
        return Rules(*map(typed, rules))._replace(previous=np.stack([high, low]))


def _is_own(value: Any) -> bool:
    """Return whether a model or a solver is this library's through and through: the source of others may change."""
    if isinstance(value, eqx.Module):
        return type(value).__module__.startswith("pdvi.") and all(map(_is_own, vars(value).values()))
    return all(map(_is_own, value)) if isinstance(value, tuple) else not callable(value)


def _program(fixed: tuple[Any, ...], arrays: Any) -> dict[str, Any]:
    """Return arrays by name: a process that has not traced the program knows no other containers."""
    others, structure = fixed
    problem, solver, state, good, key_data, batches, rules = eqx.combine(arrays, jax.tree.unflatten(structure, others))
    key = jax.random.wrap_key_data(key_data)
    rules = jax.tree.map(jnp.asarray, rules)
    batch_size, dtype, n_blocks = batches.shape[1], state.lam.dtype, len(problem.blocks)

    def metrics_of(state: State) -> dict[str, Any]:
        return solver.log_metrics(problem, TracedShards(problem, state))

    names = tuple(jax.eval_shape(metrics_of, state))

    def write(operands: tuple[State, Array, Array, Log]) -> Log:
        """Evaluate a state, write its row, and judge it."""
        state, step, notes, log = operands
        losses, gradient = problem.evaluate(state.lam, state.local)
        norms = [_norm(gradient[part]) for part in problem.block_slices.values()]
        metrics = metrics_of(state)
        values = [*precise_sum(losses), *norms, *(metrics[name] for name in names)]
        row = jnp.stack([jnp.asarray(value, dtype) for value in values])
        objective, norm = row[:2], _norm(row[2 : 2 + len(norms)])
        counts = jax.lax.dynamic_update_index_in_dim(log.counts, jnp.stack([step, notes]), log.n_rows, 0)
        numbers = jax.lax.dynamic_update_index_in_dim(log.numbers, row, log.n_rows, 0)
        n_rows, value, old = log.n_rows + 1, objective[0], log.previous[0]
        change = jnp.abs((value - old) + (objective[1] - log.previous[1]))
        n_small = (log.n_small + 1) * (change < rules.tol * jnp.abs(old) + rules.abs_tol)
        wrong = ~(jnp.isfinite(value) & (value >= rules.lower_bound))
        # what explores may rise
        rose = value > log.best + rules.slack * jnp.abs(log.best) if not solver.is_warmup else jnp.asarray(False)
        is_first = rules.at_start & (log.n_rows == 0)
        grad_limit = jax.lax.select(is_first, rules.grad_tol * norm, log.grad_limit)
        stop = wrong | (rose & ~rules.may_rise) | (n_small >= 2) | (norm < grad_limit)
        stop |= (step >= rules.last) | (n_rows >= rules.max_rows)
        best, is_good = jnp.minimum(log.best, value), ~wrong & (rules.may_rise | ~rose)
        return Log(n_rows, counts, numbers, objective, n_small, best, grad_limit, is_good, stop)

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

    counts, numbers = jnp.zeros((MAX_ROWS, 2), jnp.int32), jnp.zeros((MAX_ROWS, 2 + n_blocks + len(names)), dtype)
    no, nothing = jnp.asarray(False), jnp.asarray(0, jnp.int32)
    log = Log(nothing, counts, numbers, rules.previous, rules.n_small, rules.best, rules.grad_limit, no, no)
    first = Carry(state, good, rules.step, jnp.asarray(True), nothing, log, no)
    end = jax.lax.while_loop(lambda c: ~(c.log.stop | c.needs_host), body, first)
    ends = jnp.stack([end.step, end.needs_host.astype(jnp.int32), end.log.n_rows])
    numbers, n_known = end.log.numbers, 2 + n_blocks
    metrics = {name: numbers[:, n_known + i] for i, name in enumerate(names)}
    return {
        "states": (jax.tree.leaves(end.state), jax.tree.leaves(end.good)),
        "ends": ends,
        "counts": end.log.counts,
        "numbers": numbers[:, :n_known],
        "metrics": metrics,
    }


def _norm(x: Array) -> Array:
    """Return the norm of a vector; large entries do not overflow."""
    size = jnp.abs(x).max(initial=jnp.finfo(x.dtype).tiny)
    return size * jnp.sqrt(jnp.sum((x / size) ** 2))
