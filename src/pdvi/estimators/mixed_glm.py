"""Mixed models from a formula and a table: `MixedGLMModel` as a statistician asks for it."""

from __future__ import annotations

import re
from dataclasses import KW_ONLY, dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from scipy.special import expit
from sklearn.utils.validation import check_is_fitted

from pdvi._base.checks import key_in, one_of
from pdvi._base.types import Array
from pdvi.core.problem import Problem
from pdvi.estimators.fitting import ProblemEstimator
from pdvi.models.mixed_glm import FAMILIES, MixedGLMModel, covariance_factor, triangle
from pdvi.shards.grouping import shards_for
from pdvi.shards.ragged import Strips, strips
from pdvi.solvers.primal_dual.curvature import derivatives

SHARDS = 20  # at most: with few globals the work is in the groups, and large steps are good ones
RANDOM = re.compile(r"\+?\s*\(([^()|]*)\|([^()|]*)\)")  # "(1 + x | group)" in a formula: the rest is for formulaic
SPREAD = 0.5  # of the random effects to start from, on the scale of the response or of the link


def mixed_problem(
    y: Any, x: Any, z: Any, group: Any, *, family: str = "normal", n_shards: int | None = None
) -> tuple[Problem, Strips]:
    """Return the problem of a mixed model, and where its groups lie.

    Parameters
    ----------
    y, x, z
        responses (n,), predictors of the fixed effects (n, p) and of the random effects (n, q), as they are.
    group
        whole numbers from 0, the group of every observation.
    n_shards
        shards that groups are put into; by default at most 20.
    """
    one_of("family", family, FAMILIES)
    y, x, z, group = np.asarray(y, float), np.asarray(x, float), np.asarray(z, float), np.asarray(group)
    order = np.argsort(group, kind="stable")
    sizes = np.bincount(group)
    where = strips(sizes, shards_for(len(sizes), x.shape[1], most=SHARDS) if n_shards is None else n_shards)
    on_link = y
    if family == "poisson":
        on_link = np.log(y + 0.5)
    elif family == "bernoulli":
        on_link = 4 * (y - 0.5)
    coef = np.linalg.lstsq(x, on_link, rcond=None)[0]
    noise = max(float(np.sqrt(np.mean((on_link - x @ coef) ** 2))), 1e-6 * max(1e-6, float(np.abs(on_link).max())))
    q = z.shape[1]
    size = np.sqrt((z**2).mean(0))
    spread = SPREAD * (noise if family == "normal" else 1.0) / np.where(size > 0, size, 1.0)
    model = MixedGLMModel(
        coef=jax.device_put(coef),
        factor=jax.device_put(np.diag(spread)[np.tril_indices(q)]),
        log_sigma=jax.device_put(np.asarray(np.log(noise))),
        family=family,
    )
    shards = {name: where.spread(values[order]) for name, values in (("x", x), ("z", z), ("y", y))}
    shards |= {"weight": where.entry_mask.astype(float), "mask": where.unit_mask.astype(float), "group": where.owner}
    return Problem(model, shards), where


@dataclass(eq=False, repr=False)
class MixedGLM(ProblemEstimator):
    """A generalised linear mixed model with one kind of groups, from a formula.

    Estimates are those of a Gaussian variational approximation: the ELBO takes the place of the likelihood, and is the
    likelihood for normal observations. Standard errors come from its curvature after groups are fitted.

    Parameters
    ----------
    formula
        "y ~ x + (1 + x | group)": fixed effects as formulaic reads them, and random effects of each group, correlated
        with each other.
    family
        "normal" (identity link), "bernoulli" (logit), or "poisson" (log).
    max_epochs, tol
        of the fit, see `pdvi.fit`. A fit that ends before it has converged warns.
    solver
        any solver of `pdvi.solvers`, or its name; by default `P2DVI()`.
    n_shards
        into how many shards groups are put; by default at most 20.
    verbose
        print the course of the fit.
    random_state
        seed of the draws.

    Attributes
    ----------
    coef_, coef_sd_ (Series), covariance_ (of the random effects, a DataFrame), sigma_ (normal only),
    random_effects_, random_effects_sd_ (DataFrames, a row per group), elbo_, n_iter_ (epochs), converged_, result_,
    fit_seconds_
    """

    formula: str = ""
    _: KW_ONLY
    family: str = "normal"
    max_epochs: int = 100
    tol: float = 1e-6
    random_state: Any = 0

    def fit(self, data: pd.DataFrame, y: Any = None) -> MixedGLM:
        """Fit to a table, whose columns the formula names."""
        one_of("family", self.family, FAMILIES)
        fixed, random, self._group = parsed(self.formula)
        key_in(list(data.columns), self._group, "the columns of `data`", "name the groups after the bar")
        both, z = (formulaic().Formula(part).get_model_matrix(data, na_action="raise") for part in (fixed, random))
        self._x_spec, self._z_spec = both.rhs.model_spec, z.model_spec
        y, x, z = np.asarray(both.lhs, float), pd.DataFrame(both.rhs), pd.DataFrame(z)
        if y.ndim != 1 and y.shape[1] != 1:
            msg = f"`formula` must have one number as its response, got {y.shape[1]} columns from {fixed!r}."
            raise ValueError(msg)
        y = y.ravel()
        _check_response(y, self.family)
        group, names = pd.factorize(data[self._group], sort=True)
        if (group < 0).any():
            msg = f"`data` must have a group in every row: {int((group < 0).sum())} of {self._group!r} are missing."
            raise ValueError(msg)
        # columns of size one: the answer is the same, and single precision suffices
        by_x, by_z = _sizes(x), _sizes(z)
        problem, where = mixed_problem(y, x / by_x, z / by_z, group, family=self.family, n_shards=self.n_shards)
        result = self._fit_problem(problem, self._seed())
        found = result.global_params
        by_shard = _information(problem, problem.ravel(found), result.local_params)
        information = np.asarray(by_shard, float).sum(0)
        covariance = np.linalg.pinv(0.5 * (information + information.T), hermitian=True)
        self.coef_ = pd.Series(np.asarray(found["coef"], float) / by_x, x.columns, name="coef")
        sd = np.sqrt(np.maximum(np.diagonal(covariance)[problem.block_slices["coef"]], 0.0))
        self.coef_sd_ = pd.Series(sd / by_x, x.columns, name="sd")
        L = np.asarray(triangle(jnp.asarray(found["factor"])), float) / by_z[:, None]
        self.covariance_ = pd.DataFrame(L @ L.T, z.columns, z.columns)
        if self.family == "normal":
            self.sigma_ = float(np.exp(found["log_sigma"]))
        mean = where.gathered(result.local_params["mean"]).astype(float)
        C = where.gathered(np.asarray(covariance_factor(jnp.asarray(result.local_params["factor"])))).astype(float)
        effects, spread = mean @ L.T, np.sqrt(((L @ C) ** 2).sum(-1))
        self.random_effects_ = pd.DataFrame(effects, names, z.columns)
        self.random_effects_sd_ = pd.DataFrame(spread, names, z.columns)
        self.n_features_in_ = x.shape[1]
        return self

    def predict(self, data: pd.DataFrame) -> np.ndarray:
        """Return the mean response of rows, at the effects of their groups; 0 for a group that was not seen."""
        check_is_fitted(self)
        x, z = (np.asarray(spec.get_model_matrix(data), float) for spec in (self._x_spec, self._z_spec))
        effects = self.random_effects_.reindex(data[self._group]).fillna(0.0).to_numpy()
        eta = x @ self.coef_.to_numpy() + (z * effects).sum(1)
        return {"normal": lambda: eta, "bernoulli": lambda: expit(eta), "poisson": lambda: np.exp(eta)}[self.family]()

    def summary(self) -> pd.DataFrame:
        """Return estimates of the fixed effects with standard errors and 95 % intervals."""
        check_is_fitted(self)
        low, high = self.coef_ - 1.96 * self.coef_sd_, self.coef_ + 1.96 * self.coef_sd_
        return pd.DataFrame({"coef": self.coef_, "sd": self.coef_sd_, "2.5 %": low, "97.5 %": high})


def _sizes(matrix: pd.DataFrame) -> np.ndarray:
    size = np.sqrt((matrix.to_numpy(float) ** 2).mean(0))
    return np.where(size > 0, size, 1.0)


def _check_response(y: np.ndarray, family: str) -> None:
    allowed = {
        "bernoulli": (np.isin(y, (0, 1)), "0 or 1"),
        "poisson": ((y >= 0) & (y == np.round(y)), "whole numbers of at least 0"),
        "normal": (np.isfinite(y), "finite"),
    }
    fine, rule = allowed[family]
    if not fine.all():
        msg = f"the response must be {rule} for family={family!r}, got {y[~fine][0]:g} in row {int(np.argmin(fine))}."
        raise ValueError(msg)


def parsed(formula: str) -> tuple[str, str, str]:
    """Return a formula without its random effects, theirs, and the column of the groups."""
    found = RANDOM.findall(formula) if isinstance(formula, str) else []
    if len(found) != 1 or "~" not in formula or "|" in RANDOM.sub("", formula):
        msg = (
            '`formula` must have a response and one term of random effects, "y ~ x + (1 + x | group)", '
            f"got {formula!r}; for crossed or nested groups write a model of your own."
        )
        raise ValueError(msg)
    random, group = (part.strip() for part in found[0])
    fixed = RANDOM.sub("", formula).strip()
    return f"{fixed} 1" if fixed.endswith("~") else fixed, random, group


def formulaic() -> Any:
    """Return the package, or say how to get it."""
    try:
        import formulaic as package
    except ImportError:
        msg = 'formulas need the package formulaic, which is not installed; run pip install "pdvi[formula]".'
        raise ImportError(msg) from None
    return package


@eqx.filter_jit
def _information(problem: Problem, lam: Array, local: Any) -> Array:
    """Return what each shard knows of the globals: the curvature after its groups are fitted."""
    return problem.map_shards(lambda phi, shard: derivatives(problem, lam, phi, shard, True).profiled, local)
