"""Views: a tissue looked at in several ways, each fitted, and what they agree on.

Results differ more between reasonable settings (how many neighbours are averaged, how many components are used, domains
as places of one mean or as compositions of cell types) than between starts. So none is trusted alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import replace
from functools import cache
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from sklearn.utils import check_random_state
from threadpoolctl import ThreadpoolController

from pdvi._base.telling import tell
from pdvi.core.result import Result
from pdvi.mixtures.coarse import coarsened
from pdvi.mixtures.consensus import Consensus, adjusted_rand, consensus
from pdvi.mixtures.ground import Ground, is_one_program
from pdvi.mixtures.kinds import Fit, OfAverages, OfTypes
from pdvi.mixtures.pipeline import fit_rows
from pdvi.mixtures.recipe import Recipe
from pdvi.mixtures.task import Found, Rows, Start, Task
from pdvi.mixtures.tries import Tries


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
    """Fit every view; of a large tissue on groups of rows, from whose domains its own rows are then fitted.

    ``refine`` may fit single spots from what the views agree on; None from it means that this makes no sense.
    """
    n_domains, recipe = task.n_components, task.recipe
    is_large = len(tissue.components) > recipe.group_above
    seen_on, group = _grouped(tissue, recipe) if is_large else (tissue, None)
    seen = _fit_views(seen_on, views, task)
    labellings = [one.probabilities.argmax(1) for one in seen]
    agreed = consensus(labellings, n_domains)
    probability = agreed.probability
    if group is not None:
        if min(adjusted_rand(labels, agreed.labels, n_domains) for labels in labellings) < recipe.view_same:
            probability = _settled(seen_on, seen, task)
        probability = probability[group]
        seen = [one._replace(probabilities=one.probabilities[group], alone=one.independent[group]) for one in seen]
    start = Start(probability.astype(np.float32), sum(one.seconds for one in seen))
    found = None if refine is None else refine(start)
    refined = found is not None
    if found is None and is_large:
        best = seen[0]
        tell("all spots, from what the views agree on")
        found = fit_rows(tissue.rows(best.view, best.n_components), task, start)
    labels = agreed.labels if found is None else np.asarray(found.probabilities.argmax(1))
    independent = consensus([one.independent for one in seen], n_domains, labels)
    agreed = independent._replace(medoid=agreed.medoid)
    return Agreed(seen, agreed, found, refined)


def _settled(tissue: Tissue, seen: list[Seen], task: Task) -> np.ndarray:
    """Return probabilities from which all spots are fitted where views disagree: votes may leave a domain to nobody.

    The first view is fitted from what each has found, and the best kept: of the same features objectives can be
    compared.
    """
    tell("what the views have found, compared")
    rows = tissue.rows(seen[0].view, seen[0].n_components)
    starts = [Start(one.probabilities.astype(np.float32)) for one in seen]
    ground = Ground(rows, task, starts[0].probabilities)
    fits = [fit_rows(rows, task, start, exchange=True, ground=ground) for start in starts]
    return min(fits, key=lambda found: found.result.objective).probabilities


def _grouped(tissue: Tissue, recipe: Recipe) -> tuple[Tissue, np.ndarray]:
    """Return a tissue of groups of neighbouring spots (of one sample, as far as they lie apart), and their groups."""
    tell("groups of spots")
    counts = sorted(tissue.averages)
    all_features = np.hstack([tissue.components, *(tissue.averages[count] for count in counts)])
    coarse = coarsened(all_features, tissue.graph, tissue.coordinates, recipe.group_size)
    components, *averages = np.split(coarse.X, len(counts) + 1, axis=1)
    sample = None if tissue.sample is None else coarse.first(tissue.sample)
    groups = Tissue(components, dict(zip(counts, averages)), coarse.graph, coarse.coordinates, sample)
    return groups, coarse.group


def _fit_views(tissue: Tissue, views: tuple[View, ...], task: Task) -> list[Seen]:
    """Fit every view by itself; then, of a small tissue, from what all agree on, and keep the better."""
    seeds = [int(seed) for seed in check_random_state(task.random_state).randint(2**31, size=len(views))]
    sizes = [view.components(task.n_components, tissue.components.shape[1], task.recipe) for view in views]
    if not is_one_program(tissue.rows(views[0], 1), task):
        return _fit_large_views(tissue, views, sizes, seeds, task)
    averages = [i for i, view in enumerate(views) if view.kind == "averages"]
    width = max([size for view, size in zip(views, sizes) if view.kind == "types"], default=0)
    features = [tissue.rows(views[i], sizes[i]).X for i in averages]
    tries = Tries(tissue.rows(VIEWS[0], 1), features, task)
    began = time.perf_counter()

    def kind_of(i: int) -> OfAverages | OfTypes:
        if i in averages:
            return OfAverages(tries, averages.index(i), seeds[i])
        X, near = tissue.components[:, : sizes[i]], views[i].n_neighbors
        return OfTypes(tries, X, tissue.coordinates, near, width, seeds[i])

    def begin(i: int) -> tuple[OfAverages | OfTypes, Fit]:
        _tell(views, i)
        kind = kind_of(i)
        return kind, kind.begin()

    # compilation, most of a first call, takes one core: each kind has its own program, which is compiled first
    by_kind = [[i for i, view in enumerate(views) if view.kind == kind] for kind in ("averages", "types")]
    kinds, alone = zip(*_side_by_side(by_kind, begin))
    labels = [fit.labels for fit in alone]
    common = consensus(labels, task.n_components).labels

    def again(i: int) -> Fit:
        """Fit once more from what all agree on: one view may have missed what is better for it, too."""
        if adjusted_rand(labels[i], common, task.n_components) >= task.recipe.view_same:
            return alone[i]
        _tell(views, i, ", from what all agree on")
        return min(alone[i], kinds[i].again(common), key=lambda fit: fit.result.objective)

    best = _side_by_side(by_kind, again)
    seconds = (time.perf_counter() - began) / len(views)
    return [
        Seen(view, size, fit.probabilities, fit.result, seconds, fit.composition, fit.types, own)
        for view, size, fit, own in zip(views, sizes, best, labels)
    ]


def _side_by_side(groups: list[list[int]], work: Callable[[int], Any]) -> list[Any]:
    """Return ``work(i)`` for every number in the groups, in order; each group is a thread's.

    A thread that has done its own goes on with what others have left.
    """
    left, lock = [list(group) for group in groups], Lock()
    found: dict[int, Any] = {}

    def next_of(own: int) -> int | None:
        with lock:
            if left[own]:
                return left[own].pop(0)
            return next((rest.pop() for rest in left if rest), None)

    controller = _threads_of_libraries()

    def of_group(own: int) -> None:
        with controller.limit(limits=1, user_api="openmp"):  # of this thread's k-means: others have the other cores
            while (i := next_of(own)) is not None:
                found[i] = work(i)

    # BLAS has one number for all threads: k-means in two of them would restore it in the wrong order
    with controller.limit(limits=1, user_api="blas"), ThreadPoolExecutor(len(groups)) as threads:
        for thread in [threads.submit(copy_context().run, of_group, own) for own in range(len(groups))]:
            thread.result()
    return [found[i] for i in sorted(found)]


@cache
def _threads_of_libraries() -> ThreadpoolController:
    """Look up which libraries have threads, here and in scikit-learn, before there is a second thread that works.

    The look-up holds the dynamic linker's lock and asks for Python's. A thread that imports a library meanwhile holds
    Python's and asks for the linker's: both would wait for ever.
    """
    from sklearn.cluster import KMeans

    KMeans(1, n_init=1).fit(np.zeros((2, 1)))
    return ThreadpoolController()


def _tell(views: tuple[View, ...], i: int, how: str = "") -> None:
    tell(f"view {i + 1} of {len(views)}: {views[i].kind} of {views[i].n_neighbors} neighbours{how}", i / len(views))


def _fit_large_views(
    tissue: Tissue, views: tuple[View, ...], sizes: list[int], seeds: list[int], task: Task
) -> list[Seen]:
    """Fit views of a tissue of many shards, one after the other: each keeps all cores busy."""
    tries, seen = Tries(tissue.rows(views[0], 1), [], task), []
    for i, view in enumerate(views):
        _tell(views, i)
        seen.append(_fit_large(tissue, view, sizes[i], max(sizes), seeds[i], tries))
    return seen


def _fit_large(tissue: Tissue, view: View, size: int, width: int, seed: int, tries: Tries) -> Seen:
    """Fit one view of a tissue of many shards."""
    began = time.perf_counter()
    if view.kind == "averages":
        own = replace(tries.task, random_state=seed)
        found = fit_rows(tissue.rows(view, size), own, exchange=True, width=width, ground=tries.ground)
        fit = Fit(found.probabilities, found.result)
    else:
        X = tissue.components[:, :size]
        fit = OfTypes(tries, X, tissue.coordinates, view.n_neighbors, size, seed).begin_large()
    seconds = time.perf_counter() - began
    return Seen(view, size, fit.probabilities, fit.result, seconds, fit.composition, fit.types)
