"""What is minimised: a model that speaks about one shard, and the shards.

    minimise over phi, lam   F(phi, lam) = sum_b f_b(phi_b, lam)

Inside the library the global parameters are one vector ``lam``, so that algorithms read like the paper;
models and users see them as a dict of arrays, one entry per block.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from pdvi._base.device import on_device
from pdvi._base.forks import computing
from pdvi._base.types import Array, PyTree
from pdvi.core.model import Augmentation, Model, missing_methods, rebuilt
from pdvi.shards.stacking import stack, take, to_device
from pdvi.shards.store import Store

Blocks = tuple[tuple[str, tuple[int, ...]], ...]  # names and shapes of the globals, in the model's own order

LOOKED_AT = 2**20  # numbers of a large array that its checksum takes in
KNOWN_SHAPES = 256  # of functions of a problem that are remembered
VECTORISED = 2**18  # array elements of shards worked on at once, where shards are smaller than that


class Problem(eqx.Module):
    """A model and its shards: a list of pytrees, or one pytree stacked on axis 0.

    The data is checked and copied once, here. Arrays inside a model that is itself a pytree (an
    ``equinox.Module``, say) may change without recompilation; any other model is taken as a constant and
    must be hashable.

    Shards that touch each other (patches of a tissue) name the rows of other shards' local variables that
    they read: ``halo``, integers of shape (shards, halo rows), counts rows through all shards. A model
    then finds the latest values of these rows appended to its own; they are constants to it.

    Shards too large for memory stay in a store (`from_store`); ``shards`` and ``halo`` are then None.

    ``check``: whether start and loss are computed to see that they make sense; builders of tested models know it.
    """

    model: Any
    shards: PyTree
    halo: Array | None
    blocks: Blocks = eqx.field(static=True)
    store: Store | None = eqx.field(static=True)

    def __init__(self, model: Model, shards: PyTree, *, halo: Any = None, check: bool = True):
        computing()
        if missing := missing_methods(model, Model):
            msg = f"`model` must have a method {missing[0]!r}; {type(model).__name__} has none."
            raise ValueError(msg)
        _check_hashable(model)
        self.store = shards if isinstance(shards, Store) else None
        stacked, rows = (None, None) if self.store else stack(shards)
        self.model = jax.tree.map(lambda leaf: on_device(leaf) if isinstance(leaf, np.ndarray) else leaf, model)
        self.shards = stacked
        self.halo = None if halo is None else jax.device_put(np.asarray(halo, np.int32))
        if check:
            _check_start(model)
        blocks: list[tuple[str, tuple[int, ...]]] = []  # noted by hand: JAX would sort the names
        jax.eval_shape(
            lambda key: blocks.extend((name, np.shape(value)) for name, value in model.init_global(key).items()),
            jax.random.key(0),
        )
        self.blocks = tuple(blocks)
        if self.store is None and check:
            loss = eqx.filter_eval_shape(_first_loss, self)
            shape = loss.shape if isinstance(loss, jax.ShapeDtypeStruct) else type(loss).__name__
            if shape != ():
                msg = f"`loss` must return a scalar, got shape {shape}; sum over the shard's rows."
                raise ValueError(msg)
        if rows is not None:
            _check_mask_is_used(self, rows)

    @staticmethod
    def from_store(path: str | os.PathLike[str], model: Any = None, *, verify: bool = True) -> Problem:
        """Open the problem that `pdvi.write_store` wrote; its shards stay on disk.

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
            model = rebuilt(store.model)
        return Problem(model, store)

    def load(self) -> Problem:
        """Return the same problem with its shards in memory."""
        return self if self.store is None else Problem(self.model, self.store.load(), halo=self.store.halo)

    @property
    def n_shards(self) -> int:
        """Return B, the number of shards."""
        if self.store is not None:
            return self.store.n_shards
        return jax.tree.leaves(self.shards)[0].shape[0]

    @property
    def halo_rows(self) -> int:
        """Return how many rows of others' local variables a shard reads; 0 if shards do not touch."""
        halo = self.halo if self.store is None else self.store.halo
        return 0 if halo is None else halo.shape[1]

    @property
    def n_global(self) -> int:
        """Return the number of global parameters, all blocks together."""
        return sum(math.prod(shape) for _, shape in self.blocks)

    @property
    def block_slices(self) -> dict[str, slice]:
        """Return where each block lies in the vector ``lam``."""
        ends = np.cumsum([math.prod(shape) for _, shape in self.blocks]).tolist()
        return {name: slice(a, b) for (name, _), a, b in zip(self.blocks, [0, *ends], ends)}

    def steps_per_epoch(self, batch_size: int) -> int:
        """Return how many steps visit every shard once."""
        return steps_per_epoch(self.n_shards, batch_size)

    def shard_shape(self) -> PyTree:
        """Return shapes and types of the data of one shard, all being alike."""
        if (store := self.store) is not None:
            return jax.eval_shape(lambda: jax.tree.map(to_device, store.read(0)))
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), self.shards)

    def local_shape(self, *, halo: bool = False) -> PyTree:
        """Return shapes and types of the local variables of one shard; with ``halo``, as its model sees them."""
        own = shape_of(_start_of_shard, self, self.shard_shape())
        if not (halo and self.halo_rows):
            return own
        more = self.halo_rows
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((leaf.shape[0] + more, *leaf.shape[1:]), leaf.dtype), own)

    def fingerprint(self) -> str:
        """Return a checksum of the model's numbers and of the data: what a run must find again to be continued.

        Data of more than a few million numbers is looked at in a million evenly spaced places of each array.
        """
        code = zlib.crc32(repr((self.blocks, self.n_shards, self.store and self.store.checksums)).encode())
        for leaf in jax.tree.leaves((self.model, self.shards, self.halo)):
            array = np.asarray(leaf) if isinstance(leaf, jax.Array | np.ndarray | float | int) else np.zeros(0)
            code = zlib.crc32(repr((array.shape, array.dtype.str)).encode(), code)
            flat = array.reshape(-1)
            step = max(1, flat.size // LOOKED_AT) | 1  # odd, so that all columns of a table are met
            code = zlib.crc32(np.ascontiguousarray(flat[:: step if flat.size > 4 * LOOKED_AT else 1]), code)
        return f"{code:08x}"

    def ravel(self, globals_: Mapping[str, Any]) -> Array:
        """Return the vector ``lam`` of a dict of blocks."""
        return jnp.concatenate([jnp.ravel(globals_[name]) for name, _ in self.blocks])

    def unravel(self, lam: Any) -> dict[str, Any]:
        """Return the dict of blocks of a vector ``lam``."""
        slices = self.block_slices
        return {name: lam[slices[name]].reshape(shape) for name, shape in self.blocks}

    def loss(self, local: PyTree, lam: Array, shard: PyTree) -> Array:
        """Return f_b(phi_b, lam) of one shard."""
        return self.model.loss(local, self.unravel(lam), shard)

    def augmentation(self, lam0: Array, mu: Array, penalty: Array) -> Augmentation:
        """Return the augmented Lagrangian's extra terms, as models see them."""
        return Augmentation(self.unravel(lam0), self.unravel(mu), self.unravel(penalty))

    @eqx.filter_jit
    def init(self, key: Array) -> tuple[Array, PyTree]:
        """Return the model's own start: ``lam``, and the locals of all shards. Keys are spawned per shard."""
        local = jax.vmap(lambda b, shard: self.init_shard(key, b, shard))(jnp.arange(self.n_shards), self.shards)
        return self.init_global(key), local

    def init_global(self, key: Array) -> Array:
        """Return the model's own start of ``lam``."""
        return _init_global(self.model, tuple(name for name, _ in self.blocks), key)

    def init_shard(self, key: Array, b: Array, shard: PyTree) -> PyTree:
        """Return the model's own start of the locals of shard ``b``."""
        local = self.model.init_local(jax.random.fold_in(jax.random.split(key)[1], b), shard)
        return jax.tree.map(_in_working_precision, local)

    def evaluate(self, lam: Array, local: PyTree) -> tuple[Array, Array]:
        """Return the loss of every shard (to be added in double precision) and grad_lam F."""
        at_lam = jax.value_and_grad(self.loss, argnums=1)
        losses, gradients = self.map_shards(lambda local, shard: at_lam(local, lam, shard), local)
        return losses, gradients.sum(0)

    def read(self, local: PyTree, b: Array) -> PyTree:
        """Return the local variables of shard ``b``, its halo rows appended."""
        own = take(local, b)
        if self.halo is None:
            return own
        rows = self.halo[b]
        every = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), local)
        return with_halo(own, jax.tree.map(lambda leaf: jnp.take(leaf, rows, axis=0, mode="clip"), every))

    def map_shards(self, function: Any, local: PyTree, batch: Array | None = None, *more: PyTree) -> PyTree:
        """Call ``function(local, shard, *more)`` for each shard in ``batch`` (default: all), and stack what it returns.

        Small shards run vectorised, large ones one after the other, which keeps memory flat.
        """
        if self.n_shards == 1 and self.halo is None:  # whatever the batch: said without an index, it is compiled sooner
            alone = function(
                *(jax.tree.map(lambda leaf: jnp.squeeze(leaf, 0), tree) for tree in (local, self.shards, *more))
            )
            return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], alone)
        batch = jnp.arange(self.n_shards) if batch is None else batch

        def visit(b: Array, *rest: PyTree) -> PyTree:
            return function(self.read(local, b), take(self.shards, b), *rest)

        elements = sum(leaf[0].size for leaf in jax.tree.leaves(self.shards))
        most = min(len(batch), max(1, VECTORISED // max(elements, 1)))  # at once
        # without a remainder, which would compile the same work again, if that costs little
        even = max(size for size in range(1, most + 1) if len(batch) % size == 0)
        chunk = even if 4 * even >= most else most
        if len(batch) == 1:
            alone = visit(*jax.tree.map(lambda leaf: leaf[0], (batch, *more)))
            return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], alone)
        if chunk == len(batch):
            return jax.vmap(visit)(batch, *more)
        return jax.lax.map(lambda each: visit(*each), (batch, *more), batch_size=chunk if chunk > 1 else None)


def steps_per_epoch(n_shards: int, batch_size: int) -> int:
    """Return how many batches visit every shard once."""
    return -(-n_shards // batch_size)


def default_batch_size(n_shards: int) -> int:
    """Return how many shards a step visits where nothing is said: a hundredth of them, at least one."""
    return max(1, n_shards // 100)


def with_halo(own: PyTree, halo: PyTree) -> PyTree:
    """Return a shard's local variables as its model sees them: its own rows, then the halo's (None: no halo)."""
    return own if halo is None else jax.tree.map(lambda mine, theirs: jnp.concatenate([mine, theirs]), own, halo)


def with_halo_of(local: PyTree, own: PyTree) -> PyTree:
    """Return ``own`` with the halo rows of ``local``, if it has some, appended."""

    def append(mine: Array, all_: Array) -> Array:
        return mine if mine.shape == all_.shape else jnp.concatenate([mine, all_[mine.shape[0] :]])

    return jax.tree.map(append, own, local)


def without_halo(local: PyTree, like: PyTree) -> PyTree:
    """Return the shard's own rows, as many as ``like`` has."""
    return jax.tree.map(lambda leaf, own: leaf if leaf.shape == own.shape else leaf[: own.shape[0]], local, like)


def shape_of(function: Any, *arguments: Any) -> PyTree:
    """Return shapes and types of what a function returns, which is traced once for arguments that are alike."""
    leaves, structure = jax.tree.flatten(arguments)
    arrays = jax.Array | np.ndarray | jax.ShapeDtypeStruct
    alike = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, arrays) else leaf for leaf in leaves)
    key = (function, structure, alike, jnp.result_type(float))
    if key not in _SHAPES:
        if len(_SHAPES) >= KNOWN_SHAPES:
            _SHAPES.pop(next(iter(_SHAPES)))
        _SHAPES[key] = eqx.filter_eval_shape(function, *arguments)
    return _SHAPES[key]


_SHAPES: dict[Any, PyTree] = {}  # the oldest goes first; without them a small fit takes twice as long


@eqx.filter_jit  # without the shards: one program serves data of all sizes
def _init_global(model: Model, names: tuple[str, ...], key: Array) -> Array:
    start = model.init_global(jax.random.split(key)[0])
    return jnp.concatenate([jnp.ravel(jnp.asarray(start[name], jnp.result_type(float))) for name in names])


def _start_of_shard(problem: Problem, shard: PyTree) -> PyTree:
    return problem.init_shard(jax.random.key(0), jnp.asarray(0), shard)


def _in_working_precision(value: Any) -> Array:
    """Floats in JAX's precision, draws made in another too, and strongly typed: else everything compiles twice."""
    value = jnp.asarray(value)
    return value.astype(jnp.result_type(float) if jnp.issubdtype(value.dtype, jnp.floating) else value.dtype)


def _check_hashable(model: Any) -> None:
    """What is compiled is kept for a model, and found again by its hash."""
    for leaf in jax.tree.leaves(model):
        if eqx.is_array_like(leaf):
            continue
        try:
            hash(leaf)
        except TypeError:
            msg = (
                f"`model` must be hashable, {type(leaf).__name__} is not: what is compiled is kept for a model. "
                "Write `@dataclass(eq=False)` above a dataclass, or make the model an equinox.Module."
            )
            raise ValueError(msg) from None


def _check_start(model: Model) -> None:
    start = model.init_global(jax.random.key(0))
    if not isinstance(start, Mapping) or not start or not all(isinstance(name, str) for name in start):
        msg = f"`init_global` must return a dict of named arrays, one per block, got {type(start).__name__}."
        raise ValueError(msg)
    for name, value in start.items():
        if not np.isfinite(np.asarray(value, float)).all():
            msg = f"`init_global` must return finite numbers: block {name!r} has NaN or infinite values."
            raise ValueError(msg)


@eqx.filter_jit  # so that it is traced once for all problems that are alike
def _first_loss(problem: Problem) -> Array:
    lam, local = problem.init(jax.random.key(0))
    return problem.loss(problem.read(local, jnp.asarray(0)), lam, take(problem.shards, 0))


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
