"""Mixtures: arrays in, labels out."""

from pdvi.mixtures.build import gaussian_mixture_problem, point_at, potts_mixture_problem, potts_model
from pdvi.mixtures.damping import damping_of_patches, safe_damping
from pdvi.mixtures.recipe import RECIPE, Recipe
from pdvi.mixtures.start import EmpiricalBayes, empirical_bayes, from_labels, means_of
from pdvi.mixtures.views import VIEWS, View

__all__ = [
    "RECIPE",
    "VIEWS",
    "EmpiricalBayes",
    "Recipe",
    "View",
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
