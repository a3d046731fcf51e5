"""Topics of documents: `LatentDirichletModel` with the face of scikit-learn's LatentDirichletAllocation."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import equinox as eqx
import jax
import numpy as np
import scipy.sparse as sp
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from pdvi._base.checks import positive, whole
from pdvi._base.types import Array
from pdvi.core.problem import Problem
from pdvi.estimators.fitting import CountEstimator
from pdvi.models.latent_dirichlet import LatentDirichletModel
from pdvi.shards.grouping import shards_for
from pdvi.shards.ragged import Strips, strips

SHARDS = 20  # at most: topics are set anew at each visit, which costs as much as some hundred documents
DOCUMENTS = 25  # in a shard at least
SEEDS = 10  # documents that a topic starts from
OWN = 0.5  # share of a topic's start that comes from them; the rest is common to all
SETTLED = 50  # sweeps over documents whose topics are known
AT_ONCE = 2_000  # documents that are looked at together, when topics are known


def topic_problem(
    X: Any,
    n_topics: int,
    *,
    document_prior: float | None = None,
    topic_prior: float | None = None,
    n_shards: int | None = None,
    seed: int = 0,
) -> Problem:
    """Return the problem of finding the topics of documents, for `pdvi.fit`.

    Parameters
    ----------
    X
        word counts (documents, words), sparse or dense. Documents stay in their order: a shard has consecutive ones.
    document_prior, topic_prior
        concentrations of a document's topics and of a topic's words; by default 1 / n_topics, as in scikit-learn.
    n_shards
        by default at most 20, with at least 25 documents each, and fewer if there are so many topics and words that
        copies of them would take more than half a gigabyte.
    seed
        of the documents that topics start from.
    """
    X = _counts(X)
    whole("n_topics", n_topics, least=1)
    a = 1 / n_topics if document_prior is None else positive("document_prior", document_prior)
    b = 1 / n_topics if topic_prior is None else positive("topic_prior", topic_prior)
    model = LatentDirichletModel(
        start=jax.device_put(_start(X, n_topics, b, np.random.default_rng(seed))),
        document_prior=jax.device_put(np.full(n_topics, float(a))),
        topic_prior=jax.device_put(np.full(X.shape[1], float(b))),
    )
    if n_shards is None:
        n_shards = shards_for(X.shape[0], model.start.size, most=SHARDS, least_rows=DOCUMENTS)
    return Problem(model, _sharded(X, strips(np.diff(X.indptr), n_shards)))


def _counts(X: Any) -> sp.csr_matrix:
    X = sp.csr_matrix(X, copy=True)
    X.sum_duplicates()
    X.eliminate_zeros()
    if X.nnz == 0:
        msg = f"`X` must have at least one word, got {X.shape[0]} documents without any."
        raise ValueError(msg)
    return X


def _sharded(X: sp.csr_matrix, where: Strips) -> dict[str, np.ndarray]:
    count = where.spread(X.data.astype(float))
    in_shard = np.maximum(count.sum((1, 2)), 1e-6)  # a shard of empty documents has next to no share of the prior
    return {
        "word": where.spread(X.indices.astype(np.int32)),
        "count": count,
        "document": where.owner,
        "mask": where.unit_mask.astype(float),
        "fraction": in_shard / in_shard.sum(),
    }


def _start(X: sp.csr_matrix, n_topics: int, prior: float, rng: np.random.Generator) -> np.ndarray:
    """Topics of the size that they will have, each with a leaning to some documents."""
    common = np.asarray(X.sum(0), float).ravel()
    filled = np.flatnonzero(np.diff(X.indptr))
    some = np.stack([rng.choice(filled, min(SEEDS, len(filled)), replace=False) for _ in range(n_topics)])
    leaning = np.stack([np.asarray(X[rows].sum(0), float).ravel() for rows in some])
    leaning *= common.sum() / leaning.sum(1, keepdims=True)
    # documents of one topic would start all topics alike where there are few documents: hence some noise
    noise = rng.gamma(100.0, 0.01, leaning.shape)
    return prior + noise * ((1 - OWN) * common + OWN * leaning) / n_topics


@dataclass(eq=False, repr=False)
class LatentDirichlet(ClassNamePrefixFeaturesOutMixin, TransformerMixin, CountEstimator):
    """Latent Dirichlet allocation by P2D-VI: documents may come in any order, sorted by topic too.

    Sparse counts stay sparse.

    Parameters
    ----------
    n_components
        number of topics.
    doc_topic_prior, topic_word_prior
        concentrations of a document's topics and of a topic's words; by default 1 / n_components.
    max_epochs, tol
        of the fit, see `pdvi.fit`. A fit that ends before it has converged warns
        (`sklearn.exceptions.ConvergenceWarning`).
    solver
        any solver of `pdvi.solvers`, or its name; by default `P2DVI()`.
    n_shards
        into how many shards documents are grouped; by default as `pdvi.estimators.topic_problem` does.
    verbose
        print the course of the fit.
    random_state
        seed of the start and the draws.

    Attributes
    ----------
    components_ (concentrations of the words of every topic), doc_topic_prior_, topic_word_prior_, elbo_, n_iter_
    (epochs), converged_, result_, fit_seconds_
    """

    n_components: int = 10
    _: KW_ONLY
    doc_topic_prior: float | None = None
    topic_word_prior: float | None = None
    max_epochs: int = 50
    tol: float = 1e-4

    def fit(self, X: Any, y: Any = None) -> LatentDirichlet:
        """Find the topics of documents, counts of words (documents, words)."""
        whole("n_components", self.n_components, least=1)
        counts = self._validated(X, reset=True)
        seed = self._seed()
        problem = topic_problem(
            counts,
            self.n_components,
            document_prior=self.doc_topic_prior,
            topic_prior=self.topic_word_prior,
            n_shards=self.n_shards,
            seed=seed,
        )
        result = self._fit_problem(problem, seed)
        self.components_ = np.exp(np.asarray(result.global_params["log_concentration"], float))
        self.doc_topic_prior_ = float(problem.model.document_prior[0])
        self.topic_word_prior_ = float(problem.model.topic_prior[0])
        self._n_features_out = self.n_components
        return self

    def transform(self, X: Any) -> np.ndarray:
        """Return the expected shares of the topics in documents."""
        concentration = self._look(X)[0]
        return concentration / concentration.sum(1, keepdims=True)

    def score(self, X: Any, y: Any = None) -> float:
        """Return a lower bound of the log-likelihood of documents, the topics being known as well as the fit does.

        Scikit-learn's bound also has the divergence of the topics from their prior, once for every set of documents.
        """
        return self._look(X)[1]

    def perplexity(self, X: Any) -> float:
        """Return exp(-score / number of words): small is good."""
        return float(np.exp(-self.score(X) / max(1.0, float(sp.csr_matrix(X).sum()))))

    def _look(self, X: Any) -> tuple[np.ndarray, float]:
        """Concentrations of the documents' topics, and the documents' part of the ELBO."""
        check_is_fitted(self)
        X = self._validated(X, reset=False)
        model = LatentDirichletModel(
            start=self.components_,
            document_prior=jax.device_put(np.full(self.n_components, self.doc_topic_prior_)),
            topic_prior=jax.device_put(np.full(X.shape[1], self.topic_word_prior_)),
            sweeps=SETTLED,
        )
        where = strips(np.diff(X.indptr), -(-X.shape[0] // AT_ONCE))
        shards = {**_sharded(X, where), "fraction": np.zeros(len(where.units))}  # topics are known: no prior
        concentration, losses = _read(Problem(model, shards))
        return where.gathered(np.asarray(concentration, float)), -float(np.asarray(losses, float).sum())


@eqx.filter_jit
def _read(problem: Problem) -> tuple[Array, Array]:
    """What documents are made of, and their losses, shard by shard."""
    globals_ = problem.model.init_global(jax.random.key(0))

    def one(local: Any, shard: Any) -> tuple[Array, Array]:
        local = problem.model.local_step(local, globals_, shard)
        return problem.model.concentrations(local, shard), problem.model.loss(local, globals_, shard)

    local = problem.init(jax.random.key(0))[1]
    return problem.map_shards(one, local)
