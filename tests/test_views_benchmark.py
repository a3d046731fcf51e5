"""benchmarks/views.py on a tiny tissue: every method fits every view from the same start, and the ends are counted."""

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

from test_views import TISSUE, TRUTH

FOLDER = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(FOLDER))
VIEWS = runpy.run_path(str(FOLDER / "views.py"))
OURS, ONE_PATCH, Ending = VIEWS["OURS"], VIEWS["ONE_PATCH"], VIEWS["Ending"]


def ending(method, objective, epochs=10.0):
    return Ending("slide", "view", 0, method, objective, epochs, 0.5)


def test_ends_are_counted_by_the_objective_per_row(capsys):
    """Better by more than a thousandth of a nat, as good, and worse."""
    rivals = [method for method in VIEWS["solvers"](1) if method != OURS]
    ours, theirs = [1.0, 2.0, 3.0], [1.1, 2.0005, 2.8]
    found = [ending(OURS, value, 5.0) for value in ours] + [ending(m, value) for m in rivals for value in theirs]
    rows = VIEWS["summary"](found)
    for method in rivals:
        assert [rows[method][key] for key in ("better", "equal", "worse")] == [1, 1, 1]
        assert rows[method]["largest"] == pytest.approx(0.2)
        assert rows[method]["least"] == pytest.approx(-0.1)
    assert rows[OURS]["epochs"] == 5
    VIEWS["tell"](rows)
    assert capsys.readouterr().out.count("median epochs") == len(rows)


@pytest.mark.slow
def test_all_methods_end_at_the_domains_of_a_simple_tissue(capsys):
    found = VIEWS["endings"]("stripes", TISSUE, TRUTH, np.ones(len(TRUTH), bool), 0)
    VIEWS["lines"](found)
    assert len(capsys.readouterr().out.splitlines()) == len(found) / len(VIEWS["solvers"](1))
    by_method = {method: [one for one in found if one.method == method] for method in VIEWS["solvers"](1)}
    for both in zip(by_method["CAVI"], by_method[ONE_PATCH]):  # it updates all rows at once, whatever the patches
        assert both[0].objective == pytest.approx(both[1].objective, abs=1e-3)
    for method in (OURS, "CAVI", "memoized VB"):
        assert all(np.isfinite(one.objective) for one in by_method[method])
        assert np.mean([one.ari for one in by_method[method]]) > 0.7
