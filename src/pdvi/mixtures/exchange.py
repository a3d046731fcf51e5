"""Components exchanged: one is split, another given up, all is fitted anew; kept if the objective falls.

Re-estimation stays where k-means began: a component that covers two clusters and two that share one are an optimum.
A trial re-estimates noise and weights, since at a poor optimum the noise is large enough to hide what was merged; and,
unlike one of `reseeded`, it may begin where the exchange promises less than it costs.
"""

from __future__ import annotations

from typing import Any

from pdvi.mixtures.build import point_at
from pdvi.mixtures.em import Fitted, epochs_of, joined, variational_em
from pdvi.mixtures.recipe import Recipe
from pdvi.mixtures.reseed import moved, told


def exchanged(
    fitted: Fitted,
    solver: Any,
    *,
    noise: str | None,
    weights: bool,
    max_epochs: float,
    tol: float,
    recipe: Recipe,
    **settings: Any,
) -> Fitted:
    """Exchange components while that lowers the objective, in at most ``max_epochs`` counted over all trials."""
    left = max_epochs
    for _ in range(recipe.exchanges):
        local, taken = moved(fitted.problem, fitted.result, True, recipe, most=1)
        if not taken or left < recipe.known_epochs + recipe.round_epochs:
            break
        trial = variational_em(
            fitted.problem,
            solver,
            noise=noise,
            weights=weights,
            max_epochs=int(left),
            tol=tol,
            first=recipe.known_epochs,
            start=point_at(fitted.problem, local),
            recipe=recipe,
            **settings,
        )
        left -= epochs_of(trial.result)
        if not trial.result.objective < fitted.result.objective:
            break
        result = joined(fitted.result, trial.result, told(taken))
        fitted = Fitted(trial.problem, result, trial.whitening @ fitted.whitening)
    return fitted
