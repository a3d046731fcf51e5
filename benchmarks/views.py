"""Every view of labeled slides by every method: where P2D-VI, coordinate ascent, memoized VB and SVI end.

    python benchmarks/views.py FOLDER [--seeds 1] [--slides NAME ...] [--tol 1e-4] [--max-epochs 100]

FOLDER has AnnData files with counts in X, coordinates in obsm["spatial"] and hand-drawn domains in
obs["ground_truth"]; files without that column are skipped. Every view of `tl.domains` is fitted once from its k-means
labels, without a second start and without moves, by every method: the same model, start and stopping rule through the
same call. Printed are the objective (negative ELBO) in nats per row, epochs, and the adjusted Rand index; below, how
often P2D-VI ends better than another method, within 1e-3 nats per row of it, or worse.

CAVI updates all rows at once, so that patches make no difference to it; it is run on one patch, too, to show that. SVI
has Robbins-Monro steps (t + tau)^-0.7, in the range that Hoffman et al. (2013) recommend, with a delay tau of one
epoch. A smaller ``tol`` tells fits that stopped on a plateau from fits that ended elsewhere.
"""

from __future__ import annotations

import argparse
import dataclasses
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import anndata as ad
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import pdvi
from pdvi._anndata.checks import coordinates_of
from pdvi._anndata.keys import SPATIAL, SPATIAL_COMPONENTS, WEIGHTS
from pdvi.mixtures import CONFIG, Config
from pdvi.mixtures.checks import check_graph
from pdvi.mixtures.density import MixtureFit
from pdvi.mixtures.fit_mixture import FitOptions
from pdvi.mixtures.sharded_graph import ShardedGraph
from pdvi.pp.neighborhood import averages
from pdvi.spatial.views import (
    VIEWS,
    Tissue,
    View,
    ViewSettings,
    drop_constant_features,
    fit_from,
    rows_of,
    shard_tissue,
    starts_of,
    types_of,
)
from pdvi.tl.missing import make_missing
from slides import labeled_slides

OURS = "P2D-VI"
ONE_PATCH = "CAVI, one patch"
SAME = 1e-3  # nats per row: a smaller difference is none
FORGETTING = 0.7


def solvers(n_patches: int) -> dict[str, Any]:
    """Return the methods on so many patches."""
    return {
        OURS: pdvi.P2DVI(),
        ONE_PATCH: pdvi.CAVI(),
        "CAVI": pdvi.CAVI(),
        "memoized VB": pdvi.MemoizedVB(),
        "SVI": pdvi.SVI(rate=1.0, forgetting=FORGETTING, delay=float(n_patches)),
    }


class Ending(NamedTuple):
    """Where one fit has ended."""

    slide: str
    view: View
    seed: int
    method: str
    objective: float  # nats per row
    epochs: float
    ari: float


def tissue_of(adata: ad.AnnData) -> Tissue:
    """Return what the views of a slide see, everything at its default."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        make_missing(adata)
    coordinates, sample = coordinates_of(adata, SPATIAL), np.zeros(adata.n_obs, int)
    components = np.asarray(adata.obsm[SPATIAL_COMPONENTS])
    counts = {view.n_neighbors for view in VIEWS if view.kind == "averages"}
    graph = check_graph(adata.obsp[WEIGHTS], adata.n_obs).astype(float)
    return drop_constant_features(
        Tissue(components, averages(components, coordinates, sample, counts), graph, coordinates)
    )


def endings(
    name: str, tissue: Tissue, truth: np.ndarray, known: np.ndarray, seed: int, config: Config = CONFIG
) -> list[Ending]:
    """Fit every view by every method; ``truth`` are the labels of the ``known`` rows."""
    settings = ViewSettings(len(np.unique(truth)), options=FitOptions(seed=seed, config=config))
    graph, one = (shard_tissue(tissue, dataclasses.replace(settings, n_patches=n)) for n in (None, 1))
    types, found = types_of(tissue, settings), []
    for number, view in enumerate(VIEWS):
        for method, solver in solvers(graph.n_shards).items():
            options = dataclasses.replace(settings.options, seed=seed + number, solver=solver)
            own = dataclasses.replace(settings, options=options)
            patches = one if method == ONE_PATCH else graph
            X, fitted = fit_start(tissue, view, patches, own, types)
            value = objective(X, patches, fitted) / len(known)
            ari = pdvi.metrics.ari(truth, fitted.labels[known])
            epochs = float(fitted.result.trace["epoch"].iloc[-1])
            found.append(Ending(name, view, seed, method, value, epochs, ari))
    return found


def fit_start(
    tissue: Tissue, view: View, graph: ShardedGraph, settings: ViewSettings, types: np.ndarray
) -> tuple[np.ndarray, MixtureFit]:
    """Return a view's rows, and their fit from the first start alone."""
    X, own_types = rows_of(tissue, view, settings, types)
    start = starts_of(tissue, view, settings, X, own_types)[0]
    return X, fit_from(X, graph, start, own_types, settings.options)


def objective(X: np.ndarray, graph: ShardedGraph, fitted: MixtureFit) -> float:
    """Return the objective where a fit has ended, in double precision.

    In single precision second moments cancel: where noise vanishes (one-hot rows) that shows by tenths of a nat per
    row, and depends on the patches.
    """
    rows = (np.asarray(X, float) - fitted.offset) @ np.asarray(fitted.whitening, float).T
    with jax.enable_x64(True):
        problem = graph.problem(fitted.model, rows)
        model, shards = jax.tree.map(_double, (problem.model, problem.shards))
        exact = eqx.tree_at(lambda p: (p.model, p.shards), problem, (model, shards))
        lam, local = jax.tree.map(_double, (exact.ravel(fitted.result.global_params), fitted.result.local_params))
        return float(_total(exact, lam, local))


@eqx.filter_jit
def _total(problem: pdvi.Problem, lam: Any, local: Any) -> Any:
    return problem.map_shards(lambda phi, shard: problem.loss(phi, lam, shard), local).sum()


def _double(leaf: Any) -> Any:
    return jnp.asarray(leaf, float) if jnp.issubdtype(jnp.result_type(leaf), jnp.floating) else leaf


def heading() -> None:
    print(f"{'slide, view, seed':52}" + "".join(f"{method:>26}" for method in solvers(1)), flush=True)


def lines(found: list[Ending]) -> None:
    """Print a line for each view: objective, epochs and ARI of every method."""
    for i in range(0, len(found), len(solvers(1))):
        part = found[i : i + len(solvers(1))]
        cells = [f"{one.objective:12.4f}{one.epochs:6.0f}{one.ari:8.3f}" for one in part]
        print(f"{f'{part[0].slide}, {part[0].view}, {part[0].seed}':52}" + "".join(cells), flush=True)


def summary(found: list[Ending]) -> dict[str, dict[str, float]]:
    """Return, for every other method, how often P2D-VI ends better than it, as well, or worse, and by how much."""
    by_method = {method: [one for one in found if one.method == method] for method in solvers(1)}
    objective = {method: np.array([one.objective for one in own]) for method, own in by_method.items()}
    rows = {}
    for method, own in by_method.items():
        more = objective[OURS] - objective[method]
        rows[method] = {
            "better": int((more < -SAME).sum()),
            "equal": int((np.abs(more) <= SAME).sum()),
            "worse": int((more > SAME).sum()),
            "largest": float(more.max()),
            "least": float(more.min()),
            "mean": float(more.mean()),
            "epochs": float(np.median([one.epochs for one in own])),
            "ari": float(np.mean([one.ari for one in own])),
        }
    return rows


def tell(rows: dict[str, dict[str, float]]) -> None:
    """Print the summary."""
    print(f"\n{OURS} against, by objective: better, within {SAME:g} nats per row, worse; difference: mean, range")
    for method, row in rows.items():
        compared = f"{row['better']:8}{row['equal']:8}{row['worse']:8}"
        size = f"{row['mean']:+11.4f}{row['least']:+11.4f}{row['largest']:+11.4f}"
        own = f"   median epochs {row['epochs']:4.0f}, mean ARI {row['ari']:.3f}"
        print(f"{method:18}" + (" " * 57 if method == OURS else compared + size) + own)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--slides", nargs="*", help="names of files without .h5ad; by default all")
    parser.add_argument("--tol", type=float, default=CONFIG.tol)
    parser.add_argument("--max-epochs", type=int, default=CONFIG.max_epochs)
    arguments = parser.parse_args()
    config = dataclasses.replace(CONFIG, tol=arguments.tol, max_epochs=arguments.max_epochs)
    paths = [path for path in labeled_slides(arguments.folder) if not arguments.slides or path.stem in arguments.slides]
    if not paths:
        parser.error(f'{arguments.folder} has no such .h5ad file with obs["ground_truth"]')
    heading()
    found = []
    for path in paths:
        adata = ad.read_h5ad(path)
        known = adata.obs["ground_truth"].notna().to_numpy()
        truth = adata.obs["ground_truth"][known].astype(str).to_numpy()
        tissue = tissue_of(adata)
        for seed in range(arguments.seeds):
            found += (own := endings(path.stem, tissue, truth, known, seed, config))
            lines(own)
    tell(summary(found))


if __name__ == "__main__":
    main()
