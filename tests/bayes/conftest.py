"""Fixtures for tests of inference."""

import jax
import pytest


@pytest.fixture(scope="module")
def double_precision():
    with jax.enable_x64(True):
        yield
