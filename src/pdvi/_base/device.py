"""Numbers and arrays of the host, brought to the device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def on_device(value: Any, dtype: Any = None) -> Any:
    """Return a number or an array, by default in working precision; `jnp.asarray` would compile a program for it."""
    return jax.device_put(np.asarray(value, np.dtype(jnp.result_type(float)) if dtype is None else dtype))
