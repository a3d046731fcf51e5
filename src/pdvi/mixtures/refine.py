"""Whether domains found on averaged neighbourhoods should be refined on the components of single spots.

Averages find the domains but blur their borders. Single spots do not, and where a domain is one cloud of noise around
one mean, a mixture on them is sharper. Where a domain has several cell types it is not: such a mixture tears domains
into types. Three checks tell: the spots of a domain must be one normal cloud; the refined labels of a spot's
neighbours must predict its components no worse than the labels before; and domains must hang together as before. On
the five labelled slides that the defaults were chosen on, spots and cells alike, the first check says no, and
refinement by force gains nothing.
"""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp

from pdvi.mixtures.recipe import RECIPE, Recipe
from pdvi.mixtures.start import means_of, scale_of


def are_normal_clouds(X: np.ndarray, probability: np.ndarray, recipe: Recipe = RECIPE) -> bool:
    """Tell whether the rows of a domain are one normal cloud around its mean."""
    return abs(kurtosis(X, probability, recipe) - 1) <= recipe.kurtosis_slack


def are_torn(
    X: np.ndarray, probability: np.ndarray, before: np.ndarray, graph: sp.csr_array, recipe: Recipe = RECIPE
) -> bool:
    """Tell whether new labels scatter domains: among their neighbours', or so that these predict a row worse."""
    if apart(probability, graph, recipe) > recipe.apart_slack * apart(before, graph, recipe):
        return True
    return surprise(X, probability, graph, recipe) > surprise(X, before, graph, recipe) + recipe.surprise_slack


def apart(probability: np.ndarray, graph: sp.csr_array, recipe: Recipe = RECIPE) -> float:
    """Return the share of a row's neighbours that have another label than the row."""
    labels, some = probability.argmax(1), _some(len(probability), recipe)
    around = sp.coo_array(graph[some])
    return float((labels[some][around.row] != labels[around.col]).mean()) if around.nnz else 0.0


def kurtosis(X: np.ndarray, probability: np.ndarray, recipe: Recipe = RECIPE) -> float:
    """Return Mardia's multivariate kurtosis of the rows within their domains, over that of a normal distribution."""
    residuals = X - means_of(X, probability)[probability.argmax(1)]
    white = residuals @ np.linalg.inv(scale_of(residuals, recipe)).T.astype(residuals.dtype)
    squares = (white**2).sum(1, dtype=float)
    dim = X.shape[1]
    return float((squares**2).mean() / (dim * (dim + 2)))


def surprise(X: np.ndarray, probability: np.ndarray, graph: sp.csr_array, recipe: Recipe = RECIPE) -> float:
    """Return the log volume of the errors when each row is predicted from the domains of its neighbours alone."""
    some = _some(len(X), recipe)
    around = graph[some]
    degree = np.maximum(np.asarray(around.sum(1)).reshape(-1, 1), 1)
    errors = X[some] - (around @ np.asarray(probability, np.float32) / degree) @ means_of(X, probability)
    return 2 * float(np.log(np.diagonal(scale_of(errors, recipe))).sum())


def _some(n_rows: int, recipe: Recipe) -> slice:
    return slice(None, None, max(1, n_rows // recipe.whitening_rows))
