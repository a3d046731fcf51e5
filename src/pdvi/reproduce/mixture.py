"""Compare methods on the paper's Gaussian mixture with biased batches: `pdvi reproduce mixture`."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import multivariate_normal

import pdvi
from pdvi import datasets, metrics
from pdvi._base.console import Say
from pdvi.mixtures import empirical_bayes
from pdvi.reproduce import figures
from pdvi.reproduce.claims import Claim, listed, verdict, write_page, write_table
from pdvi.reproduce.methods import BASELINES, BY_NAME, PAPER, spelled
from pdvi.reproduce.runs import Arrays, Case, Compared, Runs, Task, compare_all
from pdvi.run.fit import Progress
from pdvi.run.sampling import Fixed

POOR, SORTED = "random-start", "sorted"
UNTUNED = "SVI diminishing untuned"
METHODS = (*PAPER, UNTUNED)
SECTION = "experiments, Gaussian mixture model"
NEAR = 1.05  # times the least distance any method reached: there
FAR = 0.1  # total variation from the truth: substantially
SAME = 1.01  # distances within this factor are called equal
Densities = dict[str, tuple[np.ndarray, tuple[float, ...]]]  # values on a grid and its extent, by what they are of
GRID = 160  # points along a side of a density


@dataclass(frozen=True)
class Sizes:
    """How large the data are, and how long the runs. ``biases`` begins with i.i.d. batches; ``bias`` is the paper's."""

    n: int = 100_000
    batch_size: int = 1_000
    bias: float = 0.95
    biases: tuple[float, ...] = (0.0, 0.5, 0.8, 0.95, 1.0)
    epochs: float = 40
    trials: int = 30
    tuning_epochs: float = 20
    log_every: float = 0.5

    @property
    def paper(self) -> str:
        """Return the key of the paper's case."""
        return f"bias-{self.bias:g}"

    @property
    def iid(self) -> str:
        """Return the key of the case with i.i.d. batches."""
        return f"bias-{self.biases[0]:g}"


FULL = Sizes()
QUICK = Sizes(n=10_000, batch_size=100, biases=(0.0, 0.95, 1.0), epochs=16, trials=8, tuning_epochs=4)


def cases(sizes: Sizes) -> dict[str, Case]:
    """Return all cases by key: every bias from the k-means start, the paper's also from a poor one, and sorted."""
    lengths = (sizes.epochs, sizes.trials, sizes.tuning_epochs, sizes.log_every)

    def case(bias: float, special: str = "") -> Case:
        title = "mixture, i.i.d. batches" if bias == 0 else f"mixture, bias {bias:g}"
        title += {POOR: ", start at random rows", SORTED: ", batches sorted by component"}.get(special, "")
        make = partial(_task, sizes, bias, special)
        return Case(special or f"bias-{bias:g}", title, make, METHODS, 1, *lengths)

    found = [*map(case, sizes.biases), case(sizes.bias, POOR), case(sizes.bias, SORTED)]
    return {each.key: each for each in found}


def _task(sizes: Sizes, bias: float, special: str, seed: int) -> Task:
    data = datasets.mixture(sizes.n, batch_size=sizes.batch_size, bias=bias, seed=seed)
    settings = empirical_bayes(data.X, len(data.means), seed=seed)
    if special == POOR:  # any rows, several of which may be of one component
        rows = np.random.default_rng([seed, 1]).choice(len(data.X), len(data.means), replace=False)
        settings = settings._replace(means=np.asarray(data.X[rows], float))
    problem = data.problem(settings)
    noise = 1 / np.asarray(problem.model.precision, float)
    truth = data.means, np.tile(data.noise_variance, (len(data.means), 1))

    def found(globals_: Any) -> tuple[np.ndarray, np.ndarray]:
        """Means and variances of the fitted components, that of their means included."""
        return np.asarray(globals_["mean"], float), noise + np.exp(np.asarray(globals_["log_var"], float))

    def watch(progress: Progress) -> dict[str, float]:
        return {"wasserstein": metrics.wasserstein_matched(*found(progress.global_params), *truth)}

    def keep(result: pdvi.Result) -> Arrays:
        mean, variance = found(result.global_params)
        return {"mean": mean, "variance": variance, "true_mean": truth[0], "true_variance": truth[1]}

    if special != SORTED:
        return Task(problem, watch, keep)
    # in every epoch by the component that most of their rows are of: as data lie on disk
    order = np.argsort(pd.crosstab(data.batch, data.labels).to_numpy().argmax(1), kind="stable")
    return Task(problem, watch, keep, Fixed(tuple(order.tolist())))


def run(out: Path, *, seeds: int, say: Say, command: str, sizes: Sizes, quick: bool = False) -> list[Claim]:
    """Make what is missing in ``out``, then tables, figures and the page."""
    runs = Runs(out, {"experiment": "mixture", **asdict(sizes)})
    done = compare_all(cases(sizes), runs, seeds, say)
    named = {"biased": done[sizes.paper], "iid": done[sizes.iid], POOR: done[POOR], SORTED: done[SORTED]}
    for name, compared in named.items():
        write_table(_table(compared, runs), out, name)
    swept = {bias: done[f"bias-{bias:g}"] for bias in sizes.biases}
    sweep = pd.DataFrame({f"bias {bias:g}": each.ends("wasserstein").mean() for bias, each in swept.items()})
    write_table(sweep.reset_index(names="method"), out, "bias")
    seconds = done[sizes.paper].ends("seconds").mean()
    write_table(seconds.rename_axis("method").reset_index(name="seconds in the solver"), out, "seconds")
    shown = (sizes.paper, POOR, SORTED)
    densities = {key: [_densities(done[key], runs, 1 + i) for i in range(seeds)] for key in shown}
    made = _claims(done, sizes, sweep, densities)
    figures.save(_distance_figure(list(named.values())), out, "wasserstein")
    figures.save(_sweep_figure(swept), out, "bias")
    figures.save(_density_figure({done[key].case.title: each[0] for key, each in densities.items()}), out, "density")
    write_page(
        out,
        "Gaussian mixture",
        made,
        about=(
            f"{sizes.n:,} rows, d = 10, K = 5, batches of {sizes.batch_size:,}, {sizes.bias:.0%} of a batch from one"
            f" component; {seeds} seeds (data sets), {sizes.trials} tuning trials of {sizes.tuning_epochs:g} epochs for"
            f" every method with a step size and every bias, on data of their own, then {sizes.epochs:g} epochs."
            " Distance: Wasserstein-2 between true and fitted components, matched one to one. The start is that of"
            " k-means, from which every sensible step is a good one, or K rows drawn at random. Batches are shuffled in"
            " every epoch, or come component by component (sorted)."
        ),
        command=command,
        quick=quick,
        figures={
            "wasserstein": "Wasserstein-2 distance against iteration; mean over seeds and one standard deviation, of"
            " logarithms. Below: the same, enlarged.",
            "bias": "Distance at the end against the share of a batch that is of one component.",
            "density": "Density in the plane of the first two principal directions of the true means, first seed."
            " Apart: total variation from the truth in this plane.",
        },
    )
    return made


def _table(done: Compared, runs: Runs) -> pd.DataFrame:
    distance = done.ends("wasserstein")
    columns = {
        "tuned": {method.name: spelled(runs.settings(done.case, method)) for method in done.methods},
        "distance": distance.mean(),
        "sd": distance.std(ddof=0),
        "iterations to 1.05 x least": _near(done).mean(),
        "gap of F": done.ends(done.gaps()).mean(),
    }
    return pd.DataFrame(columns, index=distance.columns).reset_index(names="method")


def _near(done: Compared) -> pd.DataFrame:
    """Iterations until the distance is within a factor of the least that any method reached on that seed."""
    least = done.trace.groupby("seed")["wasserstein"].transform("min")
    return done.arrivals(done.trace["wasserstein"] / least, NEAR)


def _densities(done: Compared, runs: Runs, seed: int) -> Densities:
    """The density of the truth and of three methods on a grid of a plane, with its extent."""
    names = ("SVI diminishing", UNTUNED, "P2D-VI")
    kept = {name: runs.arrays(done.case, BY_NAME[name], seed) for name in names}
    first = kept[names[0]]
    center = first["true_mean"].mean(0)
    plane = np.linalg.svd(first["true_mean"] - center)[2][:2].T
    shown = (first["true_mean"] - center) @ plane
    low, high = shown.min(0) - 3.5, shown.max(0) + 3.5
    axes = [np.linspace(a, b, GRID) for a, b in zip(low, high)]
    points = np.stack(np.meshgrid(*axes), -1)

    def density(mean: np.ndarray, variance: np.ndarray) -> np.ndarray:
        components = zip((mean - center) @ plane, variance)
        return np.mean([multivariate_normal(m, plane.T @ (v[:, None] * plane)).pdf(points) for m, v in components], 0)

    extent = (low[0], high[0], low[1], high[1])
    found = {"truth": (density(first["true_mean"], first["true_variance"]), extent)}
    return found | {name: (density(each["mean"], each["variance"]), extent) for name, each in kept.items()}


def _apart(densities: Densities, name: str) -> float:
    """Half the integral of the absolute difference from the truth: between 0 and 1."""
    truth, (left, right, bottom, top) = densities["truth"]
    cell = (right - left) * (top - bottom) / (GRID - 1) ** 2
    return float(0.5 * np.abs(densities[name][0] - truth).sum() * cell)


def _claims(
    done: dict[str, Compared], sizes: Sizes, sweep: pd.DataFrame, densities: dict[str, list[Densities]]
) -> list[Claim]:
    ours = ("PD-VI", "P2D-VI")
    change = sweep.iloc[:, -1] / sweep.iloc[:, 0]

    def lower(key: str, start: str) -> Claim:
        ends = done[key].ends("wasserstein")
        mean, spread = ends.mean(), ends.std(ddof=0)
        below = [mean[name] < mean[rival] / SAME for name in ours for rival in BASELINES]
        above = [mean[name] > mean[rival] * SAME for name in ours for rival in BASELINES]
        return Claim(
            f"PD-VI and P2D-VI end at a lower Wasserstein distance than every baseline, batches biased ({start})",
            f"{SECTION}, figure of the Wasserstein distance",
            ", ".join(f"{name} {mean[name]:.4g} ± {spread[name]:.1g}" for name in METHODS)
            + f". Lower by more than 1 % in {sum(below)}, higher in {sum(above)} of {len(below)} comparisons",
            verdict(*below),
        )

    def faster(key: str, start: str) -> Claim:
        median = _near(done[key]).median()
        return Claim(
            f"PD-VI and P2D-VI converge faster than every baseline ({start})",
            f"{SECTION}, figure of the Wasserstein distance",
            f"iterations to {NEAR} times the least distance on a seed, median over seeds: {listed(median, '.4g')}",
            verdict(*(median[name] < median[rival] for name in ours for rival in BASELINES)),
        )

    def apart(key: str, method: str, start: str) -> Claim:
        theirs, p2d = (np.array([_apart(each, name) for each in densities[key]]) for name in (method, "P2D-VI"))
        return Claim(
            f"{method} reconstructs a density that deviates substantially from the truth, P2D-VI does not ({start})",
            "introduction, figure of densities",
            f"total variation from the truth in the plane shown, mean over seeds: {theirs.mean():.3f}, at most"
            f" {theirs.max():.3f}; P2D-VI {p2d.mean():.3f}, at most {p2d.max():.3f}",
            verdict(*((theirs > FAR) & (p2d < FAR))),
        )

    starts = ((sizes.paper, "k-means start"), (POOR, "random start"), (SORTED, "batches sorted by component"))
    return [
        *(lower(*each) for each in starts),
        *(faster(*each) for each in starts),
        Claim(
            "PD-VI and P2D-VI are robust under biased batches",
            SECTION,
            "distance at the end with batches of one component over that with i.i.d. batches: " + listed(change, ".3g"),
            verdict(*(change[name] <= NEAR for name in ours)),
        ),
        *(apart(key, method, start) for method in ("SVI diminishing", UNTUNED) for key, start in starts),
    ]


def _distance_figure(done: list[Compared]) -> Any:
    figure, axes = figures.new(len(done), 2, width=3.8, height=2.8, legend=2.2)
    for column, compared in zip(axes.T, done):
        trace = compared.trace
        for ax in column:
            figures.curves(ax, trace, "step", trace["wasserstein"], compared.methods, log=True)
            ax.set(xlabel="iteration", ylabel="Wasserstein-2 distance")
        column[0].set_title(compared.case.title, loc="left", fontsize="medium")
        near = compared.ends("wasserstein").mean()
        start = trace.loc[trace["step"] == 0, "wasserstein"].mean()
        column[1].set_ylim(0.9 * near.min(), 1.3 * max(start, 1.5 * near.min()))
    figures.legend(figure, axes)
    return figure


def _sweep_figure(done: dict[float, Compared]) -> Any:
    figure, axes = figures.new(1, width=5.0, height=3.4)
    methods = next(iter(done.values())).methods
    last = [each.trace.groupby(["method", "seed"]).tail(1).assign(bias=bias) for bias, each in done.items()]
    table = pd.concat(last, ignore_index=True)
    figures.curves(axes[0, 0], table, "bias", table["wasserstein"], methods, log=True)
    axes[0, 0].set(xlabel="share of a batch that is of one component", ylabel="Wasserstein-2 distance at the end")
    figures.legend(figure, axes)
    return figure


def _density_figure(densities: dict[str, Densities]) -> Any:
    figure, axes = figures.new(4, len(densities), width=2.8, height=2.6, legend=0.4)
    for row, (case, found) in zip(axes, densities.items()):
        highest = float(found["truth"][0].max())
        for ax, (name, (values, extent)) in zip(row, found.items()):
            shown = ax.imshow(values, extent=extent, origin="lower", cmap="Greys", vmin=0, vmax=highest, aspect="auto")
            ax.contour(values, np.linspace(0.1, 0.9, 5) * highest, extent=extent, colors="#0072B2", linewidths=0.6)
            ax.set_xlabel("first direction")
            if name != "truth":
                ax.set_title(f"{name}\n{_apart(found, name):.2f} apart", fontsize="medium")
        row[0].set_ylabel("second direction")
        row[0].set_title(f"{textwrap.fill(case, 28)}\ntruth", fontsize="medium")
        figure.colorbar(shown, ax=list(row), shrink=0.8, label="density")
    return figure
