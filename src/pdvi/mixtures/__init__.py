"""Mixtures: arrays in, labels out."""

from pdvi.mixtures.build import (
    EmpiricalBayes,
    empirical_bayes,
    from_labels,
    gaussian_mixture_problem,
    mixture_model,
    potts_mixture_problem,
    potts_model,
)
from pdvi.mixtures.config import CONFIG, Config
from pdvi.mixtures.sharded_graph import safe_damping

__all__ = [
    "CONFIG",
    "Config",
    "EmpiricalBayes",
    "empirical_bayes",
    "from_labels",
    "gaussian_mixture_problem",
    "mixture_model",
    "potts_mixture_problem",
    "potts_model",
    "safe_damping",
]
