import jax
import pytest


@pytest.fixture
def x64():
    """The mathematics is tested in double precision."""
    with jax.enable_x64(True):
        yield
