"""The paper's constants against arithmetic done by hand."""

import numpy as np
import pytest

import pdvi
from pdvi import theory


def test_convex_eta():
    assert theory.convex_eta(L=2) == pytest.approx(1 / 44)


@pytest.mark.parametrize(
    ("L", "mu", "n", "m", "eta"),
    [
        (2, 1, 10, 5, 1 / 400),  # 1/400, 1/2, 5/40: the first term
        (1, 200, 10, 9, 1 / 400),  # 1/200, 1/400, 9/1600: the second
        (1, 1, 1001, 1, 1 / 8000),  # 1/200, 1/2, 1/8000: the third
        (0.001, 1, 7, 7, 1 / 2),  # 5, 1/2, and no third term where all shards are visited
    ],
)
def test_strongly_convex_eta_is_the_smallest_of_three(L, mu, n, m, eta):
    assert theory.strongly_convex_eta(L=L, mu=mu, n=n, m=m) == pytest.approx(eta)


def test_strongly_convex_rate():
    assert theory.strongly_convex_rate(mu=2, eta=1 / 8) == pytest.approx(4 / 5)


def test_strongly_convex_constants():
    """L eta = 1/200, mu eta = 1/1000, m/n = 1/2, 4 L^2 eta^2 = 1/10000.

    c1 = 8e-6 * 1.005 / (0.9999 * (0.5 - 0.001 * 0.5) - 4 * 0.0001 * 0.5 * 1.001) = 8.04e-6 / 0.49924985
    c2 = (0.002 * 0.9999 - 8 * 5 * 1e-6 * 1.005 - 1.001 * c1 * 20 / 2) / 0.9999
    """
    c1, c2 = theory.strongly_convex_constants(L=5, mu=1, n=2, m=1, eta=1 / 1000)
    assert c1 == pytest.approx(804 / 49924985, rel=1e-12)
    assert c2 == pytest.approx((0.0019998 - 0.0000402 - 10.01 * 804 / 49924985) / 0.9999, rel=1e-12)


def test_nonconvex_eta():
    """Its first term, 1 / (2 sqrt2 L sqrt(1 + 2k)), is larger than the second for every L, mu, m <= n."""
    assert theory.nonconvex_eta(L=2, mu=1, n=10, m=5) == pytest.approx(0.5 / (256 * 2 * 5))  # k = 4
    assert theory.nonconvex_eta(L=1, mu=1, n=3, m=3) == pytest.approx(1 / 512)  # k = 1; the first: 0.204


# L = sqrt(4 + 9 + 36) = 7, k = (2/2)^2 = 1, rho = 2 (3-2) / (6-2) = 1/2, xi = 4/4 + 6/2 = 4
BLOCKS = {"L_blocks": {"a": 3, "b": 6}, "L_phi": 2, "mu": 2, "n": 3, "m": 2}


def blocks_with(a):
    """The constants for eta_a = a, eta_b = a/2, so that eta_j L_j = 3a for both."""
    return theory.block_constants({"a": a, "b": a / 2}, **BLOCKS)


def test_block_constants():
    """eta_j L_j = 1/1000, so sum eta_j^2 L_j^2 = 2e-6."""
    found = blocks_with(1 / 3000)
    D = 0.999976  # 1 - 4 * 3 * 2e-6
    p = 0.000032 / 0.999976  # 8 * 2 * 2e-6 / D
    q = 4 / 3000 / 0.999976
    E, F = 17.5135, 21.009  # 3.5 + 0.0045 + (14 + 0.009) and 7 + (14 + 0.009)
    c1 = (17.5135 * p + 21.009) / (0.5 - 4 * p)  # about 42.03
    expected = {
        "rho": 0.5,
        "xi": 4,
        "S": 0.009,  # 9/3000 + 36/6000
        "E": E,
        "F": F,
        "D": D,
        "p": p,
        "q": q,
        "c1": c1,
        "c2": 0.5 - (17.5135 + 4 * c1) * q,  # about 0.252
    }
    assert {name: getattr(found, name) for name in expected} == pytest.approx(expected, rel=1e-12)
    assert found.admissible


def test_the_first_block_condition():
    """sum eta_j^2 L_j^2 = 0.18 is above 1/12."""
    found = blocks_with(0.1)
    assert abs(found.D + 1.16) < 1e-12
    assert not found.admissible


def test_the_second_block_condition():
    """sum eta_j^2 L_j^2 = 0.02 is below 1/12, but 8 * 4 * 2 * 0.02 = 1.28 is above 0.5 * 0.76; then c1 < 0,
    and the third condition holds: 8 (E + 4 c1) / 30 < 0 < D."""
    found = blocks_with(1 / 30)
    assert abs(found.D - 0.76) < 1e-12
    assert found.c1 == pytest.approx(-(18.85 * 8 / 19 + 21.9) / (4 * 8 / 19 - 0.5))  # E = 18.85, F = 21.9
    assert found.E + 4 * found.c1 < 0
    assert not found.admissible


def test_the_third_block_condition():
    """sum eta_j^2 L_j^2 = 2e-4: 0.0128 < 0.5 * 0.9976, but 8 (17.6 + 4 * 42) / 300 is about 5 > 0.9976."""
    found = blocks_with(1 / 300)
    assert abs(found.D - 0.9976) < 1e-12
    assert found.c1 > 0
    assert found.c2 < 0
    assert not found.admissible


def test_block_eta_is_the_largest_admissible_multiple_of_one_over_L():
    eta = theory.block_eta(**BLOCKS, margin=1)
    assert eta["a"] * 3 == pytest.approx(eta["b"] * 6)
    assert blocks_with(eta["a"]).admissible
    assert not blocks_with(1.02 * eta["a"]).admissible
    assert abs(blocks_with(eta["a"]).c2) < 1e-12  # here the third condition, which says c2 > 0, is the tightest
    assert theory.block_eta(**BLOCKS)["b"] == pytest.approx(0.99 * eta["b"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theory.convex_eta(L=-1), "`L` must be positive and finite, got -1"),
        (lambda: theory.convex_eta(L=float("inf")), "`L` must be positive and finite, got inf"),
        (lambda: theory.strongly_convex_eta(L=1, mu=0, n=3, m=1), "`mu` must be positive and finite, got 0"),
        (
            lambda: theory.strongly_convex_eta(L=1, mu=1, n=3, m=4),
            r"`m` must be between 1 and the number of shards \(3\), got 4",
        ),
        (lambda: theory.nonconvex_eta(L=1, mu=1, n=3, m=0), r"`m` must be between 1 and .*got 0"),
        (lambda: theory.strongly_convex_rate(mu=1, eta=-2), "`eta` must be positive and finite, got -2"),
        (
            lambda: theory.block_constants({"a": 1, "c": 1}, **BLOCKS),
            r"must name the same blocks, got \['a', 'c'\] and \['a', 'b'\]",
        ),
        (lambda: blocks_with(-1.0), r"`eta\['a'\]` must be positive and finite, got -1"),
        (
            lambda: theory.block_constants({"a": 1}, {"a": -3}, L_phi=2, mu=2, n=3, m=2),
            r"`L_blocks\['a'\]` must be positive and finite, got -3",
        ),
        (lambda: theory.block_eta(**BLOCKS, margin=1.5), "`margin` must be at most 1, got 1.5"),
    ],
)
def test_bad_constants_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_run_with_the_theorys_eta_obeys_its_bound(x64):
    n, m = 100, 10
    problem = pdvi.datasets.quadratic(n=n, condition=10, heterogeneity=0.5, linear=0.5)
    Q, v = np.asarray(problem.shards["Q"]), np.asarray(problem.shards["v"])
    eigenvalues = np.linalg.eigvalsh(Q)
    L, mu = 2 * eigenvalues.max(), 2 * eigenvalues.min()
    eta = theory.strongly_convex_eta(L=L, mu=mu, n=n, m=m)
    c1, c2 = theory.strongly_convex_constants(L=L, mu=mu, n=n, m=m, eta=eta)
    assert c1 > 0
    assert c2 > 0

    # all 5n + 5 variables at once: 2 Q x + v = 0, shard by shard in phi, summed in lam
    whole, right = np.zeros((5 * n + 5, 5 * n + 5)), np.zeros(5 * n + 5)
    for b in range(n):
        index = np.r_[5 * b : 5 * b + 5, 5 * n : 5 * n + 5]
        whole[np.ix_(index, index)] += 2 * Q[b]
        right[index] -= v[b]
    x = np.linalg.solve(whole, right)
    lam = x[5 * n :]
    points = np.concatenate([x[: 5 * n].reshape(n, 5), np.broadcast_to(lam, (n, 5))], 1)
    duals = -(2 * np.einsum("bij,bj->bi", Q, points) + v)[:, 5:]

    steps, distances = [], []

    def measure(progress):
        state = progress.state
        G = ((np.asarray(state.own.dual) - duals) ** 2).sum(1).mean()
        steps.append(progress.record["step"])
        distances.append(((np.asarray(state.lam) - lam) ** 2).sum() + c1 * G)

    pdvi.fit(
        problem,
        pdvi.PDVI(eta=eta),
        batch_size=m,
        max_steps=10_000,
        max_epochs=10_000,
        tol=0,
        sampling=pdvi.sampling.Uniform(),
        callbacks=[measure],
        log_every=10,
    )
    bound = (1 + mu * eta) ** -np.array(steps) * distances[0]
    assert len(steps) == 101
    assert bound[-1] < bound[0] / 50
    assert (np.array(distances) <= bound).all()
