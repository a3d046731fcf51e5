"""Views: a tissue looked at in several ways, each fitted, and what they agree on.

Results differ more between reasonable settings (how many neighbours are averaged, how many components are used, domains
as places of one mean or as compositions of cell types) than between starts. So none is trusted alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import scipy.sparse as sp
from sklearn.metrics import adjusted_rand_score
from sklearn.utils import check_random_state

from pdvi.core.problem import Problem
from pdvi.core.result import Result
from pdvi.mixtures.build import coupled
from pdvi.mixtures.coarse import coarsened
from pdvi.mixtures.consensus import Consensus, consensus
from pdvi.mixtures.em import Fitted
from pdvi.mixtures.pipeline import cut, fit_rows, in_white_noise, is_one_program, like
from pdvi.mixtures.program import fit_together
from pdvi.mixtures.recipe import Recipe
from pdvi.mixtures.start import EmpiricalBayes, centred, empirical_bayes, from_labels, means_of
from pdvi.mixtures.task import Found, Rows, Start, Task
from pdvi.mixtures.two_level import coupled_two_level, two_level_em, two_level_start
from pdvi.shards.partition import Layout
from pdvi.solvers import P2DVI

UNUSED = 1e-9  # of the mean prior variance: that of the means of columns that a view does not use


class View(NamedTuple):
    """One way to look at a tissue."""

    kind: str  # "averages": a domain has one mean; "types": it is a composition of types of single spots
    n_neighbors: int  # averaged; of types those in whose shares the start looks for domains
    breadth: float  # times the least number of components, see `components`

    def components(self, n_domains: int, available: int, recipe: Recipe) -> int:
        """Return how many components it uses: the means of K domains span K - 1 directions, few are never enough."""
        least = max(recipe.view_components, n_domains - 1)
        return min(available, round(self.breadth * least))


# In the order in which they are taken where time allows fewer.
VIEWS = (
    View("averages", 22, 1.0),
    View("averages", 30, 1.5),
    View("types", 30, 1.5),
    View("averages", 15, 2.5),
    View("averages", 30, 1.0),
    View("averages", 15, 1.5),
    View("types", 30, 2.5),
    View("averages", 22, 2.5),
)


def first_views(count: int, n_rows: int, recipe: Recipe) -> tuple[View, ...]:
    """Return the views that are taken first: of a tissue too large for one program those of averages."""
    if n_rows <= recipe.one_program_rows:
        return VIEWS[:count]
    return tuple(sorted(VIEWS, key=lambda view: view.kind != "averages"))[:count]


class Tissue(NamedTuple):
    """Hold single spots' components, best first, their averages over so many neighbours, graph, places and samples."""

    components: np.ndarray
    averages: dict[int, np.ndarray]
    graph: sp.csr_array
    coordinates: np.ndarray
    sample: np.ndarray | None = None

    def rows(self, view: View, n_components: int) -> Rows:
        """Return what a view of averages fits."""
        X = self.averages[view.n_neighbors][:, :n_components]
        return Rows(X, self.graph, self.coordinates, self.sample)


class Seen(NamedTuple):
    """Hold what one view found: the result is that of its best start."""

    view: View
    n_components: int
    probabilities: np.ndarray
    result: Result
    seconds: float
    composition: np.ndarray | None = None  # of types in domains, (K, T)
    types: np.ndarray | None = None  # the type of every row
    alone: np.ndarray | None = None  # labels that it found by itself, before it learned what others had found

    @property
    def independent(self) -> np.ndarray:
        """The labels that it found by itself: agreement between those tells how certain labels are."""
        return np.asarray(self.probabilities.argmax(1)) if self.alone is None else self.alone


class Agreed(NamedTuple):
    """Hold all views, what they agree on, and the fit whose labels stand for them, where they do not themselves."""

    seen: list[Seen]
    consensus: Consensus
    found: Found | None = None
    refined: bool = False


def see(
    tissue: Tissue, views: tuple[View, ...], task: Task, refine: Callable[[Start], Found | None] | None = None
) -> Agreed:
    """Fit every view; of a large tissue on groups of rows, from whose consensus its own rows are then fitted.

    ``refine`` may fit single spots from what the views agree on; None from it means that this makes no sense.
    """
    n_domains, recipe = task.n_components, task.recipe
    is_large = len(tissue.components) > recipe.group_above
    seen_on, group = _grouped(tissue, recipe) if is_large else (tissue, None)
    seen = _fit_views(seen_on, views, task)
    if group is not None:
        seen = [one._replace(probabilities=one.probabilities[group], alone=one.independent[group]) for one in seen]
    labellings = [one.probabilities.argmax(1) for one in seen]
    agreed = consensus(labellings, n_domains)
    start = Start(agreed.probability.astype(np.float32), sum(one.seconds for one in seen))
    found = None if refine is None else refine(start)
    refined = found is not None
    if found is None and is_large:
        best = seen[0]
        found = fit_rows(tissue.rows(best.view, best.n_components), task, start)
    labels = agreed.labels if found is None else np.asarray(found.probabilities.argmax(1))
    independent = consensus([one.independent for one in seen], n_domains, labels)
    agreed = independent._replace(medoid=agreed.medoid)
    return Agreed(seen, agreed, found, refined)


def _grouped(tissue: Tissue, recipe: Recipe) -> tuple[Tissue, np.ndarray]:
    """Return a tissue of groups of neighbouring spots (of one sample, as far as they lie apart), and their groups."""
    counts = sorted(tissue.averages)
    all_features = np.hstack([tissue.components, *(tissue.averages[count] for count in counts)])
    coarse = coarsened(all_features, tissue.graph, tissue.coordinates, recipe.group_size)
    components, *averages = np.split(coarse.X, len(counts) + 1, axis=1)
    sample = None if tissue.sample is None else coarse.first(tissue.sample)
    groups = Tissue(components, dict(zip(counts, averages)), coarse.graph, coarse.coordinates, sample)
    return groups, coarse.group


def _fit_views(tissue: Tissue, views: tuple[View, ...], task: Task) -> list[Seen]:
    """Fit views in their order; those of one kind of a small tissue as one program."""
    seeds = check_random_state(task.random_state).randint(2**31, size=len(views))
    width = tissue.components.shape[1]
    sizes = [view.components(task.n_components, width, task.recipe) for view in views]
    found: dict[int, Seen] = {}
    kinds = {"averages": _fit_averages, "types": _fit_types}
    with ThreadPoolExecutor(len(kinds)) as threads:  # most of a first call is compilation, which takes one core
        begun = {}
        for kind, fit in kinds.items():
            chosen = [i for i, view in enumerate(views) if view.kind == kind]
            if chosen:
                some = [(views[i], sizes[i], int(seeds[i])) for i in chosen]
                begun[kind] = chosen, threads.submit(fit, tissue, some, task)
        for chosen, running in begun.values():
            found |= dict(zip(chosen, running.result()))
    return [found[i] for i in range(len(views))]


def _fit_averages(tissue: Tissue, views: list[tuple[View, int, int]], task: Task) -> list[Seen]:
    """Fit the Potts mixture of every view of averages."""
    if not is_one_program(tissue.rows(views[0][0], 1), task, None):
        seen = []
        for view, size, seed in views:
            found = fit_rows(tissue.rows(view, size), replace(task, random_state=seed))
            seen.append(Seen(view, size, found.probabilities, found.result, found.seconds))
        return seen
    began, k, recipe = time.perf_counter(), task.n_components, task.recipe
    tries = _Tries(tissue, views, task)
    numbered = list(enumerate(zip(tries.features, views)))
    for n in range(task.n_init):
        tries.fit([(i, empirical_bayes(X, k, seed=view[2] + n, recipe=recipe)) for i, (X, view) in numbered])
    # what one view found another may have missed, though it is better there, too
    probabilities = tries.probabilities()
    labels = [one.argmax(1) for one in probabilities]
    agreement = np.array([[adjusted_rand_score(one, two) for two in labels] for one in labels])
    different = [j for j in range(len(views)) if (agreement[j, :j] < recipe.view_same).all()]
    tries.fit(
        [
            (i, from_labels(X, labels[j], means_of(X, probabilities[j]), recipe))
            for i, (X, _) in numbered
            for j in different
            if agreement[i, j] < recipe.view_same
        ]
    )
    seconds = (time.perf_counter() - began) / len(views)
    found_by = zip(views, tries.probabilities(), tries.results(), labels)
    return [Seen(view, size, own, result, seconds, alone=alone) for (view, size, _), own, result, alone in found_by]


class _Tries:
    """Fits of views of averages from any settings, in one compiled program; the best of each view is kept."""

    def __init__(self, tissue: Tissue, views: list[tuple[View, int, int]], task: Task):
        self.task, self.sample, self.seed = task, tissue.sample, views[0][2]
        self.features = [centred(tissue.rows(view, size).X, tissue.sample).X for view, size, _ in views]
        self.width = max(size for _, size, _ in views)
        self.where = cut(tissue.rows(views[0][0], 1), task)
        self.coupling = coupled(tissue.graph, self.where, beta=task.beta, recipe=task.recipe)
        self.first: list[Problem] = []  # whose graph, mask and samples all others share
        self.best: dict[int, Result] = {}

    def fit(self, tries: list[tuple[int, EmpiricalBayes]]) -> None:
        """Fit views, named by their numbers, from settings: as many at a time as there are, for one compilation."""
        task, at_once = self.task, len(self.features)
        for begin in range(0, len(tries), at_once):
            some = tries[begin : begin + at_once]
            problems = [self._problem(number, settings) for number, settings in some]
            fitted = fit_together(
                problems + problems[-1:] * (at_once - len(some)),
                noise=task.noise,
                weights=task.learn_weights,
                tol=task.tol,
                recipe=task.recipe,
                seed=self.seed,
            )
            for (number, _), one in zip(some, fitted):
                if number not in self.best or one.result.objective < self.best[number].objective:
                    self.best[number] = one.result

    def results(self) -> list[Result]:
        """Return the best result of every view."""
        return [self.best[number] for number in range(len(self.features))]

    def probabilities(self) -> list[np.ndarray]:
        """Return the probabilities of the best results, row by row."""
        return [np.asarray(self.where.unshard(result.local_params)) for result in self.results()]

    def _problem(self, number: int, start: EmpiricalBayes) -> Problem:
        white, settings, whitening = in_white_noise(self.features[number], start, self.task)
        white, settings = _widened(white, self.width), _wider(settings, self.width)
        log_scale = float(np.linalg.slogdet(whitening)[1])
        problem = like(self.first, white, settings, self.where, self.coupling, log_scale, self.sample)
        self.first = self.first or [problem]
        return problem


def _fit_types(tissue: Tissue, views: list[tuple[View, int, int]], task: Task) -> list[Seen]:
    """Fit the two-level mixture of every view of types."""
    began, recipe = time.perf_counter(), task.recipe
    n_types = min(recipe.view_types, len(tissue.components))
    width = max(size for _, size, _ in views)
    rows = Rows(tissue.components, tissue.graph, tissue.coordinates)
    where, together = cut(rows, task), is_one_program(rows, task, None)
    coupling = coupled(tissue.graph, where, beta=task.beta, recipe=recipe)
    problems = []
    for view, size, seed in views:
        X = centred(tissue.components[:, :size], tissue.sample).X
        start = two_level_start(
            X, tissue.coordinates, task.n_components, n_types, n_neighbors=view.n_neighbors, seed=seed
        )
        start = start._replace(types=_wider(start.types, width))
        problems.append(coupled_two_level(_widened(X, width), start, where, coupling, sample=tissue.sample))
    if together:
        fits = fit_together(
            problems, noise="tied", weights=False, tol=task.tol, recipe=recipe, seed=views[0][2], from_labels=True
        )
    else:
        batch = max(1, len(where.rows) // recipe.shards_per_batch)
        fits = [two_level_em(problem, P2DVI(), batch_size=batch, seed=views[0][2]) for problem in problems]
    seconds = (time.perf_counter() - began) / len(views)
    return [_seen_types(view, size, where, fit, seconds) for (view, size, _), fit in zip(views, fits)]


def _seen_types(view: View, size: int, where: Layout, fitted: Fitted, seconds: float) -> Seen:
    local = {name: where.unshard(np.asarray(part)) for name, part in fitted.result.local_params.items()}
    concentration = np.exp(np.asarray(fitted.result.global_params["log_concentration"], float))
    composition = concentration / concentration.sum(1, keepdims=True)
    return Seen(view, size, local["domain"], fitted.result, seconds, composition, local["type"].argmax(1))


def _widened(X: np.ndarray, width: int) -> np.ndarray:
    """Return the rows with columns of 0 up to a width, so that views of any size are one program."""
    return np.pad(X, ((0, 0), (0, width - X.shape[1])))


def _wider(settings: EmpiricalBayes, width: int) -> EmpiricalBayes:
    """Return the settings for widened rows: means of 0 with a prior so narrow that they stay there."""
    missing = width - settings.means.shape[1]
    narrow = UNUSED * settings.prior_variance.mean()
    return EmpiricalBayes(
        np.pad(settings.means, ((0, 0), (0, missing))),
        np.pad(settings.prior_mean, (0, missing)),
        np.pad(settings.prior_variance, (0, missing), constant_values=narrow),
        np.pad(settings.noise_variance, (0, missing), constant_values=settings.noise_variance.mean()),
    )
