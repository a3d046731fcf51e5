"""Arguments judged, and errors worded: the argument, the rule, the value, and what to do about it.

Every function returns the value it was given, in the type that the caller works with.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")
LARGEST = 1e15  # that arrays in single precision are multiplied by: squares of the product are still numbers


def whole(name: str, value: Any, *, least: int = 0, most: int | None = None, of: str = "") -> int:
    """Return ``value`` if it is a whole number between ``least`` and ``most``; ``of`` says what ``most`` is."""
    is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if is_whole and value >= least and (most is None or value <= most):
        return int(value)
    if most is None:
        msg = f"`{name}` must be a whole number of at least {least}, got {value!r}."
    else:
        limit, remedy = f"{of} ({most})" if of else most, "" if is_whole else "; give a whole number"
        msg = f"`{name}` must be between {least} and {limit}, got {value!r}{remedy}."
    raise ValueError(msg)


def wholes(name: str, values: Any, *, n: int, least: int = 0) -> tuple[int, ...]:
    """Return ``values`` as a tuple if they are ``n`` whole numbers of at least ``least``."""
    listed = tuple(values) if isinstance(values, Sequence | np.ndarray) and not isinstance(values, str) else ()
    try:
        if len(listed) == n:
            return tuple(whole(name, value, least=least) for value in listed)
    except ValueError:
        pass  # said below, with all of them
    msg = f"`{name}` must be {n} whole numbers of at least {least}, got {values!r}."
    raise ValueError(msg)


def seed(name: str, value: Any) -> int:
    """Return ``value`` if it is a seed that NumPy, scikit-learn and JAX all take."""
    return whole(name, value, most=2**32 - 1)


def positive(name: str, value: Any) -> float:
    """Return ``value`` if it is a positive, finite number."""
    return _number(name, value, lambda x: 0 < x < np.inf, "positive and finite")


def factor(name: str, value: Any) -> float:
    """Return ``value`` if it is a number of at least 0 that single precision can be multiplied by."""
    return at_most(name, at_least(name, value), LARGEST)


def at_least(name: str, value: Any, least: float = 0.0) -> float:
    """Return ``value`` if it is a finite number of at least ``least``."""
    return _number(name, value, lambda x: least <= x < np.inf, f"at least {least:g} and finite")


def at_most(name: str, value: Any, most: float) -> float:
    """Return ``value`` if it is a number of at most ``most``."""
    return _number(name, value, lambda x: x <= most, f"at most {most:g}")


def share(name: str, value: Any, *, below_one: bool = False) -> float:
    """Return ``value`` if it is a number between 0 and 1; ``below_one`` leaves out 1 itself."""
    if below_one:
        return _number(name, value, lambda x: 0 <= x < 1, "at least 0 and below 1")
    return _number(name, value, lambda x: 0 <= x <= 1, "between 0 and 1")


def one_of(name: str, value: T, options: Collection[T]) -> T:
    """Return ``value`` if it is one of ``options``."""
    if value not in options:
        msg = f"`{name}` must be one of {tuple(options)}, got {value!r}."
        raise ValueError(msg)
    return value


def instance(name: str, value: T, kinds: type | tuple[type, ...], wanted: str, remedy: str = "") -> T:
    """Return ``value`` if it is of one of these kinds; ``wanted`` says in words what is."""
    # a class has the methods of its instances, and so passes for an instance of a protocol
    if not isinstance(value, kinds) or isinstance(value, type):
        given = value.__name__ + " itself" if isinstance(value, type) else f"{type(value).__name__} {_short(value)}"
        msg = f"`{name}` must be {wanted}, got {given}{f'; {remedy}' if remedy else ''}."
        raise TypeError(msg)
    return value


def finite(name: str, array: np.ndarray, remedy: str = "remove or impute them") -> np.ndarray:
    """Return ``array`` if all its numbers are finite."""
    bad = int((~np.isfinite(array)).sum())
    if bad:
        msg = f"`{name}` must be finite: {bad} of {array.size} values are NaN or infinite; {remedy}."
        raise ValueError(msg)
    return array


def key_in(where: Collection[str], key: str, place: str, remedy: str) -> str:
    """Return ``key`` if ``where`` has it; otherwise say what is there, and the remedy (``run f(x) first``)."""
    if not isinstance(key, str) or key not in where:
        msg = f"{key!r} not in {place} (it has {sorted(map(str, where))}); {remedy}."
        raise ValueError(msg)
    return key


def _number(name: str, value: Any, holds: Callable[[Any], bool], rule: str) -> Any:
    if not isinstance(value, int | float | np.number) or isinstance(value, bool) or not holds(value):
        msg = f"`{name}` must be {rule}, got {value!r}."
        raise ValueError(msg)
    return value


def _short(value: Any) -> str:
    """The first characters of a value's text, on one line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."
