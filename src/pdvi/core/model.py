"""What a model is: three methods about one shard, and what it may offer besides.

Nothing has to be inherited. An ability that a model lacks is replaced by automatic differentiation where that is
possible; a method that cannot do without says so (`require`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from pdvi._base.types import Array, Globals, PyTree


class Model(Protocol):
    """The least a model must offer; everything is written for one shard.

    What it may offer besides is listed in `pdvi.core.model`: `LocalStep`, `Conjugate`, `GlobalStep`, `Exact`, `Curved`,
    `Natural`, `NaturalGradient`, `Nonconjugate`, `Constrained`, `Coupled`, `Rowwise`, `Bounded`, `Posterior`.
    """

    def init_global(self, key: Array) -> Mapping[str, Any]:
        """Return the global parameters to start from: a dict of arrays, one entry per block."""
        ...

    def init_local(self, key: Array, shard: PyTree) -> PyTree:
        """Return the local variables of one shard to start from: any pytree of arrays."""
        ...

    def loss(self, local: PyTree, globals_: Globals, shard: PyTree) -> Array:
        """Return this shard's share of the negative ELBO, a scalar."""
        ...


class Augmentation(NamedTuple):
    """What Algorithm 1 adds to a shard's loss: <dual, lam - centre> + 1/2 ||lam - centre||^2_penalty.

    The fields are dicts like the globals. With penalty and dual zero nothing is added: a global step is
    then the plain minimiser, as coordinate ascent needs it.
    """

    centre: Globals
    dual: Globals
    penalty: Globals

    def __call__(self, globals_: Globals) -> Array:
        """Return the value of the added terms."""
        terms = jax.tree.map(
            lambda lam, lam0, mu, d: jnp.sum((mu + 0.5 * d * (lam - lam0)) * (lam - lam0)),
            globals_,
            self.centre,
            self.dual,
            self.penalty,
        )
        return sum(jax.tree.leaves(terms), start=jnp.asarray(0.0))


class LocalStep(Protocol):
    """A model with its own step for the local variables."""

    def local_step(self, local: PyTree, globals_: Globals, shard: PyTree) -> PyTree:
        """Return the minimiser over the local variables for fixed globals, or one descent sweep towards it."""
        ...


class Conjugate(Protocol):
    """A model whose globals have a closed-form step from statistics that add over shards."""

    def statistics(self, local: PyTree, shard: PyTree) -> PyTree:
        """Return what the globals need to know of a shard; sums over shards are the statistics of their union."""
        ...

    def global_step(self, statistics: PyTree, augmentation: Augmentation) -> Globals:
        """Return the minimiser of the loss with these statistics plus ``augmentation(globals)``."""
        ...


class GlobalStep(Protocol):
    """A model with its own step for the globals, which has to look at all rows: no statistics add over shards."""

    def improve_globals(self, local: PyTree, globals_: Globals, shard: PyTree, augmentation: Augmentation) -> Globals:
        """Return the minimiser of ``loss + augmentation`` for fixed locals, or better globals than ``globals_``."""
        ...


class Exact(Protocol):
    """A model with an exact oracle."""

    def joint_step(self, local: PyTree, shard: PyTree, augmentation: Augmentation) -> tuple[PyTree, Globals]:
        """Return the joint minimiser of ``loss + augmentation``."""
        ...


class Curved(Protocol):
    """A model that knows its curvature."""

    def curvature(self, local: PyTree, globals_: Globals, shard: PyTree) -> Globals:
        """Return the diagonal of the Hessian of the loss in the globals."""
        ...


class Natural(Protocol):
    """A model whose q(globals) is in an exponential family."""

    def natural(self, globals_: Globals) -> Globals:
        """Return the natural parameters of q, as a dict with the same blocks."""
        ...

    def from_natural(self, natural: Globals) -> Globals:
        """Return the globals with these natural parameters."""
        ...


class NaturalGradient(Protocol):
    """A model that turns gradients in the globals into natural ones."""

    def natural_gradient(self, globals_: Globals, gradient: Globals) -> Globals:
        """Return the gradient in the expectation parameters that belong to `Natural.natural`."""
        ...


class Nonconjugate(Protocol):
    """A model with terms that its statistics leave out."""

    def nonconjugate(self, local: PyTree, globals_: Globals, shard: PyTree) -> Array:
        """Return the shard's share of these terms."""
        ...


class Constrained(Protocol):
    """A model whose local variables are not any numbers (probabilities, say)."""

    def to_unconstrained(self, local: PyTree) -> PyTree:
        """Return the local variables as numbers without constraints."""
        ...

    def from_unconstrained(self, x: PyTree, shard: PyTree) -> PyTree:
        """Return the inverse of `to_unconstrained`."""
        ...


class Coupled(Protocol):
    """A model whose local variables read each other, across shards too: its loss holds half of each cut edge."""

    def local_gradient(self, local: PyTree, globals_: Globals, shard: PyTree) -> PyTree:
        """Return the gradient of F in the shard's own local variables, cut edges counted in full."""
        ...


class Rowwise(Protocol):
    """A model that says whether the rows of a shard's local variables meet in the globals only."""

    def independent_rows(self) -> bool:
        """Return whether they do; where a model does not say, it is found out from the Hessian."""
        ...


class Bounded(Protocol):
    """A model whose negative ELBO cannot fall below a number: 0 for discrete data with proper priors, say."""

    def lower_bound(self) -> float:
        """Return the number; an objective below it is rounding noise, and the run that shows it went wrong."""
        ...


class Wanted(NamedTuple):
    """What is asked of a posterior."""

    draws: int
    covariance: str | None  # "mean-field", "linear-response", or None: as suits the model
    locals: bool
    log_likelihood: bool
    predictive: bool
    seed: int


class Variable(NamedTuple):
    """Draws of one quantity, the draw on the first axis, rows of the data on axis ``rows`` if it has any."""

    values: np.ndarray
    rows: int | None = None


class Sampled(NamedTuple):
    """Draws of a posterior in the model's own terms, rows in the order of the user's data."""

    unknowns: dict[str, Variable]
    log_likelihood: dict[str, Variable]
    predictive: dict[str, Variable]
    observed: dict[str, Variable]  # without an axis for draws
    log_joint: np.ndarray | None  # of the globals of each draw and all data, where the log likelihood was asked for
    log_q: np.ndarray  # of the globals of each draw
    covariance: str
    row_name: str


class Posterior(Protocol):
    """A model that can draw from what was fitted, in its own terms."""

    def sample_posterior(self, problem: Any, global_params: Globals, local_params: PyTree, wanted: Wanted) -> Sampled:
        """Return draws of the unknowns, and what goes with them."""
        ...


def offers(model: Any, ability: Any) -> bool:
    """Return whether a model has an ability: a protocol of this file."""
    return not missing_methods(model, ability)


def require(by: str, model: Any, *abilities: Any) -> None:
    """Raise if a model lacks one of the abilities that ``by`` needs, and name the methods."""
    missing = [name for ability in abilities for name in missing_methods(model, ability)]
    if missing:
        kind = model if isinstance(model, type) else type(model)
        needed = [name for ability in abilities for name in missing_methods(None, ability)]  # None has no method
        msg = (
            f"{by} needs a model with {', '.join(map(repr, needed))}; {kind.__name__} lacks "
            f"{', '.join(map(repr, missing))}. PDVI does without, and P2DVI with exploration=0."
        )
        raise ValueError(msg)


def missing_methods(model: Any, ability: Any) -> list[str]:
    """Return which of the methods that make an ability a model has not."""
    names = (name for name in vars(ability) if not name.startswith("_"))
    return [name for name in names if not callable(getattr(model, name, None))]


_REGISTERED: dict[str, type] = {}
Kind = TypeVar("Kind", bound=type)


def registered(kind: Kind) -> Kind:
    """Let stores name this model, so that one can be opened without giving it again: a class decorator."""
    _REGISTERED[kind.__name__] = kind
    return kind


def described(model: Any) -> dict[str, Any] | None:
    """Return a registered model as JSON; None for any other, which has to be given again when a store is opened."""
    kind = type(model)
    if _REGISTERED.get(kind.__name__) is not kind:
        return None
    fields = {
        name: {"dtype": np.asarray(value).dtype.str, "values": value.tolist()}
        if isinstance(value, jax.Array | np.ndarray)
        else value
        for name, value in vars(model).items()
    }
    return {"class": kind.__name__, "fields": fields}


def rebuilt(described: dict[str, Any]) -> Any:
    """Return the model that `described` told of."""
    kind = described["class"]
    if kind not in _REGISTERED:
        msg = f"the store holds a model {kind!r}, which is none of {sorted(_REGISTERED)}; give `model`."
        raise ValueError(msg)
    fields = {
        name: np.asarray(value["values"], value["dtype"]) if isinstance(value, dict) else value
        for name, value in described["fields"].items()
    }
    return _REGISTERED[kind](**fields)
