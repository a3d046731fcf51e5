"""The paper's own step-size bounds and constants, all in its scale: one loss f_i per shard, f = mean_i f_i.

Here ``L`` is the smoothness of every f_i, ``mu`` its strong convexity (in all variables, or in phi alone where
said), ``n`` the number of shards and ``m`` the number visited per step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pdvi._base.checks import at_most, positive, whole


def convex_eta(*, L: float) -> float:
    """Return the largest eta with rate O(1/T) for convex, L-smooth losses: 1 / (22 L)."""
    _positive(L=L)
    return 1 / (22 * L)


def strongly_convex_eta(*, L: float, mu: float, n: int, m: int) -> float:
    """Return the largest eta with linear rate: min{ 1/(200 L), 1/(2 mu), m / (8 mu (n - m)) }."""
    _positive(L=L, mu=mu)
    _batch(n, m)
    return min(1 / (200 * L), 1 / (2 * mu), m / (8 * mu * (n - m)) if m < n else math.inf)


def strongly_convex_rate(*, mu: float, eta: float) -> float:
    """Return the factor per step of the bound: 1 / (1 + mu eta)."""
    _positive(mu=mu, eta=eta)
    return 1 / (1 + mu * eta)


def strongly_convex_constants(*, L: float, mu: float, n: int, m: int, eta: float) -> tuple[float, float]:
    """Return c1 and c2 of the strongly convex lemma.

    r (E|gamma_t - lam*|^2 + c1 G_t) <= E|gamma_{t-1} - lam*|^2 + c1 G_{t-1} - c2 E[f - f*],  r = 1 + mu eta.
    """
    _positive(L=L, mu=mu, eta=eta)
    _batch(n, m)
    w, a = m / n, 4 * L**2 * eta**2
    c1 = 8 * eta**2 * (1 + eta * L) / ((1 - a) * (w - mu * eta * (1 - w)) - 4 * a * w * (1 + mu * eta))
    c2 = (2 * eta * (1 - a) - 8 * L * eta**2 * (1 + eta * L) - (1 + mu * eta) * c1 * 4 * L * w) / (1 - a)
    return c1, c2


def nonconvex_eta(*, L: float, mu: float, n: int, m: int) -> float:
    """Return the largest eta with mean squared gradient O(1/T), for losses mu-strongly convex in phi alone.

    min{ 1 / (2 sqrt2 L sqrt(1 + 2k)), w / (256 L (1 + k)) },  k = L^2/mu^2,  w = m/n.
    """
    _positive(L=L, mu=mu)
    _batch(n, m)
    k = (L / mu) ** 2
    return min(1 / (2 * math.sqrt(2) * L * math.sqrt(1 + 2 * k)), m / n / (256 * L * (1 + k)))


@dataclass(frozen=True)
class BlockConstants:
    """The constants of the block lemma, by the letters the paper gives them."""

    rho: float
    xi: float
    S: float
    E: float
    F: float
    D: float
    p: float
    q: float
    c1: float
    c2: float
    admissible: bool  # all three conditions of the lemma hold


def block_constants(
    eta: Mapping[str, float], L_blocks: Mapping[str, float], *, L_phi: float, mu: float, n: int, m: int
) -> BlockConstants:
    """Return the block lemma's constants for one eta per block, and whether its three conditions hold."""
    if set(eta) != set(L_blocks):
        msg = f"`eta` and `L_blocks` must name the same blocks, got {sorted(eta)} and {sorted(L_blocks)}."
        raise ValueError(msg)
    _positive(L_phi=L_phi, mu=mu, **{f"eta[{j!r}]": e for j, e in eta.items()})
    _positive(**{f"L_blocks[{j!r}]": value for j, value in L_blocks.items()})
    _batch(n, m)
    k = (L_phi / mu) ** 2
    L = math.sqrt(L_phi**2 + sum(value**2 for value in L_blocks.values()))
    squares = sum((eta[j] * L_blocks[j]) ** 2 for j in eta)
    largest = max(eta.values())
    rho = 2 * (n - m) / (2 * n - m)
    xi = 2 * m / (2 * n - m) + 2 * n / m
    S = sum(eta[j] * L_blocks[j] ** 2 for j in eta)
    E = L / 2 + S / 2 + k * (m * L + S)
    F = L * m / 2 + k * (m * L + S)
    D = 1 - 4 * (1 + 2 * k) * squares
    p = 8 * (1 + k) * squares / D if D else math.inf
    q = 4 * largest / D if D else math.inf
    pivot = xi * p + rho - 1
    c1 = -(E * p + F) / pivot if pivot else math.inf
    c2 = 0.5 - (E + c1 * xi) * q
    first, second = squares < 1 / (4 * (1 + 2 * k)), 8 * xi * (1 + k) * squares < (1 - rho) * D
    admissible = first and second and 8 * (E + c1 * xi) * largest < D
    return BlockConstants(rho, xi, S, E, F, D, p, q, c1, c2, admissible)


def block_eta(
    L_blocks: Mapping[str, float], *, L_phi: float, mu: float, n: int, m: int, margin: float = 0.99
) -> dict[str, float]:
    """Return admissible step sizes proportional to 1/L_j: ``margin`` times the largest the block lemma allows."""
    if not L_blocks:
        msg = "`L_blocks` must name at least one block, got none."
        raise ValueError(msg)
    _positive(margin=margin, **{f"L_blocks[{j!r}]": value for j, value in L_blocks.items()})
    at_most("margin", margin, 1)

    def allowed(scale: float) -> bool:
        eta = {j: scale / value for j, value in L_blocks.items()}
        return block_constants(eta, L_blocks, L_phi=L_phi, mu=mu, n=n, m=m).admissible

    low = high = 1.0  # not allowed: the first condition needs scale^2 * blocks < 1/4
    while not allowed(low):
        low /= 2
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if allowed(middle) else (low, middle)
    return {j: margin * low / value for j, value in L_blocks.items()}


def _positive(**values: float) -> None:
    for name, value in values.items():
        positive(name, value)


def _batch(n: int, m: int) -> None:
    whole("m", m, least=1, most=whole("n", n, least=1), of="the number of shards")
