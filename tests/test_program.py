"""Small tissues as one program: the numbers of the step-by-step path; padding changes nothing; few compilations."""

import dataclasses

import jax
import numpy as np
import pytest
from jax import monitoring

import pdvi
from pdvi import graphs
from pdvi.mixtures.build import coupled, coupled_problem, point_at
from pdvi.mixtures.em import variational_em
from pdvi.mixtures.ground import Ground
from pdvi.mixtures.program import fit_together
from pdvi.mixtures.recipe import RECIPE
from pdvi.mixtures.start import empirical_bayes, whitened, whitening_of
from pdvi.mixtures.task import Rows, Task
from pdvi.mixtures.tries import Tries
from pdvi.shards.buckets import AT_ONCE, bucket, columns_at_once, degree_bucket
from pdvi.shards.partition import along_space, layout, median_cuts


def tissue(n_spots=420, seed=0):
    data = pdvi.datasets.tissue_features(n_spots, n_features=5, n_domains=4, patchiness=6, seed=seed)
    X = data.X.astype(float) - data.X.mean(0)
    return X, graphs.weights(graphs.nearest(data.coordinates, 6), X), data.coordinates


def one_shard(X, graph, coordinates, *, bucketed=True, settings=None, damping=None):
    where = layout(median_cuts(coordinates, 1), along_space(coordinates))
    where = where.in_buckets() if bucketed else where
    settings = empirical_bayes(X, 4) if settings is None else settings
    return where, coupled_problem(X, settings, where, coupled(graph, where, beta=0.5, damping=damping))


def at_ends(trace):
    """Rows of a trace but those that begin a round, which the program does not look at."""
    return trace[trace["event"] == ""]


@pytest.mark.parametrize(("noise", "weights"), [("tied", True), ("diagonal", False), (None, True)])
def test_the_program_gives_the_numbers_of_the_step_by_step_path(x64, noise, weights):
    X, graph, coordinates = tissue()
    problems, expected = [], []
    where, _ = one_shard(X, graph, coordinates)
    for seed in range(2):
        settings, matrix = empirical_bayes(X, 4, seed=seed), np.eye(5)
        if noise == "tied":
            matrix = whitening_of(X, settings)
            settings = whitened(settings, matrix)
        log_scale = float(np.linalg.slogdet(matrix)[1])
        coupling = coupled(graph, where, beta=0.5)
        alone = coupled_problem(X @ matrix.T, settings, where, coupling, log_scale=log_scale)
        problems.append(alone)
        expected.append(variational_em(alone, pdvi.CAVI(), noise=noise, weights=weights, max_epochs=100, tol=1e-6))
    found = fit_together(problems, noise=noise, weights=weights, tol=1e-6, recipe=RECIPE, seed=0)
    for one, two in zip(found, expected, strict=True):
        assert one.result.status is two.result.status
        trace, steps = one.result.trace, at_ends(two.result.trace)
        for column in ("epoch", "objective", "grad_norm"):
            scale = np.abs(steps[column]).max()
            np.testing.assert_allclose(trace[column], steps[column], rtol=1e-9, atol=1e-9 * scale)
        assert (trace["event"] != "").sum() == (two.result.trace["event"] != "").sum()
        np.testing.assert_allclose(one.result.local_params, two.result.local_params, atol=1e-9)
        np.testing.assert_allclose(one.whitening, two.whitening, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(one.problem.model.noise_variance, two.problem.model.noise_variance, rtol=1e-9)


def test_from_known_probabilities_too(x64):
    X, graph, coordinates = tissue()
    where, problem = one_shard(X, graph, coordinates, damping=0.0)
    known = where.shard(np.random.default_rng(0).dirichlet(np.ones(4), len(X)))
    how = {"noise": "diagonal", "weights": True, "tol": 1e-6, "recipe": RECIPE, "seed": 0}
    (one,) = fit_together([problem], known=known, **how)
    start, settings = point_at(problem, known), {"max_epochs": 100, "first": RECIPE.known_epochs}
    two = variational_em(problem, pdvi.CAVI(), noise="diagonal", weights=True, start=start, **settings)
    for column in ("epoch", "objective"):
        np.testing.assert_allclose(one.result.trace[column], at_ends(two.result.trace)[column], rtol=1e-9)
    np.testing.assert_allclose(one.result.local_params, two.result.local_params, atol=1e-9)


def checkerboard(apart=1.0, noise=1.0, size=16):
    """A grid whose evidence differs between its colours, and whose coupling wants them all alike."""
    i, j = np.divmod(np.arange(size * size), size)
    coordinates, draws = np.stack([i, j], axis=1).astype(float), np.random.default_rng(0).normal(size=(size * size, 2))
    X = apart * np.where((i + j) % 2, 1.0, -1.0)[:, None] + noise * draws
    return X, graphs.within(coordinates, 1.1), coordinates


@pytest.mark.parametrize(
    ("apart", "noise", "beta", "wild"),
    [(1.0, 1.0, 4.0, True), (0.3, 0.3, 2.0, True), (0.3, 1.0, 20.0, True), (1.0, 0.3, 4.0, False)],
)
def test_sweeps_that_go_astray_are_made_again_with_damping(x64, apart, noise, beta, wild):
    X, graph, coordinates = checkerboard(apart, noise)
    where = layout(median_cuts(coordinates, 1), along_space(coordinates)).in_buckets()
    settings = empirical_bayes(X, 2)
    plain, damped = (
        coupled_problem(X, settings, where, coupled(graph, where, beta=beta, damping=damping)) for damping in (0, None)
    )
    safe = float(damped.model.damping)
    assert safe > 1
    how = {"noise": "diagonal", "weights": True, "tol": 1e-6, "recipe": RECIPE, "seed": 0}
    (unhelped,), (expected,) = fit_together([plain], **how), fit_together([damped], **how)
    (found,) = fit_together([plain], damping=lambda: safe, **how)
    assert (unhelped.result.objective > expected.result.objective + 100) == wild  # labels swap colours for ever
    assert float(found.problem.model.damping) == (safe if wild else 0)
    assert found.result.objective <= expected.result.objective + 1e-3
    np.testing.assert_allclose(found.result.local_params, expected.result.local_params, atol=1e-3)


def test_later_fits_of_a_tissue_whose_sweeps_went_astray_are_damped_at_once():
    X, graph, coordinates = checkerboard()
    ground = Ground(Rows(X, graph, coordinates), Task(2, learn_weights=True, beta=4.0))
    first, settings = ground.problem(X, empirical_bayes(X, 2), 0.0, None), empirical_bayes(X, 2, seed=1)
    assert float(first.model.damping) == 0
    assert ground.damping() > 1
    assert float(ground.problem(X, settings, 0.0, None).model.damping) == np.float32(ground.damping())


def test_padding_changes_no_answer(x64):
    X, graph, coordinates = tissue(421)  # 448 slots, and degrees in steps of eight
    plain, padded = (one_shard(X, graph, coordinates, bucketed=one) for one in (False, True))
    assert padded[1].shards["x"].shape[1] == 448
    assert padded[1].shards["table"].shape[1] % 8 == 0
    fits = [pdvi.fit(problem, pdvi.CAVI(), max_epochs=6, tol=0) for _, problem in (plain, padded)]
    np.testing.assert_allclose(fits[1].trace["objective"], fits[0].trace["objective"], rtol=1e-12)
    labels = [where.unshard(fit.local_params) for (where, _), fit in zip((plain, padded), fits)]
    np.testing.assert_allclose(labels[1], labels[0], atol=1e-10)


def test_patches_in_buckets_change_no_answer_either(x64):
    X, graph, coordinates = tissue(421)
    fits = []
    for bucketed in (False, True):
        where = layout(median_cuts(coordinates, 5), along_space(coordinates))
        where = where.in_buckets() if bucketed else where
        problem = coupled_problem(X, empirical_bayes(X, 4), where, coupled(graph, where, beta=0.5))
        fits.append(pdvi.fit(problem, pdvi.P2DVI(), max_epochs=4, tol=0))
    assert problem.halo.shape[1] == bucket(problem.halo.shape[1])
    np.testing.assert_allclose(fits[1].trace["objective"], fits[0].trace["objective"], rtol=1e-10)


def test_buckets_hold_their_sizes_and_waste_little():
    sizes = np.arange(1, 20_000)
    found = np.array([bucket(int(size)) for size in sizes])
    assert (found >= sizes).all()
    assert (found <= 1.125 * sizes + 1e-9).all()
    assert len(set(found[2047:4096])) == 9  # eight a doubling
    assert [degree_bucket(degree) for degree in (0, 1, 4, 5, 8)] == [8, 8, 8, 8, 8]
    assert degree_bucket(9) == 16


@pytest.mark.parametrize("columns", range(2, 50, 2))
def test_columns_of_a_table_are_worked_on_in_a_loop(columns):
    size = columns_at_once(columns)
    assert columns % size == 0
    assert columns // size >= 2 or columns == 2
    assert size <= AT_ONCE
    assert columns_at_once(2 * AT_ONCE) == AT_ONCE


def slide(n_spots):
    from anndata import AnnData

    X, _, coordinates = tissue(n_spots)
    adata = AnnData(obsm={"X_pca": X.astype(np.float32), "spatial": coordinates})
    adata.obs_names = np.arange(n_spots).astype(str)
    return adata


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:made what was missing")
def test_slides_of_one_bucket_share_what_is_compiled():
    """960 to 1,024 spots are one bucket; other patterns of degrees do not matter either."""
    compiled = []

    def count(event, duration_secs, **kwargs):
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    monitoring.register_event_duration_secs_listener(count)
    jax.clear_caches()  # what other tests compiled
    try:
        pdvi.tl.domains(slide(1_020), 4, refine=False)
        first = len(compiled)
        assert 0 < first <= 30
        for n_spots in (1_000, 970, 1_024):
            pdvi.tl.domains(slide(n_spots), 4, refine=False)
        assert len(compiled) == first
    finally:
        monitoring.unregister_event_duration_listener(count)


@pytest.mark.slow
def test_a_solver_or_patches_of_ones_own_go_step_by_step():
    X, graph, coordinates = tissue()
    usual = pdvi.PottsMixture(4, beta=0.5, random_state=0).fit(X, graph=graph, coordinates=coordinates)
    assert usual.result_.solver["class"] == "CAVI"
    patched = pdvi.PottsMixture(4, beta=0.5, n_patches=4, random_state=0).fit(X, graph=graph, coordinates=coordinates)
    assert patched.result_.solver["class"] == "P2DVI"
    assert patched.elbo_ == pytest.approx(usual.elbo_, rel=1e-2)
    small = dataclasses.replace(RECIPE, one_program_rows=100)
    large = pdvi.PottsMixture(4, beta=0.5, random_state=0, recipe=small).fit(X, graph=graph, coordinates=coordinates)
    assert large.result_.solver["class"] == "P2DVI"


def test_absent_components_and_columns_of_zeros_change_no_number(x64):
    X, graph, coordinates = tissue()
    rows = Rows(X, graph, coordinates)
    start = empirical_bayes(X, 4)
    alone = Tries(rows, [X], Task(4, learn_weights=True))
    wider = np.hstack([X, X[:, :2] ** 2])
    padded = Tries(rows, [X, wider], Task(6, learn_weights=True))
    (one,), (two,) = alone.fit([(0, start)]), padded.fit([(0, start)])
    # absent components are at home after the first epoch
    np.testing.assert_allclose(two.result.trace["objective"][1:], one.result.trace["objective"][1:], rtol=1e-6)
    probabilities = padded.probabilities(two)
    np.testing.assert_allclose(probabilities[:, :4], alone.probabilities(one), atol=1e-7)
    assert not probabilities[:, 4:].any()
