"""Domains by other tools, each as its documentation runs it, with the true number of domains; see slides.py.

Every function takes a slide (counts in X, coordinates in obsm["spatial"]), the number of domains and a seed, and
returns labels. The slides' files hold variable genes or a small panel, so all genes are taken: no tool's documentation
selects among selected ones. Packages are imported where they are used, so that a missing one leaves the others alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from importlib import metadata
from typing import NamedTuple

import anndata as ad
import numpy as np
import scanpy as sc
from scipy.spatial import cKDTree
from sklearn.mixture import GaussianMixture
from sklearn.neighbors import kneighbors_graph, radius_neighbors_graph

RECORDED = "2026-11-16"  # the day of the numbers in PEERS, and their slides:
RECORDED_ON = ("DLPFC_151673", "DLPFC_151676", "BaristaSeq_slice1", "STARmap_mPFC_BZ5", "osmFISH_SScortex")


class Peer(NamedTuple):
    """A tool: how to run it (None: it is not run), the packages it needs by their pip names, and its recorded ARI.

    One that is always run needs nothing that pdvi does not need, and has no recorded numbers.
    """

    label: Callable[[ad.AnnData, int, int], np.ndarray] | None
    packages: tuple[str, ...]
    recorded: tuple[float, ...] = ()
    always: bool = False

    def recorded_ari(self, slide: str) -> float:
        """The recorded number of a slide, NaN where there is none."""
        return dict(zip(RECORDED_ON, self.recorded)).get(slide, np.nan)

    def versions(self) -> dict[str, str | None]:
        """The installed version of each package, None where it is missing."""
        found: dict[str, str | None] = dict.fromkeys(self.packages)
        for name in self.packages:
            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
        return found


def spots(adata: ad.AnnData) -> bool:
    """Whether the rows are Visium's spots, on a lattice; else they are cells."""
    return "Visium" in str(adata.uns.get("technology", ""))


def bisected(cluster: Callable[[float], np.ndarray], n_domains: int, steps: int = 25) -> np.ndarray:
    """Labels at a resolution that gives ``n_domains``, searched by bisection; if none does, those nearest in number."""
    low, high = 0.01, 10.0
    best, missed = np.empty(0), np.inf
    for _ in range(steps):
        middle = float(np.sqrt(low * high))
        labels = cluster(middle)
        found = len(np.unique(labels))
        if abs(found - n_domains) < missed:
            best, missed = labels, abs(found - n_domains)
        if not missed:
            break
        low, high = (middle, high) if found < n_domains else (low, middle)
    return best


def seed_generators(seed: int) -> None:
    """Seed the global generators, torch's too: some tools read them whatever seed they are given."""
    import torch

    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


def tied_mixture(features: np.ndarray, n_domains: int, seed: int) -> np.ndarray:
    return GaussianMixture(n_domains, covariance_type="tied", random_state=seed).fit_predict(features)


def components(adata: ad.AnnData, seed: int, n_comps: int | None = None) -> ad.AnnData:
    """A copy with totals normalised, logarithms taken, and principal components (scanpy's number if None)."""
    slide = adata.copy()
    sc.pp.normalize_total(slide)
    sc.pp.log1p(slide)
    sc.pp.pca(slide, n_comps=n_comps and min(n_comps, slide.n_vars - 1), random_state=seed)
    return slide


def leiden(adata: ad.AnnData, n_domains: int, seed: int) -> np.ndarray:
    """scanpy's Leiden, which does not see coordinates; its resolution is bisected."""
    slide = components(adata, seed)
    sc.pp.neighbors(slide, random_state=seed)

    def cluster(resolution: float) -> np.ndarray:
        sc.tl.leiden(slide, resolution=resolution, random_state=seed)
        return slide.obs["leiden"].cat.codes.to_numpy()

    return bisected(cluster, n_domains)


def spatial_leiden(adata: ad.AnnData, n_domains: int, seed: int) -> np.ndarray:
    """SpatialLeiden as on its usage page: both resolutions by its own search, the layers' ratio 1.8.

    The spatial layer is what that page advises: the six neighbours of a spot, or ten of a cell weighted by distance.
    """
    import spatialleiden as sl

    slide = components(adata, seed)
    sc.pp.neighbors(slide, random_state=seed)
    places = np.asarray(slide.obsm["spatial"])
    if spots(adata):
        pitch = np.median(np.asarray(cKDTree(places).query(places, k=2)[0])[:, 1])
        graph = radius_neighbors_graph(places, 1.3 * pitch)  # the next ring is at 1.7 of the pitch
    else:
        graph = sl.distance2connectivity(kneighbors_graph(places, 10, mode="distance"))
    slide.obsp["spatial_connectivities"] = graph
    options = {"random_state": seed, "directed": (False, True), "layer_ratio": 1.8}
    sl.search_resolution(slide, n_domains, latent_kwargs={"random_state": seed}, spatial_kwargs=options)
    return slide.obs["spatialleiden"].cat.codes.to_numpy()


def banksy_components(adata: ad.AnnData, seed: int) -> np.ndarray:
    """BANKSY's 20 components as on its DLPFC page for spots and its STARmap page for cells.

    Spots: 6 neighbours, no azimuthal filter, lambda 0.2. Cells: 15 neighbours, the first filter, lambda 0.8.
    """
    from banksy.embed_banksy import generate_banksy_matrix
    from banksy.initialize_banksy import initialize_banksy
    from banksy_utils.umap_pca import pca_umap

    neighbours, filters, share = (6, 0, 0.2) if spots(adata) else (15, 1, 0.8)
    slide = adata.copy()
    sc.pp.normalize_total(slide)
    np.random.seed(seed)  # noqa: NPY002  (its components take no seed of their own)
    quiet = dict.fromkeys(("plt_edge_hist", "plt_nbr_weights", "plt_agf_angles", "plt_theta"), False)
    graphs = initialize_banksy(slide, ("x", "y", "spatial"), neighbours, max_m=filters, **quiet)
    made, _ = generate_banksy_matrix(slide, graphs, [share], filters, verbose=False)
    pca_umap(made, pca_dims=[20], plt_remaining_var=False)
    return made["scaled_gaussian"][share]["adata"].obsm["reduced_pc_20"]


def banksy_leiden(adata: ad.AnnData, n_domains: int, seed: int) -> np.ndarray:
    """BANKSY's components and its own Leiden on 50 neighbours; the resolution is bisected."""
    from banksy.main import LeidenPartition

    graph = LeidenPartition(banksy_components(adata, seed), num_nn=50)
    return bisected(lambda value: graph.partition(value, n_iterations=-1, seed=seed)[0].dense, n_domains)


def banksy_mixture(adata: ad.AnnData, n_domains: int, seed: int) -> np.ndarray:
    """BANKSY's components and scikit-learn's tied mixture, in place of mclust's EEE model, which needs R."""
    return tied_mixture(banksy_components(adata, seed), n_domains, seed)


def cellcharter(adata: ad.AnnData, n_domains: int, seed: int) -> np.ndarray:
    """CellCharter as in its tutorials (three rings of neighbours), on 10 principal components.

    Its tutorials have a trained embedding of 10 dimensions where the components are here.
    """
    import cellcharter as cc
    import squidpy as sq

    slide = components(adata, seed, n_comps=10)
    if spots(adata):
        sq.gr.spatial_neighbors(slide, coord_type="grid", n_neighs=6)
    else:
        sq.gr.spatial_neighbors(slide, coord_type="generic", delaunay=True)
        cc.gr.remove_long_links(slide)
    cc.gr.aggregate_neighbors(slide, n_layers=3, use_rep="X_pca", out_key="X_cellcharter")
    seed_generators(seed)  # with random_state alone its labels differ from call to call
    trainer = {"accelerator": "cpu", "enable_progress_bar": False}
    model = cc.tl.Cluster(n_clusters=n_domains, random_state=seed, trainer_params=trainer)
    model.fit(slide, use_rep="X_cellcharter")
    return np.asarray(model.predict(slide, use_rep="X_cellcharter"))


def spagcn(adata: ad.AnnData, n_domains: int, seed: int) -> np.ndarray:
    """SpaGCN as in its tutorial, without histology; Louvain's resolution is bisected, spots are refined at the end."""
    import SpaGCN

    slide = adata.copy()
    slide.X = slide.X.toarray()  # it asks sparse matrices for an attribute that scipy has removed
    SpaGCN.prefilter_specialgenes(slide)
    sc.pp.normalize_total(slide)
    sc.pp.log1p(slide)
    x, y = np.asarray(adata.obsm["spatial"], np.float32).T[:2]
    distances = SpaGCN.calculate_adj_matrix(x=x.tolist(), y=y.tolist(), histology=False)
    scale = SpaGCN.search_l(0.5, distances, start=0.01, end=1000, tol=0.01, max_run=100)
    size = min(50, slide.n_vars - 1)  # its 50 components, or what a small panel has

    def cluster(resolution: float) -> np.ndarray:
        seed_generators(seed)
        model = SpaGCN.SpaGCN()
        model.set_l(scale)
        model.train(slide, distances, num_pcs=size, res=resolution, tol=5e-3, lr=0.05, max_epochs=200)
        return model.predict()[0]

    labels = bisected(cluster, n_domains)
    if not spots(adata):
        return labels
    return np.asarray(SpaGCN.refine(slide.obs_names.tolist(), labels.tolist(), distances, shape="hexagon"))


def neighbors_mean(adata: ad.AnnData, n_domains: int, seed: int) -> np.ndarray:
    """The script in first_answer.py: variable genes, scaled; the mean of 30 neighbors; scikit-learn's tied mixture."""
    slide = adata.copy()
    if slide.n_vars > 2000:
        sc.pp.highly_variable_genes(slide, n_top_genes=2000, flavor="seurat_v3", subset=True)
    sc.pp.normalize_total(slide)
    sc.pp.log1p(slide)
    sc.pp.scale(slide, max_value=10)
    sc.pp.pca(slide, n_comps=min(15, slide.n_vars - 1))  # its 15 components, or what a small panel has
    near = cKDTree(adata.obsm["spatial"]).query(adata.obsm["spatial"], k=31)[1]
    return tied_mixture(slide.obsm["X_pca"][near].mean(1), n_domains, seed)


PEERS = {
    "scanpy Leiden (no space)": Peer(leiden, ("scanpy", "leidenalg", "igraph"), (0.21, 0.27, 0.18, 0.26, 0.13)),
    "SpatialLeiden": Peer(spatial_leiden, ("spatialleiden", "leidenalg", "igraph"), (0.30, 0.31, 0.54, 0.82, 0.62)),
    "CellCharter (PCA)": Peer(cellcharter, ("cellcharter", "squidpy", "torch"), (0.29, 0.31, 0.34, 0.44, 0.30)),
    "SpaGCN": Peer(spagcn, ("SpaGCN", "louvain", "torch"), (0.41, 0.35, 0.27, 0.29, 0.12)),
    "BANKSY + Leiden": Peer(banksy_leiden, ("pybanksy", "leidenalg", "igraph"), (0.36, 0.32, 0.69, 0.59, 0.49)),
    "BANKSY + tied mixture": Peer(banksy_mixture, ("pybanksy", "scikit-learn"), (0.29, 0.19, 0.64, 0.79, 0.60)),
    "GraphST + tied mixture": Peer(None, (), (0.57, np.nan, np.nan, 0.75, np.nan)),
    "five-line script": Peer(neighbors_mean, ("scanpy", "scikit-learn"), always=True),
}
