"""What JAX compiles, kept for the next process: in the user's cache folder, with a limit, safe for several writers."""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

LIMIT = 2**29  # bytes: hundreds of compiled programs; JAX drops those that were not used for longest
SWITCH = "PDVI_CACHE"  # of the environment: "off", or another folder
OWN = "JAX_COMPILATION_CACHE_DIR"  # JAX's own setting, which is left as the user has it


def keep_compiled(folder: str | os.PathLike[str] | None = None) -> Path | None:
    """Let JAX keep compiled programs in ``folder``, so that the next process need not compile them again.

    By default the folder is ``pdvi/compiled`` in the user's cache folder; the environment may name another
    (``PDVI_CACHE``), or say "off". A cache that JAX was told to use already is left as it is, and a folder that cannot
    be written is no reason to fail. Commands call it; a library should not change its user's settings of JAX, so in a
    script or a notebook it is for you to call. Returns the folder in use, None if there is none.
    """
    wanted = str(folder) if folder is not None else os.environ.get(SWITCH, "")
    if wanted.lower() in ("off", "0", "no"):
        return None
    if os.environ.get(OWN):
        return Path(os.environ[OWN])
    place = Path(wanted) if wanted else default_folder()
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    if not os.access(place, os.W_OK):
        return None
    settings: dict[str, str | int] = {
        "jax_compilation_cache_dir": str(place),
        "jax_compilation_cache_max_size": LIMIT,
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in settings.items():
        os.environ[name.upper()] = str(value)  # also for the processes that this one starts
        if "jax" in sys.modules:
            sys.modules["jax"].config.update(name, value)
    return place


def default_folder() -> Path:
    """Return the folder for compiled programs below the user's cache folder."""
    home = Path.home()
    places = {"darwin": home / "Library" / "Caches", "win32": Path(os.environ.get("LOCALAPPDATA", home))}
    base = os.environ.get("XDG_CACHE_HOME") or places.get(sys.platform, home / ".cache")
    return Path(base) / "pdvi" / "compiled"


def kept_bytes(place: Path) -> int:
    """Return the size of all that is kept in a folder."""
    return sum(file.stat().st_size for file in place.glob("*") if file.is_file()) if place.is_dir() else 0


@cache
def quickly_compiled() -> dict[str, Any]:
    """Return arguments of `jax.jit` with which a large program is compiled in three quarters of the time.

    XLA then makes loops in its older way. Over little data what comes out is as fast; sweeps of 150,000 spots took half
    as long again, so it is not for those. A version of XLA that does not know this compiles as usual.
    """
    import jax

    options: dict[str, Any] = {"compiler_options": {"xla_cpu_use_fusion_emitters": False}}
    try:
        jax.jit(lambda x: x + 1, **options)(0.0)
    except Exception:  # whatever it raises: this is about time alone
        return {}
    return options
