"""Models that ship as scikit-learn users expect them: data in, `fit`, attributes out."""

from pdvi.estimators.count_mixture import CountMixture, count_problem
from pdvi.estimators.factor_analysis import FactorAnalysis, factor_problem
from pdvi.estimators.latent_dirichlet import LatentDirichlet, topic_problem
from pdvi.estimators.mixed_glm import MixedGLM, mixed_problem

__all__ = [
    "CountMixture",
    "FactorAnalysis",
    "LatentDirichlet",
    "MixedGLM",
    "count_problem",
    "factor_problem",
    "mixed_problem",
    "topic_problem",
]
