"""The paper's way to tune, the same for every method: a coarse grid, then finer ones around the best."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pandas as pd
from tqdm import tqdm

from pdvi._base.atomic import check_path
from pdvi._base.checks import instance, positive
from pdvi._base.telling import wanted as bar_wanted
from pdvi.core.executor import Executor
from pdvi.core.problem import Problem
from pdvi.core.result import Point, Result
from pdvi.core.solver import Solver, settings_of
from pdvi.executors.steps import run_side_by_side
from pdvi.run.running import Run
from pdvi.run.sampling import Sampling
from pdvi.run.settings import last_step, solver_for

Settings = dict[str, float]

COARSE = (1e-6, 1e-4, 1e-2, 1.0, 1e2, 1e4)  # powers of 100: the paper's grid
FINEST = 1.0001  # settings closer than this factor are the same
PARTS = 8  # of a trial, after each of which the objective is taken
EQUAL = 1e-6  # of the way from the start: objectives closer than this are the same
# Bytes of state up to which the trials of a round run side by side. On a CPU only tiny runs, whose time goes into
# calls, gain by it, and the larger compilation must be earned; elsewhere memory sets the limit.
VECTORISED = {"cpu": 2**16, "other": 2**27}


@dataclasses.dataclass(frozen=True)
class TuningResult:
    """The best settings found, the solver with them, what it reached, and all trials in the order they were made."""

    solver: Solver
    settings: Settings
    objective: float
    # a column per setting, `round`, `objective` (inf: diverged), and `course`, the objective after each eighth
    trials: pd.DataFrame = dataclasses.field(repr=False)


def tune(
    problem: Problem,
    solver: Solver | str,
    space: Sequence[str] | Mapping[str, Sequence[float]],
    *,
    trials: int = 30,
    batch_size: int | None = None,
    max_epochs: float = 30,
    sampling: Sampling | None = None,
    start: Result | Point | Mapping[str, Any] | None = None,
    executor: Executor | None = None,
    seed: int = 0,
    path: str | os.PathLike[str] | None = None,
    equal: float = EQUAL,
    vectorise: bool | None = None,
    progress: bool | None = None,
) -> TuningResult:
    """Settings of ``solver`` that reach the lowest objective in ``max_epochs``.

    A trial is a run of `pdvi.fit` without its safeguard and its stopping rules, from one start and with one order of
    the batches. A run whose objective is not finite is ranked last. Objectives that differ by less than ``equal`` are
    the same, and decided by those an eighth of the budget earlier, and so on: of two settings that arrive, the better
    one arrives sooner. Trials are chosen in rounds:

    1. all settings at once take the first, second, ... value of their coarse grids;
    2. if there are several, each in turn takes every value of its grid, the others at their best so far, over and
       over until the best stays the same: put first what the others depend on, local rates before global ones;
    3. each in turn is multiplied and divided by the root of the grid's ratio (10), then by the root of that, ...

    until ``trials`` settings have been tried. Methods with one rate and methods with one per block get the same
    number of trials: the former refine it further. Nothing is random but the draws, which depend on ``seed`` alone.

    Parameters
    ----------
    space
        the settings to tune: ``("rate",)``; ``("rate.*", "local_rate")`` for one rate per block; ``("rate.mean",)`` for
        that of a block (the others must be set). A dict gives a setting another coarse grid than 1e-6, 1e-4, ..., 1e4.
    batch_size, max_epochs, sampling, start, executor, seed
        of every trial, as in `pdvi.fit`.
    path
        a file that keeps finished trials, a line each; a call that finds it goes on from there.
    equal
        as a share of the way from the start (a millionth): from how small a difference on objectives are the same.
    vectorise
        run the trials of a round side by side in one compiled call; by default if their states are small.
    progress
        show a progress bar; by default on a terminal only.
    """
    instance("problem", problem, Problem, "a pdvi.Problem")
    solver = solver_for(solver)
    grids = _grids(problem, solver, space)
    least = max(map(len, grids.values()))
    if isinstance(trials, bool) or not isinstance(trials, int) or trials < least:
        msg = f"`trials` must be a whole number of at least the length of the coarse grid ({least}), got {trials!r}."
        raise ValueError(msg)
    positive("max_epochs", max_epochs)
    start = start.point if isinstance(start, Result) else start  # a start, never a run to continue
    new_run = partial(
        Run,
        problem,
        batch_size=batch_size,
        seed=seed,
        sampling=sampling,
        start=start,
        executor=executor,
        log_every=max_epochs / PARTS,
    )
    first = new_run(with_settings(problem, solver, {name: grid[0] for name, grid in grids.items()}))
    first.log()
    last = last_step(max_epochs, None, first.steps_per_epoch)
    ledger = _Ledger(path, _fingerprint(solver, grids, first, max_epochs))
    limit = VECTORISED["cpu" if jax.default_backend() == "cpu" else "other"]
    is_small = sum(leaf.nbytes for leaf in jax.tree.leaves(first.state)) <= limit
    vectorise = executor is None and is_small if vectorise is None else vectorise
    longest = least if vectorise else None
    if vectorise and executor is not None:
        msg = f"`vectorise` must be left out or False with an `executor`, got {vectorise!r}."
        raise ValueError(msg)
    made: list[dict[str, Any]] = []
    start_objective = first.rows[0]["objective"]
    with tqdm(total=trials, unit="trial", disable=not bar_wanted(progress), leave=False) as bar:
        for name, wanted in _rounds(grids, lambda: _best(made, start_objective, list(grids), equal)):
            known = {_key({setting: trial[setting] for setting in grids}) for trial in made}
            new = {_key(one): one for one in wanted if _key(one) not in known}
            wanted = list(new.values())[: trials - len(made)]
            missing = [settings for settings in wanted if _key(settings) not in ledger.done]
            groups = [missing] if vectorise and missing else [[settings] for settings in missing]
            for group in groups:
                runs = [new_run(with_settings(problem, solver, settings)) for settings in group]
                for settings, course in zip(group, _courses(runs, last, longest)):
                    ledger.add(settings, course)
            for settings in wanted:
                course = ledger.done[_key(settings)]
                made.append({**settings, "round": name, "objective": course[-1], "course": course})
            bar.update(len(made) - bar.n)
            if len(made) >= trials:
                break
    settings = _best(made, start_objective, list(grids), equal)
    objective = ledger.done[_key(settings)][-1]
    return TuningResult(with_settings(problem, solver, settings), settings, objective, pd.DataFrame(made))


def _best(made: list[dict[str, Any]], start: float, names: list[str], equal: float = EQUAL) -> Settings:
    """The settings of the trial that ends lowest, or as low and sooner than others."""
    left = made
    for part in reversed(range(len(made[0]["course"]))):
        lowest = min(trial["course"][part] for trial in left)
        left = [trial for trial in left if trial["course"][part] <= lowest + equal * abs(start - lowest)]
    return {name: left[0][name] for name in names}


def _rounds(grids: dict[str, tuple[float, ...]], best: Callable[[], Settings]) -> Iterator[tuple[str, list[Settings]]]:
    """Names of rounds and the settings they try; later ones depend on the ``best`` by then."""
    longest = max(map(len, grids.values()))
    yield "coarse", [{name: grid[min(i, len(grid) - 1)] for name, grid in grids.items()} for i in range(longest)]
    before: Settings = {}
    while len(grids) > 1 and before != best():
        before = best()
        for name, grid in grids.items():
            yield f"coarse {name}", [{**best(), name: value} for value in grid]
    ratios = {name: math.sqrt(_ratio(grid)) for name, grid in grids.items()}
    while max(ratios.values()) > FINEST:
        for name, ratio in ratios.items():
            if ratio > FINEST:
                here = best()
                finer = [float(f"{here[name] * factor:.6g}") for factor in (ratio, 1 / ratio)]  # printed is tried
                yield f"fine {name}", [{**here, name: value} for value in finer]
        ratios = {name: math.sqrt(ratio) for name, ratio in ratios.items()}


def _ratio(grid: tuple[float, ...]) -> float:
    """The largest between neighbours in a grid; a grid of one value gets that of the coarse one."""
    return max((b / a for a, b in pairwise(grid)), default=COARSE[1] / COARSE[0])


def _key(settings: Settings) -> str:
    return json.dumps(settings)


def _courses(runs: list[Run], last: int, together: int | None) -> list[list[float]]:
    """What each run reaches part by part in ``last`` steps; infinity if that is not finite.

    ``together``: in compiled calls for so many runs side by side, copies of the last filling up.
    """
    courses: list[list[float]] = [[] for _ in runs]
    filled = [*runs, *(copy(runs[-1]) for _ in range((together or 0) - len(runs)))]
    while runs[0].step < last:
        if together is None:
            for run in runs:
                run.advance(last)
        else:
            _advance_together(filled, last)
        for run, course in zip(runs, courses):
            objective = run.executor.evaluate(run.state, run.solver)["objective"]
            course.append(objective if math.isfinite(objective) else math.inf)
    return courses


def _advance_together(runs: list[Run], last: int) -> None:
    """Advance runs in memory that differ in their start and in real-valued settings of one solver only.

    Each comes to the state that `Run.advance` would bring it to, up to rounding. Segments that end elsewhere in some of
    them are run one by one.
    """
    one = runs[0]
    drawn = one.next_batches(last)
    while len(drawn):
        segments = [run.next_segment() for run in runs]
        count = segments[0].n_steps
        if any(segment.n_steps != count for segment in segments):
            msg = "runs side by side must have their segments in step."
            raise ValueError(msg)
        states = run_side_by_side(
            one.problem,
            [segment.solver for segment in segments],
            [run.state for run in runs],
            jnp.asarray(drawn[:count]),
        )
        for number, run in enumerate(runs):
            run.state = jax.tree.map(lambda leaf, i=number: leaf[i], states)
        done = len(drawn) if count is None else min(len(drawn), count)
        drawn = drawn[done:]
        for run in runs:
            run.step += done


class _Ledger:
    """Finished trials, kept in a file if there is one: a line says what is tuned, then a line per trial."""

    def __init__(self, path: str | os.PathLike[str] | None, fingerprint: dict[str, Any]):
        self.path = None if path is None else check_path(path)
        self.done: dict[str, list[float]] = {}
        if self.path is None:
            return
        lines = _whole_lines(self.path)
        if not lines:
            self._append(fingerprint)
        elif lines[0] != fingerprint:
            differ = sorted(key for key in fingerprint if lines[0].get(key) != fingerprint[key])
            msg = f"`path` {str(self.path)!r} holds another tuning (other {', '.join(differ)}); choose another file."
            raise ValueError(msg)
        for line in lines[1:]:
            self.done[_key(line["settings"])] = [math.inf if value is None else value for value in line["course"]]

    def add(self, settings: Settings, course: list[float]) -> None:
        """Keep a trial; it is on disk when this returns."""
        self.done[_key(settings)] = course
        kept = [value if math.isfinite(value) else None for value in course]  # JSON has no infinity
        self._append({"settings": settings, "course": kept})

    def _append(self, line: dict[str, Any]) -> None:
        if self.path is not None:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """What the file holds; half a line that a killed call left is cut off."""
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        os.truncate(path, len(whole))
    try:
        return [json.loads(line) for line in whole.splitlines()]
    except ValueError as error:
        msg = f"`path` {str(path)!r} is not a file of tuning trials ({error}); choose another file."
        raise ValueError(msg) from None


def _fingerprint(solver: Solver, grids: dict[str, tuple[float, ...]], run: Run, max_epochs: float) -> dict[str, Any]:
    """What must agree for trials to be used again."""
    return {
        "solver": settings_of(solver),
        "space": {name: list(grid) for name, grid in grids.items()},
        "shards": run.problem.n_shards,
        "blocks": [[name, list(shape)] for name, shape in run.problem.blocks],
        "start": run.rows[0]["objective"],
        "batch_size": run.batch_size,
        "max_epochs": max_epochs,
        "sampling": repr(run.sampling),
        "seed": run.seed,
    }


def _grids(problem: Problem, solver: Solver, space: Any) -> dict[str, tuple[float, ...]]:
    """The coarse grid of every number to choose, in increasing order."""
    fields = [field.name for field in dataclasses.fields(solver)]
    grids: dict[str, tuple[float, ...]] = {}
    blocks = [name for name, _ in problem.blocks]
    for entry in (space,) if isinstance(space, str) else space:
        setting, _, block = entry.partition(".")
        if setting not in fields or block not in ("", "*", *blocks):
            msg = (
                f"`space` must name settings of {type(solver).__name__} ({fields}), alone or with a block of the model "
                f"({blocks}) or * after a dot, got {entry!r}."
            )
            raise ValueError(msg)
        grid = tuple(sorted(map(float, space[entry]))) if isinstance(space, Mapping) else COARSE
        if not grid or not (grid[0] > 0 and math.isfinite(grid[-1])) or len(set(grid)) < len(grid):
            msg = f"a grid in `space` must hold different positive numbers, got {space[entry]!r} for {entry!r}."
            raise ValueError(msg)
        for name in blocks if block == "*" else [block]:
            grids[f"{setting}.{name}" if name else setting] = grid
    if not grids:
        msg = "`space` must name at least one setting, got none."
        raise ValueError(msg)
    return grids


def with_settings(problem: Problem, solver: Solver, settings: Settings) -> Any:
    """The solver with these settings; those with a block after a dot become dicts."""
    values: dict[str, Any] = {}
    for name, value in settings.items():
        setting, _, block = name.partition(".")
        if not block:
            values[setting] = value
            continue
        blocks = values.setdefault(setting, getattr(solver, setting))
        known = blocks if isinstance(blocks, Mapping) else {other: blocks for other, _ in problem.blocks}
        values[setting] = {**known, block: value}
    return dataclasses.replace(solver, **values)
