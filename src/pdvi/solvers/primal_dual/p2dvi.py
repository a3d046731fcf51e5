"""PD-VI and P2D-VI: Algorithm 1 with a scalar, and with a block- or coordinate-wise penalty."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from pdvi.core.problem import Problem
from pdvi.run.sampling import steps_per_epoch
from pdvi.solvers.conjugate import require
from pdvi.solvers.primal_dual.algorithm import PrimalDualState, algorithm_1, initial_state, visit_shard, with_penalty
from pdvi.solvers.primal_dual.oracles import default_oracle
from pdvi.solvers.primal_dual.penalty import automatic_penalty, penalty_from_curvature, penalty_from_eta
from pdvi.solvers.svi import SVI

Array = jax.Array
PyTree = Any
Stages = tuple[tuple[float, int], ...]

ENDED = 2**30  # a count of steps after which no stage begins

# How P2D-VI explores with natural-gradient steps: a component keeps what it saw in the last sixteenth of the shards
# (in two of them at least), so one that is of no use is free again soon. With fewer than NOISY batches in an epoch
# such steps hardly differ from full ones, and explore nothing.
MEMORY, FASTEST, SWEEPS, NOISY = 1 / 16, 0.5, 3, 16

# So short a memory loses components that live in one or two shards only. What was explored must therefore be better
# than what so many epochs of Algorithm 1 reach from the same start, or the run goes on from there.
BEFORE = 2


class _PrimalDual(eqx.Module):
    """What both forms share: everything but the choice of D."""

    eta: eqx.AbstractVar[Any]
    oracle: eqx.AbstractVar[Any]

    def step(self, problem: Problem, state: Any, batch: Array) -> Any:
        """One step of Algorithm 1."""
        state = self.begin(problem, state, batch.shape[0])
        return algorithm_1(problem, self.oracle or default_oracle(problem.model), state, batch)

    def begin(self, problem: Problem, state: Any, batch_size: int) -> Any:
        """What precedes a step's visits."""
        return state

    def visit(
        self, problem: Problem, local: PyTree, shard: PyTree, lam0: Array, mu: Array, penalty: Array
    ) -> tuple[PyTree, Array, Array]:
        """One shard's part of a step: phi_b, lam_b, mu_b. For executors that go from shard to shard themselves."""
        return visit_shard(problem, self.oracle or default_oracle(problem.model), local, shard, lam0, mu, penalty)

    def settle(self, state: Any) -> Any:
        """The state of a run with nothing left to explore."""
        return state

    def metrics(self, state: Any) -> dict[str, Array]:
        """The consensus gap, mean_b |lam_b - gamma|."""
        return {"consensus": jnp.linalg.norm(state.copies - state.lam, axis=1).mean()}

    def tidy(self, state: Any) -> Any:
        """h and lam0 rebuilt from the duals: in single precision the running sum drifts."""
        return with_penalty(state, state.penalty)

    def warm(self, problem: Problem, state: Any) -> Any:
        """The duals of a start whose locals are known: minus the gradients. A stationary start then stays put."""

        def gradient(local: PyTree, shard: PyTree) -> Array:
            return jax.grad(problem.loss, argnums=1)(local, state.lam, shard)

        return self.tidy(self.settle(state)._replace(duals=-problem.map_shards(gradient, state.local)))

    def recover(self, state: Any, factor: float) -> Any:
        """The same point and duals with ``factor`` times the penalty."""
        return with_penalty(state, factor * state.penalty)


class PDVI(_PrimalDual):
    """PD-VI, Algorithm 1 with Oracle I: one step size ``eta`` for all global parameters.

    phi_b, lam_b = argmin f_b(phi, lam) + <mu_b, lam - lam0> + |lam - lam0|^2 / (2 eta)
    mu_b        += (lam_b - lam0) / eta

    Without ``eta`` the penalty is the automatic one of `P2DVI` averaged over the coordinates: safe, and as slow as
    the flattest coordinate.
    """

    eta: float | None = None
    oracle: Any = None

    def __check_init__(self) -> None:
        if isinstance(self.eta, Mapping) or (self.eta is not None and np.shape(self.eta) != ()):
            msg = f"`eta` of PDVI must be one positive number, got {self.eta!r}; use P2DVI for one per block."
            raise ValueError(msg)

    def init(
        self, problem: Problem, lam: Array, local: PyTree, batch_size: int, curvature: Array | None = None
    ) -> PrimalDualState:
        """The state before the first step."""
        if self.eta is None:
            penalty = _automatic(problem, lam, local, batch_size, 0.1, curvature).mean()
        else:
            penalty = penalty_from_eta(problem, self.eta)
        return initial_state(lam, local, penalty, problem.n_shards)


class ContinuedState(NamedTuple):
    """Algorithm 1's state, where the penalty is on its way to ``target``, and what exploring must beat."""

    lam: Array
    local: PyTree
    lam0: Array
    h: Array
    copies: Array | None
    duals: Array | None
    penalty: Array
    target: Array
    made: Array  # steps
    kept: Array  # lam of the start; while exploring, that which the first epochs reached
    reached: Array  # and its objective


class P2DVI(_PrimalDual):
    """P2D-VI, Algorithm 1 with Oracle II: a step size per block or per coordinate.

    phi_b, lam_b = argmin f_b(phi, lam) + <mu_b, lam - lam0> + 1/2 |lam - lam0|_D^2
    mu_b        += D (lam_b - lam0),      D = diag(1 / eta)

    Parameters
    ----------
    eta
        a number, a dict with a number or an array per block, or None (default): automatic, per coordinate.
    oracle
        how a subproblem is minimised; None (default): the model's closed form, else coordinate descent.
    scale
        the automatic penalty is max(1, scale B / |S|) times the curvature at the start; None (default): 0.1, or
        what the model recommends for itself.
    continuation
        stages ((factor, epochs), ...) in which D is multiplied by ``factor``, before it takes its final value. A
        small D lets shards disagree for a while, which explores; a large D converges fast. None (default): what the
        model recommends for itself, if ``eta`` is automatic (``continuation`` and ``worth_exploring``); (): none.
    exploration
        epochs of natural-gradient steps (`SVI`, noisy on purpose) after two of Algorithm 1, from the same start.
        They depend little on it, so a poor one does less harm. Algorithm 1 goes on from what they find if that is
        better, and otherwise from where it was. Rows of the trace tell it as "exploring". None (default): what the
        model recommends for itself (``exploration``), if ``eta`` and ``continuation`` are left to it and an epoch has
        at least 16 batches; 0: none.
    """

    eta: Any = None
    oracle: Any = None
    scale: float | None = None
    continuation: Stages | None = eqx.field(default=None, static=True)
    exploration: int | None = eqx.field(default=None, static=True)

    def __check_init__(self) -> None:
        if self.exploration is not None and not (isinstance(self.exploration, int) and self.exploration >= 0):
            msg = f"`exploration` must be a whole number of epochs, 0 for none, got {self.exploration!r}."
            raise ValueError(msg)
        if self.exploration and self.continuation:
            msg = f"`exploration` and `continuation` exclude each other, got {self.exploration!r} and stages; give one."
            raise ValueError(msg)

    def init(
        self, problem: Problem, lam: Array, local: PyTree, batch_size: int, curvature: Array | None = None
    ) -> ContinuedState:
        """The state before the first step."""
        if self.eta is None:
            target = _automatic(problem, lam, local, batch_size, self._scale(problem), curvature)
        else:
            target = penalty_from_eta(problem, self.eta)
        explore = self._exploration(problem, batch_size)[1] > 0
        if explore:
            require(self, problem, "statistics", "global_step", "natural", "from_natural")
        continued = not explore and self._continues(problem)
        first = target * self._stages(problem)[0][0] if continued else target
        state = initial_state(lam, local, first, problem.n_shards)
        made = jnp.asarray(0 if explore or continued else ENDED, jnp.int32)
        return ContinuedState(*state, target=target, made=made, kept=lam, reached=jnp.full((), jnp.inf))

    def stage(
        self, problem: Problem, state: ContinuedState, batch_size: int, executor: Any
    ) -> tuple[ContinuedState, Any, int | None]:
        """Who makes the next steps, how many (None: all), and the state as it takes them over."""
        begin, end = self._exploration(problem, batch_size)
        made = int(state.made)
        if made >= ENDED or not end:
            return state, self, None
        if made < begin:
            return state, self, begin - made
        if made == begin:  # noise finds more from the start than from where Algorithm 1 has led
            reached = executor.objective(problem, state)
            state = executor.with_initial_locals(
                problem, state._replace(lam=state.kept, kept=state.lam, reached=reached)
            )
        if made < end:
            rate = min(FASTEST, batch_size / (MEMORY * problem.n_shards))
            return state, SVI(rate=rate, sweeps=SWEEPS), end - made
        return self.conclude(problem, state, batch_size, executor), self, None

    def conclude(self, problem: Problem, state: ContinuedState, batch_size: int, executor: Any) -> ContinuedState:
        """The end of exploring: what was found, or where the run was before if that is better."""
        found = executor.with_best_globals(problem, self, state, batch_size)
        if executor.objective(problem, found) < state.reached:
            return found
        executor.tell("explored in vain")
        return executor.with_globals(problem, self, state.kept, batch_size)

    def exploring(self, problem: Problem, state: ContinuedState, batch_size: int) -> bool:
        """Whether the last step was one of exploration."""
        begin, end = self._exploration(problem, batch_size)
        return begin < int(state.made) <= end

    def begin(self, problem: Problem, state: ContinuedState, batch_size: int) -> ContinuedState:
        """At the start of a stage, a new D."""
        per_epoch = steps_per_epoch(problem.n_shards, batch_size)
        stages = self._stages(problem)
        begin = 0
        for (_, epochs), following in zip(stages, [*(factor for factor, _ in stages[1:]), 1.0]):
            begin += epochs * per_epoch
            state = jax.lax.cond(
                state.made == begin, lambda s, f=following: with_penalty(s, f * s.target), lambda s: s, state
            )
        return state._replace(made=state.made + 1)

    def settle(self, state: ContinuedState) -> ContinuedState:
        """The final penalty: nothing is left to explore."""
        return with_penalty(state, state.target)._replace(made=jnp.full_like(state.made, ENDED))

    def recover(self, state: ContinuedState, factor: float) -> ContinuedState:
        """The same point and duals with the final penalty, or ``factor`` times it if that is what failed."""
        target = jnp.where((state.penalty >= state.target).all(), factor * state.target, state.target)
        return with_penalty(state, target)._replace(target=target, made=jnp.full_like(state.made, ENDED))

    def _scale(self, problem: Problem) -> float:
        return getattr(problem.model, "penalty_scale", 0.1) if self.scale is None else self.scale

    def _exploration(self, problem: Problem, batch_size: int) -> tuple[int, int]:
        """After how many steps it begins and ends."""
        epochs, steps = self.exploration, steps_per_epoch(problem.n_shards, batch_size)
        if epochs is None:
            left_to_model = self.eta is None and self.continuation is None and steps >= NOISY
            epochs = getattr(problem.model, "exploration", 0) if left_to_model else 0
        return (BEFORE * steps, (BEFORE + epochs) * steps) if epochs else (0, 0)

    def _continues(self, problem: Problem) -> bool:
        if self.continuation is not None:
            return bool(self.continuation)
        return bool(self._stages(problem)) and problem.model.worth_exploring()

    def _stages(self, problem: Problem) -> Stages:
        if self.continuation is not None:
            return self.continuation
        return getattr(problem.model, "continuation", ()) if self.eta is None else ()


def _automatic(
    problem: Problem, lam: Array, local: PyTree, batch_size: int, scale: float, curvature: Array | None
) -> Array:
    """The automatic penalty; from ``curvature`` where the shards are not at hand."""
    if curvature is None:
        return automatic_penalty(problem, lam, local, batch_size, scale)
    return penalty_from_curvature(problem, curvature, batch_size, scale)
