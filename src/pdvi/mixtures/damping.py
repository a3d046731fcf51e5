"""How much parallel sweeps of a Potts mixture are damped, so that they never let the objective rise."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
from scipy.sparse.linalg import eigsh

from pdvi.mixtures.recipe import RECIPE, Recipe
from pdvi.shards.partition import Layout


def damping_of_patches(
    graph: sp.csr_array,
    where: Layout,
    temperature: float = 1.0,
    *,
    beta: float = 1.0,
    recipe: Recipe = RECIPE,
) -> float:
    """Return the damping for a graph with weights times ``beta``; for a large one the highest of its patches.

    Patches are a few times faster: the lowest eigenvectors of such a graph live in small places, most of which lie
    within a patch. Only those with the most heavily coupled rows are looked at: no eigenvalue is larger than what a
    row's weights add up to.
    """
    if graph.shape[0] <= recipe.damping_rows:
        return safe_damping(sp.csr_array(graph) * beta, temperature, spare=recipe.damping_spare, recipe=recipe)
    reach = np.asarray(abs(graph).sum(1)).ravel()
    most = np.where(where.rows >= 0, reach[where.rows], 0.0).max(1)
    looked_at = np.argsort(-most, kind="stable")[: recipe.damping_patches]
    patches = (rows[rows >= 0] for rows in where.rows[looked_at])
    spare = recipe.damping_patch_spare
    within = (sp.csr_array(graph[own][:, own]) * beta for own in patches)
    return max(safe_damping(patch, temperature, spare=spare, recipe=recipe) for patch in within)


def safe_damping(
    graph: sp.csr_array,
    temperature: float = 1.0,
    *,
    spare: float = RECIPE.damping_spare,
    recipe: Recipe = RECIPE,
) -> float:
    """Return the damping with which parallel sweeps never let F rise; see `PottsMixtureModel`.

    ``spare`` makes up for an eigenvalue that is not quite the lowest.
    """
    reach = float(abs(graph).sum(1).max(initial=0.0))  # no eigenvalue is larger in size
    if reach <= 2 * temperature:
        return 0.0
    if graph.shape[0] < recipe.damping_dense_rows:
        smallest = float(np.linalg.eigvalsh(graph.toarray()).min())
    else:
        start = np.random.default_rng(0).standard_normal(graph.shape[0])
        found = eigsh(graph, 1, which="SA", tol=recipe.damping_tol, v0=start, return_eigenvectors=False)
        smallest = spare * float(found[0])
    return max(0.0, -smallest / (4 * temperature) - 0.5)
