"""What a run gives back."""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from pdvi._base.checks import instance, one_of, whole
from pdvi._base.checks import seed as checked_seed
from pdvi._base.types import PyTree
from pdvi.core.inference_data import inference_data, point_data
from pdvi.core.model import Posterior, Wanted, offers
from pdvi.core.problem import Problem
from pdvi.core.result_file import read_result, write_result


class Status(enum.Enum):
    """Why a run ended; the text says what to do next."""

    CONVERGED = "reached the tolerance"
    MAX_EPOCHS = "did not reach tol within the budget; increase max_epochs or loosen tol"
    STALLED = (
        "the objective has settled, but its derivatives say that it is not at a minimum; go on with start=result, "
        "or try another start or a smaller tol"
    )
    MAX_SECONDS = "did not reach tol within max_seconds; increase it, or go on with start=result"
    INTERRUPTED = "interrupted; this is the last logged state, go on with start=result"
    STOPPED = "stopped by a callback"
    DIVERGED = (
        "the objective is not finite or keeps rising; this is the last good state: "
        "try a smaller eta (or a larger scale), or another start"
    )
    RUNNING = "a checkpoint of an unfinished run; go on with start=<this file>"

    def __str__(self) -> str:
        return f"{self.name}: {self.value}"


class Point(NamedTuple):
    """Global parameters and the local variables that go with them."""

    global_params: Mapping[str, Any]
    local_params: PyTree


@dataclass(frozen=True)
class Result:
    """The outcome of `pdvi.fit`.

    ``global_params`` is a dict of arrays, one per block; ``local_params`` is stacked over shards; ``trace`` has
    one row per log point. ``solver`` is the solver's settings. ``state`` holds its other arrays by name
    ("server.lam0"), so that ``start=result`` goes on with the same bits. ``data`` is a fingerprint of the problem's
    data, empty if it is not known. ``problem`` is kept where the model can draw from its posterior (`to_arviz`), and
    neither saved nor pickled.
    """

    global_params: dict[str, np.ndarray]
    local_params: PyTree
    trace: pd.DataFrame
    status: Status
    n_steps: int
    seed: int
    batch_size: int
    solver: dict[str, Any] | str
    state: dict[str, np.ndarray] = field(default_factory=dict, repr=False)
    data: str = ""
    problem: Problem | None = field(default=None, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "problem": None}

    @property
    def converged(self) -> bool:
        """Return whether the tolerance was reached."""
        return self.status is Status.CONVERGED

    @property
    def point(self) -> Point:
        """Return where the run ended, as a start for another."""
        return Point(self.global_params, self.local_params)

    @property
    def objective(self) -> float:
        """Return F at the returned parameters."""
        return float(self.trace["objective"].iloc[-1])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything to one file, whole or not at all; a file that is there is replaced."""
        write_result({**vars(self), "status": self.status.name}, path)

    def to_arviz(
        self,
        problem: Problem | None = None,
        *,
        draws: int = 500,
        include_locals: bool = False,
        log_likelihood: bool = True,
        predictive: bool = False,
        covariance: str | None = None,
        seed: int = 0,
    ) -> Any:
        """Return an ``arviz.InferenceData``.

        For a model of `pdvi.from_numpyro` it has draws of the unknowns in the model's own terms (``posterior``), the
        log likelihood of every row with its locals integrated out, the data, and the trace (``sample_stats``, along
        ``log_point``). ``attrs["khat"]`` is the shape of the tail of p / q over the draws of the globals, the locals
        integrated out too: below 0.7 the normal q is good enough to be corrected by importance weights
        (``sample_stats["log_ratio"]``), above it is not to be trusted beyond its mean. It does not see a second mode
        that q has no draws in. For any other model the fitted parameters are the only draw.

        Parameters
        ----------
        problem
            what was fitted; needed for a result that was loaded, and for models that cannot draw.
        include_locals
            draws of the locals, and of deterministic sites that have rows: draws x rows numbers each.
        log_likelihood
            off for very large data: draws x rows numbers, and sixteen times as many evaluations of the model.
        predictive
            data drawn anew for every draw (``posterior_predictive``).
        covariance
            "linear-response": what correlated unknowns have, from the curvature of the ELBO; "mean-field": that of q
            itself, too small where unknowns are correlated. None (default): the former up to 256 globals.
        """
        problem = self.problem if problem is None else instance("problem", problem, Problem, "a pdvi.Problem")
        if problem is None:
            msg = (
                "`problem` must be given as result.to_arviz(problem): this result has none, since it was loaded from a "
                "file or its model cannot draw from a posterior."
            )
            raise ValueError(msg)
        if self.data and problem.fingerprint() != self.data:
            msg = "`problem` must be the one that was fitted: its data or its draws are others; build it the same way."
            raise ValueError(msg)
        if not offers(problem.model, Posterior):
            return point_data(self.global_params, self.trace, self.status.name)
        if covariance is not None:
            one_of("covariance", covariance, ("linear-response", "mean-field"))
        wanted = Wanted(
            draws=whole("draws", draws, least=2),
            covariance=covariance,
            locals=include_locals,
            log_likelihood=log_likelihood,
            predictive=predictive,
            seed=checked_seed("seed", seed),
        )
        sampled = problem.model.sample_posterior(problem, self.global_params, self.local_params, wanted)
        return inference_data(sampled, self.trace, self.status.name)


def load_result(path: str | os.PathLike[str]) -> Result:
    """Read what `Result.save` or a checkpoint wrote. No code in the file is run; a damaged file is refused."""
    fields = read_result(path, Status.__members__)
    return Result(**{**fields, "status": Status[fields["status"]]})
