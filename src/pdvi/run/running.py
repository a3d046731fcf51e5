"""A run in progress: its state, its steps, and the trace that tells of both."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from typing import Any

import jax
import numpy as np
import pandas as pd

from pdvi._base.checks import instance, positive
from pdvi._base.forks import computing
from pdvi.core.executor import Executor, HostShards, NoShards
from pdvi.core.model import Bounded, Posterior, offers
from pdvi.core.problem import Problem
from pdvi.core.result import Point, Result, Status, load_result
from pdvi.core.solver import Segment, Solver, State, filled, named, settings_of
from pdvi.executors.fit_program import Outcome, Rules, rows_of_batches
from pdvi.run.safeguard import Safeguard
from pdvi.run.sampling import Reshuffled, Sampling, batches
from pdvi.run.settings import batch_size_for, executor_for, lam_from, no_nan, seed_for, solver_for
from pdvi.run.stopping import Tolerances
from pdvi.solvers.local_variables import reinit_shard_states, reset_and_optimize_locals

EXPLORING, RESTORED = "exploring", "restored the last good state"  # events of the trace
WARM = "start.warm"  # in the state of a result: its run started from given local variables

MAX_CALL_SECONDS = 2.0  # of a call of the compiled program, which cannot be interrupted
LARGE_STATE = 2**27  # bytes of a state from which on no copy of it is kept in the program: a call is one row then
MIN_ROW_SECONDS = 1e-3  # of a log point, from which on its evaluation is told apart from its steps
SMALL_SIZE = 2**26  # numbers of data that are worked through in a first call, of which nothing is known
MAX_STEPS = 2**30  # that a 32-bit integer counts
WIDER = 1 + 1e-5  # times: the program's tolerances, whose rounding must not decide


class SafeguardWarning(UserWarning):
    """The run was set back to its last good state and goes on with smaller steps."""


class Run:
    """A run in progress. The last row of ``rows`` always describes ``state``."""

    def __init__(
        self,
        problem: Problem,
        solver: Solver | str,
        *,
        batch_size: int | None = None,
        seed: int | None = None,
        sampling: Sampling | None = None,
        start: Any = None,
        executor: Executor | str | None = None,
        log_every: float = 1.0,
    ):
        computing()
        instance("problem", problem, Problem, "a pdvi.Problem")
        solver = solver_for(solver)
        if isinstance(start, str | os.PathLike):
            start = load_result(start)
        settings = settings_of(solver)
        earlier = start if isinstance(start, Result) and start.solver == settings else None
        self.problem, self.settings = problem, settings
        self.batch_size = batch_size_for(problem, solver, batch_size, earlier)
        given = isinstance(start, Result | Point) and start.local_params is not None
        self.warm = WARM in earlier.state if earlier else given
        self.solver = solver.specialize(problem, self.batch_size, warm=self.warm)
        self.segment: Segment | None = None  # the one under way
        self.seed = seed_for(seed, earlier)
        sampling = Reshuffled() if sampling is None else sampling
        self.sampling = instance("sampling", sampling, Sampling, "a way to draw shards such as pdvi.sampling.Uniform()")
        self.executor: Executor = executor_for(executor, problem)
        self.steps_per_epoch = problem.steps_per_epoch(self.batch_size)
        self.stride = max(1, round(positive("log_every", log_every) * self.steps_per_epoch))
        self.data = problem.fingerprint()
        self.state, self.good = self._initial_states(start, earlier)
        self.step: int = earlier.n_steps if earlier else 0
        records = earlier.trace.to_dict("records") if earlier else []
        self.rows: list[dict[str, Any]] = [{str(name): value for name, value in row.items()} for row in records]
        self.seconds: float = self.rows[-1]["seconds"] if self.rows else 0.0
        self.logged = self.state, self.step, self.seconds, len(self.rows)
        self.is_large = sum(leaf.nbytes for leaf in jax.tree.leaves(self.state)) > LARGE_STATE
        self.hook_done = False  # the next segment has been begun on the host
        self.in_program = False  # a compiled program goes on from log point to log point
        self.compiled = False  # and has made steps
        self.row_seconds: float | None = None  # of a log point in its last call, evaluation included
        self.evaluation_seconds: float | None = None  # in the compiled program, timed where log points take long
        self.uncounted = 0.0  # seconds of calls that made no steps
        self.failed = False
        # the method has no penalty to increase: its objective may rise and fall
        self.may_rise = type(self.solver).increase_penalty is Solver.increase_penalty
        self.bound = float(problem.model.lower_bound()) if offers(problem.model, Bounded) else -np.inf
        self.safeguard = Safeguard()
        for row in self.rows:
            if row["event"]:
                self.safeguard = Safeguard()
            self.safeguard.judge(row["epoch"], row["objective"])

    # ---------------------------------------------------------------------------------------------- to begin with

    def _initial_states(self, start: Any, earlier: Result | None) -> tuple[State, State]:
        """Return the state to go on from, and the last good one."""
        lam = local = None
        if isinstance(start, Result | Point):
            local, start = start.local_params, start.global_params
            no_nan({"local_params": local})
            start = start or None  # local variables alone: the globals are the model's own start
        if start is not None:
            lam = lam_from(self.problem, start)
        own_lam, opened = self.executor.open(self.problem, jax.random.key(self.seed), local)
        lam = own_lam if lam is None else lam
        shards = HostShards(self.executor, opened, warm=self.warm and earlier is None)
        shards.server = self.solver.init(self.problem, shards, lam, self.batch_size)
        shards.state = self.executor.begin(shards.state, self.solver)
        if shards.warm:
            reinit_shard_states(self.problem, shards, self.solver)
        state = shards.state
        return (state, state) if earlier is None else self._resumed(state, earlier, local is not None)

    def _resumed(self, template: State, earlier: Result, known: bool) -> tuple[State, State]:
        """Return the states that an earlier run kept."""
        if earlier.data and earlier.data != self.data:
            msg = (
                "`start` must be a run on the same data: the problem has the same shapes, but other numbers; "
                "start anew, or from its point with start=result.point."
            )
            raise ValueError(msg)
        no_nan(earlier.state)
        what = "the solver's state in `start`"
        good = {name.removeprefix("good."): value for name, value in earlier.state.items() if name.startswith("good.")}
        newest = {name: value for name, value in earlier.state.items() if not name.startswith(("good.", WARM))}
        state = filled(template._replace(local=None), newest, what)._replace(local=template.local)
        state = self._at(state, known=known)
        return state, filled(template, good, what) if good else state

    def _at(self, state: State, *, known: bool = False) -> State:
        """Return a state of an earlier moment with shards that fit it; ``known``: their local variables do already."""
        if not self.executor.remote:
            return state
        shards = HostShards(self.executor, state)
        if not known:
            reset_and_optimize_locals(self.problem, shards, state.lam)
        reinit_shard_states(self.problem, shards, self.solver)
        return shards.state

    # ---------------------------------------------------------------------------------------------- on its way

    def advance(self, last: int) -> None:
        """Run the steps up to the next log point."""
        drawn = self.next_batches(last)
        began = time.perf_counter()
        while len(drawn):
            segment = self.next_segment()
            self.state = self.executor.run(segment.solver, self.state, drawn[: segment.n_steps])
            done = len(drawn) if segment.n_steps is None else min(len(drawn), segment.n_steps)
            drawn = drawn[done:]
            self.step += done
        self.seconds += time.perf_counter() - began

    def next_batches(self, last: int, max_rows: int = 1) -> np.ndarray:
        """Return the batches of the steps up to the next log points, of at least one."""
        stop = max(self.step + 1, min(last, (self.step // self.stride + max_rows) * self.stride))
        return batches(self.sampling, self.seed, self.step, stop, self.problem.n_shards, self.batch_size)

    def next_segment(self) -> Segment:
        """Let the solver change the state where a segment has ended, and return the next one."""
        shards = HostShards(self.executor, self.state)
        self.segment = self.solver.on_segment_end(self.problem, shards, self.step, self.batch_size)
        self.state = shards.state
        return self.segment

    def proceed(self, last: int, tolerances: Tolerances, max_rows: int, max_seconds: float | None) -> None:
        """Add at least one row to the trace: that of the start, and then steps up to the next log points.

        In memory a compiled program goes on until a tolerance is reached, or something is wrong.
        """
        if not self.executor.runs_to_stop:
            if self.rows:
                self.advance(last)
            self.log()
            self.guard()
            return
        self.in_program, n_rows = True, len(self.rows)
        while len(self.rows) == n_rows:
            left = None if max_seconds is None else max_seconds - self.seconds
            self._run_program(last, tolerances, min(max_rows, self._max_rows(tolerances, left)))

    def _max_rows(self, tolerances: Tolerances, left: float | None) -> int:
        """Return for how many log points the program may run: not for long, nor far beyond the ``left`` seconds.

        It compares rows with the one before; where rows are less than an epoch apart only the host knows which to
        compare.
        """
        if self.is_large or (self.stride < self.steps_per_epoch and any(tolerances)):
            return 1
        most = rows_of_batches(self.stride, self.batch_size)
        if self.row_seconds is None:
            numbers = sum(leaf.size for leaf in jax.tree.leaves(self.problem.shards))
            work = numbers * most * max(1.0, self.stride * self.batch_size / self.problem.n_shards)
            return most if work <= SMALL_SIZE and left is None else 1
        seconds = MAX_CALL_SECONDS if left is None else min(MAX_CALL_SECONDS, 0.5 * left)
        return int(min(most, max(1.0, seconds / self.row_seconds)))

    def _run_program(self, last: int, tolerances: Tolerances, max_rows: int) -> None:
        """Run the compiled program once, and add the rows that it has written to the trace."""
        began, first_step = time.perf_counter(), self.step
        solver = self.solver if self.segment is None else self.segment.solver
        pending = self.executor.events()
        end = self._call_program(solver, self.rows, tolerances, last, max_rows)
        self.state, self.step, self.hook_done = end.state, end.step, False
        self.good = self.good if end.good is None else end.good
        seconds, n_rows, n_steps = time.perf_counter() - began, len(end.rows), end.step - first_step
        if n_rows and n_steps:
            self.row_seconds = seconds / n_rows if self.compiled else None  # not of the first call, which compiles
            self.compiled = True
            if self.evaluation_seconds is None and seconds / n_rows > MIN_ROW_SECONDS:
                began = time.perf_counter()
                self._measured()
                self.evaluation_seconds = time.perf_counter() - began
            seconds = max(0.1 * seconds, seconds - n_rows * (self.evaluation_seconds or 0.0))
        seconds, self.uncounted = seconds + self.uncounted, 0.0
        if not n_steps:  # compiled, and no step made: counted with the first
            seconds, self.uncounted = 0.0, seconds
        began_at = self.seconds
        for i, (step, numbers, notes) in enumerate(end.rows):
            self.seconds = began_at + seconds * (step - first_step) / max(1, n_steps)
            self._add_row(step, numbers, [*([EXPLORING] if solver.is_warmup else []), *notes, *pending])
            pending = []
            if i < n_rows - 1 or step < end.step:
                self._judge()
        self.seconds = began_at + seconds
        for text in pending:
            self.executor.tell(text)  # no row yet
        if n_rows and self.rows[-1]["step"] == end.step:
            self.logged = self.state, self.step, self.seconds, len(self.rows)
            self.guard()
        if end.needs_host:
            began = time.perf_counter()
            self.next_segment()
            self.hook_done = True
            self.seconds += time.perf_counter() - began

    def _call_program(
        self, solver: Solver, rows: list[dict[str, Any]], tolerances: Tolerances, last: int, max_rows: int
    ) -> Outcome:
        """Return where the compiled program has come to after ``rows``; without any it begins with that of the start.

        It looks at changes from one row to the next.
        """
        previous = rows[-1]["objective"] if rows else np.nan
        is_small = len(rows) > 1 and abs(previous - rows[-2]["objective"]) < tolerances.of(rows[-2]["objective"])
        rules = Rules(
            step=self.step,
            last=min(last, MAX_STEPS),
            stride=self.stride,
            max_rows=max_rows,
            at_start=not rows,
            hook_done=self.hook_done,
            tol=WIDER * tolerances.tol,
            abs_tol=WIDER * tolerances.abs_tol,
            grad_tol=WIDER * tolerances.grad_tol,
            grad_limit=WIDER * tolerances.grad_tol * rows[0]["grad_norm"] if rows else 0.0,
            previous=previous,
            n_small=int(is_small),
            best=self.safeguard.best,
            lower_bound=self.bound,
            slack=0.5 * Safeguard.slack,
            may_rise=self.may_rise,
        )
        good = None if self.is_large else self.good
        return self.executor.run_to_stop(solver, self.state, good, self.next_batches(last, max_rows), rules)

    def log(self, event: str = "") -> None:
        """Evaluate the state and add a row to the trace."""
        measured = self._measured() if self.in_program else self.executor.evaluate(self.state, self.solver)
        if not event and self.exploring:
            event = EXPLORING
        self._add_row(self.step, measured, [*([event] if event else []), *self.executor.events()])
        self.logged = self.state, self.step, self.seconds, len(self.rows)

    def _measured(self) -> dict[str, float]:
        """Return what the compiled program says of the state as it is: the same bits as in other rows."""
        return self._call_program(self.solver, [], Tolerances(), self.step + 1, 1).rows[0][1]

    def _add_row(self, step: int, numbers: dict[str, float], events: list[str]) -> None:
        if step == 0 and not np.isfinite(numbers["objective"]):
            msg = f"the objective at the start is {numbers['objective']}; give another `start`."
            raise ValueError(msg)
        at = {"step": step, "epoch": step / self.steps_per_epoch, "seconds": self.seconds}
        self.rows.append({**at, **numbers, "event": "; ".join(events)})

    @property
    def exploring(self) -> bool:
        """Return whether the state is that of a warm-up."""
        if self.segment is not None:
            return self.segment.solver.is_warmup
        return bool(self.rows) and self.rows[-1]["event"].startswith(EXPLORING)

    def conclude(self) -> None:
        """End a run that explores, which is noisy, with the best that it has."""
        with contextlib.suppress(NoShards):
            if self.exploring:
                shards = HostShards(self.executor, self.state)
                self.solver.finalize(self.problem, shards, self.batch_size)
                self.state, self.segment = shards.state, Segment(self.solver)
                self.log("ended while exploring")

    def rewind(self) -> None:
        """Go back to the last log point: the trace and the state must tell the same."""
        self.state, self.step, self.seconds, n_rows = self.logged
        self.rows, self.segment, self.hook_done = self.rows[:n_rows], None, False
        self.executor.interrupted()
        with contextlib.suppress(NoShards):  # who had them was interrupted too: the globals are there all the same
            if self.executor.remote:
                self.state = self._at(self.state)
                self.log("interrupted: the last logged state, its local variables rebuilt from the data")

    def _judge(self) -> str | None:
        """Return what the safeguard says of the newest row."""
        if self.rows[-1]["event"].startswith(EXPLORING):
            self.safeguard = Safeguard()  # what explores may rise; judged is what comes after
        return self.safeguard.judge(self.rows[-1]["epoch"], self.rows[-1]["objective"])

    def guard(self) -> None:
        """Go back to the last good state if the newest objective shows that the run went wrong."""
        epoch, objective = self.rows[-1]["epoch"], self.rows[-1]["objective"]
        trouble = self._judge()
        impossible = objective < self.bound
        if impossible:
            trouble = f"the objective is below {self.bound:g}, the least that the model says it can be"
        if trouble is None or (self.may_rise and np.isfinite(objective) and not impossible):
            if self.safeguard.streak == 0 or self.may_rise:
                self.good = self.state
            return
        careful = self.solver.increase_penalty(self.good.server, Safeguard.factor)
        if careful is None and np.isfinite(objective) and not impossible:
            return
        tries = sum(RESTORED in row["event"] for row in self.rows)
        self.failed = careful is None or tries >= Safeguard.tries
        action = RESTORED
        if not self.failed:
            self.good = self.good._replace(server=careful)
            action += f", penalty x{Safeguard.factor:g}"
        self.state = self.good = self._at(self.good)
        self.segment, self.hook_done = None, False  # that of the state gone back to begins anew
        self.log(f"{trouble}: {action}")
        self.safeguard = Safeguard()
        self.safeguard.judge(epoch, self.rows[-1]["objective"])
        if tries == 0:
            warnings.warn(f"{self.rows[-1]['event']} (column `event` of the trace)", SafeguardWarning, stacklevel=3)

    # ---------------------------------------------------------------------------------------------- at the end

    def result(self, status: Status) -> Result:
        """Return what the run has reached; with the last good state while it is another."""
        is_checkpoint = status is Status.RUNNING  # without local variables that are rebuilt from the data
        local = None if is_checkpoint and self.executor.remote else self.executor.local_params(self.state)
        state = named(self.state._replace(local=None))
        if self.warm:
            state[WARM] = np.asarray(True)
        if self.good is not self.state:
            state |= {f"good.{name}": value for name, value in named(self.good).items()}
        return Result(
            global_params=self.problem.unravel(np.asarray(self.state.lam)),
            local_params=local,
            trace=pd.DataFrame(self.rows),
            status=status,
            n_steps=self.step,
            seed=self.seed,
            batch_size=self.batch_size,
            solver=self.settings,
            state=state,
            data=self.data,
            problem=self.problem if offers(self.problem.model, Posterior) else None,
        )
