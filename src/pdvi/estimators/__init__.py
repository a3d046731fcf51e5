"""Models that ship as scikit-learn users expect them: data in, `fit`, attributes out."""

from pdvi.estimators.latent_dirichlet import LatentDirichlet, topic_problem

__all__ = ["LatentDirichlet", "topic_problem"]
