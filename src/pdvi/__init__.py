"""pdvi: large-scale mean-field variational inference by primal-dual optimisation."""

from pdvi import datasets, sampling, solvers, theory
from pdvi.fit import Checkpoint, Progress, SafeguardWarning, fit
from pdvi.oracles import LBFGS, CoordinateDescent, JointStep, Newton
from pdvi.problem import Augmentation, Model, Problem
from pdvi.result import Result, Status, load_result
from pdvi.solvers import P2DVI, PDVI

__version__ = "0.1.0"

__all__ = [
    "LBFGS",
    "P2DVI",
    "PDVI",
    "Augmentation",
    "Checkpoint",
    "CoordinateDescent",
    "JointStep",
    "Model",
    "Newton",
    "Problem",
    "Progress",
    "Result",
    "SafeguardWarning",
    "Status",
    "datasets",
    "fit",
    "load_result",
    "sampling",
    "solvers",
    "theory",
]
