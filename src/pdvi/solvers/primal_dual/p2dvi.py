"""P2D-VI: Algorithm 1 with a penalty per block or per coordinate, and what it does of its own accord."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import numpy as np

from pdvi._base.checks import one_of
from pdvi._base.types import Array
from pdvi.core.model import Conjugate, Coupled, Exact, Natural, Separated, offers
from pdvi.core.problem import Problem
from pdvi.core.solver import Solver
from pdvi.solvers.agreed import SCALE as AGREED_SCALE
from pdvi.solvers.agreed import Agreed
from pdvi.solvers.continued import Continued, Stages
from pdvi.solvers.explored import NOISY, Explored
from pdvi.solvers.following import followed
from pdvi.solvers.primal_dual.pdvi import SCALE, PrimalDual
from pdvi.solvers.primal_dual.penalty import constant_for, penalty_from_curvature

WELL_SEPARATED = 8.0  # two components are typically four standard deviations apart


class Policy(NamedTuple):
    """What P2D-VI does where nothing is said."""

    scale: float = SCALE
    exploration: int = 0
    continuation: Stages = ()


def policy(model: Any) -> Policy:
    """Return what suits a model.

    Where local variables read each other (labels on a graph) the penalty may be firm, since neighbours keep components
    in place; and which optimum is found depends on the start, so three epochs of exploring come first. With too few
    shards for that: six epochs with a small penalty if components are well separated (then better optima from poor
    starts, and sooner from good ones, than any constant), else the firm one at once (patches would lose track of which
    component is which). benchmarks/mixture_quality.py measures all of them.
    """
    if not offers(model, Coupled):
        return Policy()
    explorable = offers(model, Conjugate) and offers(model, Natural)
    separated = offers(model, Separated) and bool(model.separation() >= WELL_SEPARATED)
    return Policy(0.3, 3 if explorable else 0, ((0.03, 6),) if separated else ())


class P2DVI(PrimalDual):
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
        the automatic penalty is max(1, scale B / |S|) times the curvature; None (default): 0.1; 0.3 where local
        variables are coupled across shards; 0.5 for other models that tell their globals by statistics, whose shards
        begin in agreement (see `pdvi.solvers.Agreed`).
    continuation
        stages ((factor, epochs), ...) in which D is multiplied by ``factor``, before it takes its final value (see
        `pdvi.solvers.Continued`). None (default): what suits the model, if ``eta`` is automatic; (): none.
    exploration
        epochs of natural-gradient steps after two of Algorithm 1, from the same start (see `pdvi.solvers.Explored`).
        None (default): 3 for local variables that are coupled across shards, if ``eta`` and ``continuation`` are left
        out and an epoch has at least 16 batches; 0: none.
    preconditioner
        "full": D is a matrix, so that correlated parameters cost nothing; "diagonal": a number per coordinate. None
        (default): full for models without closed forms up to 256 globals, where the oracle is left out too. For these
        models D follows the run (see `pdvi.solvers.Following`), which begins near the optimum of some shards.
    """

    eta: Any = None
    oracle: Any = None
    scale: float | None = None
    continuation: Stages | None = eqx.field(default=None, static=True)
    exploration: int | None = eqx.field(default=None, static=True)
    preconditioner: str | None = eqx.field(default=None, static=True)

    def __check_init__(self) -> None:
        if self.exploration is not None and not (isinstance(self.exploration, int) and self.exploration >= 0):
            msg = f"`exploration` must be a whole number of epochs, 0 for none, got {self.exploration!r}."
            raise ValueError(msg)
        if self.preconditioner is not None:
            one_of("preconditioner", self.preconditioner, ("full", "diagonal"))
        if self.preconditioner == "full" and self.eta is not None:
            msg = f'`eta` must be left out with preconditioner="full", which chooses its own steps, got {self.eta!r}.'
            raise ValueError(msg)
        if self.exploration and self.continuation:
            msg = f"`exploration` and `continuation` exclude each other, got {self.exploration!r} and stages; give one."
            raise ValueError(msg)

    def resolved(self, problem: Problem, batch_size: int) -> Solver:
        """Return this solver alone, explored, continued, agreed or following: as asked for, or as suits the model."""
        suits = policy(problem.model)
        automatic = self.eta is None
        plain = dataclasses.replace(
            self, scale=suits.scale if self.scale is None else self.scale, continuation=(), exploration=0
        )
        epochs, stages = self.exploration, self.continuation
        if epochs is None:
            left_out = automatic and stages is None and problem.steps_per_epoch(batch_size) >= NOISY
            epochs = suits.exploration if left_out else 0
        if epochs:
            return Explored(plain, epochs)
        if stages is None:
            stages = suits.continuation if automatic else ()
        if stages:
            return Continued(plain, stages)
        if not automatic:
            return plain
        by_statistics = offers(problem.model, Conjugate) and not offers(problem.model, Exact)
        if by_statistics and not offers(problem.model, Coupled) and self.preconditioner != "full":
            return Agreed(dataclasses.replace(plain, scale=AGREED_SCALE if self.scale is None else self.scale))
        return followed(problem, plain, self.preconditioner)

    def constant(self, problem: Problem, batch_size: int) -> float:
        """Return c, how many times the curvature D is."""
        return constant_for(problem, batch_size, SCALE if self.scale is None else self.scale)

    def automatic(self, problem: Problem, curvature: np.ndarray, batch_size: int) -> Array:
        """Return one number per coordinate."""
        return penalty_from_curvature(problem, curvature, batch_size, SCALE if self.scale is None else self.scale)
