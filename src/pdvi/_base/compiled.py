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
TRACED = "traced"  # the folder below it for what comes before compilation, see `programs`

_own: Path | None = None


def keep_compiled(folder: str | os.PathLike[str] | None = None) -> Path | None:
    """Let JAX keep compiled programs in ``folder``, so that the next process need not compile them again.

    By default the folder is ``pdvi/compiled`` in the user's cache folder; the environment may name another
    (``PDVI_CACHE``), or say "off". A cache that JAX was told to use already is left as it is, and a folder that cannot
    be written is no reason to fail. Commands call it; a library should not change its user's settings of JAX, so in a
    script or a notebook it is for you to call. Returns the folder in use, None if there is none.
    """
    global _own
    wanted = str(folder) if folder is not None else os.environ.get(SWITCH, "")
    if wanted.lower() in ("off", "0", "no"):
        return None
    if os.environ.get(OWN) and os.environ[OWN] != str(_own):
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
    _own = place
    for name, value in settings.items():
        os.environ[name.upper()] = str(value)  # also for the processes that this one starts
        if "jax" in sys.modules:
            sys.modules["jax"].config.update(name, value)
    return place


def own_folder() -> Path | None:
    """Return the folder that `keep_compiled` has chosen; None if it was not asked, or JAX has a cache of the user's."""
    return _own


def default_folder() -> Path:
    """Return the folder for compiled programs below the user's cache folder."""
    home = Path.home()
    places = {"darwin": home / "Library" / "Caches", "win32": Path(os.environ.get("LOCALAPPDATA", home))}
    base = os.environ.get("XDG_CACHE_HOME") or places.get(sys.platform, home / ".cache")
    return Path(base) / "pdvi" / "compiled"


def kept_bytes(place: Path) -> int:
    """Return the size of all that is kept in a folder."""
    return sum(file.stat().st_size for file in place.rglob("*") if file.is_file()) if place.is_dir() else 0


@cache
def quickly_compiled(*, little: bool = True) -> dict[str, Any]:
    """Return arguments of `jax.jit` with which a large program is compiled in two thirds of the time, or half.

    LLVM then optimises less, which costs sweeps of 150,000 spots some 6 %. With ``little`` data XLA also makes loops in
    its older way: what comes out is as fast there, but sweeps of 150,000 spots took half as long again. A version of
    XLA that does not know this compiles as usual, and flags that the user has set are left as they are.
    """
    import jax

    wanted = {"xla_backend_optimization_level": 1, **({"xla_cpu_use_fusion_emitters": False} if little else {})}
    own = os.environ.get("XLA_FLAGS", "")  # what the user has chosen stays
    options: dict[str, Any] = {"compiler_options": {name: value for name, value in wanted.items() if name not in own}}
    try:
        jax.jit(lambda x: x + 1, **options)(0.0)
    except Exception:  # whatever it raises: this is about time alone
        return {}
    return options
