"""Calls of these tests go through JAX as those of users do."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def plain_dispatch() -> Iterator[None]:
    """Where JAX looks for keys that are used twice, it takes calls another way, in Python."""
    with jax.debug_key_reuse(False):
        yield
