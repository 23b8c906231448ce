"""Fixtures for tests of methods."""

import jax
import pytest

from eqxlike.bayes._libraries import as_libraries_compute


@pytest.fixture(scope="module", autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def as_methods_run(double_precision):
    """The context in which `bayes.infer` runs a method."""
    with as_libraries_compute():
        yield
