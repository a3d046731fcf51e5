"""What several labelings of the same rows agree on: matched to the most typical one, then averaged."""

from __future__ import annotations

import numpy as np
from scipy.optimize import linear_sum_assignment

UNDECIDED = 2  # labelings; with 1 spots of the slides were right less often than certain, by 0.12, with 3 as often


def consensus(labelings: list[np.ndarray], n_labels: int) -> np.ndarray:
    """Return the label that most labelings give a row; the medoid's where several have as many votes."""
    center = labelings[medoid(agreement(labelings, n_labels))]
    probability = votes(labelings, n_labels, center)
    is_best = probability[np.arange(len(center)), center] == probability.max(1)
    return np.where(is_best, center, probability.argmax(1))


def agreement(labelings: list[np.ndarray], n_labels: int) -> np.ndarray:
    """Return the adjusted Rand index of every two labelings, (labelings, labelings)."""
    found = np.eye(len(labelings))
    for i, one in enumerate(labelings):
        for j in range(i):
            found[i, j] = found[j, i] = adjusted_rand(one, labelings[j], n_labels)
    return found


def medoid(agreement: np.ndarray) -> int:
    """Return which labeling agrees most with all of them."""
    return int(agreement.mean(1).argmax())


def votes(labelings: list[np.ndarray], n_labels: int, reference: np.ndarray | None = None) -> np.ndarray:
    """Return the fraction of labelings that give a row each label, (rows, labels).

    Labels have no names that two fits would share: with a ``reference`` every labeling is matched to it, one label to
    one, such that as many rows as possible agree.
    """
    found = np.zeros((len(labelings[0]), n_labels), np.float32)  # of a large tissue much memory: as little as will do
    for labels in labelings:
        found[np.arange(len(labels)), labels if reference is None else match(labels, reference, n_labels)[labels]] += 1
    found /= len(labelings)
    return found


def certainty_of(probability: np.ndarray, labels: np.ndarray, n_labelings: int) -> np.ndarray:
    """Return the share of labelings that give rows their label, with two more that are undecided.

    Labelings of the same data err together: this is the posterior mean of the share, under a uniform prior that is
    worth two labelings.
    """
    share = probability[np.arange(len(labels)), labels]
    return np.asarray((n_labelings * share + UNDECIDED / probability.shape[1]) / (n_labelings + UNDECIDED))


def match(labels: np.ndarray, reference: np.ndarray, n_labels: int) -> np.ndarray:
    """Return the label of ``reference`` for every label, one to one, such that most rows agree."""
    rows, columns = linear_sum_assignment(-_together(labels, reference, n_labels))
    found = np.empty(n_labels, np.int64)
    found[rows] = columns
    return found


def adjusted_rand(one: np.ndarray, other: np.ndarray, n_labels: int) -> float:
    """Return the adjusted Rand index of two labelings by 0, 1, ...

    scikit-learn's is the same number, but finds out first what kind of labels it has, which takes most of its time.
    """

    def pairs(counts: np.ndarray) -> float:
        return float((counts * (counts - 1.0)).sum() / 2)

    together = _together(one, other, n_labels)
    both, first, second = pairs(together), pairs(together.sum(1)), pairs(together.sum(0))
    expected = first * second / max(pairs(np.asarray(len(one))), 1.0)
    most = (first + second) / 2
    return 1.0 if most == expected else (both - expected) / (most - expected)


def _together(one: np.ndarray, other: np.ndarray, n_labels: int) -> np.ndarray:
    """How many rows have each pair of labels."""
    return np.bincount(one * n_labels + other, minlength=n_labels**2).reshape(n_labels, n_labels)
