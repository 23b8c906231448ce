"""Lazy imports: names of a package that are imported on first use."""

import importlib
import sys
from collections.abc import Callable
from typing import Any

from ._moved import former_names


def on_first_use(
    package: str, *modules: str, **homes: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Makes the `__getattr__`, `__dir__` and `__all__` of a package with lazy imports (PEP 562).

    A type checker does not understand lazy imports, so the package must also import the names under
    `TYPE_CHECKING`.

    **Arguments:**

    - `package`: the `__name__` of the package. The package must already have imported its other
      names.
    - `modules`: names of submodules.
    - `homes`: maps further names to the submodules that define them.
    """
    homes |= {name: name for name in modules}
    namespace = vars(sys.modules[package])
    former_name = former_names(package)

    def get(name: str) -> Any:
        if name not in homes:
            return former_name(name)
        module = importlib.import_module(f"{package}.{homes[name]}")
        # From now on, Python finds the name in the namespace of the package, and does not call
        # `get`.
        namespace[name] = module if name in modules else getattr(module, name)
        return namespace[name]

    def names() -> list[str]:
        return sorted({*namespace, *homes})

    return get, names, [name for name in names() if not name.startswith("_")]
