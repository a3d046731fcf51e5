"""Rows on a graph labelled by a mixture that is held fixed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.special import log_softmax

from pdvi.mixtures.build import Coupling

SWEEPS = 1_000  # at most; some dozen with clear domains
STILL = 1e-6  # largest change of a probability in a sweep


def settled(evidence: Callable[[np.ndarray], np.ndarray], coupling: Coupling, shape: tuple[int, int]) -> np.ndarray:
    """Return phi with phi_i = softmax((evidence_i(phi) + beta sum_l r_il phi_l) / temperature), by damped sweeps.

    ``evidence`` says what rows themselves tell of their labels. Labels that are undecided tell neighbours nothing, so
    the first sweep knows of the rows alone.
    """
    graph = coupling.graph * coupling.beta
    phi = np.full(shape, 1 / shape[1])
    log_phi = np.log(phi)
    for _ in range(SWEEPS):
        logits = (evidence(phi) + graph @ phi) / coupling.temperature
        log_phi = log_softmax((logits + coupling.damping * log_phi) / (1 + coupling.damping), axis=1)
        before, phi = phi, np.exp(log_phi)
        if np.abs(phi - before).max() < STILL:
            break
    return phi
