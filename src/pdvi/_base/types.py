"""Define the names of types, once for all files."""

from __future__ import annotations

from typing import Any

import jax

Array = jax.Array
PyTree = Any
Globals = dict[str, Array]  # the global parameters as models and users see them: an array per block
Shard = dict[str, Array]  # the data of one shard
