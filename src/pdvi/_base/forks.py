"""Processes that were forked after JAX had started its threads: a computation there would wait for ever."""

from __future__ import annotations

import os

_state = {"computing": False, "forked": False}


def computing() -> None:
    """Take notice that this process computes; raise if it is a fork of one that did."""
    if _state["forked"]:
        msg = (
            "this process was forked from one that had used JAX, whose threads are not there any more: it would hang; "
            'start processes with multiprocessing.get_context("spawn"), with joblib (loky), or use threads.'
        )
        raise RuntimeError(msg)
    _state["computing"] = True


def _after_fork() -> None:
    _state["forked"] = _state["computing"]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
