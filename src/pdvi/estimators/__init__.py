"""Models that ship as scikit-learn users expect them: data in, `fit`, attributes out."""

from pdvi.estimators.latent_dirichlet import LatentDirichlet, topic_problem
from pdvi.estimators.mixed_glm import MixedGLM, mixed_problem

__all__ = ["LatentDirichlet", "MixedGLM", "mixed_problem", "topic_problem"]
