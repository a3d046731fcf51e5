"""Algorithm 1, and the exploring before it, from the server's side: shards are elsewhere, and keep what is theirs.

The state is that of the solver without anything that belongs to a shard, so it is small, and a snapshot of it costs
nothing. Going back to one (after a fault, an interruption, from a checkpoint) rebuilds the shards' part from the
data: phi_b minimises f_b at lam, mu_b = - grad_lam f_b, and h = D^-1 mean(mu).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from pdvi.core.problem import Problem
from pdvi.executors.diary import Diary
from pdvi.executors.host import Boundary, Measured, local_shape
from pdvi.executors.memory import REBUILD_PASSES, report, stage, traced
from pdvi.solvers.conjugate import best_globals
from pdvi.solvers.primal_dual.algorithm import server_update, with_penalty
from pdvi.solvers.primal_dual.penalty import curvature_shards

Array = jax.Array
PyTree = Any


class NoShards(RuntimeError):
    """Nobody is left who could take the shards."""


class Server(Diary, ABC):
    """What executors share whose shards are elsewhere."""

    problem: Problem
    solver: Any
    key: Array
    boundary: Boundary

    def init(self, problem: Problem, solver: Any, key: Array, lam: Array | None, local: PyTree, batch_size: int) -> Any:
        """The state before the first step."""
        self._check(problem, solver)
        self.problem, self.solver, self.key = problem, solver, key
        lam = problem.init_global(key) if lam is None else lam
        template = local_shape(problem)
        if local is not None:
            _check_local(local, template, problem.n_shards)
        self.boundary = Boundary(problem)
        self._open(template, lam, local, batch_size)
        return self._begun(solver, lam, batch_size)

    def run(self, problem: Problem, solver: Any, state: Any, batches: np.ndarray) -> Any:
        """``state`` after one step per row of ``batches``."""
        left: Any = batches
        while len(left):
            state, stepper, steps = stage(problem, solver, state, batches.shape[1], self)
            if hasattr(stepper, "visit"):
                state = self._run(problem, stepper, state, left[:steps])
            else:
                state = self._explore(problem, stepper, state, left[:steps])
            left = left[steps:] if steps else ()
        return jax.block_until_ready(state)

    def _run(self, problem: Problem, solver: Any, state: Any, batches: np.ndarray) -> Any:
        """Steps of Algorithm 1."""
        state = self._tidy(state)
        for batch in self._announce(batches):
            state = begin(problem, solver, state, len(batch))
            gap, count = self._visit(batch, state)
            state = update(state, jnp.asarray(gap), count, problem.n_shards, state.lam0) if count else state
            if self._disturbed():
                state = self._tidy(state)
        return state

    def _explore(self, problem: Problem, stepper: Any, state: Any, batches: np.ndarray) -> Any:
        """Natural-gradient steps. Whoever leaves them for Algorithm 1 asks for new duals, so none are kept up here."""
        for batch in self._announce(batches):
            statistics, count = self._look(batch, stepper, state)
            if count:
                state = _learn(problem, traced(stepper), state, jax.tree.map(jnp.asarray, statistics), count)
            else:  # nobody answered; a step all the same
                state = state._replace(made=state.made + 1)
        return state

    def objective(self, problem: Problem, state: Any) -> Array:
        """F, its shards added in double precision."""
        return jnp.asarray(_in_order(self._evaluate(state.lam).losses).sum(), state.lam.dtype)

    def with_initial_locals(self, problem: Problem, state: Any) -> Any:
        """``state``; the locals are those that the run began with."""
        self._restart()
        return state

    def with_best_globals(self, problem: Problem, solver: Any, state: Any, batch_size: int) -> Any:
        """A new beginning with the best globals for the locals there are."""
        statistics = jax.tree.map(lambda leaf: jnp.asarray(leaf, state.lam.dtype), self._statistics())
        begun = self._begun(solver, _best_globals(problem, statistics), batch_size)
        return self.warm(problem, solver, begun)

    def with_globals(self, problem: Problem, solver: Any, lam: Array, batch_size: int) -> Any:
        """A new beginning with these globals, and the locals that fit them."""
        self._settle(lam)
        return self._tidy(solver.settle(self._begun(solver, lam, batch_size)))

    def _begun(self, solver: Any, lam: Array, batch_size: int) -> Any:
        """The state before the first step."""
        curvature = None
        if solver.eta is None:
            looked_at = curvature_shards(self.problem)
            curvature = jnp.asarray(self._curvature(lam, looked_at) / len(looked_at), lam.dtype)
        return solver.init(self.problem, lam, None, batch_size, curvature)

    def warm(self, problem: Problem, solver: Any, state: Any) -> Any:
        """``state``, made aware that its local variables are known."""
        return self.resume(problem, solver, solver.settle(state), known=True)

    def resume(self, problem: Problem, solver: Any, state: Any, known: bool = False) -> Any:
        """Make the shards fit a state of an earlier moment; ``known``: their local variables do already."""
        if known:
            self._rebuild(state.lam, settle=False)
        else:
            self._settle(state.lam)
        return self._tidy(state)

    def _settle(self, lam: Array) -> None:
        """Locals that fit these globals, and their duals."""
        self._restart()
        for _ in range(1 if self.boundary.exports is None else REBUILD_PASSES):
            self._rebuild(lam, settle=True)

    def evaluate(self, problem: Problem, solver: Any, state: Any) -> dict[str, float]:
        """Objective, gradient norms and the consensus gap. Shards are added in double precision."""
        found = self._evaluate(state.lam)
        return report(
            problem, _in_order(found.losses), found.gradient, {"consensus": found.disagreement / problem.n_shards}
        )

    def _check(self, problem: Problem, solver: Any) -> None:
        name = type(self).__name__
        if problem.store is None:
            msg = (
                f"`problem` must come from a store for the executor {name}, got one in memory; "
                "use pdvi.write_store(path, problem) and pdvi.Problem.from_store(path)."
            )
            raise ValueError(msg)
        if not hasattr(solver, "visit"):
            msg = (
                f"`solver` must be PDVI or P2DVI for the executor {name}, got {type(solver).__name__}; "
                "use problem.load() and the Memory executor for any other."
            )
            raise ValueError(msg)

    def _tidy(self, state: Any) -> Any:
        """h rebuilt from the duals (fact one): it drifts, and lost shards took theirs with them."""
        mean = jnp.asarray(self._dual() / self.problem.n_shards, state.lam.dtype)
        return with_penalty(state, state.penalty, mean)

    def _announce(self, batches: np.ndarray) -> Any:
        """The batches, after telling who should know what comes."""
        return batches

    def _disturbed(self) -> bool:
        """Whether shards were rebuilt since the last call."""
        return False

    @abstractmethod
    def interrupted(self) -> None:
        """Told that whoever waits for the run wants it to end now."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what the run held."""

    @abstractmethod
    def _open(self, template: PyTree, lam: Array, local: PyTree, batch_size: int) -> None: ...

    @abstractmethod
    def _visit(self, batch: np.ndarray, state: Any) -> tuple[Any, int]:
        """The sum of lam_b - lam0 over the shards that were visited, and their number."""

    @abstractmethod
    def _look(self, batch: np.ndarray, stepper: Any, state: Any) -> tuple[PyTree, int]:
        """The sum of the statistics of the shards that were visited, and their number."""

    @abstractmethod
    def _statistics(self) -> PyTree: ...

    @abstractmethod
    def _curvature(self, lam: Array, shards: np.ndarray) -> np.ndarray: ...

    @abstractmethod
    def _restart(self) -> None: ...

    @abstractmethod
    def _rebuild(self, lam: Array, *, settle: bool) -> None: ...

    @abstractmethod
    def _evaluate(self, lam: Array) -> Measured: ...

    @abstractmethod
    def _dual(self) -> np.ndarray: ...

    @abstractmethod
    def local_params(self, state: Any) -> PyTree:
        """The local variables of all shards, memory-mapped."""

    def checkpoint_local(self, state: Any) -> PyTree:
        """None: a checkpoint holds the globals, from which the shards' part is rebuilt."""
        return None


def begin(problem: Problem, solver: Any, state: Any, batch_size: int) -> Any:
    """What the solver does before a step."""
    return _begin(problem, traced(solver), state, batch_size)


@eqx.filter_jit
def _begin(problem: Problem, solver: Any, state: Any, batch_size: int) -> Any:
    return solver.begin(problem, state, batch_size)


_best_globals = eqx.filter_jit(best_globals)


def _in_order(losses: dict[int, float]) -> np.ndarray:
    return np.array([losses[b] for b in sorted(losses)])


@eqx.filter_jit
def _learn(problem: Problem, stepper: Any, state: Any, statistics: PyTree, count: int) -> Any:
    return stepper.learn(problem, state, statistics, count)


@eqx.filter_jit
def update(state: Any, gap: Array, count: int, n_shards: int, centre: Array) -> Any:
    """The server's update from ``count`` shards that saw ``centre`` as lam0."""
    return server_update(state, gap, centre + gap / count, n_shards)


def _check_local(local: PyTree, template: PyTree, n_shards: int) -> None:
    wanted = [((n_shards, *leaf.shape), leaf.dtype) for leaf in jax.tree.leaves(template)]
    found = [(np.shape(leaf), leaf.dtype) for leaf in jax.tree.leaves(local)]
    if wanted != found:
        msg = f"the local variables of `start` must fit the problem: expected arrays {wanted}, got {found}."
        raise ValueError(msg)
