"""The hierarchical mixture: against an independent reference, exact across patches, one optimum for all methods."""

import dataclasses
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse as sp
from scipy.special import digamma, gammaln

import pdvi
from models_for_tests import cut, hierarchical_problem, ring
from pdvi import graphs, metrics
from pdvi.mixtures.density import Density
from pdvi.mixtures.fit_mixture import FitOptions, fit_hierarchical
from pdvi.mixtures.init import center, domains_of_types, kmeans_labels, one_hot
from pdvi.mixtures.sharded_graph import ShardedGraph
from pdvi.models.mixture import PRIOR_COUNT, PRIOR_ROWS

N, K, T, D = 60, 2, 3, 2
PATCHES = [1, 4, 7, 60]
KINDS = ["tied", "diagonal", "diag"]

evaluate = eqx.filter_jit(lambda problem, lam, local: problem.evaluate(lam, local)[0].sum())


def rows_of(problem, n_shards):
    return cut(N, n_shards).unshard(problem.shards["x"])


def cool(problem, temperature):
    return eqx.tree_at(lambda p: p.model.types.temperature, problem, jnp.asarray(temperature))


def reference(problem, X, phi, psi, globals_, temperature=1.0):
    """The negative ELBO without log Z as the textbook has it: each edge once, each row alone, nothing rearranged."""
    model = problem.model
    lower, g = model.types, {name: np.asarray(value) for name, value in globals_.items()}
    first = np.asarray(lower.precision)
    P = {
        "tied": lambda p: np.stack([p] * T),
        "diagonal": lambda p: np.stack([np.diag(p)] * T),
        "diag": lambda p: np.stack([np.diag(row) for row in p]),
    }[lower.covariance](g["precision"])
    alpha, a0 = np.exp(g["log_concentration"]), np.asarray(model.prior_concentration)
    log_theta = digamma(alpha) - digamma(alpha.sum(1, keepdims=True))
    eta = g["domain_log_weight"]
    total = 0.0
    for i in range(N):
        for t in range(T):
            gap = X[i] - g["mean"][t]
            normal = 0.5 * np.linalg.slogdet(P[t])[1] - 0.5 * D * np.log(2 * np.pi) + float(lower.log_scale)
            normal -= 0.5 * (gap @ P[t] @ gap + np.diag(P[t]) @ np.exp(g["log_var"][t]))
            total += psi[i, t] * (temperature * np.log(psi[i, t]) - normal)
            total -= psi[i, t] * phi[i] @ log_theta[:, t]
        total += temperature * np.sum(phi[i] * np.log(phi[i])) - phi[i] @ eta
    for i, j, r in zip(*sp.find(sp.triu(ring(N), k=1))):
        total -= r * phi[i] @ phi[j]
    prior, xi = np.asarray(lower.prior_variance), np.asarray(lower.prior_mean)
    square = (g["mean"] - xi) ** 2 + np.exp(g["log_var"])
    total += 0.5 * np.sum(square / prior + np.log(prior) - g["log_var"] - 1)
    divergence = gammaln(alpha.sum(1)) - gammaln(alpha).sum(1) - gammaln(a0.sum()) + gammaln(a0).sum()
    total += np.sum(divergence + ((alpha - a0) * log_theta).sum(1))
    # weak priors: a row with the covariance of the start for each precision, and one for each domain
    ratio = np.linalg.eigvalsh(g["precision"]) if lower.covariance == "tied" else g["precision"] / first
    total += 0.5 * PRIOR_ROWS * np.sum(ratio - np.log(ratio) - 1)
    total -= PRIOR_COUNT * np.sum(eta + np.log(K))
    return total + (N + K * PRIOR_COUNT) * (np.exp(eta).sum() - 1)


def random_point(problem, seed=3):
    """Locals row by row, and globals."""
    rng = np.random.default_rng(seed)
    phi, psi = rng.dirichlet(np.ones(K), N), rng.dirichlet(np.ones(T), N)
    globals_ = {}
    for name, value in problem.model.init_global(None).items():
        noise = rng.normal(size=value.shape)
        if name == "precision":
            small = 0.3 * noise
            globals_[name] = value + small @ small.T if problem.model.covariance == "tied" else value * np.exp(small)
        else:
            globals_[name] = value + 0.5 * noise
    return phi, psi, {name: jnp.asarray(value) for name, value in globals_.items()}


def in_shards(n_shards, phi, psi):
    where = cut(N, n_shards)
    return {name: jnp.asarray(where.shard(q) * where.mask[..., None]) for name, q in (("domain", phi), ("type", psi))}


@pytest.mark.parametrize("n_shards", PATCHES)
@pytest.mark.parametrize("covariance", KINDS)
def test_with_halo_the_partition_does_not_change_the_objective(x64, covariance, n_shards):
    problem = hierarchical_problem(N, n_shards, covariance=covariance)
    phi, psi, globals_ = random_point(problem)
    found = evaluate(problem, problem.ravel(globals_), in_shards(n_shards, phi, psi))
    expected = reference(problem, rows_of(problem, n_shards), phi, psi, globals_)
    assert float(found) == pytest.approx(expected, rel=1e-11)


def test_the_temperature_multiplies_both_entropies(x64):
    problem = cool(hierarchical_problem(N, 7), 0.3)
    phi, psi, globals_ = random_point(problem)
    found = evaluate(problem, problem.ravel(globals_), in_shards(7, phi, psi))
    expected = reference(problem, rows_of(problem, 7), phi, psi, globals_, temperature=0.3)
    assert float(found) == pytest.approx(expected, rel=1e-11)


def test_the_gradient_of_the_locals_is_that_of_the_whole_objective(x64):
    """Cut edges count in full, though a shard's loss has half of them; along the probabilities."""
    problem = cool(hierarchical_problem(N, 7), 0.8)
    where = cut(N, 7)
    phi, psi, globals_ = random_point(problem)
    local, lam = in_shards(7, phi, psi), problem.ravel(globals_)
    whole = jax.grad(lambda local: evaluate(problem, lam, local))(local)
    found = problem.map_shards(lambda q, shard: problem.model.local_gradient(q, globals_, shard), local)
    for name in ("domain", "type"):
        one, two = (where.unshard(leaf[name]) for leaf in (found, whole))
        one, two = (leaf - leaf.mean(1, keepdims=True) for leaf in (one, two))
        np.testing.assert_allclose(one, two, rtol=1e-9, atol=1e-9)


def sweeper(problem, globals_):
    return jax.jit(lambda phi: problem.map_shards(lambda q, s: problem.model.local_step(q, globals_, s), phi))


def test_the_local_step_sets_the_best_types_and_lowers_the_objective(x64):
    problem = hierarchical_problem(N, 1)
    phi, psi, globals_ = random_point(problem)
    local, lam = in_shards(1, phi, psi), problem.ravel(globals_)

    def objective(local):
        return evaluate(problem, lam, local)

    step = sweeper(problem, globals_)
    new = step(local)
    # given the old domains no other types are better: the projected gradient is zero, and perturbed ones are worse
    types = {"domain": local["domain"], "type": new["type"]}
    slope, psi = np.asarray(jax.grad(objective)(types)["type"]), np.asarray(types["type"])
    np.testing.assert_allclose(psi * (slope - (psi * slope).sum(-1, keepdims=True)), 0, atol=1e-9)
    rng = np.random.default_rng(0)
    for _ in range(3):
        other = types["type"] * np.exp(0.1 * rng.standard_normal(types["type"].shape))
        assert objective({**types, "type": other / other.sum(-1, keepdims=True)}) > objective(types)
    values = [float(objective(local))]
    for _ in range(15):
        values.append(float(objective(new)))
        new = step(new)
    assert (np.diff(values) <= 1e-9 * np.abs(values[1:])).all()
    assert values[-1] < values[1] < values[0]


def test_strong_weights_need_the_damping(x64):
    """Labels that alternate along a ring, and edges that outweigh the rows."""
    strong = sp.csr_array(60 * ring(N))
    sharded = ShardedGraph(N, strong, n_shards=1)
    rises = []
    for damping in (0.0, sharded.safe_damping()):
        model = hierarchical_problem(N, 1).model
        model = dataclasses.replace(model, types=dataclasses.replace(model.types, damping=jnp.asarray(damping)))
        problem = sharded.problem(model, rows_of(hierarchical_problem(N, 1), 1))
        phi, psi, globals_ = random_point(problem)
        globals_["log_concentration"] = jnp.zeros((K, T))
        local = {"domain": sharded.shard(phi), "type": sharded.shard(psi)}
        step, values = sweeper(problem, globals_), []
        for _ in range(30):
            local = step(local)
            values.append(float(evaluate(problem, problem.ravel(globals_), local)))
        rises.append(np.diff(values).max())
    assert rises[0] > 1e-3
    assert rises[1] <= 1e-8


def test_statistics_add_over_shards(x64):
    totals = []
    for n_shards in (1, 7):
        problem = hierarchical_problem(N, n_shards)
        phi, psi, _ = random_point(problem)
        table = problem.map_shards(problem.model.statistics, in_shards(n_shards, phi, psi))
        totals.append(jax.tree.map(lambda leaf: leaf.sum(0), table))
    X = rows_of(problem, 7)
    np.testing.assert_allclose(totals[0].counts, phi.T @ psi, rtol=1e-12)
    np.testing.assert_allclose(totals[0].types.total, psi.T @ X, rtol=1e-10)
    np.testing.assert_allclose(totals[0].types.square, X.T @ X, rtol=1e-10)
    for one, seven in zip(*map(jax.tree.leaves, totals), strict=True):
        np.testing.assert_allclose(seven, one, rtol=1e-10)


@pytest.fixture(scope="module")
def found_by_coordinate_ascent():
    with jax.enable_x64(True):
        problem = hierarchical_problem(N, 4)
        return problem, pdvi.fit(problem, pdvi.CAVI(), max_epochs=5000, tol=0, grad_tol=1e-9, log_every=50)


def test_coordinate_ascent_ends_at_a_stationary_point(x64, found_by_coordinate_ascent):
    problem, result = found_by_coordinate_ascent
    assert result.converged
    where = cut(N, 4)
    globals_ = {name: jnp.asarray(value) for name, value in result.global_params.items()}
    local = jax.tree.map(jnp.asarray, result.local_params)
    phi, psi = (np.maximum(where.unshard(local[name]), 1e-300) for name in ("domain", "type"))
    assert result.objective == pytest.approx(reference(problem, rows_of(problem, 4), phi, psi, globals_), rel=1e-10)
    both = jax.grad(lambda lam, local: evaluate(problem, lam, local), argnums=(0, 1))
    by_lam, by_local = both(problem.ravel(globals_), local)
    np.testing.assert_allclose(by_lam, 0, atol=1e-5)
    for name, q in (("domain", phi), ("type", psi)):
        slope = where.unshard(by_local[name])
        assert np.abs(q * (slope - (q * slope).sum(1, keepdims=True))).max() < 1e-5


SOLVERS = {
    "PDVI": pdvi.PDVI(),
    "P2DVI": pdvi.P2DVI(),
    "SVI": pdvi.SVI(rate=1.0, forgetting=0.6),
    "MemoizedVB": pdvi.MemoizedVB(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SOLVERS)
def test_every_method_stays_at_the_optimum_and_returns_to_it(x64, name, found_by_coordinate_ascent):
    problem, best = found_by_coordinate_ascent
    rng = np.random.default_rng(0)
    moved = {block: value + 0.02 * rng.normal() for block, value in best.global_params.items() if block != "precision"}
    start = pdvi.Point({**best.global_params, **moved}, best.local_params)
    found = pdvi.fit(problem, SOLVERS[name], start=start, max_epochs=300, tol=1e-9, log_every=20, batch_size=1)
    assert found.objective == pytest.approx(best.objective, rel=1e-3)


@pytest.mark.slow
def test_memory_and_disk_agree(tmp_path):
    problem = hierarchical_problem(N, 6)
    pdvi.write_store(tmp_path / "store", problem)
    stored = pdvi.Problem.from_store(tmp_path / "store", model=problem.model)
    settings = {"batch_size": 1, "max_epochs": 5, "tol": 0, "seed": 3}
    memory = pdvi.fit(problem, pdvi.P2DVI(), **settings)
    disk = pdvi.fit(stored, pdvi.P2DVI(), executor=pdvi.Disk(), **settings)
    np.testing.assert_allclose(disk.trace["objective"], memory.trace["objective"], rtol=1e-5)
    for name, value in memory.global_params.items():
        np.testing.assert_allclose(disk.global_params[name], value, rtol=1e-3, atol=1e-4)


class Quarters(NamedTuple):
    """Four squares of cells, each with mostly two of six types; the noise is standard normal."""

    X: np.ndarray
    coordinates: np.ndarray
    labels: np.ndarray
    types: np.ndarray
    compositions: np.ndarray


@pytest.fixture(scope="module")
def quarters():
    rng = np.random.default_rng(0)
    side = 40
    coordinates = np.stack(np.meshgrid(np.arange(side), np.arange(side)), -1).reshape(-1, 2).astype(float)
    labels = (coordinates >= side / 2) @ [1, 2]
    compositions = np.full((4, 6), 0.05)
    for k, mostly in enumerate(([0, 1], [1, 2], [3, 4], [4, 5])):
        compositions[k, mostly] = 0.4
    types = np.array([rng.choice(6, p=compositions[k]) for k in labels])
    X = 3 * rng.normal(size=(6, 5))[types] + rng.normal(size=(side**2, 5))
    return Quarters(X.astype(np.float32), coordinates, labels, types, compositions)


def fitted_to(tissue, n_domains, n_types, *, beta=0.8, **options):
    graph = graphs.nearest(tissue.coordinates, 8).astype(float)
    sharded = ShardedGraph(len(tissue.X), graph, tissue.coordinates, n_shards=8, beta=beta)
    types = one_hot(kmeans_labels(center(tissue.X), n_types, runs=4), n_types)
    start = domains_of_types(types, tissue.coordinates, n_domains)
    options = FitOptions(learn_weight=False, **options)
    return fit_hierarchical(tissue.X, sharded, start, types, options), start.argmax(1)


def best_match(found, truth, n_labels):
    return [int(np.bincount(found[truth == k], minlength=n_labels).argmax()) for k in range(n_labels)]


@pytest.mark.parametrize("covariance", ["tied", "diagonal", "diag", "spherical"])
def test_one_fit_finds_domains_types_compositions_and_noise(quarters, covariance):
    fitted, _ = fitted_to(quarters, 4, 6, covariance=covariance)
    assert fitted.result.converged
    domain, kind = fitted.labels, fitted.types.argmax(1)
    assert metrics.ari(domain, quarters.labels) > 0.92
    assert metrics.ari(kind, quarters.types) > 0.95
    order, kinds = best_match(domain, quarters.labels, 4), best_match(kind, quarters.types, 6)
    np.testing.assert_allclose(fitted.composition[np.ix_(order, kinds)], quarters.compositions, atol=0.06)
    noise = Density(fitted).covariances
    expected = np.broadcast_to(np.eye(5), (6, 5, 5))
    np.testing.assert_allclose(noise, expected, atol=0.12 if covariance in ("tied", "diagonal") else 0.3)


@pytest.mark.slow
def test_a_fit_finds_domains_that_its_start_has_missed():
    tissue = pdvi.datasets.two_level_tissue(
        1_500, n_features=6, n_domains=4, n_types=6, separation=3.0, evenness=0.2, patchiness=5, seed=0
    )
    fitted, start = fitted_to(tissue, 4, 6, beta=0.4)
    assert metrics.ari(fitted.labels, tissue.labels) > metrics.ari(start, tissue.labels) + 0.1
    assert metrics.ari(fitted.labels, tissue.labels) > 0.83


@pytest.mark.slow
def test_the_estimator_finds_the_same_in_all_units_and_labels_others(quarters):
    def fitted(factor):
        mixture = pdvi.TwoLevelMixture(4, n_types=6, beta=0.8, random_state=0)
        return mixture.fit(factor * quarters.X, coordinates=quarters.coordinates)

    mixture, other = fitted(1.0), fitted(1e-8)
    assert metrics.ari(mixture.labels_, quarters.labels) > 0.92
    np.testing.assert_array_equal(mixture.labels_, other.labels_)
    np.testing.assert_allclose(other.means_ * 1e8, mixture.means_, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(other.covariances_ * 1e16, mixture.covariances_, rtol=1e-2, atol=1e-3)
    assert other.elbo_ + quarters.X.size * np.log(1e-8) == pytest.approx(mixture.elbo_, rel=1e-4)
    again = mixture.predict(quarters.X, coordinates=quarters.coordinates)
    assert metrics.ari(again, mixture.labels_) > 0.98


def test_wrong_numbers_are_told():
    X = np.random.default_rng(0).normal(size=(40, 2))
    with pytest.raises(ValueError, match=r"`n_types` must be between 1 and the number of rows \(40\)"):
        pdvi.TwoLevelMixture(3, n_types=41).fit(X)
    with pytest.raises(ValueError, match="`concentration` must be positive and finite, got 0"):
        pdvi.TwoLevelMixture(3, n_types=4, concentration=0).fit(X)
