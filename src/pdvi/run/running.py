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
from pdvi._base.types import Array
from pdvi.core.executor import Executor, HostShards, NoShards
from pdvi.core.model import Bounded, Posterior, offers
from pdvi.core.problem import Problem
from pdvi.core.result import Point, Result, Status, load_result
from pdvi.core.solver import Segment, Solver, State, filled, named, settings_of
from pdvi.executors.fit_program import LONG_AGO, MAX_ROWS, History, Outcome, Rules, Watch, as_pair, rows_of_batches
from pdvi.executors.steps import NOTES
from pdvi.run.named import executor_for, solver_for
from pdvi.run.safeguard import Safeguard
from pdvi.run.sampling import Sampling, batches, sampling_for
from pdvi.run.settings import batch_size_for, lam_from, no_nan, seed_for
from pdvi.run.stopping import little
from pdvi.solvers.local_variables import reinit_shard_states, reset_and_optimize_locals

EXPLORING, RESTORED = "exploring", "restored the last good state"  # events of the trace
WARM = "start.warm"  # in the state of a result: its run started from given local variables
MAX_SECONDS = 2.0  # that a call of a compiled program should take: it cannot be interrupted
SMALL_SIZE = 2**21  # numbers of data: less is worked through many times in that time


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
        self.sampling = sampling_for(sampling)
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
        self.hook_done = False  # the next segment has been begun on the host
        self.in_program = False  # a compiled program goes on from log point to log point
        self.compiled = False  # and has made steps
        self.row_seconds: float | None = None  # of a log point in its last call
        self.failed = False
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
        state = template._replace(
            server=filled(template.server, earlier.state, "server", what),
            own=filled(template.own, earlier.state, "own", what),
        )
        state = self._at(state, known=known)
        if not good:
            return state, state
        return state, State(
            filled(template.server, good, "server", what),
            filled(template.local, good, "local", what),
            filled(template.own, good, "own", what),
        )

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
        stop = min(last, (self.step // self.stride + 1) * self.stride)
        drawn = batches(self.sampling, self.seed, self.step, stop, self.problem.n_shards, self.batch_size)
        began = time.perf_counter()
        while len(drawn):
            segment = self.next_segment()
            self.state = self.executor.run(segment.solver, self.state, drawn[: segment.n_steps])
            done = len(drawn) if segment.n_steps is None else min(len(drawn), segment.n_steps)
            drawn = drawn[done:]
            self.step += done
        self.seconds += time.perf_counter() - began

    def next_segment(self) -> Segment:
        """Let the solver change the state where a segment has ended, and return the next one."""
        shards = HostShards(self.executor, self.state)
        self.segment = self.solver.on_segment_end(self.problem, shards, self.step, self.batch_size)
        self.state = shards.state
        return self.segment

    def proceed(
        self,
        last: int,
        *,
        tol: float = 0.0,
        abs_tol: float = 0.0,
        grad_tol: float = 0.0,
        max_rows: int = 1,
        max_seconds: float | None = None,
    ) -> None:
        """Add at least one row to the trace: that of the start, and then steps up to the next log points.

        In memory a compiled program goes on until ``tol`` or ``grad_tol`` are reached, or something is wrong.
        """
        if self.executor.runs_to_stop:
            self.in_program, n_rows = True, len(self.rows)
            while len(self.rows) == n_rows:
                self._run_program(last, (tol, abs_tol, grad_tol), self._rows_at_once(max_rows, max_seconds))
            return
        if self.rows:
            self.advance(last)
        self.log()
        self.guard()

    def _rows_at_once(self, max_rows: int, max_seconds: float | None) -> int:
        """Return for how many log points a compiled program may run: not for long, nor far beyond the budget."""
        numbers = sum(leaf.size for leaf in jax.tree.leaves(self.problem.shards))
        per_row = self.stride * self.batch_size
        most = min(max_rows, rows_of_batches(self.stride, self.batch_size))
        if self.row_seconds is None:  # nothing is known yet
            small = numbers * max(1.0, per_row / self.problem.n_shards) * most <= SMALL_SIZE * MAX_ROWS
            return most if small and max_seconds is None else 1
        seconds = MAX_SECONDS if max_seconds is None else min(MAX_SECONDS, 0.5 * (max_seconds - self.seconds))
        return int(min(most, max(1.0, seconds / self.row_seconds)))

    def _run_program(self, last: int, tolerances: tuple[float, float, float], max_rows: int) -> None:
        """Run the compiled program once, and add the rows that it has written to the trace."""
        at_start = not self.rows
        n_steps = self.stride * max_rows
        stop = min(last, (self.step // self.stride) * self.stride + n_steps)
        drawn = batches(self.sampling, self.seed, self.step, max(stop, self.step + 1), self.problem.n_shards, self.batch_size)
        solver = self.solver if self.segment is None else self.segment.solver
        pending = self.executor.events()
        rules = self._rules(last, tolerances, max_rows, at_start, bool(pending))
        began, first_step = time.perf_counter(), self.step
        end = self.executor.run_to_stop(
            solver, self.state, self.good, drawn, rules, self._history(), self._watch()
        )
        seconds = time.perf_counter() - began
        self.state, self.step, self.good, self.hook_done = end.state, end.step, end.good, False
        n_new = len(end.rows.step)
        if n_new and first_step < self.step:
            self.row_seconds = seconds / n_new if self.row_seconds is not None or self.compiled else None
            self.compiled = True
        self._add_rows(end, solver, pending, first_step, seconds)
        self.seconds += seconds
        if not n_new:
            for text in pending:
                self.executor.tell(text)
        if end.needs_host:
            began = time.perf_counter()
            self.next_segment()
            self.hook_done = True
            self.seconds += time.perf_counter() - began

    def _add_rows(self, end: Outcome, solver: Solver, pending: list[str], first_step: int, seconds: float) -> None:
        taken = max(1, end.step - first_step)
        for i, step in enumerate(end.rows.step.tolist()):
            notes = [text for bit, text in enumerate(NOTES) if int(end.rows.notes[i]) >> bit & 1]
            row = {
                "step": step,
                "epoch": step / self.steps_per_epoch,
                "seconds": self.seconds + seconds * (step - first_step) / taken,
                **self._numbers(end, i),
                "event": "; ".join([*([EXPLORING] if solver.is_warmup else []), *notes, *pending]),
            }
            pending = []
            self.rows.append(row)
            self._check_start(row)
            if i < len(end.rows.step) - 1:
                self._judge(row)
        if len(end.rows.step) and end.step == self.rows[-1]["step"]:
            self.logged = self.state, self.step, self.seconds + seconds, len(self.rows)
            self.guard()
        elif len(end.rows.step):
            self._judge(self.rows[-1])

    def _rules(
        self, last: int, tolerances: tuple[float, float, float], max_rows: int, at_start: bool, has_event: bool
    ) -> Rules:
        values = np.array([row["objective"] for row in self.rows])
        finite = values[np.isfinite(values)]
        may_rise = type(self.solver).increase_penalty is Solver.increase_penalty
        real = np.dtype(jax.numpy.result_type(float))
        with np.errstate(over="ignore"):
            return Rules(
                *(np.asarray(value, np.int32) for value in (self.step, last, self.stride, max_rows)),
                *(np.asarray(value, bool) for value in (at_start, self.hook_done, has_event)),
                *(np.asarray(value, real) for value in tolerances),
                np.asarray(self.rows[0]["grad_norm"] if self.rows else 0, real),
                np.asarray(finite.min(initial=np.inf), real),
                np.asarray(finite.max(initial=-np.inf), real),
                np.asarray(self.bound, real),
                np.asarray(may_rise, bool),
                np.asarray(Safeguard.slack, real),
                np.asarray(Safeguard.rises, np.int32),
            )

    def _history(self) -> History:
        """Return the newest rows of the trace, as many as the stopping rule looks at."""
        room = 1 << (2 * -(-self.steps_per_epoch // self.stride)).bit_length()
        rows = self.rows[-room:]
        real = np.dtype(jax.numpy.result_type(float))
        step, has_event = np.full(room, LONG_AGO, np.int32), np.ones(room, bool)
        objective = np.zeros((room, 2), real)
        for i, row in enumerate(rows, start=room - len(rows)):
            step[i], has_event[i] = row["step"], bool(row["event"])
            objective[i] = as_pair(row["objective"], real)
        return History(step, objective, has_event)

    def _watch(self) -> Watch:
        guard, real = self.safeguard, np.dtype(jax.numpy.result_type(float))
        pairs = (as_pair(value, real) for value in (guard.first, guard.best, guard.previous))
        return Watch(
            np.asarray(guard.streak, np.int32),
            np.asarray(round(guard.good_epoch * self.steps_per_epoch), np.int32),
            *pairs,
        )

    def log(self, event: str = "") -> None:
        """Evaluate the state and add a row to the trace."""
        measured = self._measured() if self.in_program else self.executor.evaluate(self.state, self.solver)
        if not event and self.exploring:
            event = EXPLORING
        epoch = self.step / self.steps_per_epoch
        event = "; ".join([event, *self.executor.events()] if event else self.executor.events())
        self.rows.append({"step": self.step, "epoch": epoch, "seconds": self.seconds, **measured, "event": event})
        self.logged = self.state, self.step, self.seconds, len(self.rows)
        self._check_start(self.rows[-1])

    def _measured(self) -> dict[str, float]:
        """Return what the compiled program says of the state as it is: the same bits as in other rows."""
        drawn = batches(self.sampling, self.seed, self.step, self.step + 1, self.problem.n_shards, self.batch_size)
        rules = self._rules(self.step + 1, (0.0, 0.0, 0.0), 1, True, False)
        end = self.executor.run_to_stop(
            self.solver, self.state, self.good, drawn, rules, self._history(), self._watch()
        )
        return self._numbers(end, 0)

    def _numbers(self, end: Outcome, i: int) -> dict[str, float]:
        """Return the numbers of a row that the compiled program has written."""
        norms = [float(value) for value in end.rows.norms[i]]
        return {
            "objective": float(end.rows.objective[i].astype(float).sum()),
            "grad_norm": float(np.hypot.reduce(norms)),
            **{f"grad_norm_{name}": value for (name, _), value in zip(self.problem.blocks, norms)},
            **{name: float(values[i]) for name, values in end.rows.metrics.items()},
        }

    def _check_start(self, row: dict[str, Any]) -> None:
        if row["step"] == 0 and not np.isfinite(row["objective"]):
            msg = f"the objective at the start is {row['objective']}; give another `start`."
            raise ValueError(msg)

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
        self.rows = self.rows[:n_rows]
        self.executor.interrupted()
        with contextlib.suppress(NoShards):  # who had them was interrupted too: the globals are there all the same
            if self.executor.remote:
                self.state = self._at(self.state)
                self.log("interrupted: the last logged state, its local variables rebuilt from the data")

    def at_rest(self, tol: float, abs_tol: float = 0.0) -> bool:
        """Return whether the derivatives at the newest state leave as little to gain as the objective's changes say."""
        left = self.solver.remaining_gain(self.problem, HostShards(self.executor, self.state))
        return little(left, self.rows[-1]["objective"], tol, abs_tol)

    def _judge(self, row: dict[str, Any]) -> str | None:
        """Return what the safeguard says of a row."""
        if row["event"].startswith(EXPLORING):
            self.safeguard = Safeguard()  # what explores may rise; judged is what comes after
        return self.safeguard.judge(row["epoch"], row["objective"])

    def guard(self) -> None:
        """Go back to the last good state if the newest objective shows that the run went wrong."""
        epoch, objective = self.rows[-1]["epoch"], self.rows[-1]["objective"]
        trouble = self._judge(self.rows[-1])
        impossible = objective < self.bound
        if impossible:
            trouble = f"the objective is below {self.bound:g}, the least that the model says it can be"
        if trouble is None:
            if self.safeguard.streak == 0:
                self.good = self.state
            return
        careful = self.solver.increase_penalty(self.good.server, Safeguard.factor)
        if careful is None and np.isfinite(objective) and not impossible:
            return  # a method without a penalty to enlarge may rise and fall
        tries = sum(RESTORED in row["event"] for row in self.rows)
        self.failed = careful is None or tries >= Safeguard.tries
        action = RESTORED
        if not self.failed:
            self.good = self.good._replace(server=careful)
            action += f", penalty x{Safeguard.factor:g}"
        self.state = self.good = self._at(self.good)
        self.log(f"{trouble}: {action}")
        self.safeguard = Safeguard()
        self.safeguard.judge(epoch, self.rows[-1]["objective"])
        if tries == 0:
            warnings.warn(f"{self.rows[-1]['event']} (column `event` of the trace)", SafeguardWarning, stacklevel=3)

    # ---------------------------------------------------------------------------------------------- at the end

    def result(self, status: Status) -> Result:
        """Return what the run has reached; with the last good state while it is another."""
        unfinished = status is Status.RUNNING
        local = self.executor.checkpoint_local if unfinished else self.executor.local_params
        state = {**named(self.state.server, "server"), **named(self.state.own, "own")}
        if self.warm:
            state[WARM] = np.asarray(True)
        if self.good is not self.state:
            state |= {f"good.{name}": value for name, value in _all_named(self.good).items()}
        return Result(
            global_params=jax.tree.map(np.asarray, self.problem.unravel(self.state.lam)),
            local_params=local(self.state),
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


def _all_named(state: State) -> dict[str, np.ndarray]:
    return {**named(state.server, "server"), **named(state.local, "local"), **named(state.own, "own")}
