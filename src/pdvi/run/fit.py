"""The only loop: budget, trace, stopping, callbacks, progress."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from pdvi._base.checks import at_least, positive
from pdvi._base.telling import wanted
from pdvi._base.types import PyTree
from pdvi.core.executor import Executor, HostShards
from pdvi.core.problem import Problem
from pdvi.core.result import Point, Result, Status
from pdvi.core.solver import Solver, State
from pdvi.executors.fit_program import MAX_ROWS
from pdvi.run.checkpoint import Checkpoint, Keeper
from pdvi.run.running import Run
from pdvi.run.sampling import Sampling
from pdvi.run.settings import last_step
from pdvi.run.stopping import Tolerances, flat, little, settled


@dataclass(frozen=True)
class Progress:
    """What a callback is given at every log point. Return True from the callback to stop the run."""

    record: Mapping[str, Any]  # the newest row of the trace
    problem: Problem
    state: State
    executor: Executor

    @property
    def global_params(self) -> dict[str, np.ndarray]:
        """Return the global parameters now."""
        return jax.tree.map(np.asarray, self.problem.unravel(self.state.lam))

    @property
    def local_params(self) -> PyTree:
        """Return the local variables now, stacked over shards."""
        return self.executor.local_params(self.state)


def fit(
    problem: Problem,
    solver: Solver | str,
    *,
    batch_size: int | None = None,
    max_epochs: float = 100,
    max_steps: int | None = None,
    max_seconds: float | None = None,
    tol: float = 1e-6,
    abs_tol: float = 0.0,
    grad_tol: float = 0.0,
    seed: int | None = None,
    sampling: Sampling | None = None,
    start: Result | Point | str | os.PathLike[str] | Mapping[str, Any] | None = None,
    executor: Executor | str | None = None,
    callbacks: Sequence[Callable[[Progress], Any]] = (),
    checkpoint: Checkpoint | str | os.PathLike[str] | None = None,
    log_every: float = 1.0,
    progress: bool | None = None,
) -> Result:
    """Minimise ``problem`` with ``solver``.

    Parameters
    ----------
    solver
        a solver such as ``pdvi.P2DVI(eta=0.5)``; or the name of one, "p2dvi", with its default settings.
    batch_size
        shards visited per step, |S_t|; by default a hundredth of them, at least one.
    max_epochs, max_steps, max_seconds
        the budget, whichever ends first. An epoch is as many steps as visit every shard once. Seconds are
        those spent in the solver: compilation counts, evaluation and checkpoints do not. In memory, where evaluation is
        a part of the compiled program, its time is estimated.
    tol
        stop when the objective changes by less than ``tol`` times its size from one log point to the next,
        at least an epoch apart, twice in a row, and the derivatives, where the solver asks for them, agree that no more
        than a few hundredths of a nat (or a tenth of this change) are left to gain; 0 never stops.
    abs_tol
        is added to ``tol`` times the size of the objective, in its own units (nats).
    grad_tol
        stop when the norm of grad_lam F is below ``grad_tol`` times that at the start, and the objective moved by no
        more than ``grad_tol`` times the range it has covered.
    seed
        of the model's start and of the draws (default 0).
    sampling
        how shards are drawn; see `pdvi.sampling`. By default every epoch in a new random order.
    start
        a dict of blocks to start from; a `Point` (``result.point``), which has local variables too; or a result or
        a checkpoint: made by the same solver it is continued, to the same bits as an uninterrupted run with the same
        log points (budgets count from its beginning; one that ended while exploring does not explore any more); made
        by another its point is where a new run starts.
    callbacks
        called with a `Progress` at every log point; the run stops when one returns True.
    checkpoint
        a path, or a `Checkpoint`. The file can be given as ``start``.
    executor
        where shards are and steps run: `Memory` (default), `Disk` (default for a problem from a store), or `Dask`; or
        their names ("dask": with the client that the process has).
    log_every
        epochs between log points. In memory a compiled program goes on from log point to log point until the run
        stops; with callbacks, a checkpoint or a progress bar it returns at each of them. Where it goes on, the
        seconds of a row are interpolated.
    progress
        show a progress bar, which says so while the model is being compiled; by default on a terminal only.
    """
    keep = Keeper(checkpoint)
    if not isinstance(callbacks, list | tuple) or not all(map(callable, callbacks)):
        remedy = "; give it as [function]" if callable(callbacks) else ""
        msg = f"`callbacks` must be a list of functions that take a Progress, got {callbacks!r}{remedy}."
        raise TypeError(msg)
    tolerances = Tolerances(tol, abs_tol, grad_tol)
    for name, value in tolerances._asdict().items():
        at_least(name, value)
    if max_seconds is not None:
        positive("max_seconds", max_seconds)
    # there before anything is compiled, which may take longer than all steps
    with tqdm(desc="compiling", unit="step", disable=not wanted(progress), leave=False) as bar:
        run = Run(
            problem,
            solver,
            batch_size=batch_size,
            seed=seed,
            sampling=sampling,
            start=start,
            executor=executor,
            log_every=log_every,
        )
        try:
            bar.total = last = last_step(max_epochs, max_steps, run.steps_per_epoch)
            bar.initial = bar.n = run.step
            try:
                alone = bool(callbacks) or keep.to is not None or not bar.disable  # each log point is looked at
                max_rows = 1 if alone else MAX_ROWS
                if not run.rows:
                    run.proceed(last, tolerances, max_rows, max_seconds)
                while (status := _verdict(run, callbacks, last, max_seconds, tolerances)) is Status.RUNNING:
                    run.proceed(last, tolerances, max_rows, max_seconds)
                    keep.if_due(lambda: run.result(Status.RUNNING))
                    bar.set_description_str("", refresh=False)
                    bar.update(run.step - bar.n)
                    bar.set_postfix_str(f"objective {run.rows[-1]['objective']:.6g}")
            except KeyboardInterrupt:
                if not run.rows:
                    raise  # nothing done, nothing to return
                run.rewind()
                status = Status.INTERRUPTED
            run.conclude()
            result = run.result(status)
        finally:
            run.executor.close()
    keep.now(result)
    return result


def _verdict(
    run: Run,
    callbacks: Sequence[Callable[[Progress], Any]],
    last: int,
    max_seconds: float | None,
    tolerances: Tolerances,
) -> Status:
    """Return whether to stop at this log point, and why."""
    if run.failed:
        return Status.DIVERGED
    progress = Progress(run.rows[-1], run.problem, run.state, run.executor)
    answers = [callback(progress) for callback in callbacks]
    if any(isinstance(answer, bool | np.bool_) and answer for answer in answers):
        return Status.STOPPED
    quiet = settled(run.rows, tolerances)
    if quiet:  # do the derivatives leave as little to gain as the objective's changes say?
        left = run.solver.remaining_gain(run.problem, HostShards(run.executor, run.state))
        if little(left, run.rows[-1]["objective"], tolerances):
            return Status.CONVERGED
    if flat(run.rows, tolerances.grad_tol):
        return Status.CONVERGED
    if run.step >= last:
        return Status.STALLED if quiet else Status.MAX_EPOCHS
    if max_seconds is not None and run.seconds >= max_seconds:
        return Status.MAX_SECONDS
    return Status.RUNNING
