"""pdvi: large-scale mean-field variational inference by primal-dual optimisation."""

from pdvi import datasets, gr, graphs, metrics, mixtures, partition, pl, pp, sampling, solvers, theory, tl
from pdvi.estimators import GaussianMixture, PottsMixture
from pdvi.executors import Dask, Disk, Memory
from pdvi.fit import Checkpoint, CheckpointWarning, Progress, SafeguardWarning, fit
from pdvi.oracles import LBFGS, CoordinateDescent, JointStep, Newton
from pdvi.problem import Augmentation, Model, Problem
from pdvi.result import Point, Result, Status, load_result
from pdvi.sharding import write_store
from pdvi.solvers import CAVI, P2DVI, PDVI, PGSVI, SGD, SNGVI, SVI, Adam, ControlVariates, MemoizedVB, RMSProp
from pdvi.tuning import TuningResult, tune

__version__ = "0.1.0"

__all__ = [
    "CAVI",
    "LBFGS",
    "P2DVI",
    "PDVI",
    "PGSVI",
    "SGD",
    "SNGVI",
    "SVI",
    "Adam",
    "Augmentation",
    "Checkpoint",
    "CheckpointWarning",
    "ControlVariates",
    "CoordinateDescent",
    "Dask",
    "Disk",
    "GaussianMixture",
    "JointStep",
    "MemoizedVB",
    "Memory",
    "Model",
    "Newton",
    "Point",
    "PottsMixture",
    "Problem",
    "Progress",
    "RMSProp",
    "Result",
    "SafeguardWarning",
    "Status",
    "TuningResult",
    "datasets",
    "fit",
    "gr",
    "graphs",
    "load_result",
    "metrics",
    "mixtures",
    "partition",
    "pl",
    "pp",
    "sampling",
    "solvers",
    "theory",
    "tl",
    "tune",
    "write_store",
]
