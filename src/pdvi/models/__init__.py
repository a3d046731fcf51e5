"""Models: each one file; and the problem, which a store can only open where the models it may name are known."""

from pdvi.core.problem import Problem
from pdvi.models.count_mixture import CountMixtureModel
from pdvi.models.factor_analysis import FactorAnalysisModel
from pdvi.models.hierarchical_potts import HierarchicalPottsModel
from pdvi.models.latent_dirichlet import LatentDirichletModel
from pdvi.models.mixed_glm import MixedGLMModel
from pdvi.models.mixture import MixtureModel, PottsMixtureModel
from pdvi.models.quadratic import Quadratic
from pdvi.models.smooth import Quartic, TanhRegression

__all__ = [
    "CountMixtureModel",
    "FactorAnalysisModel",
    "HierarchicalPottsModel",
    "LatentDirichletModel",
    "MixedGLMModel",
    "MixtureModel",
    "PottsMixtureModel",
    "Problem",
    "Quadratic",
    "Quartic",
    "TanhRegression",
]
