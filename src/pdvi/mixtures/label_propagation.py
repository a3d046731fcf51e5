"""Probabilities of labels on a graph, with everything else held fixed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import scipy.sparse as sp
from scipy.special import log_softmax

from pdvi.mixtures.sharded_graph import safe_damping

MAX_SWEEPS = 500
TOL = 1e-5  # of a probability in a sweep


def propagate_labels(
    evidence: Callable[[np.ndarray], np.ndarray],
    graph: sp.csr_array,
    shape: tuple[int, int],
    *,
    beta: float = 1.0,
    temperature: float = 1.0,
) -> np.ndarray:
    """Return phi with phi_i = softmax((evidence_i(phi) + beta sum_l r_il phi_l) / temperature), by damped sweeps.

    ``evidence`` gives the log density of every row under every label. Labels that are undecided tell neighbors nothing,
    so the first sweep knows of the rows alone.
    """
    damping = safe_damping(graph, beta, temperature)
    phi = np.full(shape, 1 / shape[1])
    log_phi = np.log(phi)
    for _ in range(MAX_SWEEPS):
        logits = (evidence(phi) + beta * (graph @ phi)) / temperature
        log_phi = log_softmax((logits + damping * log_phi) / (1 + damping), axis=1)
        before, phi = phi, np.exp(log_phi)
        if np.abs(phi - before).max() < TOL:
            break
    return phi
