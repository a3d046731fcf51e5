"""The Potts mixture: exact across patches, monotone under strong coupling."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse as sp
from jax import monitoring

import pdvi
from pdvi import graphs, metrics
from pdvi.mixtures import empirical_bayes, potts_mixture_problem, safe_damping
from pdvi.mixtures.fit_mixture import FitOptions, fit_mixture, run_fit
from pdvi.mixtures.init import kmeans_labels, one_hot
from pdvi.mixtures.sharded_graph import ShardedGraph
from pdvi.shards.buckets import AT_ONCE, bucket, columns_at_once, degree_bucket
from pdvi.shards.partition import along_space, consecutive, grid, layout, median_cuts
from pdvi.solvers.primal_dual.oracles import CoordinateDescent

TISSUE = pdvi.datasets.tissue_features(1_600, n_features=6, n_domains=5, noise=1.0, patchiness=8, seed=1)
X, XY = TISSUE.X.astype(float), TISSUE.coordinates
GRAPH = graphs.weights(graphs.nearest(XY, 8), X)
SETTINGS = empirical_bayes(X, 5, seed=0)
K = 5


def reference(phi, mean, log_var, graph, settings=SETTINGS):
    """The negative ELBO without log Z, dense and unvectorized where it matters: each edge once."""
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
    """Each spot's responsibilities solve the coordinate equation with its neighbors' full weights."""
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


def test_several_sweeps_a_visit_read_the_same_halo():
    """The rows of other patches stay as they are within a visit, and more sweeps end at the same labels."""
    problem, where = potts(4)
    labels = []
    for n_sweeps in (1, 3):
        solver = pdvi.P2DVI(oracle=CoordinateDescent(sweeps=n_sweeps))
        labels.append(where.unshard(pdvi.fit(problem, solver).local_params).argmax(1))
    assert metrics.ari(*labels) > 0.95


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
    """So the test above can fail: a chain that alternates has nothing but neighbors of the other kind."""
    n = len(X)
    chain = sp.diags_array([np.full(n - 1, 30.0)] * 2, offsets=[1, -1]).tocsr()
    where = layout(np.zeros(n, int))
    bare, damped = (potts_mixture_problem(X, chain, SETTINGS, where, damping=d) for d in (0.0, None))
    assert (np.diff(sweeps(bare, where)) > 1e-3).any()
    values = sweeps(damped, where)
    assert (np.diff(values) <= 1e-9 * np.abs(values[1:])).all()


def exact_damping(graph):
    return -np.linalg.eigvalsh(graph.toarray()).min() / 4 - 0.5


def test_damping_is_zero_for_weak_coupling_and_enough_for_the_spectrum(x64):
    assert safe_damping(sp.csr_array(0.01 * GRAPH)) == 0
    assert exact_damping(20.0 * STRONG) <= safe_damping(sp.csr_array(20.0 * STRONG))
    assert safe_damping(GRAPH, beta=20.0) == pytest.approx(safe_damping(sp.csr_array(20.0 * GRAPH)))
    assert safe_damping(STRONG, 20.0, temperature=2.0) == pytest.approx(safe_damping(STRONG, 10.0))


def test_on_a_ring_the_damping_is_no_more_than_it_must_be(x64):
    """Neighbors of an even ring are of two colors, and its lowest eigenvalue is minus the sum of a row."""
    n = 40
    ring = sp.csr_array((np.full(n, 3.0), (np.arange(n), (np.arange(n) + 1) % n)), shape=(n, n))
    ring = sp.csr_array(ring + ring.T)
    assert safe_damping(ring) == pytest.approx(exact_damping(ring))


@pytest.mark.slow
def test_patches_give_the_same_labels_with_halo_and_seams_without():
    """Seams: neighbors in different patches disagree more often once their edges are dropped."""
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


# ------------------------------------------------------------------------------------------------- sizes in buckets


@pytest.mark.parametrize("n_patches", [1, 5])
def test_padding_to_a_bucket_changes_no_answer(x64, n_patches):
    n = 421  # 448 slots in one patch, and degrees in steps of eight
    fits = []
    for bucketed in (False, True):
        where = layout(median_cuts(XY[:n], n_patches), along_space(XY[:n]))
        where = where.in_buckets() if bucketed else where
        graph = graphs.weights(graphs.nearest(XY[:n], 6), X[:n])
        problem = potts_mixture_problem(X[:n], graph, SETTINGS, where, beta=0.5)
        result = pdvi.fit(problem, pdvi.CAVI(), max_epochs=6, tol=0)
        fits.append((problem, where.unshard(result.local_params), result.trace["objective"]))
    (plain, labels, objective), (padded, padded_labels, padded_objective) = fits
    assert padded.shards["x"].shape[1] == bucket(plain.shards["x"].shape[1])
    assert padded.shards["table"].shape[1] % 8 == 0
    np.testing.assert_allclose(padded_objective, objective, rtol=1e-10)
    np.testing.assert_allclose(padded_labels, labels, atol=1e-9)


def test_buckets_hold_their_sizes_and_waste_little():
    sizes = np.arange(1, 20_000)
    found = np.array([bucket(int(size)) for size in sizes])
    assert (found >= sizes).all()
    assert (found <= 1.125 * sizes + 1e-9).all()
    assert len(set(found[2047:4096])) == 9  # eight a doubling
    assert [bucket(size, 0) for size in (1, 2, 3, 5, 8, 9)] == [1, 2, 4, 8, 8, 16]
    assert [degree_bucket(degree) for degree in (0, 1, 4, 5, 8)] == [8, 8, 8, 8, 8]
    assert degree_bucket(9) == 16


@pytest.mark.parametrize("columns", range(2, 50, 2))
def test_columns_of_a_table_are_worked_on_in_a_loop(columns):
    size = columns_at_once(columns)
    assert columns % size == 0
    assert columns // size >= 2 or columns == 2
    assert size <= AT_ONCE
    assert columns_at_once(2 * AT_ONCE) == AT_ONCE


@pytest.mark.slow
def test_tissues_of_one_bucket_share_what_is_compiled():
    """960 to 1,024 spots are one bucket; other patterns of degrees do not matter either."""
    compiled = []

    def count(event, duration_secs, **kwargs):
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    def fit(n_spots):
        drawn = pdvi.datasets.tissue_features(n_spots, n_features=5, n_domains=4, patchiness=6, seed=n_spots)
        graph = graphs.weights(graphs.nearest(drawn.coordinates, 6), drawn.X)
        mixture = pdvi.PottsMixture(4, beta=0.5, n_patches=1, reseed=False, random_state=0)
        mixture.fit(drawn.X, graph=graph, coordinates=drawn.coordinates)

    monitoring.register_event_duration_secs_listener(count)
    jax.clear_caches()  # what other tests compiled
    try:
        fit(1_020)
        first = len(compiled)
        assert first > 0
        for n_spots in (1_000, 970, 1_024):
            fit(n_spots)
        assert len(compiled) == first
    finally:
        monitoring.unregister_event_duration_listener(count)


# ------------------------------------------------------------------------------------------------- everything at once


def checkerboard(apart=1.0, noise=1.0, size=16):
    """A grid whose evidence differs between its colors, and whose coupling wants them all alike."""
    i, j = np.divmod(np.arange(size * size), size)
    places, draws = np.stack([i, j], axis=1).astype(float), np.random.default_rng(0).normal(size=(size * size, 2))
    rows = apart * np.where((i + j) % 2, 1.0, -1.0)[:, None] + noise * draws
    return rows, sp.csr_array(graphs.within(places, 1.1), dtype=float), places


def fit_both(rows, graph, places, start, beta):
    """A mixture on a checkerboard as it is fitted, and the objective of a run that is damped from the beginning."""
    sharded = ShardedGraph(len(rows), graph, places, n_shards=1, beta=beta)
    options = FitOptions(covariance="diagonal")
    assert sharded.safe_damping() > 1
    found = fit_mixture(rows, sharded, start, options)
    problem = sharded.problem(found.model, (rows - found.offset) @ found.whitening.T)
    damped = eqx.tree_at(lambda p: p.model.damping, problem, jnp.asarray(sharded.safe_damping()))
    return found, run_fit(damped, sharded.shard(start), options).objective


@pytest.mark.filterwarnings("ignore:the objective rose:pdvi.run.running.SafeguardWarning")
@pytest.mark.parametrize(("apart", "noise", "beta"), [(1.0, 1.0, 4.0), (0.3, 0.3, 2.0), (0.3, 1.0, 20.0)])
def test_a_fit_that_oscillates_ends_no_worse_than_a_damped_one(x64, apart, noise, beta):
    """All spots that have the other color around them want to change at once."""
    rows, graph, places = checkerboard(apart, noise)
    found, damped = fit_both(rows, graph, places, one_hot((places.sum(1) % 2).astype(int), 2, float), beta)
    assert found.objective <= damped + 1e-6


@pytest.mark.parametrize(("apart", "noise", "beta"), [(1.0, 1.0, 4.0), (0.3, 1.0, 20.0)])
def test_so_it_does_where_the_safeguard_has_ended_the_first_run(x64, apart, noise, beta):
    rows, graph, places = checkerboard(apart, noise)
    found, damped = fit_both(rows, graph, places, one_hot(kmeans_labels(rows, 2), 2, float), beta)
    assert found.result.converged
    assert found.objective <= damped + 1e-6


def three_domains(noise):
    drawn = pdvi.datasets.tissue_features(2_000, n_features=10, n_domains=3, patchiness=6, seed=2)
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(3, 10))[drawn.labels] + noise * rng.normal(size=(2_000, 10))
    graph = graphs.nearest(drawn.coordinates, 12, mutual=False)
    return rows, drawn.labels, {"graph": graph, "coordinates": drawn.coordinates}


@pytest.mark.parametrize("patches", [1, 4])
@pytest.mark.parametrize("learn_weights", [False, True])
def test_a_component_that_a_start_leaves_empty_is_put_to_use(patches, learn_weights):
    rows, truth, given = three_domains(0.7 if learn_weights else 1.5)
    start = np.eye(3)[np.minimum(truth, 1)]
    how = {"beta": 0.8, "learn_weights": learn_weights, "n_patches": patches, "random_state": 0}
    without = pdvi.PottsMixture(3, reseed=False, **how).fit(rows, start=start, **given)
    mixture = pdvi.PottsMixture(3, **how).fit(rows, start=start, **given)
    assert mixture.elbo_ > without.elbo_ + 100
    assert pdvi.metrics.ari(truth, mixture.labels_) > 0.95
    own = np.stack([rows[mixture.labels_ == k].mean(0) for k in range(3)])  # in the units of the rows
    np.testing.assert_allclose(mixture.means_, own, atol=0.1)


@pytest.mark.parametrize("covariance", ["tied", "diagonal"])
def test_one_fit_finds_domains_and_noise(covariance):
    rows, truth, given = three_domains(1.5)
    mixture = pdvi.PottsMixture(3, beta=0.5, covariance=covariance, random_state=0).fit(rows, **given)
    assert pdvi.metrics.ari(truth, mixture.labels_) > 0.95
    expected = 2.25 * np.eye(10) if covariance == "tied" else np.full(10, 2.25)
    np.testing.assert_allclose(mixture.covariances_, expected, atol=0.3)
    fixed = pdvi.PottsMixture(3, beta=0.5, covariance=covariance, random_state=0, estimate_noise=False)
    assert mixture.elbo_ > fixed.fit(rows, **given).elbo_


def test_the_number_of_patches_does_not_change_where_a_fit_ends():
    rows, truth, given = three_domains(1.0)
    start = np.eye(3)[truth]
    one, eight = (
        pdvi.PottsMixture(3, beta=0.5, n_patches=n, tol=1e-7, random_state=0).fit(rows, start=start, **given)
        for n in (1, 8)
    )
    assert eight.elbo_ == pytest.approx(one.elbo_, rel=1e-5)
    np.testing.assert_allclose(eight.covariances_, one.covariances_, atol=0.01)
    assert (eight.labels_ == one.labels_).mean() > 0.999


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (np.ones((10, 2)), r"`start` must have rows of 3 probabilities for 1600 rows of X, got shape \(10, 2\)\."),
        (np.ones((1_600, 3)), "whose rows do not all add up to 1; divide each by its sum"),
    ],
)
def test_bad_starts_are_named(start, message):
    with pytest.raises(ValueError, match=message):
        pdvi.PottsMixture(3).fit(X, graph=GRAPH, start=start)
