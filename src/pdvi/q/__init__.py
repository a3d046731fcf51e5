"""Posteriors, so that nobody writes KL terms by hand: families, expected log densities, and models made of them.

A distribution is a start, a prior or a posterior. `Model` turns families, a prior and a likelihood into what
`pdvi.Problem` takes.
"""

from pdvi.q.densities import (
    bernoulli_logit_lpmf,
    beta_lpdf,
    binomial_lpmf,
    categorical_lpmf,
    dirichlet_lpdf,
    gamma_lpdf,
    lognormal_lpdf,
    normal_lpdf,
    poisson_lpmf,
)
from pdvi.q.draws import expectation, standard_normal
from pdvi.q.family import Family
from pdvi.q.gamma import Gamma
from pdvi.q.model import Model
from pdvi.q.normal import FullNormal, LogNormal, Normal, independent_sum
from pdvi.q.simplex import Beta, Categorical, Dirichlet

__all__ = [
    "Beta",
    "Categorical",
    "Dirichlet",
    "Family",
    "FullNormal",
    "Gamma",
    "LogNormal",
    "Model",
    "Normal",
    "bernoulli_logit_lpmf",
    "beta_lpdf",
    "binomial_lpmf",
    "categorical_lpmf",
    "dirichlet_lpdf",
    "expectation",
    "gamma_lpdf",
    "independent_sum",
    "lognormal_lpdf",
    "normal_lpdf",
    "poisson_lpmf",
    "standard_normal",
]
