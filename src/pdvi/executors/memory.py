"""Everything in this process's memory: the steps between two log points run as one compiled scan."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from pdvi.core.problem import Problem
from pdvi.executors.diary import Diary
from pdvi.solvers.conjugate import add, best_globals
from pdvi.solvers.local_variables import own_rows, settled

Array = jax.Array
PyTree = Any

REBUILD_PASSES = 3  # over touching shards, whose rows next to each other settle together


class Memory(Diary):
    """The default executor."""

    def init(self, problem: Problem, solver: Any, key: Array, lam: Array | None, local: PyTree, batch_size: int) -> Any:
        """The state before the first step, from ``lam`` and ``local`` where they are given."""
        if problem.store is not None:
            msg = (
                "`problem` must be in memory for the executor Memory, got one from the store "
                f"{str(problem.store.path)!r}; use problem.load(), or executor=pdvi.Disk()."
            )
            raise ValueError(msg)
        self.key = key
        own_lam, own_local = problem.init(key)
        if local is not None:
            own_local = like(own_local, jax.tree.leaves(local), "the local variables of `start`")
        return solver.init(problem, own_lam if lam is None else lam, own_local, batch_size)

    def run(self, problem: Problem, solver: Any, state: Any, batches: np.ndarray) -> Any:
        """``state`` after one step per row of ``batches``."""
        left: Any = batches
        while len(left):
            state, stepper, steps = stage(problem, solver, state, batches.shape[1], self)
            state = _run(problem, traced(stepper), state, jnp.asarray(left[:steps]))
            left = left[steps:] if steps else ()
        return jax.block_until_ready(state)

    def warm(self, problem: Problem, solver: Any, state: Any) -> Any:
        """``state``, made aware that its local variables are known."""
        return _warm(problem, traced(solver), state)

    def resume(self, problem: Problem, solver: Any, state: Any, known: bool = True) -> Any:
        """``state`` itself: it holds everything."""
        return state

    def local_params(self, state: Any) -> PyTree:
        """The local variables of all shards."""
        return jax.tree.map(np.asarray, state.local)

    checkpoint_local = local_params

    def objective(self, problem: Problem, state: Any) -> Array:
        """F, its shards added in double precision."""
        return jnp.asarray(np.asarray(_evaluate(problem, state.lam, state.local)[0], float).sum())

    def with_initial_locals(self, problem: Problem, state: Any) -> Any:
        """``state`` with the locals that the run began with."""
        return state._replace(local=problem.init(self.key)[1])

    def with_best_globals(self, problem: Problem, solver: Any, state: Any, batch_size: int) -> Any:
        """A new beginning with the best globals for the locals of ``state``."""
        lam = _best_globals(problem, state.local)
        return self.warm(problem, solver, solver.init(problem, lam, state.local, batch_size))

    def with_globals(self, problem: Problem, solver: Any, lam: Array, batch_size: int) -> Any:
        """A new beginning with these globals, and the locals that fit them."""
        local = _settled(problem, lam, problem.init(self.key)[1])
        return self.warm(problem, solver, solver.init(problem, lam, local, batch_size))

    def interrupted(self) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """Nothing is held."""

    def evaluate(self, problem: Problem, solver: Any, state: Any) -> dict[str, float]:
        """Objective, gradient norms and the solver's own metrics. Shards are added in double precision."""
        losses, summed = _evaluate(problem, state.lam, state.local)
        metrics = _metrics(traced(solver), state) if hasattr(solver, "metrics") else {}
        return report(problem, np.asarray(losses, float), np.asarray(summed, float), metrics)


def report(problem: Problem, losses: np.ndarray, gradient: np.ndarray, metrics: dict[str, Any]) -> dict[str, float]:
    """What the trace tells of a log point, from every shard's loss and the summed gradient."""
    with np.errstate(over="ignore", invalid="ignore"):  # a run that diverges is for the safeguard to judge
        norms = {
            f"grad_norm_{name}": float(np.linalg.norm(gradient[part])) for name, part in problem.block_slices.items()
        }
        objective = float(losses.sum())
    return {
        "objective": objective,
        "grad_norm": float(np.hypot.reduce(list(norms.values()))),
        **norms,
        **{name: float(value) for name, value in metrics.items()},
    }


def like(tree: PyTree, leaves: list[Any], what: str) -> PyTree:
    """``leaves`` in the structure of ``tree``, if their number, shapes and types fit."""
    template, structure = jax.tree.flatten(tree)
    wanted = [(leaf.shape, leaf.dtype) for leaf in template]
    found = [(np.shape(leaf), np.asarray(leaf).dtype) for leaf in leaves]
    if wanted != found:
        msg = f"{what} must fit the problem: expected arrays {wanted}, got {found}."
        raise ValueError(msg)
    return jax.tree.unflatten(structure, [jnp.asarray(leaf) for leaf in leaves])


def stage(problem: Problem, solver: Any, state: Any, batch_size: int, executor: Any) -> tuple[Any, Any, int | None]:
    """Who makes the next steps, how many of them (None: all), and the state as it takes them over.

    A solver that works in stages decides that outside compiled code: a branch inside would cost copies of the state.
    """
    return solver.stage(problem, state, batch_size, executor) if hasattr(solver, "stage") else (state, solver, None)


@eqx.filter_jit
def _run(problem: Problem, solver: Any, state: Any, batches: Array) -> Any:
    state = solver.tidy(state) if hasattr(solver, "tidy") else state
    return jax.lax.scan(lambda s, batch: (solver.step(problem, s, batch), None), state, batches)[0]


# apart from the solver, so that all solvers share one compilation of it
@eqx.filter_jit
def _evaluate(problem: Problem, lam: Array, local: Any) -> tuple[Array, Array]:
    return problem.evaluate(lam, local)


@eqx.filter_jit
def _metrics(solver: Any, state: Any) -> dict[str, Array]:
    return solver.metrics(state)


@eqx.filter_jit
def _best_globals(problem: Problem, local: PyTree) -> Array:
    return best_globals(problem, add(problem.map_shards(problem.model.statistics, local)))


@eqx.filter_jit
def _settled(problem: Problem, lam: Array, local: PyTree) -> PyTree:
    """The locals near ``local`` that minimise F for these globals."""

    def settle(_: Any, local: PyTree) -> PyTree:
        return problem.map_shards(lambda phi, shard: own_rows(problem, settled(problem, phi, lam, shard)), local)

    return jax.lax.fori_loop(0, 1 if problem.halo is None else REBUILD_PASSES, settle, local)


@eqx.filter_jit
def _warm(problem: Problem, solver: Any, state: Any) -> Any:
    return solver.warm(problem, state) if hasattr(solver, "warm") else state


def traced(solver: Any) -> Any:
    """Real-valued settings as arrays: a grid over step sizes or tolerances then compiles once."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf) if isinstance(leaf, float) else leaf, solver)
