"""Dirichlet blocks: q(theta_k) = Dir(alpha_k), alpha = exp(rho), with prior Dir(a0); rows are k.

With the expected counts n_kc of a shard and its share w of the prior, the shard's loss has, per row,

    w KL(Dir(alpha) || Dir(a0)) - sum_c n_c E log theta_c  =  w KL(Dir(alpha) || Dir(a0 + n / w)) + constant,

so the plain minimiser is a0 + n / w; with the terms that Algorithm 1 adds it is found by Newton steps in rho.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pdvi._base.types import Array
from pdvi.q.special import digamma, mild, scaled_polygammas

STEPS = 60  # at most; three or four near the minimum, some ten from far away
LONGEST = 4.0  # step in rho: far from the minimum the objective is exponential, and a Newton step in it about 1


def expected_log(rho: Array) -> Array:
    """Return E log theta of every row, psi(alpha_c) - psi(sum alpha)."""
    psi = digamma(_and_sum(jnp.exp(rho)))
    return psi[..., :-1] - psi[..., -1:]


def divergence(rho: Array, prior: Array) -> Array:
    """Return KL(Dir(exp rho) || Dir(prior)) of every row."""
    constant = (prior * expected_log(jnp.log(prior))).sum(-1) - _spread(prior)
    return _spread(jnp.exp(rho)) - (prior * expected_log(rho)).sum(-1) + constant


def augmented_step(counts: Array, prior: Array, fraction: Array, centre: Array, dual: Array, penalty: Array) -> Array:
    """Return the rho that minimises every row of a shard's loss plus the augmentation.

        w KL(Dir(alpha) || Dir(prior)) - <counts, E log theta> + <dual, rho - centre> + 1/2 |rho - centre|^2_penalty

    A row whose dual and penalty are zero has the closed form. The others take Newton steps, in which the Hessian is
    diagonal minus rank one, O(C) each; where it is not positive definite it is lifted to the Fisher information. A
    step that does not lower the objective is shortened. A row rests as soon as its gradient is rounding.
    """
    row = fraction * prior + counts, fraction, centre, dual, penalty
    plain = jnp.log(prior + counts / fraction)
    free = ((dual == 0) & (penalty == 0)).all(-1, keepdims=True)
    weight = scaled_polygammas(jnp.exp(plain))[0] * fraction
    between = (weight * plain + penalty * centre - dual) / (weight + penalty)
    start = jnp.clip(between, jnp.minimum(plain, centre), jnp.maximum(plain, centre))
    zero = jnp.zeros_like(start[..., :1])
    nowhere = _Place(start, zero + jnp.inf, zero, jnp.zeros_like(start), zero - 1, free)  # anything is better

    def unfinished(carry: tuple) -> Array:
        count, here, _ = carry
        return (count < STEPS) & ~here.settled.all()

    def move(carry: tuple) -> tuple:
        count, here, length = carry
        there = _look(here.rho + length * here.step, *row)
        # where rounding hides the rest of the way from the objective, the slopes tell whether there is one
        close = -here.slope <= here.rounding
        lower = there.value <= here.value + 1e-4 * length * here.slope + here.rounding
        better = jnp.where(close, there.slope > 0.5 * here.slope, lower) & ~here.settled
        chosen = jax.tree.map(lambda new, old: jnp.where(better, new, old), there, here)
        chosen = chosen._replace(settled=chosen.settled | (close & ~better))
        return count + 1, chosen, jnp.where(better, 1.0, 0.25 * length)

    return jnp.where(free, plain, jax.lax.while_loop(unfinished, move, (0, nowhere, zero + 1))[1].rho)


def curvature(rho: Array, fraction: Array) -> Array:
    """Return the diagonal of the Hessian in rho where a shard's loss has its minimum at ``rho``."""
    alpha = jnp.exp(rho)
    total = alpha.sum(-1, keepdims=True)
    return fraction * (scaled_polygammas(alpha)[0] - (alpha / total) ** 2 * scaled_polygammas(total)[0])


def natural_gradient(rho: Array, gradient: Array) -> Array:
    """Return the gradient in the expectation parameters E log theta, which belong to alpha, from that in rho.

    The inverse of the Fisher information, diagonal minus rank one, times the gradient in alpha.
    """
    alpha = jnp.exp(rho)
    total = alpha.sum(-1, keepdims=True)
    share, by_rho = alpha / total, scaled_polygammas(alpha)[0]
    return alpha * _solve(by_rho, scaled_polygammas(total)[0], share, gradient)


class _Place(NamedTuple):
    """A point, the objective there with the size of its rounding, and the step to make next."""

    rho: Array
    value: Array
    rounding: Array
    step: Array
    slope: Array
    settled: Array


def _look(rho: Array, strength: Array, w: Array, centre: Array, dual: Array, penalty: Array) -> _Place:
    """Value, slope and Newton step of all rows; the strength is w prior + counts."""
    eps = jnp.finfo(rho.dtype).eps
    alpha = jnp.exp(rho)
    total = alpha.sum(-1, keepdims=True)
    share = alpha / total
    both = _and_sum(alpha)
    special = (digamma(both), mild(both), *scaled_polygammas(both)[:2])
    (psi, own_mild, one, two), (all_psi, all_mild, all_one, all_two) = (
        [leaf[..., part] for leaf in special] for part in (slice(None, -1), slice(-1, None))
    )
    need, all_need = strength / alpha, strength.sum(-1, keepdims=True) / total
    common = share * (w - all_need) * all_one
    gradient = (w - need) * one - common + dual + penalty * (rho - centre)
    diagonal = w * one + (w - need) * (one + two) - common + penalty
    rank_one = w * all_one + (w - all_need) * all_two
    definite = (diagonal > 0).all(-1, keepdims=True)
    definite &= rank_one * (share**2 / jnp.where(definite, diagonal, 1.0)).sum(-1, keepdims=True) < 1
    diagonal = jnp.where(definite, diagonal, jnp.maximum(diagonal, w * one + penalty))
    rank_one = jnp.where(definite, rank_one, jnp.minimum(rank_one, w * all_one))
    step = -_solve(diagonal, rank_one, share, gradient)
    step *= jnp.minimum(1.0, LONGEST / jnp.maximum(jnp.abs(step).max(-1, keepdims=True), 1e-30))
    fit, away = strength * (psi - all_psi), rho - centre
    added = (dual + 0.5 * penalty * away) * away
    spread = w * (all_mild - own_mild.sum(-1, keepdims=True))
    value = spread + (added - fit).sum(-1, keepdims=True)
    sizes = strength * (1 + jnp.abs(psi)) + jnp.abs(fit) + jnp.abs(added)
    rounding = 8 * eps * (jnp.abs(spread) + sizes.sum(-1, keepdims=True))
    terms = (w + need) * one + share * (w + all_need) * all_one
    terms += jnp.abs(dual) + penalty * (jnp.abs(rho) + jnp.abs(centre))
    settled = (jnp.abs(gradient) <= 2 * eps * terms).all(-1, keepdims=True)
    return _Place(rho, value, rounding, step, (gradient * step).sum(-1, keepdims=True), settled)


def _solve(diagonal: Array, rank_one: Array, u: Array, right: Array) -> Array:
    """(diag - rank_one u u')^-1 right, row by row."""
    inner = 1 - rank_one * (u**2 / diagonal).sum(-1, keepdims=True)
    along = (u * right / diagonal).sum(-1, keepdims=True)
    return (right + rank_one * u * along / inner) / diagonal


def _spread(alpha: Array) -> Array:
    """log Gamma(A) - sum log Gamma(alpha) + sum alpha (psi(alpha) - psi(A)), without its cancellation."""
    both = mild(_and_sum(alpha))
    return both[..., -1] - both[..., :-1].sum(-1)


def _and_sum(alpha: Array) -> Array:
    """The rows with their sums as a last column: a special function of both is compiled once."""
    return jnp.concatenate([alpha, alpha.sum(-1, keepdims=True)], axis=-1)
