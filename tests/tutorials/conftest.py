"""Runs a script of `examples/` in a short form, under the strict rules of the suite."""

import importlib.util
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


@pytest.fixture
def script() -> Callable[[str], Any]:
    """A function from the name of a script to what it defines; it is not run."""

    def load(name: str) -> Any:
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load
