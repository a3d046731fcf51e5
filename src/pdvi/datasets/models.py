"""Simulate data of the models that ship: documents, observations in groups, columns with factors, counts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd
import scipy.sparse as sp

from pdvi._base import checks
from pdvi.core.problem import Problem
from pdvi.datasets.problems import checked_rng
from pdvi.estimators import topic_problem
from pdvi.models.mixed_glm import FAMILIES


class Documents(NamedTuple):
    """Word counts of documents, with the topics that they were made of."""

    X: sp.csr_matrix  # (documents, words)
    topics: np.ndarray  # (topics, words): how often a topic uses a word
    shares: np.ndarray  # (documents, topics): what a document is made of

    def problem(self, n_topics: int | None = None, *, n_shards: int | None = None, seed: int = 0) -> Problem:
        """Return the problem of finding that many topics, by default as many as there are."""
        return topic_problem(self.X, len(self.topics) if n_topics is None else n_topics, n_shards=n_shards, seed=seed)


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
    positive = {"length": length, "evenness": evenness, "word_evenness": word_evenness}
    rng = checked_rng(seed, positive, n=n, n_words=n_words, n_topics=n_topics)
    topics = rng.dirichlet(np.full(n_words, word_evenness), n_topics)
    shares = rng.dirichlet(np.full(n_topics, evenness), n)
    if in_order:
        shares = shares[np.argsort(shares.argmax(1), kind="stable")]
    sizes = 1 + rng.poisson(rng.gamma(4.0, length / 4.0, n))
    of_topic = rng.multinomial(sizes, shares)
    rows = [np.repeat(np.arange(n), of_topic[:, k]) for k in range(n_topics)]
    below = [np.cumsum(topic)[:-1] for topic in topics]
    columns = [np.searchsorted(b, rng.random(len(row)), side="right") for b, row in zip(below, rows)]
    row, column = np.concatenate(rows), np.concatenate(columns)
    X = sp.coo_matrix((np.ones(len(row), np.int64), (row, column)), shape=(n, n_words)).tocsr()
    return Documents(X, topics, shares)


class Grouped(NamedTuple):
    """Observations in groups as a table, with the truth."""

    table: pd.DataFrame  # columns y, x1, x2, ..., group
    coef: np.ndarray  # of the intercept and the predictors
    covariance: np.ndarray  # of the random intercept and, if there are, the slopes of the first predictors


def grouped(
    n_groups: int = 200,
    *,
    size: float = 10.0,
    family: str = "normal",
    n_predictors: int = 2,
    n_slopes: int = 0,
    spread: float = 0.7,
    sigma: float = 0.5,
    seed: int = 0,
) -> Grouped:
    """Simulate a mixed model: y ~ family(coef' (1, x) + u' (1, x_1..)), u ~ N(0, covariance), for each group.

    Parameters
    ----------
    size
        mean number of observations of a group, which has at least one.
    n_slopes
        predictors with a slope of their own in every group, besides the intercept.
    spread
        standard deviation of the random intercepts; slopes have half of it, and a correlation of 0.3 with everything.
    sigma
        standard deviation of normal observations.
    """
    positive = {"size": size, "spread": spread, "sigma": sigma}
    rng = checked_rng(seed, positive, n_groups=n_groups, n_predictors=n_predictors)
    checks.whole("n_slopes", n_slopes, most=n_predictors, of="the number of predictors")
    checks.one_of("family", family, FAMILIES)
    group = np.repeat(np.arange(n_groups), 1 + rng.poisson(size - 1 if size > 1 else 0.0, n_groups))
    x = np.column_stack([np.ones(len(group)), rng.standard_normal((len(group), n_predictors))])
    coef = rng.normal(0, 0.5, n_predictors + 1)
    sd = spread * np.r_[1.0, np.full(n_slopes, 0.5)]
    covariance = np.outer(sd, sd) * (0.7 * np.eye(n_slopes + 1) + 0.3)
    u = rng.multivariate_normal(np.zeros(n_slopes + 1), covariance, n_groups)
    eta = x @ coef + (x[:, : n_slopes + 1] * u[group]).sum(1)
    if family == "bernoulli":
        y = (rng.random(len(eta)) < 1 / (1 + np.exp(-eta))).astype(float)
    elif family == "poisson":
        y = rng.poisson(np.exp(np.minimum(eta, 8.0))).astype(float)
    else:
        y = eta + sigma * rng.standard_normal(len(eta))
    columns = {f"x{j}": x[:, j] for j in range(1, n_predictors + 1)}
    return Grouped(pd.DataFrame({"y": y, **columns, "group": group}), coef, covariance)


class Factors(NamedTuple):
    """Rows whose columns have factors in common, with the truth."""

    X: np.ndarray  # (rows, columns)
    mean: np.ndarray
    loading: np.ndarray  # (columns, factors)
    noise_variance: np.ndarray  # of every column
    factors: np.ndarray  # (rows, factors)


def factors(
    n: int = 1_000, *, n_columns: int = 20, n_factors: int = 3, noise: float = 1.0, even: bool = False, seed: int = 0
) -> Factors:
    """Simulate factor analysis: x = mean + loading z + e, loadings and z standard normal.

    Parameters
    ----------
    noise
        standard deviation of e, on average over the columns; that of one is between a half and three halves of it.
    even
        the noise is the same in all columns, as probabilistic PCA has it.
    """
    rng = checked_rng(seed, {"noise": noise}, n=n, n_columns=n_columns, n_factors=n_factors)
    mean, loading = rng.standard_normal(n_columns), rng.standard_normal((n_columns, n_factors))
    sd = np.full(n_columns, noise) if even else noise * rng.uniform(0.5, 1.5, n_columns)
    z = rng.standard_normal((n, n_factors))
    X = mean + z @ loading.T + sd * rng.standard_normal((n, n_columns))
    return Factors(X, mean, loading, sd**2, z)


class Counts(NamedTuple):
    """Counts of rows that belong to groups, with the truth."""

    X: sp.csr_matrix  # (rows, columns)
    labels: np.ndarray  # the group of every row
    means: np.ndarray  # (groups, columns), of a row with size factor 1
    dispersions: np.ndarray  # of every column
    size_factors: np.ndarray  # of every row


def counts(
    n: int = 1_000,
    *,
    n_columns: int = 50,
    n_components: int = 4,
    mean: float = 2.0,
    difference: float = 1.0,
    dispersion: float = 0.5,
    in_order: bool = False,
    seed: int = 0,
) -> Counts:
    """Simulate a mixture of negative binomials, as counts of genes in cells.

    Parameters
    ----------
    mean
        typical count, the median over columns; columns differ by a factor of e, groups by exp(``difference``).
    dispersion
        typical dispersion d of a column: the variance of a count is mean + d mean^2.
    in_order
        rows come sorted by their group, as they may lie on a disk.
    """
    positive = {"mean": mean, "dispersion": dispersion}
    rng = checked_rng(seed, positive, n=n, n_columns=n_columns, n_components=n_components)
    checks.at_least("difference", difference)
    column = rng.standard_normal(n_columns)
    means = mean * np.exp(column + difference * rng.standard_normal((n_components, n_columns)))
    dispersions = dispersion * np.exp(0.3 * rng.standard_normal(n_columns))
    labels = rng.choice(n_components, n, p=rng.dirichlet(np.full(n_components, 5.0)))
    if in_order:
        labels = np.sort(labels)
    size_factors = np.exp(0.3 * rng.standard_normal(n))
    noise = rng.gamma(1 / dispersions, dispersions, (n, n_columns))
    X = sp.csr_matrix(rng.poisson(noise * size_factors[:, None] * means[labels]))
    return Counts(X, labels, means, dispersions, size_factors)
