"""Loads a script as a module, so that a test can call its functions."""

import importlib.util
import pathlib
from typing import Any

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


def load(path: pathlib.Path, name: str | None = None) -> Any:
    """The script at `path` as a module. `__name__` is not `"__main__"`."""
    spec = importlib.util.spec_from_file_location(name or path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
