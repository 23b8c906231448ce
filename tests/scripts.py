"""Loads a script, so that a test may call what it defines."""

import importlib.util
import pathlib
from typing import Any

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


def load(path: pathlib.Path, name: str | None = None) -> Any:
    """What the script at `path` defines; it is not run as the main program."""
    spec = importlib.util.spec_from_file_location(name or path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
