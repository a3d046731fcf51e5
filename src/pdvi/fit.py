"""The only loop: budget, trace, stopping, callbacks, checkpoints, progress."""

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
import jax.numpy as jnp
import numpy as np
import pandas as pd
from tqdm import tqdm

from pdvi.executors import Disk, Memory
from pdvi.executors.memory import like
from pdvi.executors.server import NoShards
from pdvi.problem import Problem
from pdvi.result import Point, Result, Status, check_path, load_result
from pdvi.sampling import Reshuffled, Sampling, batches, steps_per_epoch
from pdvi.stepsize import Safeguard

PyTree = Any

EXPLORING, RESTORED = "exploring", "restored the last good state"  # events of the trace


class SafeguardWarning(UserWarning):
    """The run was set back to its last good state and goes on with smaller steps."""


class CheckpointWarning(UserWarning):
    """A checkpoint could not be written; the one before is still there."""


@dataclass(frozen=True)
class Checkpoint:
    """Where to keep a run while it lasts, and how often; written at log points and at the end."""

    path: str | os.PathLike
    every_seconds: float = 5.0


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
    last = _last_step(max_epochs, max_steps, run.steps_per_epoch)
    if max_seconds is not None:
        _positive("max_seconds", max_seconds)
    for name, value in (("tol", tol), ("grad_tol", grad_tol)):
        if not value >= 0:
            msg = f"`{name}` must be at least 0, got {value!r}."
            raise ValueError(msg)
    keep = _Keeper(checkpoint)
    with tqdm(total=last, initial=run.step, unit="step", disable=not _wanted(progress), leave=False) as bar:
        try:
            if not run.rows:
                run.log()
                run.guard()
            while (status := _verdict(run, callbacks, last, max_seconds, tol, grad_tol)) is Status.RUNNING:
                run.advance(last)
                run.log()
                run.guard()
                keep.if_due(run)
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
        self.batch_size = _batch_size(problem, solver, batch_size, earlier)
        self.seed = _seed(seed, earlier)
        self.sampling = sampling or Reshuffled()
        self.executor = executor
        self.steps_per_epoch = steps_per_epoch(problem.n_shards, self.batch_size)
        self.stride = max(1, round(_positive("log_every", log_every) * self.steps_per_epoch))
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
            lam = _lam_from(self.problem, start)
        key = jax.random.key(self.seed)
        state = self.executor.init(self.problem, self.solver, key, lam, local, self.batch_size)
        known = local is not None
        if earlier is None:
            state = self.executor.warm(self.problem, self.solver, state) if known else state
            return state, state
        leaves = [state.lam, *jax.tree.leaves(state.local), *earlier.rest]
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
            rest=[np.asarray(leaf) for leaf in rest],
        )


class _Keeper:
    """Writes checkpoints, not too often."""

    def __init__(self, checkpoint: Checkpoint | str | os.PathLike | None):
        self.to = Checkpoint(checkpoint) if isinstance(checkpoint, str | os.PathLike) else checkpoint
        if self.to:
            check_path(self.to.path)  # now, not after the first hour
        self.saved = time.monotonic()

    def if_due(self, run: _Run) -> None:
        """Keep a run that goes on."""
        if self.to and time.monotonic() - self.saved >= self.to.every_seconds:
            self.now(run.result(Status.RUNNING))

    def now(self, result: Result) -> None:
        """Keep this result. A full disk is no reason to lose the run: it goes on, and the last checkpoint stays."""
        if not self.to:
            return
        try:
            result.save(self.to.path)
        except OSError as error:
            kept = "the one before is kept" if os.path.exists(self.to.path) else "there is none yet"
            why = error.strerror or error
            msg = f"cannot write the checkpoint {str(self.to.path)!r}: {why}; {kept}, and the run goes on. Make room."
            warnings.warn(msg, CheckpointWarning, stacklevel=4)
        self.saved = time.monotonic()


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


def _batch_size(problem: Problem, solver: Any, batch_size: int | None, earlier: Result | None) -> int:
    if getattr(solver, "full_batch", False):
        if batch_size not in (None, problem.n_shards):
            msg = (
                f"`batch_size` must be left out for {type(solver).__name__}, which visits all "
                f"{problem.n_shards} shards in every step, got {batch_size!r}."
            )
            raise ValueError(msg)
        return problem.n_shards
    if batch_size is None:
        return earlier.batch_size if earlier else max(1, problem.n_shards // 100)
    if (
        isinstance(batch_size, bool)
        or not isinstance(batch_size, int | np.integer)
        or not 1 <= batch_size <= problem.n_shards
    ):
        msg = (
            f"`batch_size` must be a whole number between 1 and the number of shards ({problem.n_shards}), "
            f"got {batch_size!r}."
        )
        raise ValueError(msg)
    if earlier and batch_size != earlier.batch_size:
        msg = f"`batch_size` must be that of the run to continue ({earlier.batch_size}), got {batch_size!r}."
        raise ValueError(msg)
    return int(batch_size)


def _seed(seed: int | None, earlier: Result | None) -> int:
    if seed is None:
        return earlier.seed if earlier else 0
    if not _is_whole(seed) or seed < 0:
        msg = f"`seed` must be a whole number of at least 0, got {seed!r}."
        raise ValueError(msg)
    if earlier and seed != earlier.seed:
        msg = f"`seed` must be that of the run to continue ({earlier.seed}), got {seed!r}."
        raise ValueError(msg)
    return int(seed)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _last_step(max_epochs: float, max_steps: int | None, per_epoch: int) -> int:
    last = round(_positive("max_epochs", max_epochs) * per_epoch)
    return max(1, last if max_steps is None else min(last, int(_positive("max_steps", max_steps))))


def _positive(name: str, value: float) -> float:
    if not isinstance(value, int | float | np.number) or not (np.isfinite(value) and value > 0):
        msg = f"`{name}` must be positive and finite, got {value!r}."
        raise ValueError(msg)
    return value


def _lam_from(problem: Problem, start: Any) -> jax.Array:
    if not isinstance(start, Mapping) or set(start) != {name for name, _ in problem.blocks}:
        found = sorted(start) if isinstance(start, Mapping) else type(start).__name__
        msg = f"`start` must have the blocks {[name for name, _ in problem.blocks]}, got {found}."
        raise ValueError(msg)
    for name, shape in problem.blocks:
        if np.asarray(start[name]).dtype.kind not in "fiub":
            msg = f"`start` of block {name!r} must hold numbers, got {start[name]!r}."
            raise ValueError(msg)
        if np.shape(start[name]) != shape:
            msg = f"`start` of block {name!r} must have shape {shape}, got {np.shape(start[name])}."
            raise ValueError(msg)
        if not np.isfinite(np.asarray(start[name])).all():
            msg = f"`start` must be finite: block {name!r} has NaN or infinite values."
            raise ValueError(msg)
    return problem.ravel({name: jnp.asarray(value, jnp.result_type(float)) for name, value in start.items()})


def _describe(solver: Any) -> str:
    """The solver with all its numbers: what tells whether a run can be continued."""
    spelled = jax.tree.map(lambda leaf: leaf.tolist() if isinstance(leaf, np.ndarray | jax.Array) else leaf, solver)
    return " ".join(repr(spelled).split())


def _wanted(progress: bool | None) -> bool:
    return sys.stderr.isatty() if progress is None else progress
