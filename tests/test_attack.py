"""The attack of benchmarks/attack.py, a part of it: everything is answered or refused with one clear error."""

import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ATTACK = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks/attack.py"))


@pytest.mark.parametrize("part", ["calls", "files"])
def test_nothing_but_answers_and_clear_errors(part):
    tally = ATTACK["attack"](quick=True, only=part)
    assert sum(sum(row.values()) for row in tally.counts.values()) >= 60
    assert not tally.failures


@pytest.mark.slow
def test_ctrl_c_leaves_all_files_or_none():
    tally = ATTACK["attack"](quick=True, only="interrupts")
    assert sum(tally.counts["Ctrl-C"].values()) == 2
    assert not tally.failures


def test_failures_are_seen(tmp_path):
    """A tally that could not fail would be worth nothing."""
    is_clear, is_valid = ATTACK["is_clear"], ATTACK["is_valid"]
    assert not is_clear(caught(lambda: int("a")), "tol", "a")
    tally = ATTACK["Tally"]()
    file = tmp_path / "numbers"
    file.write_bytes(bytes(range(64)))
    ATTACK["damage"](tally, "unguarded", file, file.read_bytes, 20)
    assert tally.counts["unguarded"][ATTACK["ELSE"]] == 20
    assert not is_valid((float("nan"),))


def caught(call):
    try:
        call()
    except ValueError as error:
        return error
    raise AssertionError
