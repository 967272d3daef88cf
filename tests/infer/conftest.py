"""What many tests of decoding share. Equal targets share what is compiled for them."""

import jax
import pytest

from tests.infer.random_target import random_target, with_eos


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="session")
def target():
    """The shape `shared` in float64, without end tokens."""
    with jax.enable_x64(True):
        return with_eos(random_target("shared"))
