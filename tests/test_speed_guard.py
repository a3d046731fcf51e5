"""A guard against a kernel that became slow: an epoch against a bare sweep in the same run, never against the clock."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import pdvi


def test_an_epoch_costs_a_few_sweeps():
    """The benchmark's target is 8; twice that here, since the machine may be busy and the problem is small."""
    from mixture_speed import bare_sweep, epoch, tissue_problem

    problem, *_ = tissue_problem(36_864)
    ratio = min(epoch(problem, pdvi.P2DVI()) / bare_sweep(problem) for _ in range(2))
    assert ratio < 16, ratio
