"""What PD-VI and P2D-VI do where nothing is said: which penalty, which initialization, which oracle."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import jax

from pdvi.core.model import Conjugate, Constrained, Coupled, Exact, GlobalStep, LocalStep, Natural, offers
from pdvi.core.problem import Problem
from pdvi.core.solver import Solver
from pdvi.solvers.adaptive_penalty import CONSENSUS, NEWTON, AdaptivePenalty
from pdvi.solvers.explored import NOISY, Explored
from pdvi.solvers.primal_dual.arrow import rows_are_independent
from pdvi.solvers.primal_dual.oracles import NEWTON_DIMENSION, CoordinateDescent, JointNewton

FULL_DIMENSION = 256  # globals up to which D is a matrix and a visit takes Newton steps on all: P^2 numbers, P products
SCALE, COUPLED_SCALE, CONSENSUS_SCALE = 0.1, 0.3, 0.5  # c / (B / |S|)
WARMUP_EPOCHS = 3

# The consensus scale: the visits of an epoch then weigh twice as much as all shards together, and those at its start
# still count at its end (e^-2). With 0.1 nothing is left of them (e^-10): shards that come last decide, and the order
# matters. With 1 it does not matter at all, but the last digits take twice as long.


def has_closed_form(problem: Problem) -> bool:
    """Return whether a subproblem is solved by the model's own steps, so that D need not follow the run.

    Shards that touch each other count too: their locals are not minimized over by Newton steps.
    """
    return bool(problem.halo_rows) or offers(problem.model, Exact) or offers(problem.model, Conjugate)


def without_closed_form(problem: Problem, solver: Any, preconditioner: str | None) -> AdaptivePenalty:
    """Return a solver whose penalty follows the run, and its oracle, for a model without closed forms.

    Where locals are any numbers and few, or independent by row, a visit moves locals and globals at once, and D is the
    curvature that is left when locals follow; else they take turns, and D is that for fixed locals.
    """
    model = problem.model
    few = problem.n_global <= FULL_DIMENSION
    rows = rows_are_independent(problem)
    shapes = [leaf.shape[1:] if rows else leaf.shape for leaf in jax.tree.leaves(problem.local_shape())]
    small = sum(math.prod(shape) for shape in shapes) <= NEWTON_DIMENSION
    chosen = solver.oracle is None
    together = chosen and few and small and not (offers(model, LocalStep) or offers(model, Constrained))
    if chosen:
        oracle = JointNewton(independent_rows=rows) if together else CoordinateDescent(independent_rows=rows)
        solver = dataclasses.replace(solver, oracle=oracle)
    own_step = offers(model, GlobalStep)  # it takes a diagonal, and is faster than any that takes a matrix
    full = (few and chosen and not own_step) if preconditioner is None else preconditioner == "full"
    return AdaptivePenalty(solver, NEWTON if together else None, full=full, independent_rows=rows)


class Case:
    """A P2D-VI solver with its settings, and the problem it is to solve."""

    def __init__(self, solver: Any, problem: Problem, batch_size: int, warm: bool):
        self.solver, self.problem, self.batch_size, self.warm = solver, problem, batch_size, warm
        self.model = problem.model

    def plain(self, scale: float | None = None) -> Any:
        """Return the solver alone; ``scale`` where the user gives none."""
        default = COUPLED_SCALE if offers(self.model, Coupled) else SCALE
        wanted = (default if scale is None else scale) if self.solver.scale is None else self.solver.scale
        return dataclasses.replace(self.solver, scale=wanted, exploration=0)

    @property
    def has_consensus(self) -> bool:
        """Return whether shards can begin at the best globals for their local variables."""
        closed = offers(self.model, Conjugate) and not offers(self.model, Exact)
        return closed and self.solver.preconditioner != "full"

    @property
    def explores(self) -> bool:
        """Return whether a warm-up suits the model, and an epoch has enough batches for it."""
        suits = all(offers(self.model, ability) for ability in (Coupled, Conjugate, Natural))
        left_out = self.solver.eta is None and self.solver.exploration is None
        return suits and left_out and not self.warm and self.problem.steps_per_epoch(self.batch_size) >= NOISY

    @cached_property
    def adaptive(self) -> AdaptivePenalty:
        """Return the solver for a model without closed forms."""
        return without_closed_form(self.problem, self.plain(), self.solver.preconditioner)


class Row(NamedTuple):
    """A row of the table: if the condition holds, P2D-VI does this, for this reason."""

    applies: Callable[[Case], bool]
    behavior: str
    reason: str
    build: Callable[[Case], Solver]


# The first row that applies is what P2D-VI does.
TABLE = [
    Row(
        lambda case: bool(case.solver.exploration) and not case.warm,
        "SVI warm-up, then a constant penalty",
        "`exploration` asks for it",
        lambda case: Explored(case.plain(), case.solver.exploration),
    ),
    Row(
        lambda case: case.solver.eta is not None,
        "a constant penalty, 1 / eta",
        "`eta` is given",
        lambda case: case.plain(),
    ),
    Row(
        lambda case: case.explores,
        "SVI warm-up, then a constant penalty",
        "local variables are coupled across shards, so that the optimum that is found depends on the start, and an "
        f"epoch has at least {NOISY} batches",
        lambda case: Explored(case.plain(), WARMUP_EPOCHS),
    ),
    Row(
        lambda case: case.has_consensus and case.warm,
        "consensus initialization, constant diagonal penalty",
        "the model has the best globals in closed form from statistics that add over shards, and the run starts from "
        "given local variables",
        lambda case: AdaptivePenalty(case.plain(CONSENSUS_SCALE), CONSENSUS, warm=True),
    ),
    Row(
        lambda case: case.has_consensus,
        "consensus initialization, adaptive diagonal penalty",
        "the model has the best globals in closed form from statistics that add over shards",
        lambda case: AdaptivePenalty(case.plain(CONSENSUS_SCALE), CONSENSUS),
    ),
    Row(
        lambda case: (
            bool(case.problem.halo_rows) or (has_closed_form(case.problem) and case.solver.preconditioner != "full")
        ),
        "a constant diagonal penalty, from the curvature at the start",
        "the model minimizes a subproblem in closed form, or its shards touch each other",
        lambda case: case.plain(),
    ),
    Row(
        lambda case: case.adaptive.initialization == NEWTON,
        "Newton initialization, adaptive penalty, joint Newton steps",
        f"the model has no closed forms, at most {FULL_DIMENSION} globals, and few local variables or independent rows",
        lambda case: case.adaptive,
    ),
    Row(
        lambda case: True,
        "adaptive penalty, locals and globals in turn",
        "the model has no closed form for its globals",
        lambda case: case.adaptive,
    ),
]


def row_for(case: Case) -> Row:
    """Return the row of the table that applies."""
    return next(row for row in TABLE if row.applies(case))
