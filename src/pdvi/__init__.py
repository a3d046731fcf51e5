"""pdvi: large-scale mean-field variational inference by primal-dual optimisation."""

from pdvi import datasets, graphs, metrics, mixtures, partition, sampling, solvers, theory
from pdvi.estimators import GaussianMixture, PottsMixture
from pdvi.fit import Checkpoint, Progress, SafeguardWarning, fit
from pdvi.oracles import LBFGS, CoordinateDescent, JointStep, Newton
from pdvi.problem import Augmentation, Model, Problem
from pdvi.result import Point, Result, Status, load_result
from pdvi.solvers import CAVI, P2DVI, PDVI, SVI, MemoizedVB

__version__ = "0.1.0"

__all__ = [
    "CAVI",
    "LBFGS",
    "P2DVI",
    "PDVI",
    "SVI",
    "Augmentation",
    "Checkpoint",
    "CoordinateDescent",
    "GaussianMixture",
    "JointStep",
    "MemoizedVB",
    "Model",
    "Newton",
    "Point",
    "PottsMixture",
    "Problem",
    "Progress",
    "Result",
    "SafeguardWarning",
    "Status",
    "datasets",
    "fit",
    "graphs",
    "load_result",
    "metrics",
    "mixtures",
    "partition",
    "sampling",
    "solvers",
    "theory",
]
