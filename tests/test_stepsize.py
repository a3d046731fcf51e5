"""The automatic penalty, step sizes by hand, and the way back from a bad one."""

import re
import warnings

import jax.numpy as jnp
import numpy as np
import pytest

import pdvi
from models_for_tests import algorithm_1, begun
from pdvi.run.safeguard import Safeguard
from pdvi.solvers.primal_dual.penalty import penalty_from_eta
from test_algorithm import quadratic, stripped


def automatic(problem, batch_size=1, solver=None, **settings):
    solver = pdvi.P2DVI(preconditioner="diagonal", **settings) if solver is None else solver
    return np.asarray(algorithm_1(begun(problem, solver, batch_size).state.server).penalty)


def mean_diagonal(problem):
    """mean_b of 2 diag(C_b), the Hessian of x' Q x in lam."""
    return 2 * np.asarray(problem.shards["Q"])[:, range(5, 10), range(5, 10)].mean(0)


@pytest.mark.parametrize(("batch_size", "c"), [(1, 10), (2, 5), (10, 1), (100, 1)])
def test_the_automatic_penalty_is_c_times_the_mean_curvature(x64, batch_size, c):
    """c = max(1, 0.1 B / |S|), B = 100."""
    problem = pdvi.datasets.quadratic(n=100, condition=10, heterogeneity=0.5, linear=0.5)
    np.testing.assert_allclose(automatic(problem, batch_size), c * mean_diagonal(problem), rtol=1e-12)


def test_scale_is_the_constant_per_batch(x64):
    problem = quadratic()
    np.testing.assert_allclose(automatic(problem, 3, scale=2.5), 10 * mean_diagonal(problem), rtol=1e-12)


def test_pdvi_takes_the_mean(x64):
    problem = quadratic()
    found = automatic(problem, 3, pdvi.PDVI())
    np.testing.assert_allclose(found, np.full(5, mean_diagonal(problem).mean()), rtol=1e-12)


def test_autodiff_finds_the_closed_forms_curvature(x64):
    problem = quadratic()
    np.testing.assert_allclose(automatic(stripped(problem)), automatic(problem), rtol=1e-12)


class Bowl:
    """sum_j a_j lam_j^2 / 2 + weight (sum_j lam_j)^2 / 2, in blocks of the given sizes."""

    def __init__(self, **sizes):
        self.sizes = sizes

    def init_global(self, key):
        return {name: jnp.ones(size) for name, size in self.sizes.items()}

    def init_local(self, key, shard):
        return jnp.zeros(())

    def loss(self, local, globals_, shard):
        lam = jnp.concatenate([globals_[name] for name in self.sizes])
        together = shard["weight"] * jnp.sum(lam) ** 2
        return 0.5 * local**2 + 0.5 * jnp.sum(shard["a"] * lam**2) + 0.5 * together


def bowl(a, weight=0.0, **sizes):
    a = np.asarray(a, float)
    return pdvi.Problem(Bowl(**sizes), {"a": a, "weight": np.full(len(a), weight)})


def test_hutchinsons_probes_are_exact_for_a_diagonal_hessian(x64):
    a = np.random.default_rng(0).uniform(0.5, 2, (4, 300))
    np.testing.assert_allclose(automatic(bowl(a, lam=300), 4), a.mean(0), rtol=1e-12)


def test_hutchinsons_probes_are_near_otherwise(x64):
    """Off the diagonal weight everywhere: the error of 64 probes is weight * sqrt(299 / 64) = 0.0216."""
    a = np.random.default_rng(0).uniform(0.5, 2, (4, 300))
    error = automatic(bowl(a, weight=0.01, lam=300), 4) - (a.mean(0) + 0.01)
    assert 0.0216 / 1.5 < error.std() < 0.0216 * 1.5


def test_negative_curvature_counts_by_its_size(x64):
    problem = bowl([[-3.0, 2.0], [1.0, 2.0]], lam=2)
    np.testing.assert_allclose(automatic(problem, 2), [2, 2], rtol=1e-12)


def test_a_floor_keeps_the_penalty_positive(x64):
    """A flat coordinate gets 1e-12 of its block's mean, 1; a flat block 1e-12 of the mean of all five, 0.4."""
    problem = bowl([[2.0, 0, 0, 0, 0]] * 2, steep=2, flat=3)
    np.testing.assert_allclose(automatic(problem, 2), [2, 1e-12, 4e-13, 4e-13, 4e-13], rtol=1e-12)
    np.testing.assert_allclose(automatic(bowl([[0.0] * 5] * 2, steep=2, flat=3), 2), [1e-12] * 5, rtol=1e-12)


def test_curvature_that_is_not_finite_is_named(x64):
    class Root(Bowl):
        def loss(self, local, globals_, shard):
            return local**2 + jnp.sum(jnp.abs(globals_["sharp"] - 1) ** 1.5) + jnp.sum(globals_["smooth"] ** 2)

    problem = pdvi.Problem(Root(sharp=1, smooth=2), {"a": np.zeros((2, 3))})
    with pytest.raises(ValueError, match=r"not finite in \['sharp'\]; give another `start`, or set `eta`"):
        automatic(problem)


@pytest.mark.parametrize(
    ("eta", "penalty"),
    [
        (0.5, [2, 2, 2, 2]),
        ({"weight": 0.25, "gain": 2.0}, [4, 4, 4, 0.5]),
        ({"gain": 2, "weight": [0.5, 0.25, 0.2]}, [2, 4, 5, 0.5]),
    ],
)
def test_the_penalty_is_one_over_eta(x64, eta, penalty):
    found = penalty_from_eta(pdvi.datasets.tanh_regression(4), eta)
    np.testing.assert_array_equal(found, penalty)


@pytest.mark.parametrize(
    ("eta", "message"),
    [
        (0, "`eta` must be positive and finite, got 0 for block 'weight'"),
        (-0.5, "`eta` must be positive and finite, got -0.5"),
        (float("nan"), "`eta` must be positive and finite, got nan"),
        (float("inf"), "`eta` must be positive and finite, got inf"),
        ({"weight": 1.0, "gain": -1.0}, "`eta` must be positive and finite, got -1.0 for block 'gain'"),
        ({"weight": [1.0, 0.0, 1.0], "gain": 1.0}, "`eta` must be positive and finite, got .* for block 'weight'"),
        ({"weight": 1.0, "gain": 1.0, "bias": 1.0}, r"\(\['weight', 'gain'\]\) and no others: unknown \['bias'\]"),
        ({"weight": 1.0}, r"`eta` must name the blocks .* no others: missing \['gain'\]"),
        ({"weight": [1.0, 1.0], "gain": 1.0}, r"block 'weight' must be a number or have its shape \(3,\), got \(2,\)"),
    ],
)
def test_bad_etas_are_named(eta, message):
    problem = pdvi.datasets.tanh_regression(4)
    with pytest.raises(ValueError, match=message):
        pdvi.fit(problem, pdvi.P2DVI(eta=eta))


def test_pdvi_wants_one_number():
    with pytest.raises(ValueError, match=r"`eta` of PDVI must be one positive number, got .*; use P2DVI for one per"):
        pdvi.PDVI(eta={"weight": 1.0, "gain": 1.0})
    with pytest.raises(ValueError, match="`eta` must be positive and finite, got -1"):
        pdvi.fit(pdvi.datasets.tanh_regression(4), pdvi.PDVI(eta=-1.0))


def verdicts(objectives, epochs=None):
    guard = Safeguard()
    return [guard.judge(e, o) for e, o in zip(epochs or range(len(objectives)), objectives)]


def acts(objectives, epochs=None):
    """Whether the safeguard acts on the last of the objectives, and on no other."""
    *before, last = verdicts(objectives, epochs)
    assert before == [None] * len(before)
    assert last is None or last.endswith("for 4 epochs")
    return last is not None


def test_the_safeguard_waits_for_four_rises_in_a_row():
    assert not acts([5, 6, 7, 8])
    assert acts([5, 6, 7, 8, 9])
    assert acts([-5, -4, -3, -2, -1])
    assert not acts([100, 50, 51, 52, 53, 49, 50, 51, 52])


def test_the_safeguard_acts_when_half_of_the_gain_is_lost_for_four_epochs():
    """Best 0, first 100: above 50 is lost, rising or not."""
    assert acts([100, 0, 60, 59, 58, 57])
    assert not acts([100, 0, 49, 48, 47, 46])
    assert not acts([100, 0, 60, 59, 58, 49])


def test_the_safeguard_waits_for_four_epochs_however_often_one_looks():
    quarters = [i / 4 for i in range(17)]
    assert acts(range(17), quarters)
    assert not acts(range(16), quarters[:16])


def test_the_safeguard_ignores_rises_of_the_size_of_rounding():
    assert verdicts([1000 * (1 + 5e-7) ** i for i in range(20)]) == [None] * 20
    assert verdicts([1e6] + [1e-7 * i for i in range(10)]) == [None] * 11  # against the largest seen
    assert verdicts([1000 * (1 + 5e-6) ** i for i in range(5)])[-1] is not None


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_the_safeguard_acts_on_a_number_that_is_not_finite(value):
    assert verdicts([5, 4, value]) == [None, None, "the objective is not finite"]


def optimum(problem):
    """lam and F at the optimum of the quadratic, phi eliminated: F = sum_b lam' S lam + s' lam - a' A^-1 a / 4."""
    Q, v = np.asarray(problem.shards["Q"]), np.asarray(problem.shards["v"])
    A, B, C, a, c = Q[:, :5, :5], Q[:, :5, 5:], Q[:, 5:, 5:], v[:, :5], v[:, 5:]
    solved = np.linalg.solve(A, np.concatenate([B, a[:, :, None]], 2))
    S = (C - np.einsum("bij,bik->bjk", B, solved[:, :, :5])).sum(0)
    s = (c - np.einsum("bij,bi->bj", B, solved[:, :, 5])).sum(0)
    lam = np.linalg.solve(2 * S, -s)
    return lam, lam @ S @ lam + s @ lam - np.sum(a * solved[:, :, 5]) / 4


def test_a_step_size_far_too_large_is_found_out_and_mended(x64):
    problem = quadratic(nonconvexity=0.05)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = pdvi.fit(problem, pdvi.PDVI(eta=50.0), batch_size=3, max_epochs=200, tol=1e-10)
    told = [w for w in caught if w.category is pdvi.SafeguardWarning]
    assert len(told) == len(caught) == 1
    message = r"the objective rose.* for 4 epochs: restored the last good state, penalty x4"
    assert re.match(message, str(told[0].message))
    trace = result.trace
    assert trace["objective"].max() > 1e6  # it did diverge
    events = trace.index[trace["event"] != ""]
    assert len(events) >= 2
    for at in events:  # the row describes the state gone back to
        assert re.fullmatch(message, trace["event"][at])
        assert trace["step"][at] == trace["step"][at - 1]
        assert trace["objective"][at] in trace["objective"][:at].to_numpy()
        assert trace["objective"][at] <= trace["objective"][1:at].min() < trace["objective"][at - 1]

    assert result.converged
    lam, best = optimum(problem)
    np.testing.assert_allclose(result.global_params["lam"], lam, atol=1e-5)
    assert result.objective == pytest.approx(best, rel=1e-8)


def test_the_safeguard_goes_back_to_the_start_if_all_went_up_from_there(x64):
    with pytest.warns(pdvi.SafeguardWarning):
        trace = pdvi.fit(quadratic(nonconvexity=0.05), pdvi.PDVI(eta=50.0), batch_size=3, max_epochs=6).trace
    restored = trace["objective"][trace["event"] != ""].iloc[0]
    assert restored == trace["objective"][0]


class Precipice:
    """Finite only at lam = 0, which every oracle leaves."""

    def init_global(self, key):
        return {"lam": jnp.zeros(2)}

    def init_local(self, key, shard):
        return jnp.zeros(())

    def loss(self, local, globals_, shard):
        return local**2 + shard + jnp.where(jnp.all(globals_["lam"] == 0), 0.0, jnp.nan)

    def joint_step(self, local, shard, augmentation):
        return local + 1, {"lam": augmentation.centre["lam"] + 1}


def test_a_hopeless_run_ends_with_a_remedy_and_the_last_good_state():
    problem = pdvi.Problem(Precipice(), np.ones(4))
    with pytest.warns(pdvi.SafeguardWarning, match="the objective is not finite: restored the last good") as told:
        result = pdvi.fit(problem, pdvi.P2DVI(eta=1.0), max_epochs=50)
    assert len(told) == 1
    assert result.status is pdvi.Status.DIVERGED
    assert not result.converged
    assert "try a smaller eta" in str(result.status)
    np.testing.assert_array_equal(result.global_params["lam"], [0, 0])
    np.testing.assert_array_equal(result.local_params, [0, 0, 0, 0])
    assert result.objective == 4
    events = result.trace["event"][result.trace["event"] != ""].tolist()
    restored = "the objective is not finite: restored the last good state"
    assert events == [f"{restored}, penalty x4"] * 5 + [restored]
    assert len(result.trace) == 1 + 2 * 6  # the start, then a NaN and a return six times
