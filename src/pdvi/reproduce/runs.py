"""Keep runs as files: a finished one is never made twice, a half-written one never taken for finished.

A folder holds `settings.json` (what all runs have in common), `tuning/<case>/<method>.jsonl` (trials) and `.json` (the
best settings), and `runs/<case>/<method>-<seed>.csv` (the trace), beside it `.npz` if a run keeps arrays. Every file
takes its name when it is whole, and the trace is the last one of a run.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pandas as pd

import pdvi
from pdvi._base.atomic import replacing
from pdvi._base.console import Say
from pdvi.reproduce.methods import BY_NAME, Method, applicable
from pdvi.reproduce.provenance import sign
from pdvi.run.fit import Progress
from pdvi.run.sampling import Sampling
from pdvi.run.tune import EQUAL, PARTS, with_settings

Arrays = dict[str, np.ndarray]
ROUNDING = 1e-12  # relative, in double precision: smaller differences of objectives mean nothing
LOG_POINT = ("step", "event")  # together these tell the rows of a trace apart


class Task(NamedTuple):
    """A problem, what is measured at every log point beside the trace, what is kept of the end, the order of shards."""

    problem: pdvi.Problem
    watch: Callable[[Progress], dict[str, float]] | None = None
    keep: Callable[[pdvi.Result], Arrays] | None = None
    sampling: Sampling | None = None  # None: shuffled in every epoch


@dataclass(frozen=True)
class Case:
    """Tasks by seed, and how they are visited. Seed 0 is for tuning, the others are run."""

    key: str
    title: str
    make: Callable[[int], Task]
    methods: tuple[str, ...]
    batch_size: int
    epochs: float
    trials: int
    tuning_epochs: float
    log_every: float = 1.0
    double: bool = False  # precision


class Runs:
    """The folder of one experiment."""

    def __init__(self, folder: Path, settings: dict[str, Any]):
        self.folder = folder
        path, wanted = folder / "settings.json", json.loads(json.dumps(settings))
        if not path.exists():
            write_text(path, json.dumps(wanted, indent=1))
        found = json.loads(path.read_text())
        if differ := sorted(key for key in {*wanted, *found} if wanted.get(key) != found.get(key)):
            msg = f"{str(folder)!r} holds runs with other settings ({', '.join(differ)}); give another --out."
            raise ValueError(msg)

    def of(self, case: Case, method: Method, seed: int) -> Path:
        """Return the path of the trace of a run."""
        return self.folder / "runs" / case.key / f"{method.key}-{seed}.csv"

    def arrays(self, case: Case, method: Method, seed: int) -> Arrays:
        """Return the arrays that a finished run has kept."""
        with np.load(self.of(case, method, seed).with_suffix(".npz")) as kept:
            return dict(kept)

    def settings(self, case: Case, method: Method) -> dict[str, float]:
        """Return the tuned settings of a method; none if it has nothing to tune."""
        return json.loads(self.tuned(case, method).read_text()) if method.space else {}

    def tuned(self, case: Case, method: Method) -> Path:
        """Return the path of the tuned settings of a method."""
        return self.folder / "tuning" / case.key / f"{method.key}.json"

    def missing(self, cases: list[Case], seeds: int) -> int:
        """Return how many tunings and runs are left to do, at most."""
        pairs = [(case, BY_NAME[name]) for case in cases for name in case.methods]
        paths = [self.tuned(*pair) for pair in pairs if pair[1].space is not None]
        paths += [self.of(*pair, seed) for pair in pairs for seed in range(1, seeds + 1)]
        return sum(not path.exists() for path in paths)


class Compared(NamedTuple):
    """The traces of all methods on all seeds of a case, and which methods these are."""

    case: Case
    methods: list[Method]
    trace: pd.DataFrame

    def ends(self, values: str | pd.Series) -> pd.DataFrame:
        """Return the last value of every run, of a column or of other values: a row per seed, a column per method."""
        return self._by_run(self.trace[values] if isinstance(values, str) else values, "last")

    def gaps(self, optimum: float | None = None) -> pd.Series:
        """Return (F - best) / (F at the start - best) at every log point; best: that of any method on the seed."""
        by_seed = self.trace.groupby("seed")["objective"]
        best = by_seed.transform("min") if optimum is None else optimum
        return (self.trace["objective"] - best) / (by_seed.transform("first") - best)

    def arrivals(self, values: pd.Series, target: float, against: str = "step") -> pd.DataFrame:
        """Return where each run first is at or below a target; infinite if it never is."""
        return self._by_run(self.trace[against].where(values <= target), "min").fillna(np.inf)

    def _by_run(self, values: pd.Series, how: Any) -> pd.DataFrame:
        runs = values.groupby([self.trace["seed"], self.trace["method"]], sort=False)
        return runs.agg(how).unstack()[[method.name for method in self.methods]]


def compare(case: Case, runs: Runs, seeds: int, step: Callable[[str], None]) -> Compared:
    """Tune every method alike and run each on every seed, or read what is there; ``step`` is told of each."""
    with jax.enable_x64(True) if case.double else nullcontext():
        make = cache(case.make)
        methods = _applicable(case, runs, make)
        for method in methods:
            if method.space and not runs.tuned(case, method).exists():
                step(f"{case.title}: tuning {method.name}")
                _tune(case, method, runs, make(0))
        for seed in range(1, seeds + 1):
            make.cache_clear()  # two problems at once may not fit into memory
            for method in methods:
                if not runs.of(case, method, seed).exists():
                    step(f"{case.title}: {method.name}, seed {seed}")
                    _run(case, method, runs, make(seed), seed)
    traces = [
        pd.read_csv(runs.of(case, method, seed), float_precision="round_trip").assign(method=method.name, seed=seed)
        for seed in range(1, seeds + 1)
        for method in methods
    ]
    return Compared(case, methods, pd.concat(traces, ignore_index=True))


def compare_all(
    cases: dict[str, Case], runs: Runs, seeds: int, say: Say, *, column: str = "case"
) -> dict[str, Compared]:
    """Compare methods on all cases, and write all traces into one table; ``column`` has the keys of the cases."""
    total = runs.missing(list(cases.values()), seeds)
    steps = iter(range(total + 1))

    def step(line: str) -> None:
        done = next(steps, total)
        say(f"{line} ({done + 1} of {total})", done / max(total, 1))

    found = {key: compare(case, runs, seeds, step) for key, case in cases.items()}
    say("writing tables and figures", 1.0)
    traces = pd.concat([each.trace.assign(**{column: key}) for key, each in found.items()], ignore_index=True)
    traces.to_csv(runs.folder / "traces.csv", index=False)
    return found


def _applicable(case: Case, runs: Runs, make: Callable[[int], Task]) -> list[Method]:
    """From a file when it is there: a finished case then costs nothing."""
    path = runs.folder / "tuning" / case.key / "methods.json"
    if not path.exists():
        names = [method.name for method in applicable(case.methods, make(0).problem)]
        write_text(path, json.dumps(names))
    return [BY_NAME[name] for name in json.loads(path.read_text())]


def _tune(case: Case, method: Method, runs: Runs, task: Task) -> None:
    path = runs.tuned(case, method)
    as_run = case.tuning_epochs <= PARTS * case.log_every  # as many steps at a time: one compilation serves both
    found = pdvi.tune(
        task.problem,
        method.solver,
        method.space,
        trials=case.trials,
        batch_size=case.batch_size,
        max_epochs=case.tuning_epochs,
        sampling=task.sampling,
        path=path.with_suffix(".jsonl"),
        equal=ROUNDING if case.double else EQUAL,
        vectorise=False if as_run else None,
        progress=False,
    )
    write_text(path, json.dumps(found.settings))


def _run(case: Case, method: Method, runs: Runs, task: Task, seed: int) -> None:
    problem, watch, keep, sampling = task
    solver = with_settings(problem, method.solver, runs.settings(case, method))
    extra: list[dict[str, Any]] = []
    settings: dict[str, Any] = {
        "batch_size": None if solver.full_batch else case.batch_size,
        "log_every": case.log_every,
        "sampling": sampling,
        "seed": seed,
        "tol": 0,
        "progress": False,
    }
    pdvi.fit(problem, solver, max_epochs=case.log_every, **settings)  # compiles: not what is to be timed

    def look(progress: Progress) -> None:
        if watch:
            extra.append({key: progress.record[key] for key in LOG_POINT} | watch(progress))

    result = pdvi.fit(problem, solver, max_epochs=case.epochs, callbacks=[look], **settings)
    trace = result.trace.assign(status=result.status.name)
    if extra:  # points that the safeguard undid are not measured
        trace = trace.merge(pd.DataFrame(extra), "left", list(LOG_POINT))
    path = runs.of(case, method, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    if keep:
        with replacing(path.with_suffix(".npz")) as temporary:
            np.savez_compressed(temporary, **keep(result))  # type: ignore[arg-type]
    sign(runs.folder)
    with replacing(path) as temporary:
        trace.to_csv(temporary, index=False)


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
