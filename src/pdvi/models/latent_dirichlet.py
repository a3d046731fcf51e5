"""Latent Dirichlet allocation: documents are mixtures of topics, topics are distributions of words.

    theta_d ~ Dir(a),   beta_k ~ Dir(b),   z_dw ~ Cat(theta_d),   word ~ Cat(beta_z)

    q(beta_k) = Dir(exp rho_k),   q(theta_d) = Dir(gamma_d),   q(z_dw) = Cat(phi_dw),   phi_dwk ~ exp(t_dk + e_kw)

The last is the form that the best phi has: t = E log theta_d, e = E log beta. So a shard keeps t for its documents, and
e of its last visit, not phi for every word of every document. Given phi the best gamma_d is a + N_d with the expected
counts N_dk = sum_w n_dw phi_dwk; put in, theta_d is integrated out:

    f_b = sum_d [ log B(a) - log B(a + N_d) ] + sum_dwk n_dw phi_dwk (log phi_dwk - E log beta_kw) + w sum_k KL_k
"""

from __future__ import annotations

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.scipy.special import gammaln

from pdvi._base.types import Array, Globals, Shard
from pdvi.core.model import Augmentation, registered
from pdvi.models import dirichlet
from pdvi.q.special import digamma

Locals = dict[str, Array]  # "document": t, (documents, K), and "word": e, (K, V)
LOWEST = -40.0  # of t and e, below the topics' largest: a product of two is still a number in single precision


class TopicStatistics(NamedTuple):
    """What the topics need to know of a shard; adds over shards."""

    counts: Array  # n_kw = sum_d n_dw phi_dwk
    fraction: Array  # w, the shard's share of the words and so of the prior


@registered
class LatentDirichletModel(eqx.Module):
    """Hyper-parameters, and the mathematics of one shard of documents.

    A shard has pairs (``word``, ``count``) in strips of one width, each of which belongs to a ``document`` of the
    shard; a ``mask`` of its documents, and its ``fraction`` of all words. A count of 0 is padding.

    A local step is ``sweeps`` rounds of coordinate ascent over all documents, from where they were left.
    """

    start: Array  # concentrations to start from, (K, V)
    document_prior: Array  # a, (K,)
    topic_prior: Array  # b, (V,)
    sweeps: int = eqx.field(static=True, default=4)

    def init_global(self, key: Array) -> Globals:
        """Return the starting topics."""
        return {"log_concentration": jnp.log(self.start)}

    def init_local(self, key: Array, shard: Shard) -> Locals:
        """Return documents that are undecided."""
        n_topics = self.start.shape[0]
        undecided = jnp.zeros((shard["mask"].shape[0], n_topics), self.start.dtype)
        return {"document": undecided, "word": jnp.zeros(self.start.shape, self.start.dtype)}

    def loss(self, local: Locals, globals_: Globals, shard: Shard) -> Array:
        """Return the shard's share of the negative ELBO."""
        rho = globals_["log_concentration"]
        by_document, by_word, log_norm = self._expected(local, shard)
        mixed = shard["mask"] @ (_log_beta(self.document_prior) - _log_beta(self.document_prior + by_document))
        entropy = jnp.sum(by_document * _relative(local["document"], 1)) - jnp.sum(shard["count"] * log_norm)
        fit = jnp.sum(by_word * (_relative(local["word"], 0) - dirichlet.expected_log(rho)))
        return mixed + entropy + fit + shard["fraction"] * dirichlet.divergence(rho, self.topic_prior).sum()

    def local_step(self, local: Locals, globals_: Globals, shard: Shard) -> Locals:
        """Return the documents after a few rounds of coordinate ascent, none of which raises the loss."""
        word = dirichlet.expected_log(globals_["log_concentration"])
        weights = _weights(word, 0).T[shard["word"]]

        def sweep(_: int, document: Array) -> Array:
            counts = self._by_document(_weights(document, 1), weights, shard)[0]
            return digamma(self.document_prior + counts)

        return {"document": jax.lax.fori_loop(0, self.sweeps, sweep, local["document"]), "word": word}

    def statistics(self, local: Locals, shard: Shard) -> TopicStatistics:
        """Return the expected counts of words in topics."""
        return TopicStatistics(self._expected(local, shard)[1], shard["fraction"])

    def global_step(self, statistics: TopicStatistics, augmentation: Augmentation) -> Globals:
        """Return the best topics."""
        parts, (counts, w) = (part["log_concentration"] for part in augmentation), statistics
        return {"log_concentration": dirichlet.augmented_step(counts, self.topic_prior, w, *parts)}

    def curvature(self, local: Locals, globals_: Globals, shard: Shard) -> Globals:
        """Return that of topics which stay where they are."""
        return {"log_concentration": dirichlet.curvature(globals_["log_concentration"], shard["fraction"])}

    def natural(self, globals_: Globals) -> Globals:
        """Return the concentrations."""
        return {"log_concentration": jnp.exp(globals_["log_concentration"])}

    def from_natural(self, natural: Globals) -> Globals:
        """Return the topics with these concentrations."""
        return {"log_concentration": jnp.log(natural["log_concentration"])}

    def natural_gradient(self, globals_: Globals, gradient: Globals) -> Globals:
        """Return the gradient in E log beta, which belongs to the concentrations."""
        rho, slope = globals_["log_concentration"], gradient["log_concentration"]
        return {"log_concentration": dirichlet.natural_gradient(rho, slope)}

    def lower_bound(self) -> float:
        """Return 0: words are discrete, and the priors are proper."""
        return 0.0

    def concentrations(self, local: Locals, shard: Shard) -> Array:
        """Return gamma of every document."""
        return self.document_prior + self._expected(local, shard)[0]

    def _expected(self, local: Locals, shard: Shard) -> tuple[Array, Array, Array]:
        """Expected counts of topics in documents and of words in topics, and the logarithm of phi's norm."""
        document, word = _weights(local["document"], 1), _weights(local["word"], 0)
        by_document, share, norm = self._by_document(document, word.T[shard["word"]], shard)
        spread = share[..., None] * document[shard["document"]][:, None, :]
        counts = jnp.zeros(word.T.shape, word.dtype).at[shard["word"]].add(spread)
        return by_document, counts.T * word, jnp.log(norm)

    def _by_document(self, document: Array, weights: Array, shard: Shard) -> tuple[Array, Array, Array]:
        """Expected counts of topics in documents, n / norm, and norm; ``weights`` are those of the shard's words."""
        own = document[shard["document"]]
        norm = jnp.einsum("rwk,rk->rw", weights, own)
        share = shard["count"] / norm
        strips = jnp.einsum("rw,rwk->rk", share, weights) * own
        return jnp.zeros_like(document).at[shard["document"]].add(strips), share, norm


def _relative(log_weight: Array, axis: int) -> Array:
    """Logarithms of weights of the topics, relative to the largest."""
    return jnp.maximum(log_weight - jax.lax.stop_gradient(log_weight.max(axis, keepdims=True)), LOWEST)


def _weights(log_weight: Array, axis: int) -> Array:
    return jnp.exp(_relative(log_weight, axis))


def _log_beta(concentration: Array) -> Array:
    return gammaln(concentration).sum(-1) - gammaln(concentration.sum(-1))
