"""Lazy imports: names of a package that are imported on first use."""

import importlib
import sys
from collections.abc import Callable
from typing import Any

from ._moved import former_names


def on_first_use(
    package: str, *modules: str, **homes: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """The `__getattr__`, `__dir__` and `__all__` (PEP 562) of a package with lazy imports.

    Type checkers cannot follow them, so the package also imports the names under `TYPE_CHECKING`.

    **Arguments:**

    - `package`: the `__name__` of the package, which has already imported its other names.
    - `modules`: names of submodules.
    - `homes`: further names, each with the submodule that defines it.
    """
    homes |= {name: name for name in modules}
    namespace = vars(sys.modules[package])
    former_name = former_names(package)

    def get(name: str) -> Any:
        if name not in homes:
            return former_name(name)
        module = importlib.import_module(f"{package}.{homes[name]}")
        # From now on Python finds the name in the namespace and does not call `get`.
        namespace[name] = module if name in modules else getattr(module, name)
        return namespace[name]

    def names() -> list[str]:
        return sorted({*namespace, *homes})

    return get, names, [name for name in names() if not name.startswith("_")]
