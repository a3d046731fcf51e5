"""Families of shares and of labels: beta, Dirichlet, categorical."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import gammaln

from pdvi._base.types import Array
from pdvi.q import family, quadrature
from pdvi.q.family import Family, Function
from pdvi.q.special import digamma, mild


class Beta(Family):
    """Independent beta entries with density proportional to x^(a - 1) (1 - x)^(b - 1).

    Unconstrained: ``logit_mean``, and ``log_total``, the logarithm of a + b.
    """

    logit_mean: Any
    log_total: Any

    def __init__(self, a: Any = 1.0, b: Any = 1.0, *, logit_mean: Any = None, log_total: Any = None):
        if logit_mean is None:
            a, b = family.numbers("a", a, positive=True), family.numbers("b", b, positive=True)
            logit_mean, log_total = family.log(a) - family.log(b), family.log(a + b)
        self.logit_mean, self.log_total = family.together(logit_mean, log_total)

    @property
    def a(self) -> Array:
        """Return the first parameter of every entry."""
        return jnp.exp(jnp.asarray(self.log_total) + jax.nn.log_sigmoid(jnp.asarray(self.logit_mean)))

    @property
    def b(self) -> Array:
        """Return the second parameter of every entry."""
        return jnp.exp(jnp.asarray(self.log_total) + jax.nn.log_sigmoid(-jnp.asarray(self.logit_mean)))

    @property
    def total(self) -> Array:
        """Return a + b of every entry."""
        return jnp.exp(jnp.asarray(self.log_total))

    @property
    def mean(self) -> Array:
        """Return the mean of every entry."""
        return jax.nn.sigmoid(jnp.asarray(self.logit_mean))

    @property
    def variance(self) -> Array:
        """Return the variance of every entry."""
        return self.mean * jax.nn.sigmoid(-jnp.asarray(self.logit_mean)) / (self.total + 1)

    @property
    def mean_log(self) -> Array:
        """Return the mean of the logarithm."""
        return digamma(self.a) - digamma(self.total)

    @property
    def mean_log1m(self) -> Array:
        """Return the mean of log(1 - x)."""
        return digamma(self.b) - digamma(self.total)

    def entropy(self) -> Array:
        """Return the entropy of every entry."""
        return mild(self.a) + mild(self.b) - mild(self.total) + self.mean_log + self.mean_log1m

    def expected_log(self, x: Any) -> Array:
        """Return E log p(x) of every entry."""
        a, b = self.a, self.b
        constant = gammaln(self.total) - gammaln(a) - gammaln(b)
        return constant + (a - 1) * family.mean_log(x) + (b - 1) * family.mean_log1m(x)

    def expect(self, function: Function, *, nodes: int = quadrature.NODES) -> Array:
        """Return E f(x) of every entry by quadrature in logit x."""
        return quadrature.beta(function, self.a, self.b, nodes)


class Dirichlet(Family):
    """Independent vectors of shares along the last axis, Dir(alpha). Unconstrained: ``log_alpha``."""

    log_alpha: Any

    def __init__(self, alpha: Any = None, *, log_alpha: Any = None):
        self.log_alpha = family.log(family.numbers("alpha", alpha, positive=True)) if log_alpha is None else log_alpha
        if np.ndim(self.log_alpha) < 1 or np.shape(self.log_alpha)[-1] < 2:
            msg = f"`alpha` must have at least two entries along its last axis, got shape {np.shape(self.log_alpha)}."
            raise ValueError(msg)

    @property
    def alpha(self) -> Array:
        """Return the parameters of every vector."""
        return jnp.exp(jnp.asarray(self.log_alpha))

    @property
    def mean(self) -> Array:
        """Return the mean of every entry."""
        return jax.nn.softmax(jnp.asarray(self.log_alpha), axis=-1)

    @property
    def variance(self) -> Array:
        """Return the variance of every entry."""
        return self.mean * (1 - self.mean) / (self.alpha.sum(-1, keepdims=True) + 1)

    @property
    def mean_log(self) -> Array:
        """Return the mean of the logarithm of every entry."""
        return digamma(self.alpha) - digamma(self.alpha.sum(-1, keepdims=True))

    def entropy(self) -> Array:
        """Return the entropy of every vector."""
        return mild(self.alpha).sum(-1) - mild(self.alpha.sum(-1)) + self.mean_log.sum(-1)

    def expected_log(self, x: Any) -> Array:
        """Return E log p(x) of every vector."""
        alpha = self.alpha
        constant = gammaln(alpha.sum(-1)) - gammaln(alpha).sum(-1)
        return constant + jnp.sum((alpha - 1) * family.mean_log(x), axis=-1)

    def marginals(self) -> Beta:
        """Return the distribution of each entry alone, of which `Beta.expect` takes expectations."""
        log_rest = jnp.log(self.alpha.sum(-1, keepdims=True) - self.alpha)
        return Beta(
            logit_mean=jnp.asarray(self.log_alpha) - log_rest,
            log_total=jnp.broadcast_to(jnp.log(self.alpha.sum(-1, keepdims=True)), self.shape),
        )


class Categorical(Family):
    """Independent labels, one of K, with probabilities along the last axis; a draw is a vector of one 1 and zeros.

    Unconstrained: ``logits`` of all but the first label, relative to the first: K - 1 numbers, so that no direction is
    flat.
    """

    logits: Any

    def __init__(self, probabilities: Any = None, *, logits: Any = None):
        if logits is None:
            logs = family.log(family.numbers("probabilities", probabilities, positive=True))
            if np.ndim(logs) < 1 or np.shape(logs)[-1] < 2:
                msg = f"`probabilities` must have at least two entries along its last axis, got shape {np.shape(logs)}."
                raise ValueError(msg)
            logits = logs[..., 1:] - logs[..., :1]
        self.logits = logits

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of a draw."""
        *rows, size = np.shape(self.logits)
        return (*rows, size + 1)

    @property
    def log_probabilities(self) -> Array:
        """Return the logarithms of the probabilities."""
        logits = jnp.asarray(self.logits)
        return jax.nn.log_softmax(jnp.concatenate([jnp.zeros_like(logits[..., :1]), logits], axis=-1), axis=-1)

    @property
    def probabilities(self) -> Array:
        """Return the probabilities."""
        return jnp.exp(self.log_probabilities)

    @property
    def mean(self) -> Array:
        """Return the mean of every entry of a draw: the probabilities."""
        return self.probabilities

    @property
    def variance(self) -> Array:
        """Return the variance of every entry of a draw."""
        return self.mean * (1 - self.mean)

    def entropy(self) -> Array:
        """Return the entropy of every label."""
        return -jnp.sum(self.probabilities * self.log_probabilities, axis=-1)

    def expected_log(self, x: Any) -> Array:
        """Return E log p(x) of every label; numbers are vectors of one 1 and zeros."""
        return jnp.sum(family.mean(x) * self.log_probabilities, axis=-1)

    def expect(self, values: Any) -> Array:
        """Return the mean of a value that depends on the label: ``values`` has one for each along its last axis."""
        return jnp.sum(self.probabilities * jnp.asarray(values), axis=-1)
