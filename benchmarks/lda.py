"""Topics of simulated documents that come sorted by topic: pdvi beside scikit-learn's online LDA, in one run.

    python benchmarks/lda.py --documents 20000 --words 10000 --topics 20

Prints a table: seconds of the fit (compilation included), those of the processor besides, which do not depend on what
else the machine does, and held-out perplexity by document completion: half of the words of every new document say what
it is made of, and the other half is predicted, by the same code for all methods.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from functools import partial

import numpy as np
import scipy.sparse as sp
from scipy.special import digamma
from sklearn.decomposition import LatentDirichletAllocation

import pdvi

warnings.filterwarnings("ignore")  # methods that are stopped early say so


def halves(X: sp.csr_matrix, seed: int) -> tuple[sp.csr_matrix, sp.csr_matrix]:
    """Return every document's words thrown into two heaps."""
    rng = np.random.default_rng(seed)
    first = X.copy()
    first.data = rng.binomial(X.data.astype(int), 0.5)
    second = X - first
    first.eliminate_zeros()
    second.eliminate_zeros()
    return first, second.tocsr()


def perplexity(concentration: np.ndarray, X: sp.csr_matrix, seed: int = 0, rounds: int = 60) -> float:
    """Return how surprising one half of the documents is after the other; topics by their posterior mean."""
    known, asked = halves(X, seed)
    topics = concentration / concentration.sum(1, keepdims=True)
    n_topics = len(topics)
    total, words = 0.0, 0.0
    for d in range(X.shape[0]):
        a, b = known.indptr[d : d + 2]
        columns, counts = topics[:, known.indices[a:b]], known.data[a:b]
        gamma = np.ones(n_topics)
        for _ in range(rounds):
            weight = np.exp(digamma(gamma) - digamma(gamma.sum()))
            gamma = 1 / n_topics + weight * (columns @ (counts / np.maximum(weight @ columns, 1e-300)))
        a, b = asked.indptr[d : d + 2]
        predicted = (gamma / gamma.sum()) @ topics[:, asked.indices[a:b]]
        total += asked.data[a:b] @ np.log(predicted)
        words += asked.data[a:b].sum()
    return float(np.exp(-total / words))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=2_000)
    parser.add_argument("--words", type=int, default=1_000)
    parser.add_argument("--topics", type=int, default=10)
    parser.add_argument("--length", type=float, default=150)
    parser.add_argument("--held-out", type=int, default=500)
    parser.add_argument("--passes", type=int, nargs="+", default=[1, 3], help="of scikit-learn's online method")
    parser.add_argument("--epochs", type=int, nargs="+", default=[4, 10], help="of P2D-VI and memoized VB")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    n, K = options.documents, options.topics
    data = pdvi.datasets.documents(
        n + options.held_out, n_words=options.words, n_topics=K, length=options.length, seed=options.seed
    )
    held_out, X = data.X[n:], data.X[:n]
    order = np.argsort(data.shares[:n].argmax(1), kind="stable")
    in_order = X[order]
    print(f"{n} documents x {options.words} words, {K} topics, {X.nnz / n:.0f} different words in a document")
    print(f"{'method':40} {'documents':>10} {'seconds':>8} {'processor':>9} {'perplexity':>10}")

    def row(name: str, kind: str, fit: Callable[[], np.ndarray]) -> None:
        wall, processor = time.perf_counter(), time.process_time()
        concentration = fit()
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
        surprise = perplexity(concentration, held_out)
        print(f"{name:40} {kind:>10} {wall:8.1f} {processor:9.1f} {surprise:10.1f}", flush=True)

    def ours(solver: pdvi.Solver, epochs: int) -> np.ndarray:
        settings = {"solver": solver, "max_epochs": epochs, "random_state": options.seed}
        return pdvi.LatentDirichlet(K, **settings).fit(in_order).components_

    def theirs(documents: sp.csr_matrix, passes: int) -> np.ndarray:
        settings = {"learning_method": "online", "max_iter": passes, "random_state": options.seed}
        return LatentDirichletAllocation(K, **settings).fit(documents).components_

    row("the topics that made them", "", lambda: data.topics + 1e-12)
    solvers = {"pdvi P2DVI()": pdvi.P2DVI(), "pdvi MemoizedVB()": pdvi.MemoizedVB()}
    for name, solver in solvers.items():
        for epochs in options.epochs:
            row(f"{name}, {epochs} epochs", "sorted", partial(ours, solver, epochs))
    for kind, documents in (("sorted", in_order), ("shuffled", X)):
        for passes in options.passes:
            row(f"scikit-learn online, {passes} passes", kind, partial(theirs, documents, passes))


if __name__ == "__main__":
    main()
