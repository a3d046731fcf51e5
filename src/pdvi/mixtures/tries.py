"""Many fits of one small tissue, in one compiled program: from any features, settings and numbers of components."""

from __future__ import annotations

import numpy as np

from pdvi.core.problem import Problem
from pdvi.mixtures.em import Fitted
from pdvi.mixtures.ground import Ground
from pdvi.mixtures.pipeline import in_one_shape, in_white_noise
from pdvi.mixtures.program import fit_together
from pdvi.mixtures.start import EmpiricalBayes, centred
from pdvi.mixtures.task import Rows, Task


class Tries:
    """Fits of the Potts mixture to a tissue that is seen through several features.

    Narrower features are padded with columns of 0, and mixtures with fewer components than ``task`` has with absent
    ones; padding changes no label and no probability, and with tied noise no ELBO.
    """

    def __init__(self, rows: Rows, features: list[np.ndarray], task: Task):
        self.task, self.sample = task, rows.sample
        self.features = [centred(X, rows.sample).X for X in features]
        self.width = max([X.shape[1] for X in features], default=0)
        self.ground = Ground(rows, task)

    def fit(self, tries: list[tuple[int, EmpiricalBayes]], *, seed: int = 0) -> list[Fitted]:
        """Fit features, named by their numbers, from settings."""
        problems = [self._problem(number, settings) for number, settings in tries]
        return fit_together(problems, seed=seed, damping=self.ground.damping, **self.task.how)

    def probabilities(self, fitted: Fitted) -> np.ndarray:
        """Return the probabilities that a fit gives every row."""
        return np.asarray(self.ground.where.unshard(fitted.result.local_params))

    def _problem(self, number: int, start: EmpiricalBayes) -> Problem:
        white, settings, whitening = in_white_noise(self.features[number], start, self.task)
        log_scale = float(np.linalg.slogdet(whitening)[1])
        white, settings, _, log_scale = in_one_shape(white, settings, whitening, log_scale, self.task, self.width)
        return self.ground.problem(white, settings, log_scale, self.sample)
