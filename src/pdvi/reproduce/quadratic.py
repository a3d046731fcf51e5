"""Compare methods on the paper's quadratic, and measure the rates of its table: `pdvi reproduce quadratic`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from pdvi import datasets
from pdvi._base.console import Say
from pdvi.core.problem import Problem
from pdvi.reproduce import figures
from pdvi.reproduce.claims import Claim, listed, verdict, write_page, write_table
from pdvi.reproduce.methods import PAPER, spelled
from pdvi.reproduce.rates import Rate, power, rate, squared_gradients
from pdvi.reproduce.runs import Case, Compared, Runs, Task, compare_all

TABLE = "Table 1"
APPENDIX = "appendix, quadratic synthetic data"
OPTIMUM = {"paper": 0.0, "convex": 0.0}  # of F where it is known; elsewhere the best that any method reached
MARGIN = 0.1  # by which a fitted exponent may miss the one of a bound
Measured = dict[str, tuple[Rate, float]]  # the rate of each method, and the exponent of its mean squared gradient


@dataclass(frozen=True)
class Sizes:
    """How large the problems are, and how long the runs."""

    n: int = 10_000
    batch_size: int = 100
    epochs: float = 40
    small: int = 100  # shards of the problems that only the rates are measured on
    long: float = 400  # their epochs
    rows: int = 5_000  # of the mixture among these
    trials: int = 30
    tuning_epochs: float = 40


FULL = Sizes()
QUICK = Sizes(n=1_000, batch_size=10, epochs=24, small=40, long=48, rows=1_000, trials=8, tuning_epochs=8)


def cases(sizes: Sizes) -> dict[str, Case]:
    """Return all cases by key. All are in double precision: a linear rate is followed down to rounding."""

    def case(
        key: str, title: str, problem: Callable[[int], Problem], batch_size: int, epochs: float, *more: str
    ) -> Case:
        lengths = (batch_size, epochs, sizes.trials, sizes.tuning_epochs)
        return Case(key, title, lambda seed: Task(problem(seed)), (*PAPER, *more), *lengths, double=True)

    def quadratic(seed: int, linear: float = 0.0) -> Problem:
        return datasets.quadratic(sizes.n, linear=linear, seed=seed)

    def quartic(seed: int) -> Problem:
        return datasets.quartic(sizes.small, seed=seed)

    def tanh(seed: int) -> Problem:
        return datasets.tanh_regression(sizes.small, seed=seed)

    def mixture(seed: int) -> Problem:
        return datasets.mixture(sizes.rows, batch_size=max(1, sizes.rows // 50), seed=seed).problem(seed=seed)

    large = sizes.batch_size, sizes.epochs
    small = max(1, sizes.small // 10), sizes.long
    found = [
        case("paper", "the paper's quadratic", quadratic, *large),
        case("shifted", "the same with linear terms", partial(quadratic, linear=1.0), *large),
        case("convex", "convex quartic", quartic, *small),
        case("nonconvex", "nonconvex tanh regression", tanh, *small),
        case("mixture", "small biased mixture", mixture, 1, sizes.long / 2, "PG-SVI", "SNGVI"),
    ]
    return {case.key: case for case in found}


def run(out: Path, *, seeds: int, say: Say, command: str, sizes: Sizes, quick: bool = False) -> list[Claim]:
    """Make what is missing in ``out``, then tables, figures and the page."""
    runs = Runs(out, {"experiment": "quadratic", **asdict(sizes)})
    done = compare_all(cases(sizes), runs, seeds, say)
    measured = {key: _measured(each, OPTIMUM.get(key)) for key, each in done.items()}
    write_table(_table(done, measured, runs), out, "rates")
    made = _claims(done, measured)
    figures.save(_loss_figure(done), out, "loss")
    figures.save(_rates_figure(done), out, "rates")
    write_page(
        out,
        "Quadratic, and rates",
        made,
        about=(
            f"{sizes.n:,} shards, {sizes.batch_size} per step, {seeds} seeds (data sets), {sizes.trials} tuning trials"
            f" of {sizes.tuning_epochs:g} epochs for every method with a step size, on data of their own. The quadratic"
            " has one block of globals, so P2D-VI with a step size per block would be PD-VI: there it is the automatic"
            " one, per coordinate. Gap: (F - F*) / (F at the start - F*). Slopes are fitted from a quarter of a run on."
        ),
        command=command,
        quick=quick,
        figures={
            "loss": "Loss against iteration; mean over seeds and one standard deviation, of logarithms.",
            "rates": "Rates: the gap on the convex problem, the mean squared gradient norm of T/2 to T on the others.",
        },
    )
    return made


def _measured(done: Compared, optimum: float | None) -> Measured:
    """Averages over the seeds."""
    trace = done.trace.assign(gap=done.gaps(optimum))
    found = {}
    for method in done.methods:
        each = [run for _, run in trace[trace["method"] == method.name].groupby("seed")]
        rates = [rate(run["epoch"].to_numpy(), run["gap"].to_numpy()) for run in each]
        powers = [power(run["epoch"].to_numpy(), squared_gradients(run)) for run in each]
        # means over the runs that did not diverge
        found[method.name] = Rate(*(float(pd.Series(part).mean()) for part in zip(*rates))), pd.Series(powers).mean()
    return found


def _table(done: dict[str, Compared], measured: dict[str, Measured], runs: Runs) -> pd.DataFrame:
    rows = []
    for key, compared in done.items():
        for method in compared.methods:
            found, exponent = measured[key][method.name]
            rows.append(
                {
                    "problem": compared.case.title,
                    "method": method.name,
                    "tuned": spelled(runs.settings(compared.case, method)),
                    "decades per epoch": found.per_epoch,
                    "R2": found.straight,
                    "slope of log gap against log T": found.slope,
                    "gap at the end": found.level,
                    "slope of the mean squared gradient": exponent,
                    "reading": found.reading,
                    "diverged": int((compared.ends("status")[method.name] == "DIVERGED").sum()),
                }
            )
    return pd.DataFrame(rows)


def _claims(done: dict[str, Compared], measured: dict[str, Measured]) -> list[Claim]:
    pd_vi, p2d, auto = "PD-VI", "P2D-VI", "P2D-VI automatic"
    paper, shifted, mixture = (measured[key] for key in ("paper", "shifted", "mixture"))

    def rates(where: Measured, *names: str) -> str:
        return "; ".join(
            f"{name} {found.reading} ({-found.per_epoch:.2g} decades per epoch, R2 {found.straight:.2f},"
            f" gap at the end {found.level:.1g})"
            for name in names
            for found in where[name][:1]
        )

    def exponents(key: str, *names: str) -> str:
        return ", ".join(f"{name} T^{measured[key][name][1]:.2f}" for name in names)

    def epochs_to(key: str, name: str, target: float) -> float:
        gaps = done[key].gaps(OPTIMUM.get(key))
        return float(done[key].arrivals(gaps, target, "epoch")[name].mean())

    faster = {key: (epochs_to(key, auto, 1e-8), epochs_to(key, pd_vi, 1e-8)) for key in ("paper", "shifted")}
    faster["mixture"] = epochs_to("mixture", p2d, 1e-8), epochs_to("mixture", pd_vi, 1e-8)
    noisy, constant = ("SGD", "RMSProp", "Adam"), ("SVI constant", "PG-SVI")
    convex = pd.Series({name: measured["convex"][name][0].slope for name in (pd_vi, auto)})
    general = [measured[key][name][1] <= -1 + MARGIN for key in ("nonconvex", "mixture") for name in (pd_vi, p2d)]
    slower = [
        measured[key][name][1] > max(measured[key][p2d][1], -1) + MARGIN
        for key in ("mixture", "nonconvex")
        for name in ("Adam", "SGD")
    ]
    return [
        Claim(
            "PD-VI and P2D-VI converge linearly under strong convexity, with a constant step",
            f"{TABLE}; {APPENDIX}",
            f"v = 0: {rates(paper, pd_vi, auto)}. Linear terms: {rates(shifted, pd_vi, auto)}",
            verdict(*(where[name][0].linear for where in (paper, shifted) for name in (pd_vi, auto))),
        ),
        Claim(
            "preconditioning accelerates",
            f"{APPENDIX}; introduction",
            "epochs to a gap of 1e-8, P2D-VI and PD-VI: "
            + "; ".join(f"{done[key].case.title} {fast:.3g} and {slow:.3g}" for key, (fast, slow) in faster.items()),
            verdict(*(fast < slow for fast, slow in faster.values())),
        ),
        Claim(
            "SGD, RMSProp and Adam with constant steps stall at a floor: the paper's quadratic, v = 0",
            f"{TABLE} (SGD: rho^T + sigma^2)",
            f"{rates(paper, *noisy)}. Shards share their optimum here, so that SGD has no noise at it",
            verdict(*(paper[name][0].floor for name in noisy)),
        ),
        Claim(
            "the same where shards disagree at the optimum (linear terms)",
            f"{TABLE} (SGD: rho^T + sigma^2)",
            rates(shifted, *noisy),
            verdict(*(shifted[name][0].floor for name in noisy)),
        ),
        Claim(
            "SVI and PG-SVI with constant steps stall at a floor",
            f"{TABLE} (PG-SVI: 1/T + sigma^2); related work",
            f"biased mixture: {rates(mixture, *constant)}; beside them {rates(mixture, pd_vi, p2d, auto)}",
            verdict(*(mixture[name][0].floor for name in constant)),
        ),
        Claim(
            "PD-VI and P2D-VI: O(1/T) on convex problems",
            TABLE,
            f"slope of log gap against log T on the quartic: {listed(convex, '.2f')}",
            verdict(*(convex <= -1 + MARGIN)),
        ),
        Claim(
            "PD-VI and P2D-VI: mean squared gradient norm O(1/T) on nonconvex problems",
            TABLE,
            f"tanh regression: {exponents('nonconvex', pd_vi, p2d, auto)}; biased mixture:"
            f" {exponents('mixture', pd_vi, p2d, auto)}",
            verdict(*general),
        ),
        Claim(
            "SVI with diminishing steps: O(1/sqrt T), slower than O(1/T); SNGVI with diminishing steps: O(1/T)",
            TABLE,
            f"mean squared gradient norm, biased mixture: {exponents('mixture', 'SVI diminishing', 'SNGVI')}",
            verdict(-1 + MARGIN < mixture["SVI diminishing"][1] <= -0.5 + MARGIN, mixture["SNGVI"][1] <= -1 + MARGIN),
        ),
        Claim(
            "Adam and SGD on general problems, O(log T / sqrt T) and O(1/sqrt T + sigma^2), are slower than O(1/T)",
            TABLE,
            f"mean squared gradient norm, biased mixture: {exponents('mixture', 'Adam', 'SGD')}; tanh regression:"
            f" {exponents('nonconvex', 'Adam', 'SGD')}",
            verdict(*slower),
        ),
    ]


def _loss_figure(done: dict[str, Compared]) -> Any:
    figure, axes = figures.new(2)
    for ax, key in zip(axes[0], ("paper", "shifted")):
        gap = done[key].gaps(OPTIMUM.get(key))
        figures.curves(ax, done[key].trace, "step", gap, done[key].methods, log=True)
        ax.set_ylim(1e-14, 10)
        ax.set_title(done[key].case.title, loc="left", fontsize="medium")
        ax.set(xlabel="iteration", ylabel="gap of the loss, relative to the start")
    figures.legend(figure, axes)
    return figure


def _rates_figure(done: dict[str, Compared]) -> Any:
    figure, axes = figures.new(3)
    for ax, key, lowest in zip(axes[0], ("convex", "nonconvex", "mixture"), (1e-12, 1e-20, 1e-20)):
        compared, trace = done[key], done[key].trace
        if key == "convex":
            values, label = compared.gaps(OPTIMUM[key]), "gap of the loss, relative to the start"
        else:
            parts = [pd.Series(squared_gradients(run), run.index) for _, run in trace.groupby(["method", "seed"])]
            values, label = pd.concat(parts), "mean squared gradient norm,\nT/2 to T"
        figures.curves(ax, trace, "step", values.where(trace["step"] > 0), compared.methods, log=True)
        ax.set_title(compared.case.title, loc="left", fontsize="medium")
        ax.set(xscale="log", xlabel="iteration T", ylabel=label)
        start, ends = trace["step"][trace["step"] > 0].min(), trace["step"].max()
        for exponent in (-0.5, -1):
            ax.plot([start, ends], [1, (ends / start) ** exponent], color="#BBBBBB", linewidth=0.8, zorder=0)
            ax.annotate(f"T^{exponent:g}", (ends, (ends / start) ** exponent), fontsize="x-small", color="#777777")
        ax.set_ylim(lowest, 10)
    figures.legend(figure, axes)
    return figure
