"""The two-level mixture: against an independent reference, exact across patches, the same optimum by every method."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse as sp
from scipy.special import digamma, gammaln

import pdvi
from models_for_tests import largest_difference
from pdvi import graphs, metrics
from pdvi.core.problem import Augmentation
from pdvi.mixtures.reestimate import starting_point
from pdvi.mixtures.two_level import two_level_em, two_level_problem, two_level_start
from pdvi.shards.partition import along_space, layout, median_cuts

pytestmark = pytest.mark.slow

TISSUE = pdvi.datasets.two_level_tissue(400, n_features=3, n_domains=3, n_types=4, evenness=0.2, patchiness=5, seed=1)
X, XY = TISSUE.X.astype(float), TISSUE.coordinates
GRAPH = graphs.weights(graphs.nearest(XY, 6), X)
START = two_level_start(X, XY, 3, 4)
K, T, D = 3, 4, 3
SHARES = np.array([0.5, 0.3, 0.2])
BETA = 0.2

evaluate = eqx.filter_jit(lambda problem, lam, local: problem.evaluate(lam, local)[0].sum())


def two_level(n_patches, *, dtype=float, **settings):
    """The problem with unequal shares; 7 patches of 400 rows are padded."""
    where = layout(median_cuts(XY, n_patches), along_space(XY))
    problem = two_level_problem(X.astype(dtype), GRAPH, START, where, beta=BETA, concentration=0.7, **settings)
    return with_shares(problem), where


def with_shares(problem):
    return eqx.tree_at(lambda p: p.model.log_share, problem, jnp.log(jnp.asarray(SHARES, jnp.result_type(float))))


def reference(phi, psi, mean, log_var, rho, temperature=1.0):
    """The negative ELBO without log Z, as spec and textbook have it: each edge once, nothing rearranged."""
    noise, prior, centre = START.types.noise_variance, START.types.prior_variance, START.types.prior_mean
    squares = (X[:, None] - mean) ** 2 + np.exp(log_var)
    normal = -0.5 * (np.log(2 * np.pi * noise) + squares / noise).sum(-1)
    alpha, a0 = np.exp(rho), np.full(T, 0.7)
    logs = digamma(alpha) - digamma(alpha.sum(1, keepdims=True))
    total = temperature * sum(np.sum(q * np.log(np.maximum(q, 1e-300))) for q in (phi, psi))
    total -= np.sum(psi * normal) + np.einsum("ik,it,kt->", phi, psi, logs) + np.sum(phi @ np.log(SHARES))
    for i, j, r in zip(*sp.find(sp.triu(BETA * GRAPH, k=1))):
        total -= r * phi[i] @ phi[j]
    distance = (mean - centre) ** 2 + np.exp(log_var)
    total += 0.5 * np.sum(distance / prior + np.log(prior) - log_var - 1)
    divergence = gammaln(alpha.sum(1)) - gammaln(alpha).sum(1) - gammaln(a0.sum()) + gammaln(a0).sum()
    return total + np.sum(divergence + ((alpha - a0) * logs).sum(1))


def random_point(seed=3):
    rng = np.random.default_rng(seed)
    phi, psi = rng.dirichlet(np.ones(K), len(X)), rng.dirichlet(np.ones(T), len(X))
    return phi, psi, rng.standard_normal((T, D)), rng.standard_normal((T, D)) - 2, rng.uniform(-2, 6, (K, T))


def placed(problem, where, phi, psi, mean, log_var, rho):
    """The point as the problem has it."""
    lam = problem.ravel({"mean": mean, "log_var": log_var, "log_concentration": rho})
    masked = {"domain": phi, "type": psi}
    return jnp.asarray(lam), {name: jnp.asarray(where.shard(q) * where.mask[..., None]) for name, q in masked.items()}


@pytest.mark.parametrize("n_patches", [1, 7, 40])
def test_with_halo_the_partition_does_not_change_the_objective(x64, n_patches):
    problem, where = two_level(n_patches)
    point = random_point()
    found = evaluate(problem, *placed(problem, where, *point))
    np.testing.assert_allclose(found, reference(*point), rtol=1e-10)


def test_the_temperature_multiplies_both_entropies(x64):
    problem, where = two_level(7, temperature=0.3)
    point = random_point()
    found = evaluate(problem, *placed(problem, where, *point))
    np.testing.assert_allclose(found, reference(*point, temperature=0.3), rtol=1e-10)


def test_the_gradient_of_the_locals_is_that_of_the_whole_objective(x64):
    """Cut edges count in full, though a shard's loss has half of them."""
    problem, where = two_level(7, temperature=0.8)
    lam, local = placed(problem, where, *random_point())
    whole = jax.grad(lambda phi: evaluate(problem, lam, phi))(local)
    model, globals_ = problem.model, problem.unravel(lam)
    found = jax.jit(lambda phi: problem.map_shards(lambda q, s: model.local_gradient(q, globals_, s), phi))(local)
    for name in ("domain", "type"):
        np.testing.assert_allclose(where.unshard(found[name]), where.unshard(whole[name]), rtol=1e-9)


def test_the_local_step_sets_the_best_types_and_lowers_the_objective(x64):
    problem, where = two_level(1)
    lam, local = placed(problem, where, *random_point())
    globals_ = problem.unravel(lam)

    def objective(phi):
        return evaluate(problem, lam, phi)

    step = jax.jit(lambda phi: problem.map_shards(lambda q, s: problem.model.local_step(q, globals_, s), phi))
    new = step(local)
    # given the old domains no other types are better: the projected gradient is zero, and perturbed ones are worse
    types = {"domain": local["domain"], "type": new["type"]}
    slope = np.asarray(jax.grad(objective)(types)["type"])
    psi = np.asarray(types["type"])
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
    """A chain whose labels alternate, and edges that outweigh the rows."""
    n = len(X)
    chain = sp.diags_array([np.full(n - 1, 30.0)] * 2, offsets=[1, -1]).tocsr()
    where = layout(np.zeros(n, int))
    rises = []
    for damping in (0.0, None):
        problem = two_level_problem(X, chain, START, where, damping=damping)
        lam, local = placed(problem, where, *random_point()[:4], np.zeros((K, T)))
        globals_ = problem.unravel(lam)
        step = jax.jit(lambda phi, p=problem, g=globals_: p.map_shards(lambda q, s: p.model.local_step(q, g, s), phi))
        values = []
        for _ in range(30):
            local = step(local)
            values.append(float(evaluate(problem, lam, local)))
        rises.append(np.diff(values).max())
    assert rises[0] > 1e-3
    assert rises[1] <= 1e-8


def test_the_global_step_is_the_minimiser(x64):
    """Of one shard's loss plus any augmentation: the gradient is zero, and other globals are worse."""
    problem, where = two_level(1)
    lam, local = placed(problem, where, *random_point())
    shard, own = (jax.tree.map(lambda leaf: leaf[0], tree) for tree in (problem.shards, local))
    rng = np.random.default_rng(5)
    penalty = np.exp(rng.uniform(-2, 4, lam.shape))
    for scale in (0.0, 1.0):
        parts = (lam, scale * penalty * rng.standard_normal(lam.shape), scale * penalty)
        augmentation = Augmentation(*(problem.unravel(jnp.asarray(part)) for part in parts))
        objective = jax.jit(lambda x, extra=augmentation: problem.loss(own, x, shard) + extra(problem.unravel(x)))
        step = jax.jit(lambda extra: problem.model.global_step(problem.model.statistics(own, shard), extra))
        found = problem.ravel(step(augmentation))
        np.testing.assert_allclose(jax.grad(objective)(found), 0, atol=1e-8)
        for _ in range(5):
            assert objective(found + 1e-2 * rng.standard_normal(lam.shape)) > objective(found)


def test_statistics_add_over_shards(x64):
    phi, psi, *rest = random_point()
    totals = []
    for n_patches in (1, 7):
        problem, where = two_level(n_patches)
        _, local = placed(problem, where, phi, psi, *rest)
        totals.append(jax.tree.map(lambda leaf: leaf.sum(0), problem.map_shards(problem.model.statistics, local)))
    np.testing.assert_allclose(totals[0].counts, phi.T @ psi, rtol=1e-12)
    np.testing.assert_allclose(totals[0].total, psi.T @ X, rtol=1e-10)
    for one, seven in zip(*totals):
        np.testing.assert_allclose(one, seven, rtol=1e-10)


def test_natural_parameters_and_gradients(x64):
    """A full natural-gradient step leads to the best globals: the model is conjugate."""
    problem, where = two_level(1)
    lam, local = placed(problem, where, *random_point())
    model, globals_ = problem.model, problem.unravel(lam)
    back = model.from_natural(model.natural(globals_))
    for name, value in globals_.items():
        np.testing.assert_allclose(back[name], value, rtol=1e-12)
    shard, own = (jax.tree.map(lambda leaf: leaf[0], tree) for tree in (problem.shards, local))
    slope = jax.jit(jax.grad(model.loss, argnums=1))(own, globals_, shard)
    natural = jax.tree.map(jnp.subtract, model.natural(globals_), model.natural_gradient(globals_, slope))
    zero = jax.tree.map(jnp.zeros_like, globals_)
    step = jax.jit(lambda extra: model.global_step(model.statistics(own, shard), extra))
    best = model.natural(step(Augmentation(zero, zero, zero)))
    for name, value in best.items():
        np.testing.assert_allclose(natural[name], value, rtol=1e-6)


def test_free_locals_come_back(x64):
    problem, where = two_level(7)
    _, local = placed(problem, where, *random_point())
    free = problem.model.to_unconstrained(local)
    back = jax.vmap(problem.model.from_unconstrained)(free, problem.shards)
    own = {name: where.unshard(leaf) for name, leaf in back.items()}
    np.testing.assert_allclose(own["domain"], where.unshard(local["domain"]), rtol=1e-9)
    np.testing.assert_allclose(own["type"], where.unshard(local["type"]), rtol=1e-9)


def test_coordinate_ascent_ends_at_a_stationary_point(x64):
    problem, where = two_level(4)
    result = pdvi.fit(problem, pdvi.CAVI(), max_epochs=3000, tol=1e-15, log_every=50)
    assert result.converged
    lam, local = problem.ravel(result.global_params), jax.tree.map(jnp.asarray, result.local_params)
    phi, psi = (where.unshard(local[name]) for name in ("domain", "type"))
    blocks = (result.global_params[name] for name in ("mean", "log_var", "log_concentration"))
    assert result.objective == pytest.approx(reference(phi, psi, *blocks), rel=1e-10)
    by_lam, by_local = jax.grad(lambda lam, phi: evaluate(problem, lam, phi), argnums=(0, 1))(lam, local)
    np.testing.assert_allclose(by_lam, 0, atol=1e-5)
    for name, q in (("domain", phi), ("type", psi)):
        slope = where.unshard(by_local[name])
        assert np.abs(q * (slope - (q * slope).sum(1, keepdims=True))).max() < 1e-6


SOLVERS = {
    "PDVI": pdvi.PDVI(),
    "P2DVI": pdvi.P2DVI(),
    "SVI": pdvi.SVI(rate=1.0, forgetting=0.6),
    "MemoizedVB": pdvi.MemoizedVB(),
}


@pytest.mark.parametrize("name", SOLVERS)
def test_every_method_ends_at_the_same_objective(x64, name):
    problem, _ = two_level(8)
    point = starting_point(problem)
    expected = pdvi.fit(problem, pdvi.CAVI(), start=point, max_epochs=300, tol=1e-9, log_every=20).objective
    found = pdvi.fit(problem, SOLVERS[name], start=point, max_epochs=200, tol=1e-9, log_every=20).objective
    assert found == pytest.approx(expected, rel=1e-3)


def test_memory_and_disk_agree(tmp_path):
    problem, _ = two_level(6, dtype=np.float32)
    pdvi.write_store(tmp_path / "store", problem)
    stored = pdvi.Problem.from_store(tmp_path / "store")
    settings = {"batch_size": 1, "max_epochs": 5, "tol": 0, "seed": 3}
    memory = pdvi.fit(problem, pdvi.P2DVI(), **settings)
    disk = pdvi.fit(stored, pdvi.P2DVI(), executor=pdvi.Disk(), **settings)
    assert largest_difference(memory, disk) < 4e-6
    np.testing.assert_allclose(disk.trace["objective"], memory.trace["objective"], rtol=1e-6)


@pytest.mark.parametrize("noise", ["diagonal", "tied"])
def test_domains_and_types_are_found_with_noise_re_estimated(noise):
    tissue = pdvi.datasets.two_level_tissue(
        1_500, n_features=6, n_domains=4, n_types=6, separation=3.0, evenness=0.2, patchiness=5, seed=0
    )
    graph = graphs.nearest(tissue.coordinates, 8)
    where = layout(median_cuts(tissue.coordinates, 8), along_space(tissue.coordinates))
    start = two_level_start(tissue.X, tissue.coordinates, 4, 8)
    problem = two_level_problem(tissue.X, graph, start, where, beta=0.4)
    fitted = two_level_em(problem, pdvi.P2DVI(), noise=noise)
    domain, kind = (where.unshard(fitted.result.local_params[name]).argmax(1) for name in ("domain", "type"))
    assert metrics.ari(domain, tissue.labels) > max(0.8, metrics.ari(start.domain, tissue.labels))
    assert metrics.ari(kind, tissue.types) > 0.65  # eight types are sought where there are six
    estimated = np.linalg.inv(fitted.whitening)
    covariance = estimated @ np.diag(np.asarray(fitted.problem.model.noise_variance)) @ estimated.T
    np.testing.assert_allclose(np.diagonal(covariance), 1, atol=0.25)  # the simulated noise is standard normal


def test_wrong_numbers_are_told():
    with pytest.raises(ValueError, match=r"`n_types` must be between 1 and the number of rows \(400\)"):
        two_level_start(X, XY, 3, 401)
    with pytest.raises(ValueError, match="`concentration` must be positive and finite, got 0"):
        two_level_problem(X, GRAPH, START, layout(np.zeros(len(X), int)), concentration=0)
