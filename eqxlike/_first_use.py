"""Names of a package that are imported only when somebody first asks for them."""

import importlib
import sys
from collections.abc import Callable
from typing import Any

from ._moved import former_names


def on_first_use(
    package: str, *modules: str, **homes: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """The `__getattr__`, `__dir__` and `__all__` (PEP 562) of a package with such names.

    A type checker cannot see what they do: for it, the package also imports the names where no
    program does.

    **Arguments:**

    - `package`: the `__name__` of the package, which has imported its other names already.
    - `modules`: names of submodules, each found under its own name.
    - `homes`: further names, each with the submodule that has it.
    """
    homes |= {name: name for name in modules}
    namespace = vars(sys.modules[package])
    former_name = former_names(package)

    def get(name: str) -> Any:
        if name not in homes:
            return former_name(name)
        module = importlib.import_module(f"{package}.{homes[name]}")
        # Python does not ask again for what it finds here.
        namespace[name] = module if name in modules else getattr(module, name)
        return namespace[name]

    def names() -> list[str]:
        return sorted({*namespace, *homes})

    return get, names, [name for name in names() if not name.startswith("_")]
