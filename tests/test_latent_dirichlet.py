"""Latent Dirichlet allocation against scikit-learn's batch algorithm and against the ELBO written out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse as sp
from scipy.special import digamma, gammaln
from sklearn.decomposition import LatentDirichletAllocation
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.estimator_checks import check_estimator

import pdvi
from pdvi.estimators import topic_problem

DATA = pdvi.datasets.documents(120, n_words=40, n_topics=3, length=30, seed=1)


def plain_elbo(problem, local, rho):
    """The ELBO of all shards from phi and gamma of every word, one document after the other."""
    alpha, a, b = np.exp(rho), np.asarray(problem.model.document_prior), np.asarray(problem.model.topic_prior)
    log_beta = digamma(alpha) - digamma(alpha.sum(1, keepdims=True))

    def divergence(q, p):
        logs = digamma(q) - digamma(q.sum())
        constant = gammaln(q.sum()) - gammaln(q).sum() - gammaln(p.sum()) + gammaln(p).sum()
        return constant + ((q - p) * logs).sum()

    total = -sum(divergence(row, b) for row in alpha)
    shards = jax.tree.map(np.asarray, problem.shards)
    for s in range(problem.n_shards):
        for d in np.flatnonzero(shards["mask"][s]):
            mine = shards["document"][s] == d
            words, counts = shards["word"][s][mine].ravel(), shards["count"][s][mine].ravel()
            logits = local["document"][s][d] + local["word"][s][:, words].T
            phi = np.exp(logits - logits.max(1, keepdims=True))
            phi /= phi.sum(1, keepdims=True)
            gamma = a + counts @ phi
            log_theta = digamma(gamma) - digamma(gamma.sum())
            total += (counts[:, None] * phi * (log_theta + log_beta[:, words].T - np.log(phi))).sum()
            total -= divergence(gamma, a)
    return total


@pytest.mark.slow
def test_the_loss_is_the_elbo_written_out(x64):
    problem = topic_problem(DATA.X, 3, n_shards=4)
    lam, local = problem.init(jax.random.key(0))
    local = jax.tree.map(lambda leaf: leaf + 0.3 * jax.random.normal(jax.random.key(1), leaf.shape), local)
    objective = float(problem.evaluate(lam, local)[0].sum())
    expected = -plain_elbo(problem, jax.tree.map(np.asarray, local), np.asarray(lam).reshape(3, 40))
    np.testing.assert_allclose(objective, expected, rtol=1e-10)


@pytest.mark.slow
def test_coordinate_ascent_ends_where_scikit_learn_ends(x64):
    """The same start, the same fixed point: topics and bound."""
    theirs = LatentDirichletAllocation(
        3, learning_method="batch", max_iter=400, max_doc_update_iter=1000, mean_change_tol=1e-10, random_state=0
    ).fit(DATA.X)
    problem = topic_problem(DATA.X, 3, n_shards=4)
    start = {"log_concentration": jnp.log(theirs.components_)}
    result = pdvi.fit(problem, pdvi.CAVI(), start=start, max_epochs=200, tol=0)
    ours = np.exp(result.global_params["log_concentration"])
    np.testing.assert_allclose(ours, theirs.components_, rtol=1e-4)
    np.testing.assert_allclose(-result.objective, theirs.score(DATA.X), rtol=1e-6)


@pytest.mark.slow
def test_the_partition_does_not_change_the_objective(x64):
    values = []
    for n_shards in (1, 4):
        problem = topic_problem(DATA.X, 3, n_shards=n_shards)
        lam, local = problem.init(jax.random.key(0))
        local = {"document": local["document"], "word": local["word"] + jax.random.normal(jax.random.key(1), (3, 40))}
        values.append(float(problem.evaluate(lam, local)[0].sum()))
    np.testing.assert_allclose(values, values[0], rtol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("solver", [pdvi.P2DVI(), pdvi.MemoizedVB(), pdvi.SVI(forgetting=0.7, rate=1.0)])
def test_solvers_agree_with_documents_sorted_by_topic(solver):
    data = pdvi.datasets.documents(400, n_words=60, n_topics=3, length=60, in_order=True, seed=2)
    problem = topic_problem(data.X, 3)
    whole = pdvi.fit(problem, pdvi.CAVI(), max_epochs=60)
    found = pdvi.fit(problem, solver, max_epochs=60, sampling=pdvi.sampling.Fixed())
    assert found.objective < whole.objective * (1.01 if isinstance(solver, pdvi.SVI) else 1.002)


def test_the_estimator_finds_the_topics():
    data = pdvi.datasets.documents(600, n_words=80, n_topics=4, length=80, in_order=True, seed=3)
    lda = pdvi.LatentDirichlet(4, random_state=0).fit(data.X)
    assert lda.converged_
    found = lda.components_ / lda.components_.sum(1, keepdims=True)
    distance = np.abs(found[:, None] - data.topics).sum(-1)
    assert (distance.min(0) < 0.2).all()
    order = distance.argmin(0)
    shares = lda.transform(data.X)
    np.testing.assert_allclose(shares.sum(1), 1, rtol=1e-6)
    assert np.abs(shares[:, order] - data.shares).mean() < 0.05
    assert lda.perplexity(data.X) < 80
    truth = -(data.X.multiply(np.log(data.shares @ data.topics))).sum() / data.X.sum()
    assert np.log(lda.perplexity(data.X)) < truth + 0.35


@pytest.mark.slow
def test_the_score_is_scikit_learns_without_the_topics_own_part(x64):
    lda = pdvi.LatentDirichlet(3, random_state=0).fit(DATA.X)
    theirs = LatentDirichletAllocation(3, max_iter=1, max_doc_update_iter=1000, mean_change_tol=1e-8).fit(DATA.X)
    theirs.components_ = lda.components_
    theirs.exp_dirichlet_component_ = np.exp(digamma(lda.components_) - digamma(lda.components_.sum(1, keepdims=True)))
    new = pdvi.datasets.documents(30, n_words=40, n_topics=3, length=30, seed=9).X
    np.testing.assert_allclose(lda.transform(new), theirs.transform(new), atol=1e-4)
    nothing = sp.csr_matrix((1, 40), dtype=float)
    own = theirs.score(nothing)  # no documents: what is left is the divergence of the topics from their prior
    np.testing.assert_allclose(lda.score(new), theirs.score(new) - own, rtol=1e-5)


def test_dense_and_sparse_counts_give_the_same():
    few = pdvi.LatentDirichlet(2, random_state=0, max_epochs=60)
    sparse = few.fit(DATA.X).components_
    np.testing.assert_array_equal(few.fit(DATA.X.toarray()).components_, sparse)


def test_what_it_refuses():
    with pytest.raises(ValueError, match="Negative values in data passed to LatentDirichlet"):
        pdvi.LatentDirichlet(2).fit([[1, -1], [0, 1]])
    with pytest.raises(ValueError, match="`X` must have at least one word, got 2 documents without any"):
        pdvi.LatentDirichlet(2).fit(np.zeros((2, 3)))
    with pytest.raises(ValueError, match="`n_components` must be a whole number of at least 1, got 0"):
        pdvi.LatentDirichlet(0).fit(DATA.X)
    with pytest.warns(ConvergenceWarning, match="LatentDirichlet did not converge in 1 epochs"):
        pdvi.LatentDirichlet(3, max_epochs=1).fit(DATA.X)


@pytest.mark.slow
def test_empty_documents_are_what_the_prior_says():
    counts = sp.vstack([DATA.X[:50], sp.csr_matrix((3, 40), dtype=DATA.X.dtype)])
    lda = pdvi.LatentDirichlet(3, random_state=0).fit(counts)
    np.testing.assert_allclose(lda.transform(counts)[-3:], 1 / 3, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
def test_scikit_learns_own_checks():
    check_estimator(pdvi.LatentDirichlet(n_components=3, random_state=0, max_epochs=5))
