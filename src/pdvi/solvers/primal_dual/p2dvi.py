"""P2D-VI: Algorithm 1 with a penalty per block or per coordinate, and what it does of its own accord."""

from __future__ import annotations

from typing import Any

import equinox as eqx

from pdvi._base.checks import one_of
from pdvi.core.problem import Problem, default_batch_size
from pdvi.core.solver import Solver
from pdvi.solvers.primal_dual.behavior import SCALE, Case, row_for
from pdvi.solvers.primal_dual.pdvi import PrimalDual


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
        the automatic penalty is max(1, scale B / |S|) times the curvature; None (default): 0.1; 0.5 for models with
        ``statistics`` and ``global_step``, whose shards start in consensus; 0.3 with a warm-up.
    exploration
        epochs of natural-gradient steps after two of Algorithm 1, from the same start (see `pdvi.solvers.Explored`).
        None (default): 3 for local variables that are coupled across shards, if ``eta`` is left out and an epoch has at
        least 16 batches; 0: none. There is none either where a run starts from given local variables.
    preconditioner
        "full": D is a matrix, so that correlated parameters cost nothing; "diagonal": a number per coordinate. None
        (default): full for models without closed forms up to 256 globals, where the oracle is left out too.

    Notes
    -----
    Where ``eta`` is left out, D follows the run for most models (see `pdvi.solvers.AdaptivePenalty`); `explain` returns
    what is done for a problem, and why.
    """

    eta: Any = None
    oracle: Any = None
    scale: float | None = None
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

    def specialize(self, problem: Problem, batch_size: int, *, warm: bool = False) -> Solver:
        """Return this solver alone, with an adaptive penalty, or with a warm-up: see `explain`."""
        case = Case(self, problem, batch_size, warm)
        return row_for(case).build(case)

    def explain(self, problem: Problem, batch_size: int | None = None, *, warm: bool = False) -> str:
        """Return in a sentence what this solver does on a problem, and why.

        ``batch_size`` as in `pdvi.fit`; ``warm``: the run starts from given local variables.

        Examples
        --------
        >>> import pdvi
        >>> print(pdvi.P2DVI(eta=0.1).explain(pdvi.datasets.quadratic(n=20)))
        a constant penalty, 1 / eta: `eta` is given
        """
        size = default_batch_size(problem.n_shards) if batch_size is None else batch_size
        row = row_for(Case(self, problem, size, warm))
        return f"{row.behavior}: {row.reason}"

    @property
    def _scale(self) -> float:
        return SCALE if self.scale is None else self.scale
