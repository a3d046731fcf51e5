"""Arguments judged, and errors worded: the argument, the rule, the value, and what to do about it.

Every function returns the value it was given, in the type that the caller works with.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")


def whole(name: str, value: Any, *, least: int = 0, most: int | None = None, of: str = "") -> int:
    """Return ``value`` if it is a whole number between ``least`` and ``most``; ``of`` says what ``most`` is."""
    fits = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not fits or value < least or (most is not None and value > most):
        where = f" of at least {least}" if most is None else f" between {least} and {_named(most, of)}"
        msg = f"`{name}` must be a whole number{where}, got {value!r}."
        raise ValueError(msg)
    return int(value)


def positive(name: str, value: Any) -> float:
    """Return ``value`` if it is a positive, finite number."""
    if not _is_number(value) or not (np.isfinite(value) and value > 0):
        msg = f"`{name}` must be positive and finite, got {value!r}."
        raise ValueError(msg)
    return value


def at_least(name: str, value: Any, least: float = 0.0) -> float:
    """Return ``value`` if it is a finite number of at least ``least``."""
    if not _is_number(value) or not (np.isfinite(value) and value >= least):
        msg = f"`{name}` must be at least {least:g} and finite, got {value!r}."
        raise ValueError(msg)
    return value


def one_of(name: str, value: T, options: Collection[T]) -> T:
    """Return ``value`` if it is one of ``options``."""
    if value not in options:
        msg = f"`{name}` must be one of {tuple(options)}, got {value!r}."
        raise ValueError(msg)
    return value


def instance(name: str, value: T, kinds: type | tuple[type, ...], wanted: str) -> T:
    """Return ``value`` if it is of one of these kinds; ``wanted`` says in words what is."""
    if not isinstance(value, kinds):
        given = value.__name__ + " itself" if isinstance(value, type) else f"{type(value).__name__} {value!r:.60}"
        msg = f"`{name}` must be {wanted}, got {given}."
        raise TypeError(msg)
    return value


def finite(name: str, array: np.ndarray, remedy: str = "remove or impute them") -> np.ndarray:
    """Return ``array`` if all its numbers are finite."""
    bad = int((~np.isfinite(array)).sum())
    if bad:
        msg = f"`{name}` must be finite: {bad} of {array.size} values are NaN or infinite; {remedy}."
        raise ValueError(msg)
    return array


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def _named(most: int, of: str) -> str:
    return f"{of} ({most})" if of else str(most)
