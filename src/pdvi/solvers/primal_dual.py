"""PD-VI and P2D-VI: Algorithm 1 with a scalar, and with a block- or coordinate-wise penalty."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from pdvi.algorithm import PrimalDualState, algorithm_1, initial_state, with_penalty
from pdvi.oracles import default_oracle
from pdvi.problem import Problem
from pdvi.stepsize import automatic_penalty, penalty_from_eta, scalar_penalty

Array = jax.Array
PyTree = Any


class _PrimalDual(eqx.Module):
    """What both forms share: everything but the choice of D."""

    eta: eqx.AbstractVar[Any]
    oracle: eqx.AbstractVar[Any]

    def step(self, problem: Problem, state: PrimalDualState, batch: Array) -> PrimalDualState:
        """One step of Algorithm 1."""
        oracle = self.oracle or default_oracle(problem.model)
        return algorithm_1(partial(oracle, problem), problem.shards, state, batch)

    def metrics(self, state: PrimalDualState) -> dict[str, Array]:
        """The consensus gap, mean_b |lam_b - gamma|."""
        return {"consensus": jnp.linalg.norm(state.copies - state.lam, axis=1).mean()}

    def recover(self, state: PrimalDualState, factor: float) -> PrimalDualState:
        """The same point and duals with ``factor`` times the penalty."""
        return with_penalty(state, factor * state.penalty)


class PDVI(_PrimalDual):
    """PD-VI, Algorithm 1 with Oracle I: one step size ``eta`` for all global parameters.

    phi_b, lam_b = argmin f_b(phi, lam) + <mu_b, lam - lam0> + |lam - lam0|^2 / (2 eta)
    mu_b        += (lam_b - lam0) / eta

    Without ``eta`` it is chosen from the curvature at the start (the geometric mean over the coordinates).
    """

    eta: float | None = None
    oracle: Any = None

    def __check_init__(self) -> None:
        if isinstance(self.eta, Mapping):
            msg = f"`eta` of PDVI must be one positive number, got {self.eta!r}; use P2DVI for one per block."
            raise ValueError(msg)

    def init(self, problem: Problem, lam: Array, local: PyTree, batch_size: int) -> PrimalDualState:
        """The state before the first step."""
        if self.eta is None:
            penalty = scalar_penalty(automatic_penalty(problem, lam, local, batch_size))
        else:
            penalty = penalty_from_eta(problem, self.eta)
        return initial_state(lam, local, penalty, problem.n_shards)


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
        the automatic penalty is max(1, scale B / |S|) times the curvature at the start.
    """

    eta: Any = None
    oracle: Any = None
    scale: float = 0.1

    def init(self, problem: Problem, lam: Array, local: PyTree, batch_size: int) -> PrimalDualState:
        """The state before the first step."""
        if self.eta is None:
            penalty = automatic_penalty(problem, lam, local, batch_size, self.scale)
        else:
            penalty = penalty_from_eta(problem, self.eta)
        return initial_state(lam, local, penalty, problem.n_shards)
