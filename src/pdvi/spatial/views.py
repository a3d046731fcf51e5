"""Views: a tissue seen in several ways, each fitted, and the labels they agree on.

Results differ more between reasonable settings (how many neighbors are averaged, domains as places of one mean or as
compositions of expression states) than between starts. So none is trusted alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from threadpoolctl import ThreadpoolController

from pdvi._base.telling import tell
from pdvi.mixtures.coarsen import coarsen
from pdvi.mixtures.config import Config
from pdvi.mixtures.density import MixtureFit
from pdvi.mixtures.fit_mixture import FitOptions, fit_hierarchical, fit_mixture
from pdvi.mixtures.init import center, domains_of_types, kmeans_labels, one_hot
from pdvi.mixtures.sharded_graph import ShardedGraph
from pdvi.mixtures.split_merge import split_and_merge
from pdvi.spatial.consensus import agreement, certainty_of, consensus, medoid, votes
from pdvi.spatial.streaming import Storage, StoredGraph


class View(NamedTuple):
    """One way to see a tissue."""

    kind: str  # "averages": a domain has one mean; "types": it is a composition of types of single spots; "features"
    n_neighbors: int  # averaged; of types those in whose fractions the start looks for domains; of features 0

    def __str__(self) -> str:
        return f"{self.kind} of {self.n_neighbors} neighbors"


# In the order in which they are taken where time allows fewer.
VIEWS = (
    View("averages", 22),
    View("types", 30),
    View("averages", 30),
    View("averages", 15),
    View("types", 15),
)


MIN_SPREAD = 1e-3  # of a component, over the largest one's
SAMPLED_ROWS = 100_000  # that it is computed from
FEATURES = View("features", 0)  # features of the user, fitted as they are


class Tissue(NamedTuple):
    """What a tissue is fitted from."""

    components: np.ndarray  # of single spots, best first
    averages: dict[int, np.ndarray]  # of components over so many neighbors
    graph: sp.csr_array
    coordinates: np.ndarray
    sample: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class ViewSettings:
    """What `tl.domains` asks of every view."""

    n_domains: int
    beta: float = 1.0
    n_patches: int | None = None
    n_init: int = 1  # k-means starts of a view, of which the best fit is kept
    options: FitOptions = dataclasses.field(default_factory=FitOptions)
    storage: Storage | None = None  # for rows that do not fit into memory

    @property
    def config(self) -> Config:
        """Return the numbers."""
        return self.options.config

    def n_features(self, available: int) -> int:
        """Return how many components a view uses: the means of K domains span K - 1 directions."""
        return min(available, max(self.config.n_components, self.n_domains - 1))


def shard_tissue(tissue: Tissue, settings: ViewSettings) -> ShardedGraph:
    """Return the patches of a tissue, which all its views share: in a store if rows do not fit into memory."""
    n_rows, storage = len(tissue.coordinates), settings.storage
    places: dict[str, Any] = {"beta": settings.beta, "sample": tissue.sample}
    if storage is not None and n_rows > storage.max_rows:
        n_shards = settings.config.patches(n_rows)
        return StoredGraph(n_rows, tissue.graph, tissue.coordinates, storage, n_shards=n_shards, **places)
    n_shards = settings.config.patches(n_rows) if settings.n_patches is None else settings.n_patches
    return ShardedGraph(n_rows, tissue.graph, tissue.coordinates, n_shards=n_shards, **places)


def fit_view(
    tissue: Tissue,
    view: View,
    graph: ShardedGraph,
    settings: ViewSettings,
    start: np.ndarray | None = None,
    types: np.ndarray | None = None,
) -> MixtureFit:
    """Fit one view, from given probabilities of the domains or from k-means.

    A component that has lost its rows is put where the fit is poorest, if that helps (in memory).
    """
    X, types = rows_of(tissue, view, settings, types)
    starts = [start] if start is not None else starts_of(tissue, view, settings, X, types)

    def refit(probabilities: np.ndarray) -> MixtureFit:
        return fit_from(X, graph, probabilities, types, settings.options)

    fitted = min(map(refit, starts), key=lambda one: one.objective)
    if types is not None or isinstance(graph, StoredGraph):
        return fitted
    rows = fitted.rows(X, graph.sample)
    return split_and_merge(fitted, rows, refit, graph=tissue.graph, max_moves=settings.n_domains)


def rows_of(
    tissue: Tissue, view: View, settings: ViewSettings, types: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the rows that a view fits, and in a view of types the probabilities of these (``types`` if given)."""
    available = tissue.components.shape[1]
    size = available if view == FEATURES else settings.n_features(available)
    if view.kind == "types":
        return tissue.components[:, :size], types_of(tissue, settings) if types is None else types
    return tissue.averages[view.n_neighbors][:, :size], None


def fit_from(
    X: np.ndarray, graph: ShardedGraph, start: np.ndarray, types: np.ndarray | None, options: FitOptions
) -> MixtureFit:
    """Return one fit of a view's rows, from probabilities of the domains."""
    if types is None:
        return fit_mixture(X, graph, start, options)
    # each domain's weight is fixed: learned, and with weak evidence, they lead to one domain for all rows
    return fit_hierarchical(X, graph, start, types, dataclasses.replace(options, learn_weight=False))


def starts_of(
    tissue: Tissue, view: View, settings: ViewSettings, X: np.ndarray, types: np.ndarray | None
) -> list[np.ndarray]:
    """Return the probabilities of domains that a view is fitted from, by k-means."""
    n_domains, seed = settings.n_domains, settings.options.seed
    if types is not None:
        near: dict[str, Any] = {"n_neighbors": view.n_neighbors, "runs": settings.config.runs(len(X)), "seed": seed}
        return [domains_of_types(types, tissue.coordinates, n_domains, **near)]
    rows = center(X, tissue.sample)
    seeds = (seed + 101 * number for number in range(settings.n_init))
    return [one_hot(_kmeans(rows, n_domains, settings.config, seed), n_domains) for seed in seeds]


def types_of(tissue: Tissue, settings: ViewSettings) -> np.ndarray:
    """Return expression states of single spots by k-means, as probabilities; as many as there are different spots."""
    X = center(tissue.components[:, : settings.n_features(tissue.components.shape[1])], tissue.sample)
    labels = _kmeans(X, min(settings.config.n_types, len(X)), settings.config, settings.options.seed)
    used, labels = np.unique(labels, return_inverse=True)
    return one_hot(labels, len(used))


def _kmeans(X: np.ndarray, n_clusters: int, config: Config, seed: int) -> np.ndarray:
    """Labels by k-means of some hundred rows a cluster: averages of neighbors are much alike."""
    runs = config.runs(len(X))
    max_rows = 300 * n_clusters if runs == config.kmeans_runs else 20_000
    return kmeans_labels(X, n_clusters, seed=seed, runs=runs, max_rows=max_rows)


def fit_views(tissue: Tissue, views: tuple[View, ...], settings: ViewSettings) -> list[MixtureFit]:
    """Return a fit of every view, each with a seed and a thread of its own."""
    graph = shard_tissue(tissue, settings)
    types = types_of(tissue, settings) if any(view.kind == "types" for view in views) else None

    def fit_one(number: int) -> MixtureFit:
        tell(f"view {number + 1} of {len(views)}: {views[number]}", number / len(views))
        own = dataclasses.replace(settings.options, seed=settings.options.seed + number)
        return fit_view(tissue, views[number], graph, dataclasses.replace(settings, options=own), types=types)

    # a view of types first, since their program takes longest to compile
    first = next((number for number, view in enumerate(views) if view.kind == "types"), 0)
    order = [first, *(number for number in range(len(views)) if number != first)]
    found = map_threads(lambda place: fit_one(order[place]), len(views))
    return [found[order.index(number)] for number in range(len(views))]


class Domains(NamedTuple):
    """The domains of a tissue: what its views agree on."""

    labels: np.ndarray
    probability: np.ndarray  # the fraction of views that give a row each label, matched to these
    certainty: np.ndarray  # see `certainty_of`
    agreement: np.ndarray  # of the views, (views, views)
    medoid: int  # the view that agrees most with all
    fits: list[MixtureFit]  # one for each view, of all rows or of groups of rows
    labelings: list[np.ndarray]  # of all rows, by every view
    best: MixtureFit  # whose posterior stands for the domains


def find_domains(tissue: Tissue, views: tuple[View, ...], settings: ViewSettings) -> Domains:
    """Fit the views and return what they agree on; a large tissue is seen in groups of spots first."""
    tissue, config, n_domains = drop_constant_features(tissue), settings.config, settings.n_domains
    n_rows = len(tissue.coordinates)
    if n_rows <= config.group_above or n_rows // config.group_size < n_domains:  # fewer groups than domains
        fits = fit_views(tissue, views, settings)
        labelings = [fit.labels for fit in fits]
        labels, typical = consensus(labelings, n_domains), medoid(agreement(labelings, n_domains))
        best = fits[typical]
    else:
        tell("groups of spots")
        groups, group = group_tissue(tissue, config.group_size)
        coarse = dataclasses.replace(config, tol=config.tol * config.group_size)  # per spot
        options = dataclasses.replace(settings.options, config=coarse)
        found = find_domains(groups, views, dataclasses.replace(settings, options=options))
        tell("all spots, from what the views agree on")
        best = fit_view(tissue, views[0], shard_tissue(tissue, settings), settings, found.probability[group])
        fits, labels, labelings = found.fits, best.labels, [labels[group] for labels in found.labelings]
        typical = found.medoid
    probability = votes(labelings, n_domains, labels)
    certainty = certainty_of(probability, labels, len(labelings))
    return Domains(labels, probability, certainty, agreement(labelings, n_domains), typical, fits, labelings, best)


def drop_constant_features(tissue: Tissue) -> Tissue:
    """Return the tissue without components that hardly vary: a direction without noise has no precision.

    One-hot matrices of cell types, whose rows add up to 1, have one.
    """
    every = max(1, len(tissue.components) // SAMPLED_ROWS)
    spread = np.std(tissue.components[::every], axis=0)
    kept = spread > MIN_SPREAD * spread.max(initial=0.0)
    if kept.all() or not kept.any():
        return tissue
    averages = {count: mean[:, kept] for count, mean in tissue.averages.items()}
    return tissue._replace(components=tissue.components[:, kept], averages=averages)


def group_tissue(tissue: Tissue, size: int) -> tuple[Tissue, np.ndarray]:
    """Return a tissue of groups of neighboring spots, and the group of every spot."""
    counts = sorted(tissue.averages)
    features = np.hstack([tissue.components, *(tissue.averages[count] for count in counts)])
    X, graph, coordinates, group = coarsen(features, tissue.graph, tissue.coordinates, size)
    components, *averages = np.split(X, len(counts) + 1, axis=1)
    sample = None if tissue.sample is None else tissue.sample[np.unique(group, return_index=True)[1]]
    return Tissue(components, dict(zip(counts, averages)), graph, coordinates, sample), group


def map_threads(work: Callable[[int], Any], count: int) -> list[Any]:
    """Return ``work(i)`` for every number, each in a thread of its own: a small fit keeps one core busy."""
    controller = _thread_controller()

    def one(number: int) -> Any:
        with controller.limit(limits=1, user_api="openmp"):  # of this thread's k-means: the other has the other cores
            return work(number)

    # BLAS has one number for all threads: k-means in two of them would restore it in the wrong order
    with controller.limit(limits=1, user_api="blas"), ThreadPoolExecutor(max(1, count)) as threads:
        return [done.result() for done in [threads.submit(copy_context().run, one, i) for i in range(count)]]


@cache
def _thread_controller() -> ThreadpoolController:
    """Look up which libraries have threads, here and in scikit-learn, before there is a second thread that works.

    The look-up holds the dynamic linker's lock and asks for Python's. A thread that imports a library meanwhile holds
    Python's and asks for the linker's: both would wait for ever.
    """
    from sklearn.cluster import KMeans

    KMeans(1, n_init=1).fit(np.zeros((2, 1)))
    return ThreadpoolController()
