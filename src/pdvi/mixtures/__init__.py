"""Mixtures: arrays in, labels out."""

from pdvi.mixtures.build import (
    EmpiricalBayes,
    damping_of_patches,
    empirical_bayes,
    from_labels,
    gaussian_mixture_problem,
    means_of,
    point_at,
    potts_mixture_problem,
    potts_model,
    safe_damping,
)

__all__ = [
    "EmpiricalBayes",
    "damping_of_patches",
    "empirical_bayes",
    "from_labels",
    "gaussian_mixture_problem",
    "means_of",
    "point_at",
    "potts_mixture_problem",
    "potts_model",
    "safe_damping",
]
