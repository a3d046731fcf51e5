"""What several labellings of the same rows agree on: matched to the most typical one, then averaged."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.optimize import linear_sum_assignment

UNDECIDED = 2  # labellings; with 1 spots of the slides were right less often than certain, by 0.12, with 3 as often


class Consensus(NamedTuple):
    """Hold what labellings agree on, how much each agrees with each (ARI), and which is the most typical."""

    labels: np.ndarray
    probability: np.ndarray  # (rows, labels), the mean of matched labellings
    certainty: np.ndarray  # of every row, see `certainty_of`
    agreement: np.ndarray  # (labellings, labellings)
    medoid: int


def consensus(labellings: list[np.ndarray], n_labels: int, reference: np.ndarray | None = None) -> Consensus:
    """Return what labellings agree on: the medoid is the one whose mean agreement with the others is highest.

    Labels have no names that two fits would share. So every labelling is matched to the medoid, one to one, such that
    as many rows as possible keep their label; a row then gets the label that most labellings give it, and the medoid's
    where several have as many votes. With a ``reference`` all are matched to it, and its labels are kept.
    """
    agreement = np.eye(len(labellings))
    for i, one in enumerate(labellings):
        for j in range(i):
            agreement[i, j] = agreement[j, i] = adjusted_rand(one, labellings[j], n_labels)
    medoid = int(agreement.mean(1).argmax())
    centre = labellings[medoid] if reference is None else reference
    probability = votes([match(labels, centre, n_labels)[labels] for labels in labellings], n_labels)
    labels = centre
    if reference is None:
        best = probability.max(1)
        is_best = probability[np.arange(len(centre)), centre] == best
        labels = np.where(is_best, centre, probability.argmax(1))
    certainty = certainty_of(probability, labels, len(labellings))
    return Consensus(labels, probability, certainty, agreement, medoid)


def votes(labellings: list[np.ndarray], n_labels: int) -> np.ndarray:
    """Return the share of labellings that give a row each label, (rows, labels)."""
    shares = np.zeros((len(labellings[0]), n_labels), np.float32)  # of a large tissue much memory: as little as will do
    for labels in labellings:
        shares[np.arange(len(labels)), labels] += 1
    shares /= len(labellings)
    return shares


def certainty_of(probability: np.ndarray, labels: np.ndarray, n_labellings: int) -> np.ndarray:
    """Return the share of labellings that give rows their label, with two more that are undecided.

    A few labellings that agree cannot make anybody entirely sure, the less so as they come from the same data and err
    together: this is the posterior mean of the share under a prior that is worth two labellings and knows nothing.
    """
    share = probability[np.arange(len(labels)), labels]
    return np.asarray((n_labellings * share + UNDECIDED / probability.shape[1]) / (n_labellings + UNDECIDED))


def match(labels: np.ndarray, reference: np.ndarray, n_labels: int) -> np.ndarray:
    """Return the label of ``reference`` for every label, one to one, such that most rows agree."""
    rows, columns = linear_sum_assignment(-_together(labels, reference, n_labels))
    found = np.empty(n_labels, np.int64)
    found[rows] = columns
    return found


def adjusted_rand(one: np.ndarray, other: np.ndarray, n_labels: int) -> float:
    """Return the adjusted Rand index of two labellings by 0, 1, ...

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
