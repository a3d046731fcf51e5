"""Models: each one file; and the problem, which a store can only open where the models it may name are known."""

from pdvi.core.problem import Problem
from pdvi.models.count_mixture import CountMixtureModel
from pdvi.models.factor_analysis import FactorAnalysisModel
from pdvi.models.free_mixture import FreeMixtureModel
from pdvi.models.gaussian_mixture import GaussianMixtureModel
from pdvi.models.latent_dirichlet import LatentDirichletModel
from pdvi.models.mixed_glm import MixedGLMModel
from pdvi.models.potts_mixture import PottsMixtureModel
from pdvi.models.quadratic import Quadratic
from pdvi.models.sample_offsets import SampleOffsets
from pdvi.models.smooth import Quartic, TanhRegression
from pdvi.models.two_level_mixture import TwoLevelMixtureModel

__all__ = [
    "CountMixtureModel",
    "FactorAnalysisModel",
    "FreeMixtureModel",
    "GaussianMixtureModel",
    "LatentDirichletModel",
    "MixedGLMModel",
    "PottsMixtureModel",
    "Problem",
    "Quadratic",
    "Quartic",
    "SampleOffsets",
    "TanhRegression",
    "TwoLevelMixtureModel",
]
