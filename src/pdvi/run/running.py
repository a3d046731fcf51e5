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
from pdvi.core.executor import Executor, NoShards
from pdvi.core.model import Bounded, Posterior, offers
from pdvi.core.problem import Problem
from pdvi.core.result import Point, Result, Status, load_result
from pdvi.core.solver import Begin, Dialogue, Solver, State, filled, named, settings_of
from pdvi.run.named import executor_for, solver_for
from pdvi.run.safeguard import Safeguard
from pdvi.run.sampling import Sampling, batches, sampling_for
from pdvi.run.settings import batch_size_for, lam_from, no_nan, seed_for
from pdvi.run.stopping import little
from pdvi.solvers.local_variables import recalled, resettled

EXPLORING, RESTORED = "exploring", "restored the last good state"  # events of the trace


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
        self.solver = solver.resolved(problem, self.batch_size)
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
        self.logged = self.state, self.step, self.seconds
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
        if start is not None:
            lam = lam_from(self.problem, start)
        own_lam, opened = self.executor.open(self.problem, jax.random.key(self.seed), local)
        lam = own_lam if lam is None else lam
        known = local is not None
        state = self.executor.answered(self._beginning(opened, lam, known and earlier is None))
        return (state, state) if earlier is None else self._resumed(state, earlier, known)

    def _beginning(self, opened: State, lam: Array, known: bool) -> Dialogue[State]:
        server = yield from self.solver.begin(self.problem, opened, lam, self.batch_size)
        state = yield Begin(opened._replace(server=server), self.solver)
        if known:
            state = yield from recalled(self.solver, state._replace(server=self.solver.settled(server)))
        return state

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
        return self.executor.answered(self._rebuilding(state, known))

    def _rebuilding(self, state: State, known: bool) -> Dialogue[State]:
        if not known:
            state = yield from resettled(self.problem, state, state.lam)
        return (yield from recalled(self.solver, state))

    # ---------------------------------------------------------------------------------------------- on its way

    def advance(self, last: int) -> None:
        """Run the steps up to the next log point."""
        stop = min(last, (self.step // self.stride + 1) * self.stride)
        drawn = batches(self.sampling, self.seed, self.step, stop, self.problem.n_shards, self.batch_size)
        began = time.perf_counter()
        while len(drawn):
            stage = self.turned()
            self.state = self.executor.run(stage.solver, self.state, drawn[: stage.steps])
            drawn = drawn[stage.steps :] if stage.steps else drawn[:0]
        self.seconds += time.perf_counter() - began
        self.step = stop

    def turned(self) -> Any:
        """Return the stage that comes next, the state as it takes it over."""
        self.state = self.executor.answered(self.solver.turn(self.problem, self.state, self.batch_size))
        return self.solver.stage(self.problem, self.state.server, self.batch_size)

    def log(self, event: str = "") -> None:
        """Evaluate the state and add a row to the trace."""
        measured = self.executor.evaluate(self.state, self.solver)
        if not event and self.exploring:
            event = EXPLORING
        epoch = self.step / self.steps_per_epoch
        event = "; ".join([event, *self.executor.events()] if event else self.executor.events())
        self.rows.append({"step": self.step, "epoch": epoch, "seconds": self.seconds, **measured, "event": event})
        self.state = self.state._replace(server=self.solver.heard(self.state.server, epoch, measured["objective"]))
        self.logged = self.state, self.step, self.seconds
        if self.step == 0 and not np.isfinite(measured["objective"]):
            msg = f"the objective at the start is {measured['objective']}; give another `start`."
            raise ValueError(msg)

    @property
    def exploring(self) -> bool:
        """Return whether the state is that of a search."""
        return self.solver.exploring(self.state.server)

    def conclude(self) -> None:
        """End a run that explores, which is noisy, with the best that it has."""
        with contextlib.suppress(NoShards):
            if self.exploring:
                dialogue = self.solver.concluded(self.problem, self.state, self.batch_size)
                self.state = self.executor.answered(dialogue)
                self.log("ended while exploring")

    def rewind(self) -> None:
        """Go back to the last log point: the trace and the state must tell the same."""
        self.state, self.step, self.seconds = self.logged
        self.executor.interrupted()
        with contextlib.suppress(NoShards):  # who had them was interrupted too: the globals are there all the same
            if self.executor.remote:
                self.state = self._at(self.state)
                self.log("interrupted: the last logged state, its local variables rebuilt from the data")

    def at_rest(self, tol: float) -> bool:
        """Return whether the derivatives at the newest state leave as little to gain as the objective's changes say."""
        left = self.executor.answered(self.solver.left(self.problem, self.state))
        return little(left, self.rows[-1]["objective"], tol)

    def guard(self) -> None:
        """Go back to the last good state if the newest objective shows that the run went wrong."""
        epoch, objective = self.rows[-1]["epoch"], self.rows[-1]["objective"]
        if self.rows[-1]["event"].startswith(EXPLORING):
            self.safeguard = Safeguard()  # what explores may rise; judged is what comes after
        trouble = self.safeguard.judge(epoch, objective)
        impossible = objective < self.bound
        if impossible:
            trouble = f"the objective is below {self.bound:g}, the least that the model says it can be"
        if trouble is None:
            if self.safeguard.streak == 0:
                self.good = self.state
            return
        careful = self.solver.recover(self.good.server, Safeguard.factor)
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
