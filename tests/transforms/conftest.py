"""Calls of these tests go through JAX as those of users do."""

import pytest


@pytest.fixture(autouse=True)
def as_users_call(plain_dispatch: None) -> None:
    """Every test here is about calls."""
