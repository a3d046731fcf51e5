import os
from pathlib import Path

import pytest

# What tests compile is kept for the next run, and shared by workers and by the processes that tests start.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "compiled"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import jax


@pytest.fixture
def x64():
    """The mathematics is tested in double precision."""
    with jax.enable_x64(True):
        yield
