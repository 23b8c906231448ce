"""eqxlike under the name of Equinox, for libraries that are built on Equinox."""

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
import types
from collections.abc import Iterable, Sequence
from typing import Any

EQUINOX_VERSION = "0.13.8"
"""The version of Equinox whose interface eqxlike has."""

THEIRS, OURS = "equinox", "eqxlike"
PARTS = (THEIRS, f"{THEIRS}.debug", f"{THEIRS}.internal", f"{THEIRS}.nn")

_ABSENT = f"eqxlike stands in for Equinox {EQUINOX_VERSION} in this process, and has no `{{}}`"


def install_as_equinox() -> dict[str, str]:
    """Makes `import equinox` give eqxlike from here on, in this process alone.

    With it a library that is built on Equinox runs on eqxlike as it is, for instance Diffrax:

    ```python
    import eqxlike

    eqxlike.install_as_equinox()  # before the first import of what is built on Equinox

    import diffrax
    ```

    `equinox`, `equinox.nn`, `equinox.debug` and `equinox.internal` then hold what the parts of
    eqxlike of the same names hold, imported when they are first asked for. `equinox.__version__`,
    and what `importlib.metadata.version("equinox")` returns, is the version of Equinox whose
    interface that is. A name that eqxlike lacks, and every private one, is an error that says so.
    Equinox itself need not be installed, and is not imported where it is. A second call changes
    nothing.

    **Returns:** for each module of Equinox the one whose names it has now:
    `{"equinox": "eqxlike", "equinox.nn": "eqxlike.nn", ...}`.

    **Raises:** `RuntimeError` if Equinox has been imported already: what was built on its classes
    would meet ours.
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        if imported := sys.modules.get(THEIRS):
            raise RuntimeError(
                "install_as_equinox() must come before the first import of Equinox, and it has "
                f"been imported in this process, from {getattr(imported, '__file__', None)}. Call "
                "install_as_equinox() at the start of the program, above the imports of Equinox "
                "and of all that is built on it."
            )
        sys.meta_path.insert(0, _Finder())
    return {name: _ours(name) for name in PARTS}


def _ours(name: str) -> str:
    """The module of eqxlike that stands for a module of Equinox."""
    return OURS + name.removeprefix(THEIRS)


class _Finder(importlib.metadata.DistributionFinder, importlib.abc.Loader):
    """Finds and makes the modules that stand for Equinox's, and says which version they are."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != THEIRS:
            return None
        if "._" in fullname or importlib.util.find_spec(_ours(fullname)) is None:
            # Of our name: Python puts an error of its own in the place of one of the name that it
            # looks for.
            raise ModuleNotFoundError(_ABSENT.format(fullname), name=_ours(fullname))
        return importlib.machinery.ModuleSpec(fullname, self, origin=OURS, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        theirs, ours = module.__name__, importlib.import_module(_ours(module.__name__))

        def get(name: str) -> Any:
            if name.startswith("_") or not hasattr(ours, name):
                message = _ABSENT.format(f"{theirs}.{name}")
                raise AttributeError(message, name=name, obj=module)
            value = getattr(ours, name)
            if isinstance(value, types.ModuleType):
                return importlib.import_module(f"{theirs}.{name}")
            return value

        public = [name for name in dir(ours) if not name.startswith("_")]
        namespace = {
            "__doc__": f"eqxlike's `{ours.__name__}`, under the name that it has in Equinox.",
            "__getattr__": get,
            "__dir__": lambda: sorted({*vars(module), *public}),
            "__all__": public,
        }
        vars(module).update(namespace)
        if theirs == THEIRS:
            vars(module)["__version__"] = EQUINOX_VERSION

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterable[importlib.metadata.Distribution]:
        is_asked_for = context is None or context.name in (None, THEIRS)
        return [_Distribution()] if is_asked_for else []


class _Distribution(importlib.metadata.Distribution):
    """What `importlib.metadata` says of Equinox while eqxlike stands in for it."""

    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        return f"Metadata-Version: 2.1\nName: {THEIRS}\nVersion: {EQUINOX_VERSION}\n"

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(f"{path}: eqxlike stands in for Equinox, and has none of its files")
