"""What is minimised: a model that speaks about one shard, and the shards.

    minimise over phi, lam   F(phi, lam) = sum_b f_b(phi_b, lam)

Inside the library the global parameters are one vector ``lam``, so that algorithms read like the paper;
models and users see them as a dict of arrays, one entry per block.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from pdvi.shards.stacking import stack, take
from pdvi.shards.store import Store, rebuild_fields

Array = jax.Array
PyTree = Any
Globals = dict[str, Array]

VECTORISED = 2**18  # array elements of shards worked on at once, where shards are smaller than that


class Model(Protocol):
    """The least a model must offer. Nothing to inherit; everything is written for one shard.

    What a model may offer besides, each used where it exists and replaced by autodiff where it does not:

    ``local_step(local, globals_, shard) -> local``
        the minimiser over the local variables for fixed globals, or one descent sweep towards it.
    ``statistics(local, shard) -> pytree``
        what the globals need to know of a shard; sums over shards must be the statistics of their union.
    ``global_step(statistics, augmentation) -> globals``
        the minimiser over the globals of the loss with those statistics plus ``augmentation(globals)``.
    ``joint_step(local, shard, augmentation) -> (local, globals)``
        the joint minimiser of ``loss + augmentation``: an exact oracle.
    ``curvature(local, globals_, shard) -> globals``
        the diagonal of the Hessian of the loss in the globals.
    """

    def init_global(self, key: Array) -> Mapping[str, Any]:
        """The global parameters to start from: a dict of arrays, one entry per block."""
        ...

    def init_local(self, key: Array, shard: PyTree) -> PyTree:
        """The local variables of one shard to start from: any pytree of arrays."""
        ...

    def loss(self, local: PyTree, globals_: Globals, shard: PyTree) -> Array:
        """This shard's share of the negative ELBO, a scalar."""
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
        """The value of the added terms."""
        terms = jax.tree.map(
            lambda lam, lam0, mu, d: jnp.sum((mu + 0.5 * d * (lam - lam0)) * (lam - lam0)),
            globals_,
            self.centre,
            self.dual,
            self.penalty,
        )
        return sum(jax.tree.leaves(terms), start=jnp.asarray(0.0))


class Problem(eqx.Module):
    """A model and its shards: a list of pytrees, or one pytree stacked on axis 0.

    The data is checked and copied once, here. Arrays inside a model that is itself a pytree (an
    ``equinox.Module``, say) may change without recompilation; any other model is taken as a constant and
    must be hashable.

    Shards that touch each other (patches of a tissue) name the rows of other shards' local variables that
    they read: ``halo``, integers of shape (shards, halo rows), counts rows through all shards. A model
    then finds the latest values of these rows appended to its own; they are constants to it.

    Shards too large for memory stay in a store (`from_store`); ``shards`` and ``halo`` are then None.
    """

    model: Any
    shards: PyTree
    halo: Array | None
    blocks: tuple[tuple[str, tuple[int, ...]], ...] = eqx.field(static=True)
    store: Store | None = eqx.field(static=True)

    def __init__(self, model: Model, shards: PyTree, *, halo: Any = None):
        for name in ("init_global", "init_local", "loss"):
            if not callable(getattr(model, name, None)):
                msg = f"`model` must have a method {name!r}; {type(model).__name__} has none."
                raise ValueError(msg)
        self.store = shards if isinstance(shards, Store) else None
        stacked, rows = (None, None) if self.store else stack(shards)
        self.model = _arrays_on_device(model)
        self.shards = stacked
        self.halo = None if halo is None else jnp.asarray(halo, jnp.int32)
        self.blocks = _blocks_of(model)
        if self.store is None:
            _check_loss(self)
        if rows is not None:
            _check_mask_is_used(self, rows)

    @staticmethod
    def from_store(path: str | os.PathLike, model: Any = None, *, verify: bool = True) -> Problem:
        """The problem that `pdvi.write_store` wrote; its shards stay on disk.

        Parameters
        ----------
        model
            to be given where the store holds none, that is, where the model is none of this library's.
        verify
            compare the checksum of every shard now: one read of all data.
        """
        store = Store(path, verify=verify)
        if model is None:
            if store.model is None:
                msg = f"`model` must be given: the store {str(store.path)!r} holds none, since it is not one of pdvi's."
                raise ValueError(msg)
            # by name, since models are built on problems and not the other way round
            kind = getattr(importlib.import_module("pdvi.models"), store.model["class"])
            model = kind(**rebuild_fields(store.model))
        return Problem(model, store)

    def load(self) -> Problem:
        """The same problem with its shards in memory."""
        return self if self.store is None else Problem(self.model, self.store.load(), halo=self.store.halo)

    @property
    def n_shards(self) -> int:
        """B, the number of shards."""
        if self.store is not None:
            return self.store.n_shards
        return jax.tree.leaves(self.shards)[0].shape[0]

    @property
    def n_global(self) -> int:
        """The number of global parameters, all blocks together."""
        return sum(math.prod(shape) for _, shape in self.blocks)

    @property
    def block_slices(self) -> dict[str, slice]:
        """Where each block lies in the vector ``lam``."""
        ends = np.cumsum([math.prod(shape) for _, shape in self.blocks]).tolist()
        return {name: slice(a, b) for (name, _), a, b in zip(self.blocks, [0, *ends], ends)}

    def ravel(self, globals_: Mapping[str, Any]) -> Array:
        """The vector ``lam`` of a dict of blocks."""
        return jnp.concatenate([jnp.ravel(globals_[name]) for name, _ in self.blocks])

    def unravel(self, lam: Array) -> Globals:
        """The dict of blocks of a vector ``lam``."""
        slices = self.block_slices
        return {name: lam[slices[name]].reshape(shape) for name, shape in self.blocks}

    def loss(self, local: PyTree, lam: Array, shard: PyTree) -> Array:
        """f_b(phi_b, lam) of one shard."""
        return self.model.loss(local, self.unravel(lam), shard)

    def augmentation(self, lam0: Array, mu: Array, penalty: Array) -> Augmentation:
        """The augmented Lagrangian's extra terms, as models see them."""
        return Augmentation(self.unravel(lam0), self.unravel(mu), self.unravel(penalty))

    @eqx.filter_jit
    def init(self, key: Array) -> tuple[Array, PyTree]:
        """The model's own start: ``lam``, and the locals of all shards. Keys are spawned per shard."""
        local = jax.vmap(lambda b, shard: self.init_shard(key, b, shard))(jnp.arange(self.n_shards), self.shards)
        return self.init_global(key), local

    def init_global(self, key: Array) -> Array:
        """The model's own start of ``lam``."""
        return self.ravel(jax.tree.map(_float, dict(self.model.init_global(jax.random.split(key)[0]))))

    def init_shard(self, key: Array, b: Array, shard: PyTree) -> PyTree:
        """The model's own start of the locals of shard ``b``."""
        local = self.model.init_local(jax.random.fold_in(jax.random.split(key)[1], b), shard)
        # a weakly typed start would compile everything twice
        return jax.tree.map(lambda leaf: jnp.asarray(leaf).astype(jnp.asarray(leaf).dtype), local)

    def evaluate(self, lam: Array, local: PyTree) -> tuple[Array, Array]:
        """The loss of every shard (to be added in double precision) and grad_lam F."""

        def one(local: PyTree, shard: PyTree) -> tuple[Array, Array]:
            return jax.value_and_grad(self.loss, argnums=1)(local, lam, shard)

        losses, gradients = self.map_shards(one, local)
        return losses, gradients.sum(0)

    def read(self, local: PyTree, b: Array) -> PyTree:
        """The local variables of shard ``b``, its halo rows appended."""
        own = take(local, b)
        if self.halo is None:
            return own
        rows = self.halo[b]

        def halo_rows(everyone: Array) -> Array:
            return jnp.take(everyone.reshape(-1, *everyone.shape[2:]), rows, axis=0, mode="clip")

        return with_halo(own, jax.tree.map(halo_rows, local))

    def map_shards(self, function: Any, local: PyTree, batch: Array | None = None, *more: PyTree) -> PyTree:
        """``function(local, shard, *more)`` for each shard in ``batch`` (default: all), results stacked.

        Small shards run vectorised, large ones one after the other, which keeps memory flat.
        """
        batch = jnp.arange(self.n_shards) if batch is None else batch

        def visit(arguments: tuple) -> PyTree:
            b, *rest = arguments
            return function(self.read(local, b), take(self.shards, b), *rest)

        elements = sum(leaf[0].size for leaf in jax.tree.leaves(self.shards))
        chunk = _chunk(len(batch), max(1, VECTORISED // max(elements, 1)))
        if len(batch) == 1:
            alone = visit(jax.tree.map(lambda leaf: leaf[0], (batch, *more)))
            return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], alone)
        if chunk >= len(batch):
            return jax.vmap(lambda *arguments: visit(arguments))(batch, *more)
        return jax.lax.map(visit, (batch, *more), batch_size=chunk if chunk > 1 else None)


def with_halo(own: PyTree, halo: PyTree) -> PyTree:
    """A shard's local variables as its model sees them: its own rows, then the halo's (None: there is none)."""
    return own if halo is None else jax.tree.map(lambda mine, theirs: jnp.concatenate([mine, theirs]), own, halo)


def _chunk(length: int, most: int) -> int:
    """At most ``most`` at once; without a remainder, which would compile the same work again, if that costs little."""
    even = max(size for size in range(1, min(most, length) + 1) if length % size == 0)
    return even if 4 * even >= min(most, length) else most


def _float(value: Any) -> Array:
    return jnp.asarray(value, jnp.result_type(float))


def _arrays_on_device(model: Any) -> Any:
    return jax.tree.map(lambda leaf: _float(leaf) if isinstance(leaf, np.ndarray) else leaf, model)


def _blocks_of(model: Model) -> tuple[tuple[str, tuple[int, ...]], ...]:
    start = model.init_global(jax.random.key(0))
    if not isinstance(start, Mapping) or not start or not all(isinstance(name, str) for name in start):
        msg = f"`init_global` must return a dict of named arrays, one per block, got {type(start).__name__}."
        raise ValueError(msg)
    for name, value in start.items():
        if not np.isfinite(np.asarray(value, float)).all():
            msg = f"`init_global` must return finite numbers: block {name!r} has NaN or infinite values."
            raise ValueError(msg)
    return tuple((name, tuple(np.shape(value))) for name, value in start.items())


def _check_loss(problem: Problem) -> None:
    def first_loss() -> Array:
        lam, local = problem.init(jax.random.key(0))
        return problem.loss(problem.read(local, jnp.asarray(0)), lam, take(problem.shards, 0))

    loss = jax.eval_shape(first_loss)
    if getattr(loss, "shape", None) != ():
        shape = getattr(loss, "shape", type(loss).__name__)
        msg = f"`loss` must return a scalar, got shape {shape}; sum over the shard's rows."
        raise ValueError(msg)


def _check_mask_is_used(problem: Problem, rows: np.ndarray) -> None:
    """Padded rows must not count: the shortest shard's loss with and without its padding must agree."""
    index, longest = int(rows.argmin()), int(rows.max())
    size = int(rows[index])
    lam, local = problem.init(jax.random.key(0))
    padded = (take(local, index), take(problem.shards, index))
    cut = jax.tree.map(lambda leaf: leaf[:size] if leaf.shape[:1] == (longest,) else leaf, padded)
    with_padding, without = problem.loss(padded[0], lam, padded[1]), problem.loss(cut[0], lam, cut[1])
    if not np.allclose(with_padding, without, rtol=1e-4, atol=1e-6):
        msg = (
            "`loss` must leave out the rows where shard['mask'] is 0: the shards have "
            f"{size} to {longest} rows and were padded, and the loss of shard {index} is {float(without):.6g} "
            f"without and {float(with_padding):.6g} with padding; multiply each row's term by shard['mask']."
        )
        raise ValueError(msg)
