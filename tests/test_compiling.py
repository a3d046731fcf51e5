"""Programs that are compiled the quicker way: which ones, to which numbers, and where XLA does not know it."""

import jax
import numpy as np
import pytest

import pdvi
from pdvi._base.compiled import quickly_compiled
from pdvi.executors import steps
from pdvi.models.smooth import Quartic


def loss_of_first(problem, lam):
    local = problem.init(jax.random.key(0))[1]
    return problem.loss(problem.read(local, 0), lam, jax.tree.map(lambda leaf: leaf[0], problem.shards))


@pytest.fixture
def asked(monkeypatch):
    calls = []
    monkeypatch.setattr(steps, "quickly_compiled", lambda: calls.append(1) or quickly_compiled())
    return calls


def quartic():
    rng = np.random.default_rng(0)
    return pdvi.Problem(Quartic(3), {"a": rng.normal(size=(5, 3)), "b": rng.normal(size=(5, 3))})


def test_derivatives_over_little_data_are_compiled_the_quicker_way_to_the_same_number(x64, asked):
    problem, lam = quartic(), np.arange(3.0)
    np.testing.assert_allclose(steps.compiled(loss_of_first)(problem, lam), loss_of_first(problem, lam), rtol=1e-12)
    assert asked


def test_much_data_closed_forms_and_inner_programs_are_not(monkeypatch, asked):
    small, lam = quartic(), np.arange(3.0, dtype=np.float32)
    jax.jit(lambda lam: steps.compiled(loss_of_first)(small, lam))(lam)
    closed = pdvi.datasets.quadratic(n=10)
    steps.compiled(loss_of_first)(closed, closed.init_global(jax.random.key(0)))
    monkeypatch.setattr(steps, "LITTLE", 1)
    steps.compiled(loss_of_first)(small, lam)
    assert not asked


def test_flags_that_the_user_has_set_stay(monkeypatch):
    def wanted(flags):
        monkeypatch.setenv("XLA_FLAGS", flags)
        return quickly_compiled.__wrapped__(little=False)["compiler_options"]

    assert wanted("--xla_backend_optimization_level=3") == {}
    assert wanted("") == {"xla_backend_optimization_level": 1}


def test_where_xla_does_not_know_it_all_is_compiled_as_usual(monkeypatch):
    def refused(*args, **kwargs):
        raise RuntimeError("No such compile option")

    monkeypatch.setattr(jax, "jit", refused)
    assert quickly_compiled.__wrapped__() == {}


def test_a_fit_is_compiled_for_the_size_of_its_data(monkeypatch):
    data = np.zeros(100)
    levels = []
    for little, moderate in ((100, 1_000), (10, 100), (1, 10)):
        monkeypatch.setattr(steps, "LITTLE", little)
        monkeypatch.setattr(steps, "MODERATE", moderate)
        levels.append(steps.compile_options(data))
    assert levels == [quickly_compiled(), quickly_compiled(little=False), {}]
