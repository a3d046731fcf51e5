"""The Potts mixture: exact across patches, monotone under strong coupling."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse as sp
from scipy.sparse.linalg import eigsh

import pdvi
from pdvi import graphs, metrics
from pdvi.mixtures import damping_of_patches, empirical_bayes, potts_mixture_problem, safe_damping
from pdvi.shards.partition import along_space, consecutive, grid, layout, median_cuts

TISSUE = pdvi.datasets.tissue_features(1_600, n_features=6, n_domains=5, noise=1.0, patchiness=8, seed=1)
X, XY = TISSUE.X.astype(float), TISSUE.coordinates
GRAPH = graphs.weights(graphs.nearest(XY, 8), X)
SETTINGS = empirical_bayes(X, 5, seed=0)
K = 5


def reference(phi, mean, log_var, graph, settings=SETTINGS):
    """The negative ELBO without log Z, dense and unvectorised where it matters: each edge once."""
    squares = (X[:, None] - mean) ** 2 + np.exp(log_var)
    normal = -0.5 * (np.log(2 * np.pi * settings.noise_variance) + squares / settings.noise_variance).sum(-1)
    total = np.sum(phi * (np.log(np.maximum(phi, 1e-300)) - normal - np.log(1 / K)))
    for i, j, r in zip(*sp.find(sp.triu(graph, k=1))):
        total -= r * phi[i] @ phi[j]
    distance = (mean - settings.prior_mean) ** 2 + np.exp(log_var)
    return total + 0.5 * np.sum(distance / settings.prior_variance + np.log(settings.prior_variance) - log_var - 1)


def potts(n_patches, beta=0.5, **settings):
    where = layout(median_cuts(XY, n_patches), along_space(XY))
    return potts_mixture_problem(X, GRAPH, SETTINGS, where, beta=beta, **settings), where


def random_point():
    rng = np.random.default_rng(3)
    return rng.dirichlet(np.ones(K), len(X)), rng.standard_normal((K, 6)), rng.standard_normal((K, 6)) - 2


def masked(where, phi):
    return jnp.asarray(where.shard(phi) * where.mask[..., None])


@pytest.mark.parametrize("n_patches", [1, 4, 32, 100])
def test_with_halo_the_partition_does_not_change_the_objective(x64, n_patches):
    problem, where = potts(n_patches)
    phi, mean, log_var = random_point()
    lam = problem.ravel({"mean": jnp.asarray(mean), "log_var": jnp.asarray(log_var)})
    losses, _ = problem.evaluate(lam, masked(where, phi))
    expected = reference(phi, mean, log_var, 0.5 * GRAPH)
    np.testing.assert_allclose(losses.sum(), expected, rtol=1e-10)


def test_without_halo_cut_edges_are_missing(x64):
    problem, where = potts(32, halo=False)
    phi, mean, log_var = random_point()
    lam = problem.ravel({"mean": jnp.asarray(mean), "log_var": jnp.asarray(log_var)})
    patch = median_cuts(XY, 32)
    edges = sp.coo_array(GRAPH)
    kept = patch[edges.row] == patch[edges.col]
    cut = sp.csr_array((edges.data[kept], (edges.row[kept], edges.col[kept])), shape=GRAPH.shape)
    losses, _ = problem.evaluate(lam, masked(where, phi))
    np.testing.assert_allclose(losses.sum(), reference(phi, mean, log_var, 0.5 * cut), rtol=1e-10)
    assert kept.mean() < 0.95


@pytest.mark.parametrize("solver", [pdvi.P2DVI(), pdvi.CAVI()], ids=lambda s: type(s).__name__)
def test_the_answer_is_a_stationary_point_of_the_reference(x64, solver):
    """Each spot's responsibilities solve the coordinate equation with its neighbours' full weights."""
    problem, where = potts(16)
    result = pdvi.fit(problem, solver, max_epochs=2000, tol=1e-15, log_every=20)
    assert result.converged
    phi = where.unshard(result.local_params)
    mean, log_var = result.global_params["mean"], result.global_params["log_var"]
    np.testing.assert_allclose(result.objective, reference(phi, mean, log_var, 0.5 * GRAPH), rtol=1e-9)
    squares = (X[:, None] - mean) ** 2 + np.exp(log_var)
    logits = -0.5 * (squares / SETTINGS.noise_variance).sum(-1) + 0.5 * GRAPH @ phi
    # the projected gradient in phi: log phi - logits must be the same for all components
    gradient = np.log(np.maximum(phi, 1e-300)) - logits
    spread = (phi * (gradient - (phi * gradient).sum(1, keepdims=True))).max()
    assert abs(spread) < 1e-6
    slope = phi.sum(0)[:, None] * mean - phi.T @ X
    slope = slope / SETTINGS.noise_variance + (mean - SETTINGS.prior_mean) / SETTINGS.prior_variance
    np.testing.assert_allclose(slope, 0, atol=1e-5)


def sweeps(problem, where, count=40):
    """F over repeated sweeps of all spots at once, the globals fixed."""
    lam, local = problem.init(jax.random.key(0))
    rng = np.random.default_rng(0)
    local = masked(where, rng.dirichlet(np.full(K, 0.2), len(X)))
    globals_ = problem.unravel(lam)

    @jax.jit
    def sweep(local):
        local = problem.map_shards(lambda phi, shard: problem.model.local_step(phi, globals_, shard), local)
        return local, problem.evaluate(lam, local)[0].sum()

    values = []
    for _ in range(count):
        local, value = sweep(local)
        values.append(float(value))
    return np.array(values)


STRONG = graphs.weights(graphs.nearest(XY, 24), X)


def strong(damping=None):
    """Mean degree about 24, and edges that outweigh any evidence."""
    where = layout(np.zeros(len(X), int))
    return potts_mixture_problem(X, STRONG, SETTINGS, where, beta=20.0, damping=damping), where


def test_strong_weights_never_let_the_objective_rise(x64):
    assert STRONG.nnz / len(X) > 20
    values = sweeps(*strong())
    assert (np.diff(values) <= 1e-9 * np.abs(values[1:])).all()


def test_without_damping_strong_weights_do_oscillate(x64):
    """So the test above can fail: a chain that alternates has nothing but neighbours of the other kind."""
    n = len(X)
    chain = sp.diags_array([np.full(n - 1, 30.0)] * 2, offsets=[1, -1]).tocsr()
    where = layout(np.zeros(n, int))
    bare, damped = (potts_mixture_problem(X, chain, SETTINGS, where, damping=d) for d in (0.0, None))
    assert (np.diff(sweeps(bare, where)) > 1e-3).any()
    values = sweeps(damped, where)
    assert (np.diff(values) <= 1e-9 * np.abs(values[1:])).all()


def test_damping_is_zero_for_weak_coupling_and_bounded_by_the_spectrum(x64):
    assert safe_damping(sp.csr_array(0.01 * GRAPH)) == 0
    strongest = sp.csr_array(20.0 * STRONG)
    exact = -np.linalg.eigvalsh(strongest.toarray()).min() / 4 - 0.5
    assert exact <= safe_damping(strongest) < 1.15 * exact


def test_damping_of_a_large_graph_is_that_of_its_patches(x64):
    places = np.random.default_rng(0).uniform(size=(24_000, 2))
    graph = sp.csr_array(graphs.nearest(places, 12, mutual=False), dtype=float)
    lowest = eigsh(graph, 1, which="SA", tol=1e-4, return_eigenvectors=False)[0]
    exact = -lowest / 4 - 0.5
    assert exact <= damping_of_patches(graph, layout(median_cuts(places, 32))) < 1.25 * exact


@pytest.mark.slow
def test_patches_give_the_same_labels_with_halo_and_seams_without():
    """Seams: neighbours in different patches disagree more often once their edges are dropped."""
    tissue = pdvi.datasets.tissue_features(10_000, n_features=20, n_domains=6, noise=1.5, patchiness=12)
    graph = graphs.weights(graphs.nearest(tissue.coordinates, 8), tissue.X)
    settings = empirical_bayes(tissue.X, 6)
    order = along_space(tissue.coordinates)

    def labels(n_patches, halo=True):
        where = layout(median_cuts(tissue.coordinates, n_patches), order)
        problem = potts_mixture_problem(tissue.X, graph, settings, where, halo=halo)
        return where.unshard(pdvi.fit(problem, pdvi.P2DVI()).local_params).argmax(1)

    one, many, cut = labels(1), labels(32), labels(32, halo=False)
    assert metrics.ari(one, many) > 0.98
    patch = median_cuts(tissue.coordinates, 32)
    edges = sp.coo_array(sp.triu(graph, k=1))
    crossing = patch[edges.row] != patch[edges.col]

    def disagree(labels):
        return (labels[edges.row] != labels[edges.col])[crossing].mean()

    assert disagree(cut) > 1.2 * disagree(many), (disagree(cut), disagree(many), disagree(one))


@pytest.mark.slow
def test_isolated_spots_and_single_spot_patches():
    lonely = sp.lil_array(GRAPH)
    lonely[7, :] = 0
    lonely[:, 7] = 0
    for patch in (consecutive(len(X), 8), np.arange(len(X))):
        where = layout(patch)
        problem = potts_mixture_problem(X, sp.csr_array(lonely), SETTINGS, where, beta=0.5)
        result = pdvi.fit(problem, pdvi.P2DVI(), max_epochs=20)
        phi = where.unshard(result.local_params)
        np.testing.assert_allclose(phi.sum(1), 1, rtol=1e-4)


def test_an_empty_graph_is_the_plain_mixture(x64):
    where = layout(consecutive(len(X), 4))
    potts_problem = potts_mixture_problem(X, sp.csr_array(GRAPH.shape), SETTINGS, where)
    plain = pdvi.mixtures.gaussian_mixture_problem(X, SETTINGS, where)
    solver = pdvi.P2DVI(eta={"mean": 0.02, "log_var": 2.0})  # by itself it begins and explores as suits the model
    one = pdvi.fit(potts_problem, solver, max_epochs=5, tol=0)
    two = pdvi.fit(plain, solver, max_epochs=5, tol=0)
    np.testing.assert_allclose(one.trace["objective"], two.trace["objective"], rtol=1e-12)


def test_temperature_hardens_the_labels(x64):
    cold, where = potts(4, temperature=0.05)
    warm, _ = potts(4)
    entropies = []
    for problem in (cold, warm):
        phi = where.unshard(pdvi.fit(problem, pdvi.P2DVI(), max_epochs=30).local_params)
        entropies.append(-np.sum(phi * np.log(np.maximum(phi, 1e-300))))
    assert entropies[0] < 0.5 * entropies[1]


def test_the_papers_grid_gives_a_valid_layout():
    patch = grid(XY, 5, 5)
    where = layout(patch)
    assert sorted(where.rows[where.mask].tolist()) == list(range(len(X)))
    problem = potts_mixture_problem(X, GRAPH, SETTINGS, where, halo=False)
    assert np.isfinite(pdvi.fit(problem, pdvi.P2DVI(), max_epochs=3).objective)
