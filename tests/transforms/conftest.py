"""Calls in these tests use the fast path, as in a user's program."""

import pytest


@pytest.fixture(autouse=True)
def as_users_call(plain_dispatch: None) -> None:
    """Makes all tests of this folder dispatch calls as users do."""
