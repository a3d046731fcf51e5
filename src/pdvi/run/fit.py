"""The only loop: budget, trace, stopping, callbacks, progress."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import numpy as np
import pandas as pd
from tqdm import tqdm

from pdvi.core.problem import Problem
from pdvi.core.result import Point, Result, Status, load_result
from pdvi.executors import Disk, Memory
from pdvi.executors.memory import like
from pdvi.executors.server import NoShards
from pdvi.run.checkpoint import Checkpoint, Keeper
from pdvi.run.safeguard import Safeguard
from pdvi.run.sampling import Reshuffled, Sampling, batches, steps_per_epoch
from pdvi.run.settings import batch_size_for, lam_from, last_step, positive, seed_for

PyTree = Any

EXPLORING, RESTORED = "exploring", "restored the last good state"  # events of the trace


class SafeguardWarning(UserWarning):
    """The run was set back to its last good state and goes on with smaller steps."""


@dataclass(frozen=True)
class Progress:
    """What a callback is given at every log point. Return True from the callback to stop the run."""

    record: Mapping[str, Any]  # the newest row of the trace
    problem: Problem
    state: Any
    executor: Any

    @property
    def global_params(self) -> dict[str, np.ndarray]:
        """The global parameters now."""
        return jax.tree.map(np.asarray, self.problem.unravel(self.state.lam))

    @property
    def local_params(self) -> PyTree:
        """The local variables now, stacked over shards."""
        return self.executor.local_params(self.state)


def fit(
    problem: Problem,
    solver: Any,
    *,
    batch_size: int | None = None,
    max_epochs: float = 100,
    max_steps: int | None = None,
    max_seconds: float | None = None,
    tol: float = 1e-6,
    grad_tol: float = 0.0,
    seed: int | None = None,
    sampling: Sampling | None = None,
    start: Result | Point | str | os.PathLike | Mapping[str, Any] | None = None,
    executor: Any = None,
    callbacks: Sequence[Callable[[Progress], Any]] = (),
    checkpoint: Checkpoint | str | os.PathLike | None = None,
    log_every: float = 1.0,
    progress: bool | None = None,
) -> Result:
    """Minimise ``problem`` with ``solver``.

    Parameters
    ----------
    batch_size
        shards visited per step, |S_t|; by default a hundredth of them, at least one.
    max_epochs, max_steps, max_seconds
        the budget, whichever ends first. An epoch is as many steps as visit every shard once. Seconds are
        those spent in the solver: compilation counts, evaluation and checkpoints do not.
    tol
        stop when the objective changes by less than ``tol`` times its size from one log point to the next,
        at least an epoch apart, twice in a row; 0 never stops.
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
        where shards are and steps run: `Memory` (default), `Disk` (default for a problem from a store), or `Dask`.
    log_every
        epochs between log points; steps in between run as one compiled scan.
    progress
        show a progress bar; by default on a terminal only.
    """
    run = _Run(problem, solver, batch_size, seed, sampling, start, executor, log_every)
    last = last_step(max_epochs, max_steps, run.steps_per_epoch)
    if max_seconds is not None:
        positive("max_seconds", max_seconds)
    for name, value in (("tol", tol), ("grad_tol", grad_tol)):
        if not value >= 0:
            msg = f"`{name}` must be at least 0, got {value!r}."
            raise ValueError(msg)
    keep = Keeper(checkpoint)
    with tqdm(total=last, initial=run.step, unit="step", disable=not _wanted(progress), leave=False) as bar:
        try:
            if not run.rows:
                run.log()
                run.guard()
            while (status := _verdict(run, callbacks, last, max_seconds, tol, grad_tol)) is Status.RUNNING:
                run.advance(last)
                run.log()
                run.guard()
                keep.if_due(lambda: run.result(Status.RUNNING))
                bar.update(run.step - bar.n)
                bar.set_postfix_str(f"objective {run.rows[-1]['objective']:.6g}")
        except KeyboardInterrupt:
            if not run.rows:
                raise  # nothing done, nothing to return
            run.rewind()
            status = Status.INTERRUPTED
    run.conclude()
    result = run.result(status)
    run.executor.close()
    keep.now(result)
    return result


class _Run:
    """A run in progress. The last row of ``rows`` always describes ``state``."""

    def __init__(
        self,
        problem: Problem,
        solver: Any,
        batch_size: int | None,
        seed: int | None,
        sampling: Sampling | None,
        start: Any,
        executor: Any,
        log_every: float,
    ):
        if isinstance(start, str | os.PathLike):
            start = load_result(start)
        executor = executor or (Memory() if problem.store is None else Disk())
        earlier = start if isinstance(start, Result) and start.solver == _describe(solver) else None
        self.problem, self.solver = problem, solver
        self.batch_size = batch_size_for(problem, solver, batch_size, earlier)
        self.seed = seed_for(seed, earlier)
        self.sampling = sampling or Reshuffled()
        self.executor = executor
        self.steps_per_epoch = steps_per_epoch(problem.n_shards, self.batch_size)
        self.stride = max(1, round(positive("log_every", log_every) * self.steps_per_epoch))
        self.state, self.good = self._initial_states(start, earlier)
        self.step: int = earlier.n_steps if earlier else 0
        self.rows: list[dict] = earlier.trace.to_dict("records") if earlier else []
        self.seconds: float = self.rows[-1]["seconds"] if self.rows else 0.0
        self.logged = self.state, self.step, self.seconds
        self.failed = False
        self.safeguard = Safeguard()
        for row in self.rows:
            if row["event"]:
                self.safeguard = Safeguard()
            self.safeguard.judge(row["epoch"], row["objective"])

    def _initial_states(self, start: Any, earlier: Result | None) -> tuple[Any, Any]:
        """The state to go on from, and the last good one."""
        lam = local = None
        if isinstance(start, Result | Point):
            local, start = start.local_params, start.global_params
        if start is not None:
            lam = lam_from(self.problem, start)
        key = jax.random.key(self.seed)
        state = self.executor.init(self.problem, self.solver, key, lam, local, self.batch_size)
        known = local is not None
        if earlier is None:
            state = self.executor.warm(self.problem, self.solver, state) if known else state
            return state, state
        leaves = [state.lam, *jax.tree.leaves(state.local), *earlier.state.values()]
        size = len(jax.tree.leaves(state))
        now = like(state, leaves[:size], "the solver's state in `start`")
        good = like(state, leaves[size:], "the last good state in `start`") if leaves[size:] else now
        current = self.executor.resume(self.problem, self.solver, now, known=known)
        return current, current if good is now else good

    def advance(self, last: int) -> None:
        """Run the steps up to the next log point."""
        stop = min(last, (self.step // self.stride + 1) * self.stride)
        drawn = batches(self.sampling, self.seed, self.step, stop, self.problem.n_shards, self.batch_size)
        began = time.perf_counter()
        self.state = self.executor.run(self.problem, self.solver, self.state, drawn)
        self.seconds += time.perf_counter() - began
        self.step = stop

    def log(self, event: str = "") -> None:
        """Evaluate the state and add a row to the trace."""
        measured = self.executor.evaluate(self.problem, self.solver, self.state)
        if not event and self._exploring():
            event = EXPLORING
        epoch = self.step / self.steps_per_epoch
        event = "; ".join([event, *self.executor.events()] if event else self.executor.events())
        self.rows.append({"step": self.step, "epoch": epoch, "seconds": self.seconds, **measured, "event": event})
        self.logged = self.state, self.step, self.seconds
        if self.step == 0 and not np.isfinite(measured["objective"]):
            msg = f"the objective at the start is {measured['objective']}; give another `start`."
            raise ValueError(msg)

    def _exploring(self) -> bool:
        exploring = getattr(self.solver, "exploring", None)
        return bool(exploring and exploring(self.problem, self.state, self.batch_size))

    def conclude(self) -> None:
        """A run that ends while it explores, which is noisy, gives the best that it has."""
        with contextlib.suppress(NoShards):
            if self._exploring():
                self.state = self.solver.conclude(self.problem, self.state, self.batch_size, self.executor)
                self.log("ended while exploring")

    def rewind(self) -> None:
        """Back to the last log point: the trace and the state must tell the same."""
        self.state, self.step, self.seconds = self.logged
        self.executor.interrupted()
        with contextlib.suppress(NoShards):  # who had them was interrupted too: the globals are there all the same
            rebuilt = self.executor.resume(self.problem, self.solver, self.state)
            if rebuilt is not self.state:
                self.state = rebuilt
                self.log("interrupted: the last logged state, its local variables rebuilt from the data")

    def guard(self) -> None:
        """Go back to the last good state if the newest objective shows that the run went wrong."""
        epoch, objective = self.rows[-1]["epoch"], self.rows[-1]["objective"]
        if self.rows[-1]["event"].startswith(EXPLORING):
            self.safeguard = Safeguard()  # what explores may rise; judged is what comes after
        trouble = self.safeguard.judge(epoch, objective)
        if trouble is None:
            if self.safeguard.streak == 0:
                self.good = self.state
            return
        recover = getattr(self.solver, "recover", None)
        if recover is None and np.isfinite(objective):
            return  # a method without a penalty to enlarge may rise and fall
        tries = sum(RESTORED in row["event"] for row in self.rows)
        self.failed = recover is None or tries >= Safeguard.tries
        action = RESTORED
        if recover is not None and not self.failed:
            self.good = recover(self.good, Safeguard.factor)
            action += f", penalty x{Safeguard.factor:g}"
        self.state = self.good = self.executor.resume(self.problem, self.solver, self.good)
        self.log(f"{trouble}: {action}")
        self.safeguard = Safeguard()
        self.safeguard.judge(epoch, self.rows[-1]["objective"])
        if tries == 0:
            warnings.warn(f"{self.rows[-1]['event']} (column `event` of the trace)", SafeguardWarning, stacklevel=3)

    def result(self, status: Status) -> Result:
        """What the run has reached; with the last good state while it is another."""
        unfinished = status is Status.RUNNING
        local = self.executor.checkpoint_local if unfinished else self.executor.local_params
        rest = jax.tree.leaves(self.state[2:]) + ([] if self.good is self.state else jax.tree.leaves(self.good))
        return Result(
            global_params=jax.tree.map(np.asarray, self.problem.unravel(self.state.lam)),
            local_params=local(self.state),
            trace=pd.DataFrame(self.rows),
            status=status,
            n_steps=self.step,
            seed=self.seed,
            batch_size=self.batch_size,
            solver=_describe(self.solver),
            state={str(i): np.asarray(leaf) for i, leaf in enumerate(rest)},
        )


def _verdict(
    run: _Run,
    callbacks: Sequence[Callable],
    last: int,
    max_seconds: float | None,
    tol: float,
    grad_tol: float,
) -> Status:
    """Whether to stop at this log point, and why."""
    if run.failed:
        return Status.DIVERGED
    progress = Progress(run.rows[-1], run.problem, run.state, run.executor)
    answers = [callback(progress) for callback in callbacks]
    if any(answer is True for answer in answers):
        return Status.STOPPED
    if _settled(run.rows, tol) or _flat(run.rows, grad_tol):
        return Status.CONVERGED
    if run.step >= last:
        return Status.MAX_EPOCHS
    if max_seconds is not None and run.seconds >= max_seconds:
        return Status.MAX_SECONDS
    return Status.RUNNING


def _flat(rows: list[dict[str, Any]], grad_tol: float) -> bool:
    """A small gradient in the globals, and an objective that moves no more: the locals must have settled too."""
    if len(rows) < 2 or rows[-1]["grad_norm"] >= grad_tol * rows[0]["grad_norm"]:
        return False
    values = np.array([row["objective"] for row in rows])
    return bool(abs(values[-1] - values[-2]) <= grad_tol * np.ptp(values[np.isfinite(values)]))


def _settled(rows: list[dict[str, Any]], tol: float) -> bool:
    """Two changes in a row below ``tol``, relative, between points at least an epoch apart."""
    points = [rows[-1]]
    for row in reversed(rows):
        if row["event"]:
            break
        if points[-1]["epoch"] - row["epoch"] >= 1 - 1e-9:
            points.append(row)
        if len(points) == 3:
            values = [point["objective"] for point in points]
            return all(abs(a - b) < tol * abs(b) for a, b in pairwise(values))
    return False


def _describe(solver: Any) -> str:
    """The solver with all its numbers: what tells whether a run can be continued."""
    spelled = jax.tree.map(lambda leaf: leaf.tolist() if isinstance(leaf, np.ndarray | jax.Array) else leaf, solver)
    return " ".join(repr(spelled).split())


def _wanted(progress: bool | None) -> bool:
    return sys.stderr.isatty() if progress is None else progress
