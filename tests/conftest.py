import os
import subprocess
import sys
from pathlib import Path

import pytest

# What tests compile is kept for the next run, and shared by workers and by the processes that tests start.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "compiled"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# Tests compile much and compute little. Without optimisation by LLVM, and with loops made in XLA's older way, they are
# compiled in a third of the time. A version of XLA that does not know one of these flags would end the process.
QUICK = (
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
)
if "XLA_FLAGS" not in os.environ:
    tried = subprocess.run(
        [sys.executable, "-c", "import jax; jax.devices()"],
        env={**os.environ, "XLA_FLAGS": QUICK},
        capture_output=True,
        check=False,
    )
    os.environ["XLA_FLAGS"] = QUICK if tried.returncode == 0 else ""

import jax  # noqa: E402 - JAX reads the environment when it is imported
from hypothesis import HealthCheck, settings  # noqa: E402

# `make fuzz` takes the long profile; in the suite the same few examples come every time.
settings.register_profile("long", max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
settings.register_profile(
    "short", max_examples=25, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)
settings.load_profile("short")


@pytest.fixture
def x64():
    """The mathematics is tested in double precision."""
    with jax.enable_x64(True):
        yield


MAPPINGS = Path("/proc/self/maps")
MOST_MAPPINGS = 20_000  # of the 65,530 that Linux allows a process: a compiled program takes about twenty


@pytest.fixture(autouse=True)
def room_for_programs():
    """Let programs go when there are very many: a process that is given no more mappings crashes."""
    yield
    if MAPPINGS.exists() and MAPPINGS.read_bytes().count(b"\n") > MOST_MAPPINGS:
        jax.clear_caches()
