"""Simulate data of the models that ship: documents, grouped observations, factors, counts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import scipy.sparse as sp

from pdvi._base import checks
from pdvi.core.problem import Problem
from pdvi.estimators import topic_problem


class Documents(NamedTuple):
    """Word counts of documents, with the topics that they were made of."""

    X: sp.csr_matrix  # (documents, words)
    topics: np.ndarray  # (topics, words): how often a topic uses a word
    shares: np.ndarray  # (documents, topics): what a document is made of

    def problem(self, n_topics: int | None = None, *, n_shards: int | None = None, seed: int = 0) -> Problem:
        """Return the problem of finding that many topics, by default as many as there are."""
        n_topics = len(self.topics) if n_topics is None else n_topics
        return topic_problem(self.X, n_topics, n_shards=n_shards, seed=seed)


def documents(
    n: int = 1_000,
    *,
    n_words: int = 500,
    n_topics: int = 5,
    length: float = 80.0,
    evenness: float = 0.1,
    word_evenness: float = 0.05,
    in_order: bool = False,
    seed: int = 0,
) -> Documents:
    """Simulate latent Dirichlet allocation.

    Parameters
    ----------
    length
        mean number of words of a document; lengths are negative binomial, with a standard deviation of half of it.
    evenness
        concentration of a document's shares: small, and it has few topics.
    word_evenness
        concentration of a topic's words.
    in_order
        documents come sorted by their main topic, as they may lie on a disk.
    """
    for name, value in (("n", n), ("n_words", n_words), ("n_topics", n_topics)):
        checks.whole(name, value, least=1)
    for name, size in (("length", length), ("evenness", evenness), ("word_evenness", word_evenness)):
        checks.positive(name, size)
    checks.seed("seed", seed)
    rng = np.random.default_rng(seed)
    topics = rng.dirichlet(np.full(n_words, word_evenness), n_topics)
    shares = rng.dirichlet(np.full(n_topics, evenness), n)
    if in_order:
        shares = shares[np.argsort(shares.argmax(1), kind="stable")]
    sizes = 1 + rng.poisson(rng.gamma(4.0, length / 4.0, n))
    of_topic = rng.multinomial(sizes, shares)
    rows, columns = [], []
    for k in range(n_topics):
        document = np.repeat(np.arange(n), of_topic[:, k])
        rows.append(document)
        columns.append(np.searchsorted(np.cumsum(topics[k])[:-1], rng.random(len(document)), side="right"))
    row, column = np.concatenate(rows), np.concatenate(columns)
    X = sp.coo_matrix((np.ones(len(row), np.int64), (row, column)), shape=(n, n_words)).tocsr()
    return Documents(X, topics, shares)
