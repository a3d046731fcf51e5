"""The mixture with everything estimated as a block: its ELBO, its steps and Algorithm 1, in double precision."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse as sp
from scipy.special import logsumexp

import pdvi
from pdvi.core.problem import Problem
from pdvi.models.closed_forms import log_det, positive_root
from pdvi.models.collapsed_mixture import CollapsedMixtureModel
from pdvi.models.mixture import PRIOR_COUNT, PRIOR_ROWS, MixtureModel, PottsMixtureModel
from pdvi.shards.neighbours import neighbour_tables
from pdvi.shards.partition import consecutive, layout
from pdvi.shards.stacking import take

K, D, N, S = 3, 2, 60, 2
SHAPES = {"diagonal": (D,), "tied": (D, D), "diag": (K, D), "spherical": (K,), "full": (K, D, D)}
SHARED = ("diagonal", "tied")

pytestmark = pytest.mark.usefixtures("x64")


@dataclasses.dataclass
class Case:
    """Rows, what is known of them, and the model; `problem` cuts them into shards."""

    X: np.ndarray
    model: MixtureModel
    weight: np.ndarray | None = None
    sample: np.ndarray | None = None
    graph: sp.csr_array | None = None

    def problem(self, n_shards=1, *, passes=1):
        where = layout(consecutive(len(self.X), n_shards))
        weight = np.ones(len(self.X)) if self.weight is None else self.weight
        real = where.mask
        x, mask = where.shard(self.X), where.shard(weight) * real
        shards = {"x": x, "mask": mask, "fraction": mask.sum(1) / weight.sum()}
        if self.model.covariance == "tied":
            shards["square"] = np.einsum("bnd,bne,bn->bde", x, x, mask)
        elif self.model.covariance == "diagonal":
            shards["square"] = np.einsum("bnd,bnd,bn->bd", x, x, mask)
        if self.sample is not None:
            shards["sample"] = where.shard(self.sample).astype(np.int32)
        halo = None
        if self.graph is not None:
            tables = list(neighbour_tables(self.graph, where))
            shards |= {name: np.stack([getattr(t, name) for t in tables]) for name in ("table", "weight")}
            longest = max(len(t.halo) for t in tables)
            halo = np.stack([np.resize(t.halo, longest) for t in tables]) if longest else None
        return Problem(dataclasses.replace(self.model, passes=passes), shards, halo=halo), where


def case(covariance, *, weights=True, precision=True, samples=False, graph=False, rows_weighted=False, seed=0):
    rng = np.random.default_rng(seed)
    truth = rng.integers(K, size=N)
    X = np.array([[0, 0], [6, 0], [0, 6]])[truth] + rng.normal(size=(N, D))
    sample = np.arange(N) % S if samples else None
    if samples:
        X = X + rng.normal(size=(S, D))[sample]
    weight = rng.uniform(0.5, 2.0, N) if rows_weighted else None
    start = {
        "diagonal": np.full(D, 0.8),
        "tied": np.eye(D),
        "diag": rng.uniform(0.5, 1.5, (K, D)),
        "spherical": rng.uniform(0.5, 1.5, K),
        "full": np.broadcast_to(np.eye(D), (K, D, D)),
    }[covariance]
    full = covariance == "full"
    frame = rng.normal(size=(K, D, D)) * 0.2 + np.eye(D) if full else None
    matrix = covariance in ("tied", "full")
    model = (PottsMixtureModel if graph else MixtureModel)(
        start=jnp.zeros((K, D)) if full else jnp.asarray([[0.5, 0], [5, 0.5], [0.5, 5]]),
        prior_mean=jnp.asarray(rng.normal(size=D)),
        prior_variance=jnp.full(D, 4.0) if matrix else jnp.asarray(rng.uniform(2, 5, D)),
        precision=jnp.asarray(start),
        log_weight=jnp.log(jnp.asarray([0.5, 0.3, 0.2])),
        n_rows=jnp.asarray(float(N if weight is None else weight.sum())),
        log_scale=jnp.asarray(0.3),
        temperature=jnp.asarray(1.0),
        damping=jnp.asarray(0.0),
        offset_variance=jnp.asarray([1.5, 2.0]) if samples else None,
        frame_mean=jnp.asarray([[0.5, 0], [5, 0.5], [0.5, 5]]) if full else None,
        frame=None if frame is None else jnp.asarray(frame),
        covariance=covariance,
        learn_precision=precision,
        learn_weight=weights,
    )
    edges = None
    if graph:
        ring = sp.csr_array((np.full(N, 0.7), (np.arange(N), (np.arange(N) + 1) % N)), shape=(N, N))
        edges = sp.csr_array(ring + ring.T)
    return Case(X, model, weight, sample, edges)


CASES = {
    **{covariance: {"covariance": covariance} for covariance in SHAPES},
    "diagonal, all fixed": {"covariance": "diagonal", "weights": False, "precision": False},
    "tied, fixed precision": {"covariance": "tied", "precision": False},
    "tied on a graph": {"covariance": "tied", "graph": True},
    "tied with samples": {"covariance": "tied", "samples": True},
    "diagonal with samples on a graph": {"covariance": "diagonal", "samples": True, "graph": True},
    "full, weighted rows": {"covariance": "full", "rows_weighted": True},
    "diag, weighted rows": {"covariance": "diag", "rows_weighted": True},
}


@pytest.fixture(params=list(CASES), ids=lambda name: name.replace(" ", "_").replace(",", ""))
def given(request):
    return case(**CASES[request.param])


def globals_near(model, seed=1):
    """Globals away from the start, the precision positive definite."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, value in model.init_global(None).items():
        noise = rng.normal(size=value.shape)
        if name == "precision":
            root = noise * 0.2
            if value.ndim >= 2 and value.shape[-1] == value.shape[-2] and model.covariance in ("tied", "full"):
                found[name] = value + root @ np.swapaxes(root, -1, -2)
            else:
                found[name] = value * np.exp(root)
        else:
            found[name] = value + 0.3 * noise
    return {name: jnp.asarray(value) for name, value in found.items()}


def labels_near(n, seed=2):
    phi = np.random.default_rng(seed).dirichlet(np.ones(K), n)
    return phi


def component_precisions(model, precision):
    """Precision, as a matrix in the units of the rows, of every component."""
    precision = np.asarray(precision)
    if model.covariance == "full":
        frame = np.asarray(model.frame)
        return np.swapaxes(frame, 1, 2) @ precision @ frame
    whole = {
        "diagonal": lambda: np.broadcast_to(np.diag(precision) if precision.ndim == 1 else precision, (K, D, D)),
        "tied": lambda: np.broadcast_to(precision, (K, D, D)),
        "diag": lambda: np.stack([np.diag(row) for row in precision]),
        "spherical": lambda: np.stack([value * np.eye(D) for value in precision]),
    }
    return whole[model.covariance]()


def reference(given, phi, globals_):
    """The negative ELBO row by row, from the densities themselves; the weights normalized by hand."""
    model, X = given.model, given.X
    g = {name: np.asarray(value) for name, value in globals_.items()}
    weight = np.ones(N) if given.weight is None else given.weight
    precision = component_precisions(model, g.get("precision", np.asarray(model.precision)))
    mean, variance = g["mean"], np.exp(g["log_var"])
    if model.frame is not None:  # blocks of a component are in its own frame
        back = np.linalg.inv(np.asarray(model.frame))
        centers = np.einsum("kde,ke->kd", back, mean) + np.asarray(model.frame_mean)
        spread = np.einsum("kde,ke,kfe->kdf", back, variance, back)
    else:
        centers, spread = mean, np.stack([np.diag(row) for row in variance])
    eta = g.get("log_weight", np.asarray(model.log_weight))
    value = 0.0
    for i in range(N):
        x = X[i].copy()
        own = np.zeros((D, D))
        if given.sample is not None:
            x -= g["offset"][given.sample[i]]
            own = np.diag(np.exp(g["offset_log_var"][given.sample[i]]))
        for k in range(K):
            P = precision[k]
            residual = x - centers[k]
            log_density = 0.5 * np.linalg.slogdet(P)[1] - 0.5 * D * np.log(2 * np.pi)
            log_density -= 0.5 * (residual @ P @ residual + np.trace(P @ (spread[k] + own)))
            p = weight[i] * phi[i, k]
            value -= p * (log_density + float(model.log_scale) + eta[k] - np.log(phi[i, k]))
    if given.graph is not None:
        graph = given.graph.toarray()
        value -= 0.5 * np.einsum("il,ik,lk->", graph, phi, phi)

    def divergence(mean, log_var, prior_mean, prior_variance):
        v = np.exp(log_var)
        terms = np.log(prior_variance) - log_var - 1 + (v + (mean - prior_mean) ** 2) / prior_variance
        return 0.5 * terms.sum()

    value += divergence(mean, g["log_var"], np.asarray(model.prior_mean), np.asarray(model.prior_variance))
    if given.sample is not None:
        s2 = np.asarray(model.offset_variance)[:, None]
        value += divergence(g["offset"], g["offset_log_var"], 0.0, s2)
    if model.learn_precision:  # the weak prior: one more row around every mean, with the covariance of the start
        P = np.asarray(g["precision"])
        first = np.asarray(model.precision)
        if model.covariance in ("tied", "full"):
            traces, dets = np.trace(P, axis1=-2, axis2=-1), np.linalg.slogdet(P)[1]
        elif model.covariance == "spherical":
            traces, dets = D * P / first, D * np.log(P / first)
        else:
            traces, dets = (P / first).sum(-1), np.log(P / first).sum(-1)
        value += 0.5 * PRIOR_ROWS * np.sum(traces - dets - D)
    if model.learn_weight:
        value -= PRIOR_COUNT * (eta + np.log(K)).sum()
        value += (weight.sum() + K * PRIOR_COUNT) * (np.exp(eta).sum() - 1)
    return value


def total_loss(problem, where, phi, globals_, weight):
    local = where.shard(phi * weight[:, None]) * where.mask[..., None]
    return float(problem.evaluate(problem.ravel(globals_), jnp.asarray(local))[0].sum())


def weight_of(given):
    return np.ones(N) if given.weight is None else given.weight


@pytest.mark.parametrize("n_shards", [1, 4])
def test_the_loss_is_the_negative_elbo_however_rows_are_cut(given, n_shards):
    problem, where = given.problem(n_shards)
    phi, globals_ = labels_near(N), globals_near(given.model)
    found = total_loss(problem, where, phi, globals_, weight_of(given))
    assert found == pytest.approx(reference(given, phi, globals_), rel=1e-10)


def test_weights_that_do_not_add_up_to_one_only_cost(x64):
    given = case("tied")
    problem, where = given.problem()
    phi, globals_ = labels_near(N), globals_near(given.model)
    normalized = {**globals_, "log_weight": globals_["log_weight"] - logsumexp(globals_["log_weight"])}
    ones = np.ones(N)
    assert total_loss(problem, where, phi, globals_, ones) > total_loss(problem, where, phi, normalized, ones)


def shard_of(problem, b):
    return jax.tree.map(lambda leaf: leaf[b], problem.shards)


def augmentation_of(problem, lam, seed=3):
    """Dual and penalty as Algorithm 1 has them: one penalty for a matrix and for each of its means; symmetric duals."""
    rng = np.random.default_rng(seed)
    dual, penalty = {}, {}
    for name, shape in problem.blocks:
        noise = 0.3 * rng.normal(size=shape)
        matrix = problem.model.covariance in ("tied", "full")
        if name == "precision" and matrix:
            noise = noise + np.swapaxes(noise, -1, -2)
            size = rng.uniform(0.5, 2.0, shape[:-2])
            penalty[name] = np.broadcast_to(np.asarray(size)[..., None, None], shape)
        elif name in ("mean", "offset") and matrix:
            penalty[name] = np.broadcast_to(rng.uniform(0.5, 2.0, (shape[0], 1)), shape)
        else:
            penalty[name] = rng.uniform(0.5, 2.0, shape)
        dual[name] = noise
    return problem.augmentation(lam, problem.ravel(dual), problem.ravel(penalty))


@pytest.mark.parametrize("augmented", [True, False])
def test_passes_over_the_blocks_end_at_the_minimizer(given, augmented):
    problem, where = given.problem(2, passes=400)
    lam = problem.ravel(globals_near(given.model))
    phi = jnp.asarray(where.shard(labels_near(N) * weight_of(given)[:, None]) * where.mask[..., None])
    local, shard = problem.read(phi, jnp.asarray(1)), shard_of(problem, 1)
    added = augmentation_of(problem, lam) if augmented else problem.augmentation(lam, 0 * lam, 0 * lam)
    best = problem.ravel(problem.model.global_step(problem.model.statistics(local, shard), added))
    slope = jax.grad(lambda x: problem.loss(local, x, shard) + added(problem.unravel(x)))(best)
    np.testing.assert_allclose(slope, 0, atol=1e-7)


def test_no_pass_raises_the_augmented_loss(given):
    problem, where = given.problem(2)
    lam = problem.ravel(globals_near(given.model))
    phi = jnp.asarray(where.shard(labels_near(N) * weight_of(given)[:, None]) * where.mask[..., None])
    local, shard = problem.read(phi, jnp.asarray(0)), shard_of(problem, 0)
    added = augmentation_of(problem, lam)
    best = problem.ravel(problem.model.global_step(problem.model.statistics(local, shard), added))

    def value(x):
        return float(problem.loss(local, x, shard) + added(problem.unravel(x)))

    assert value(best) < value(lam)


def test_a_matrix_stays_symmetric_and_positive_however_wild_dual_and_center_are(x64):
    for covariance in ("tied", "full"):
        given = case(covariance)
        problem, where = given.problem(2)
        globals_ = globals_near(given.model)
        globals_["precision"] = globals_["precision"] - 5 * jnp.eye(D)  # as h may leave it at the server
        lam = problem.ravel(globals_)
        phi = jnp.asarray(where.shard(labels_near(N)) * where.mask[..., None])
        shard = shard_of(problem, 0)
        found = problem.model.global_step(problem.model.statistics(phi[0], shard), augmentation_of(problem, lam))
        P = np.asarray(found["precision"])
        np.testing.assert_allclose(P, np.swapaxes(P, -1, -2), atol=1e-12)
        assert np.linalg.eigvalsh(P).min() > 0
        assert np.isfinite(np.asarray(problem.ravel(found))).all()


@pytest.mark.parametrize("a", [-1e8, -3.0, 0.0, 1e-9, 3.0, 1e8])
@pytest.mark.parametrize("penalty", [1e-8, 1.0, 1e8])
def test_the_positive_root_solves_its_equation(a, penalty):
    p = float(positive_root(jnp.asarray(a), jnp.asarray(penalty), jnp.asarray(7.0)))
    assert p > 0
    size = 3.5 / p + abs(a) + penalty * p
    assert -3.5 / p + a + penalty * p == pytest.approx(0, abs=1e-12 * size)


def test_without_a_penalty_the_root_is_the_plain_estimate():
    assert float(positive_root(jnp.asarray(2.0), jnp.asarray(0.0), jnp.asarray(7.0))) == pytest.approx(7 / 4)


def test_a_local_step_leaves_no_projected_gradient(given):
    if given.graph is not None:
        pytest.skip("on a graph a sweep is one step of many")
    problem, _ = given.problem()
    shard, globals_ = shard_of(problem, 0), globals_near(given.model)
    phi = problem.model.local_step(jnp.asarray(labels_near(N)), globals_, shard)
    slope = np.asarray(jax.grad(lambda p: problem.model.loss(p, globals_, shard))(phi))
    np.testing.assert_allclose(slope - slope.mean(1, keepdims=True), 0, atol=1e-8)
    np.testing.assert_allclose(np.asarray(phi).sum(1), weight_of(given), rtol=1e-12)


def test_the_local_gradient_is_that_of_all_shards(given):
    if given.graph is None:
        pytest.skip("without a graph a shard's own loss has all of it")
    problem, where = given.problem(3)
    lam = problem.ravel(globals_near(given.model))
    local = jnp.asarray(where.shard(labels_near(N) * weight_of(given)[:, None]) * where.mask[..., None])
    whole = jax.grad(lambda phi: problem.evaluate(lam, phi)[0].sum())(local)
    offered = problem.map_shards(lambda p, s: problem.model.local_gradient(p, problem.unravel(lam), s), local)
    np.testing.assert_allclose(np.asarray(offered)[where.mask], np.asarray(whole)[where.mask], rtol=1e-8, atol=1e-8)


def test_the_curvature_is_that_of_the_hessian_at_its_own_optimum(given):
    """Between a third and three times the mean of every block's diagonal, where the globals fit the labels."""
    problem, where = given.problem(1, passes=50)
    lam = problem.ravel(globals_near(given.model))
    local = jnp.asarray(where.shard(labels_near(N) * weight_of(given)[:, None]))[0]
    shard = shard_of(problem, 0)
    nothing = problem.augmentation(lam, 0 * lam, 0 * lam)
    best = problem.ravel(problem.model.global_step(problem.model.statistics(local, shard), nothing))
    exact = np.diagonal(jax.hessian(lambda x: problem.loss(local, x, shard))(best))
    offered = np.asarray(problem.ravel(problem.model.curvature(local, problem.unravel(best), shard)))
    for name, part in problem.block_slices.items():
        ratio = offered[part].mean() / exact[part].mean()
        assert 1 / 3 < ratio < 3, (name, ratio)


def test_natural_parameters_and_back(given):
    globals_ = globals_near(given.model)
    again = given.model.from_natural(given.model.natural(globals_))
    for name, value in globals_.items():
        np.testing.assert_allclose(again[name], value, rtol=1e-8, atol=1e-10)


# ------------------------------------------------------------------------------------------------ Algorithm 1 on it


def run_of(given, solver, n_shards=6, epochs=3, **settings):
    problem, where = given.problem(n_shards, **settings)
    return problem, where, pdvi.fit(problem, solver, max_epochs=epochs, tol=0, batch_size=1, seed=0)


@pytest.mark.parametrize("covariance", list(SHAPES))
def test_facts_of_algorithm_1_hold_for_the_precision_block(covariance):
    """h = D^-1 mean mu; lam0 = gamma + h; duals of matrices are symmetric; mu_b = - grad f_b after an exact oracle."""
    given = case(covariance)
    problem, _, result = run_of(given, pdvi.P2DVI(eta=0.05), passes=200)
    state = result.state
    mu, D_, h = (np.asarray(state[name], float) for name in ("own.dual", "server.penalty", "server.h"))
    np.testing.assert_allclose(h, mu.mean(0) / D_, atol=1e-9)
    np.testing.assert_allclose(state["server.lam0"], state["server.lam"] + h, atol=1e-9)
    for b in range(problem.n_shards):
        local = jnp.asarray(result.local_params[b])
        slope = jax.grad(problem.loss, argnums=1)(local, jnp.asarray(state["own.copy"][b]), shard_of(problem, b))
        np.testing.assert_allclose(mu[b], -np.asarray(slope), atol=1e-6)
        if covariance in ("tied", "full"):
            dual = np.asarray(problem.unravel(jnp.asarray(mu[b]))["precision"])
            np.testing.assert_allclose(dual, np.swapaxes(dual, -1, -2), atol=1e-9)


@pytest.mark.parametrize("covariance", list(SHAPES))
@pytest.mark.parametrize("graph", [False, True])
def test_p2dvi_ends_where_coordinate_ascent_ends(covariance, graph):
    given = case(covariance, graph=graph)
    if graph and covariance not in SHARED:
        pytest.skip("one covariance type of its own is enough")
    problem, _ = given.problem(6)
    start = pdvi.fit(problem, pdvi.CAVI(), max_epochs=400, tol=0).point
    best = pdvi.fit(problem, pdvi.CAVI(), start=start, max_epochs=400, tol=0)
    found = pdvi.fit(problem, pdvi.P2DVI(exploration=0), start=start, max_epochs=40, tol=0, batch_size=1)
    assert found.objective == pytest.approx(best.objective, abs=1e-6 * abs(best.objective))
    assert np.abs(np.diff(found.trace["objective"])).max() < 1e-6 * abs(best.objective)  # it stays where it is


@pytest.mark.parametrize("covariance", list(SHAPES))
def test_everything_is_estimated_by_one_fit(covariance):
    """From the model's own start the globals end at a stationary point of F in all blocks."""
    given = case(covariance)
    problem, _ = given.problem(6)
    result = pdvi.fit(problem, pdvi.P2DVI(exploration=0), max_epochs=300, tol=0, batch_size=1)
    lam = problem.ravel({name: jnp.asarray(value) for name, value in result.global_params.items()})
    slope = jax.grad(lambda x: problem.evaluate(x, jnp.asarray(result.local_params))[0].sum())(lam)
    np.testing.assert_allclose(slope, 0, atol=1e-4)


def test_an_indefinite_precision_has_no_objective():
    """Two negative eigenvalues have a positive determinant; a run that gets there must count as diverged."""
    problem, where = case("tied").problem()
    globals_ = {**globals_near(problem.model), "precision": -jnp.eye(D)}
    assert np.isnan(total_loss(problem, where, labels_near(N), globals_, np.ones(N)))


def test_log_det_has_the_inverse_as_its_derivative():
    roots = np.random.default_rng(0).normal(size=(3, 4, 4))
    matrices = jnp.asarray(roots @ np.swapaxes(roots, 1, 2))
    value, gradient = jax.vmap(jax.value_and_grad(log_det))(matrices)
    np.testing.assert_allclose(value, np.linalg.slogdet(matrices)[1], rtol=1e-12)
    np.testing.assert_allclose(gradient, np.linalg.inv(matrices), rtol=1e-8)
    assert np.isnan(log_det(jnp.diag(jnp.asarray([1.0, -1.0]))))


@pytest.mark.parametrize("rows_weighted", [False, True])
@pytest.mark.parametrize("covariance", SHAPES)
def test_statistics_stand_for_responsibilities(covariance, rows_weighted):
    problem, _ = case(covariance, rows_weighted=rows_weighted).problem(2)
    model, globals_ = problem.model, globals_near(problem.model)
    shard = take(problem.shards, 1)
    phi = model.local_step(None, globals_, shard)
    blocks = {**shard, "x": shard["x"].reshape(3, 10, D), "mask": shard["mask"].reshape(3, 10)}
    collapsed = CollapsedMixtureModel(**vars(model))
    nothing = collapsed.init_local(jax.random.key(0), blocks)
    assert not any(leaf.any() for leaf in jax.tree.leaves(nothing))
    found = collapsed.local_step(nothing, globals_, blocks)
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-10),
        collapsed.statistics(found, blocks),
        model.statistics(phi, shard),
    )
    for at in (globals_, globals_near(model, seed=7)):
        expected = model.loss(phi, at, shard)
        np.testing.assert_allclose(collapsed.loss(found, at, blocks), expected, rtol=1e-10)
