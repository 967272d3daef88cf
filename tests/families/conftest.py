"""Cases shared by the tests of the families: each made once, by the first test that asks."""

import functools

import pytest

from tests.families.parity import Case


@pytest.fixture(scope="session")
def case(tmp_path_factory):
    """By name of a configuration: its `Case`."""

    @functools.cache
    def make(name: str) -> Case:
        return Case(name, tmp_path_factory.mktemp(name))

    return make
