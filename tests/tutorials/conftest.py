"""Runs a script of `examples/` in a short form, under the strict rules of the suite."""

from collections.abc import Callable
from typing import Any

import pytest

from tests import scripts


@pytest.fixture
def script() -> Callable[[str], Any]:
    """A function from the name of a script to what it defines; it is not run."""

    return lambda name: scripts.load(scripts.EXAMPLES / f"{name}.py")
