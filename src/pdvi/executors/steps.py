"""Steps as compiled programs: between two log points, for one run or, side by side, for several."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from pdvi._base.compiled import quickly_compiled
from pdvi._base.types import Array, PyTree
from pdvi.core.executor import traced
from pdvi.core.model import LocalStep, offers
from pdvi.core.problem import Problem, without_halo
from pdvi.core.solver import LocalUpdateFn, ShardFn, Shards, ShardStateFn, Solver, State, add
from pdvi.shards.stacking import put, take

P = ParamSpec("P")
T = TypeVar("T")

LITTLE = 2_000_000  # numbers in all: a program that goes through them runs for less time than it compiles
MODERATE = 64 * LITTLE  # a fit gains less by what LLVM's last optimizations bring than it waits for them
FEW_STEPS = 256  # calls of up to so many steps share what is compiled, longer ones up to the next power of two


def compiled(function: Callable[Concatenate[Problem, P], T]) -> Callable[Concatenate[Problem, P], T]:
    """Return a function of a problem compiled so that it is soon there, where that takes longer than to run it.

    That is so where there is little data, and derivatives of a loss: closed forms are compiled soon in any way.
    """
    usual = eqx.filter_jit(function)
    quick = cache(lambda: eqx.filter_jit(function, **quickly_compiled()))

    @wraps(function)
    def call(problem: Problem, /, *args: P.args, **kwargs: P.kwargs) -> T:
        is_usual = offers(problem.model, LocalStep) or not is_little((problem, args, kwargs))
        return (usual if is_usual else quick())(problem, *args, **kwargs)

    return call


def is_little(arguments: PyTree, most: int | None = None) -> bool:
    """Return whether there are few numbers in all arrays; not so inside of another program, which has its own way."""
    most = LITTLE if most is None else most
    arrays = [leaf for leaf in jax.tree.leaves(arguments) if eqx.is_array(leaf)]
    return not any(isinstance(leaf, jax.core.Tracer) for leaf in arrays) and sum(a.size for a in arrays) <= most


def compile_options(arguments: PyTree) -> dict[str, Any]:
    """Return arguments of `jax.jit` for a whole fit: the less data there is, the less time is given to compilation."""
    return quickly_compiled(little=is_little(arguments)) if is_little(arguments, MODERATE) else {}


def step(problem: Problem, solver: Solver, state: State, batch: Array) -> State:
    """Return the state after one step: the shards in ``batch`` are visited, the others are left as they are."""
    broadcast = solver.broadcast(state.server)
    local, own, messages = visited(problem, solver.local_update, broadcast, state.local, state.own, batch)
    server = solver.server_update(problem, state.server, add(messages), batch.shape[0], broadcast)
    return State(server, put(state.local, batch, local), put(state.own, batch, own))


def steps(
    problem: Problem, solver: Solver, state: State, batches: Array, count: Array | int, first: Array | int = 0
) -> State:
    """Return the state after a step for each of ``count`` rows of ``batches``; the server's sums are rebuilt before.

    How many is no part of what is compiled: segments of a run differ in their lengths.
    """
    shards = TracedShards(problem, state)
    solver.rebuild_sums(problem, shards)
    begun = state._replace(
        server=jax.tree.map(lambda new, old: jnp.where(count > 0, new, old), shards.server, state.server)
    )
    return jax.lax.fori_loop(first, first + count, lambda i, s: step(problem, solver, s, batches[i]), begun)


_compiled_steps = compiled(steps)


def run_steps(problem: Problem, solver: Solver, state: State, batches: np.ndarray) -> State:
    """Return the state after one step per row of ``batches``."""
    room = with_room(batches, len(batches))
    return _compiled_steps(problem, solver, state, jnp.asarray(room), jnp.asarray(len(batches)))


def with_room(batches: np.ndarray, most: int) -> np.ndarray:
    """Return batches with empty ones appended, up to a bucket that ``most`` fit into."""
    room = np.zeros((max(FEW_STEPS, 1 << (most - 1).bit_length()), *batches.shape[1:]), batches.dtype)
    room[: len(batches)] = batches
    return room


def run_side_by_side(problem: Problem, solvers: list[Solver], states: list[State], batches: Array) -> State:
    """Return several states, stacked, after the same batches; the solvers differ in real-valued settings only."""
    return _run_side_by_side(problem, _stacked([traced(solver) for solver in solvers]), _stacked(states), batches)


@eqx.filter_jit
def _run_side_by_side(problem: Problem, solvers: Solver, states: State, batches: Array) -> State:
    arrays, rest = eqx.partition(solvers, eqx.is_array)
    return jax.vmap(lambda some, state: steps(problem, eqx.combine(some, rest), state, batches, len(batches)))(
        arrays, states
    )


def _stacked(trees: list[Any]) -> Any:
    """Return pytrees of the same structure as one, arrays stacked."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves) if eqx.is_array(leaves[0]) else leaves[0], *trees)


def visited(
    problem: Problem, visitor: Any, told: Any, local: PyTree, own: PyTree, batch: Array | None
) -> tuple[PyTree, PyTree, PyTree]:
    """Return new locals, what is kept, and the messages of the shards in ``batch`` (None: all), stacked."""

    def one(phi: PyTree, shard: PyTree, kept: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        new, kept, message = visitor(problem, told, phi, kept, shard)
        return without_halo(new, rows), kept, message

    rows = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), local)
    return problem.map_shards(one, local, batch, own if batch is None else take(own, batch))


def folded(function: Any, told: Any, own: PyTree) -> PyTree:
    """Return the sum of ``function(told, own)`` over all shards."""
    if not jax.tree.leaves(own):
        return function(told, own)
    return add(jax.vmap(lambda kept: function(told, kept))(own))


# All texts that compiled programs may write into the trace: each is a bit there. This library's own are listed, so that
# a program that another process has traced means the same ones.
NOTES = ["consensus initialization", "warm-up did not improve the objective"]


class TracedShards(Shards):
    """All shards of a problem in memory, inside of a compiled program.

    ``key`` is that of the model's start. Where ``enabled`` is false nothing is done `when` a condition holds.
    """

    is_traced: ClassVar[bool] = True
    warm: bool = False

    def __init__(self, problem: Problem, state: State, key: Array | None = None, enabled: Any = True, notes: Any = 0):
        self.problem, self.state, self.key, self.enabled = problem, state, key, enabled
        self.notes, self.needs_host = jnp.asarray(notes, jnp.int32), jnp.asarray(False)

    def sum(self, fn: ShardFn, broadcast: Any, subset: np.ndarray | None = None) -> PyTree:
        """Return the sum of ``fn`` over shards; scalars are added with twice the digits."""
        batch = None if subset is None else jnp.asarray(subset)
        found = self.problem.map_shards(
            lambda phi, shard: fn(self.problem, broadcast, phi, None, shard), self.state.local, batch
        )
        return jax.tree.map(lambda leaf: precise_sum(leaf)[0] if leaf.ndim == 1 else leaf.sum(0), found)

    def sum_states(self, fn: ShardStateFn, broadcast: Any) -> PyTree:
        """Return the sum of ``fn`` over shard states."""
        return folded(fn, broadcast, self.state.own)

    def update(self, fn: LocalUpdateFn, broadcast: Any) -> None:
        """Change what is the shards'."""
        local, own, _ = visited(self.problem, fn, broadcast, self.state.local, self.state.own, None)
        self.state = self.state._replace(local=local, own=own)

    def reset(self) -> None:
        """Set the local variables to those at the start."""
        assert self.key is not None
        self.state = self.state._replace(local=self.problem.init(self.key)[1])

    def note(self, text: str) -> None:
        """Write a note into the next row of the trace."""
        if text not in NOTES:
            NOTES.append(text)
        self.notes = self.notes | (1 << NOTES.index(text))

    def when(self, condition: Any, fn: Callable[[Shards], None], *, on_host: bool = False) -> None:
        """Call ``fn`` if ``condition`` holds: by a loop of at most one pass, since a branch would copy the state."""
        condition = jnp.asarray(condition) & self.enabled
        if on_host:
            self.needs_host = self.needs_host | condition
            return

        def once(carry: tuple[Any, State, Array]) -> tuple[Any, State, Array]:
            _, state, notes = carry
            inside = TracedShards(self.problem, state, self.key, notes=notes)
            fn(inside)
            alike = jax.tree.map(lambda new, old: jnp.asarray(new, old.dtype), inside.state, state)
            return jnp.asarray(False), alike, inside.notes

        first = (condition & ~self.needs_host, self.state, self.notes)
        _, self.state, self.notes = jax.lax.while_loop(lambda carry: carry[0], once, first)


def precise_sum(x: Array) -> tuple[Array, Array]:
    """Return the sum of a vector as two numbers, the second being what rounding has taken from the first (Knuth)."""

    def add_pairs(one: tuple[Array, Array], other: tuple[Array, Array]) -> tuple[Array, Array]:
        a, b = one[0], other[0]
        total = a + b
        back = total - a
        error = (a - (total - back)) + (b - back)
        return total, one[1] + other[1] + error

    zero = jnp.zeros((), x.dtype)
    high, low = jax.lax.reduce((x, jnp.zeros_like(x)), (zero, zero), add_pairs, (0,))
    return high, jnp.where(jnp.isfinite(high), low, 0)
