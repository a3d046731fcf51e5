"""Arguments are judged and errors worded in one place."""

import re

import numpy as np
import pytest

from pdvi._base import checks

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: checks.whole("k", -1), "`k` must be a whole number of at least 0, got -1."),
        (lambda: checks.whole("k", 4.0, least=1), "`k` must be a whole number of at least 1, got 4.0."),
        (lambda: checks.whole("k", True), "`k` must be a whole number of at least 0, got True."),
        (lambda: checks.whole("k", 9, least=2, most=5, of="the number of spots"), "`k` must be between 2 and the "
         "number of spots (5), got 9."),
        (lambda: checks.whole("k", 2.5, least=2, most=5), "`k` must be between 2 and 5, got 2.5; give a whole number."),
        (lambda: checks.wholes("cells", (0, 1), n=2, least=1), "`cells` must be 2 whole numbers of at least 1, got "
         "(0, 1)."),
        (lambda: checks.wholes("cells", 3, n=2), "`cells` must be 2 whole numbers of at least 0, got 3."),
        (lambda: checks.wholes("cells", "12", n=2), "`cells` must be 2 whole numbers of at least 0, got '12'."),
        (lambda: checks.wholes("cells", (1, 2, 3), n=2), "`cells` must be 2 whole numbers of at least 0, got "
         "(1, 2, 3)."),
        (lambda: checks.seed("seed", 2**63), f"`seed` must be between 0 and 4294967295, got {2**63}."),
        (lambda: checks.seed("seed", -1), "`seed` must be between 0 and 4294967295, got -1."),
        (lambda: checks.positive("radius", 0), "`radius` must be positive and finite, got 0."),
        (lambda: checks.positive("radius", NAN), "`radius` must be positive and finite, got nan."),
        (lambda: checks.positive("radius", "1"), "`radius` must be positive and finite, got '1'."),
        (lambda: checks.at_least("tau", -1e-9), "`tau` must be at least 0 and finite, got -1e-09."),
        (lambda: checks.at_least("tau", INF, 1), "`tau` must be at least 1 and finite, got inf."),
        (lambda: checks.at_most("margin", NAN, 1), "`margin` must be at most 1, got nan."),
        (lambda: checks.share("bias", 1.01), "`bias` must be between 0 and 1, got 1.01."),
        (lambda: checks.share("bias", NAN), "`bias` must be between 0 and 1, got nan."),
        (lambda: checks.share("dropout", 1, below_one=True), "`dropout` must be at least 0 and below 1, got 1."),
        (lambda: checks.one_of("against", "hour", ("epoch", "step")), "`against` must be one of ('epoch', 'step'), got "
         "'hour'."),
        (lambda: checks.finite("X", np.array([1, NAN, INF])), "`X` must be finite: 2 of 3 values are NaN or infinite; "
         "remove or impute them."),
        (lambda: checks.key_in({"b": 1, "a": 2}, "c", "adata.obs", "run f(x) first"), "'c' not in adata.obs (it has "
         "['a', 'b']); run f(x) first."),
        (lambda: checks.key_in({"b": 1}, ["c"], "adata.obs", "run f(x) first"), "['c'] not in adata.obs (it has "
         "['b']); run f(x) first."),
    ],
)  # fmt: skip
def test_a_wrong_value_is_told_with_the_rule(call, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        call()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("P2DVI", "`solver` must be a solver, got str 'P2DVI'; give an instance."),
        (float, "`solver` must be a solver, got float itself; give an instance."),
        (list(range(100)), f"`solver` must be a solver, got list {str(list(range(100)))[:57]}...; give an instance."),
    ],
)
def test_a_wrong_kind_is_told_with_what_is_wanted(value, message):
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        checks.instance("solver", value, dict, "a solver", "give an instance")


def test_what_is_right_comes_back():
    assert (checks.whole("k", np.int64(3), least=3, most=3), checks.whole("k", 0)) == (3, 0)
    assert type(checks.whole("k", np.int64(3))) is int
    assert checks.wholes("cells", np.array([2, 3]), n=2, least=1) == (2, 3)
    assert checks.seed("seed", 2**32 - 1) == 2**32 - 1
    assert (checks.positive("x", 0.5), checks.at_least("x", 0), checks.at_most("x", 1, 1)) == (0.5, 0, 1)
    assert (checks.share("x", 1), checks.share("x", 0, below_one=True)) == (1, 0)
    assert checks.one_of("x", "a", ("a", "b")) == "a"
    assert checks.instance("x", 3, (int, str), "a number or its name") == 3
    assert checks.key_in({"a"}, "a", "adata.obs", "") == "a"
    array = np.ones(3)
    assert checks.finite("X", array) is array
