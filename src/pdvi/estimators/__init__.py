"""Models that ship as scikit-learn users expect them: data in, `fit`, attributes out."""

from pdvi.estimators.factor_analysis import FactorAnalysis, factor_problem
from pdvi.estimators.latent_dirichlet import LatentDirichlet, topic_problem
from pdvi.estimators.mixed_glm import MixedGLM, mixed_problem

__all__ = ["FactorAnalysis", "LatentDirichlet", "MixedGLM", "factor_problem", "mixed_problem", "topic_problem"]
