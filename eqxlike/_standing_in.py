"""Lets libraries that are built on Equinox import eqxlike under the name `equinox`."""

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
import types
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ._module import (
    Initialising,
    abstract_names,
    clear_slot,
    ignore_strict_rules,
    own_record,
    set_cached,
)

EQUINOX_VERSION = "0.13.8"
"""The version of Equinox whose interface eqxlike provides."""

EQUINOX, EQXLIKE = "equinox", "eqxlike"
PARTS = (EQUINOX, f"{EQUINOX}.debug", f"{EQUINOX}.internal", f"{EQUINOX}.nn")

_MODULES = {
    EQUINOX: "_ad _caches _callback _compile_utils _config _custom_types _deprecate _doc_utils "
    "_enum _errors _eval_shape _filters _jit _make_jaxpr _misc _module _module._better_abstract "
    "_module._field _module._flatten _module._module _module._prebuilt _pretty_print "
    "_serialisation _sharding _tree _unvmap _update _vmap_pmap",
    f"{EQUINOX}.debug": "_announce_transform _backward_nan _breakpoint_if _dce _max_traces",
    f"{EQUINOX}.internal": "_closure_to_pytree _finalise_jaxpr _getkey _loop _loop.bounded "
    "_loop.checkpointed _loop.common _loop.loop _misc _nextafter _noinline _nontraceable _omega "
    "_primitive _progress_meter _str2jax",
    f"{EQUINOX}.nn": "_activations _attention _batch_norm _conv _dropout _embedding _inference "
    "_linear _misc _mlp _normalisation _pool _rnn _sequential _shared _spectral_norm _stateful "
    "_weight_norm",
}
"""Maps each public module of Equinox to its private modules, which also have all public names."""

_PRIVATE = {f"{part}.{name}" for part, names in _MODULES.items() for name in names.split()}

_NAMES = {
    f"{EQUINOX}._ad._ClosureConvert": "_transforms._derivatives._custom.ClosureConverted",
    f"{EQUINOX}._custom_types.sentinel": "_pytree.MISSING",
    f"{EQUINOX}._enum.EnumerationItem": "_transforms._enumeration.EnumerationItem",
    f"{EQUINOX}._enum._EnumerationMeta": "_transforms._enumeration.EnumerationMeta",
    f"{EQUINOX}._errors._EquinoxRuntimeError": "_transforms.EquinoxRuntimeError",
    f"{EQUINOX}._jit._JitWrapper": "_transforms._jit._filter_jit.JitFunction",
    f"{EQUINOX}._misc.default_floating_dtype": "_standing_in.default_floating_dtype",
    f"{EQUINOX}._module._module._ModuleMeta": "_module.ModuleMeta",
    f"{EQUINOX}._module._module._currently_initialising": "_standing_in.currently_initialising",
    f"{EQUINOX}._module._module._has_dataclass_init": "_standing_in.has_dataclass_init",
    f"{EQUINOX}._module._module.is_abstract_module": "_standing_in.is_abstract_module",
    f"{EQUINOX}._module._prebuilt.BoundMethod": "_module.BoundMethod",
    f"{EQUINOX}.internal._omega._Metaω": "internal._omega._Meta",
    f"{EQUINOX}.internal._omega._ω": "internal._omega.ω",
    f"{EQUINOX}.nn._misc.default_init": "nn._parameters.uniform",
    f"{EQUINOX}.nn._misc.named_scope": "_standing_in.named_scope",
}
"""The private names of `EQUINOX_VERSION` that libraries use, with their equivalents in eqxlike."""

_HINTS = {
    "MISSING": "a field without a value is not in `vars(module)`",
    "_nan_like": "use `jax.numpy.full_like(x, jax.numpy.nan)`",
    "wrap_method": "a method is bound as `equinox._module._prebuilt.BoundMethod`",
}
"""Hints for private names of other versions of Equinox. eqxlike does not have these names."""

_MISSING = f"eqxlike stands in for Equinox {EQUINOX_VERSION} in this process, and has no `{{}}`"


def install_as_equinox() -> dict[str, str]:
    """Makes `import equinox` import eqxlike, in this process only.

    Libraries that are built on Equinox, such as Diffrax, then run on eqxlike without changes:

    ```python
    import eqxlike

    eqxlike.install_as_equinox()  # before the first import of a library built on Equinox

    import diffrax
    ```

    - `equinox`, `equinox.nn`, `equinox.debug` and `equinox.internal` have the public names of
      `eqxlike` and its submodules. The names are imported on first use.
    - `equinox.__version__` and `importlib.metadata.version("equinox")` return the version of
      Equinox whose interface eqxlike provides.
    - Some libraries use private names of this version. These names exist at their paths in Equinox.
      Equinox's private modules exist too, with all public names. Access to any other private name
      raises an error.
    - `strict=True` checks nothing in this process, as in this version of Equinox.

    Equinox need not be installed. If it is installed, it is not imported. A second call changes
    nothing.

    **Returns:** a dictionary that maps each module of Equinox to the module that replaces it:
    `{"equinox": "eqxlike", "equinox.nn": "eqxlike.nn", ...}`.

    **Raises:** `RuntimeError` if Equinox has already been imported, since the program would then
    mix classes of Equinox and eqxlike.
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        if imported := sys.modules.get(EQUINOX):
            raise RuntimeError(
                "install_as_equinox() must be called before Equinox is imported, but Equinox has "
                f"been imported in this process, from {getattr(imported, '__file__', None)}. Call "
                "install_as_equinox() at the start of the program, before it imports Equinox or a "
                "library that is built on Equinox."
            )
        sys.meta_path.insert(0, _Finder())
        ignore_strict_rules()
    return {name: _replacement_of(name) for name in PARTS}


def _replacement_of(name: str) -> str:
    """The module of eqxlike that replaces a module of Equinox."""
    return EQXLIKE + name.removeprefix(EQUINOX)


def _part_of(name: str) -> str:
    """The public module of Equinox that contains a private module."""
    return name.partition("._")[0]


def _missing_message(name: str) -> str:
    """The error message for a missing name, with a hint if a replacement is known."""
    last = name.rpartition(".")[2]
    found = [path for path in (*_PRIVATE, *_NAMES) if path.rpartition(".")[2] == last]
    hint = f"in Equinox {EQUINOX_VERSION} it is `{min(found)}`" if found else _HINTS.get(last)
    return _MISSING.format(name) + (f": {hint}" if hint else "")


class _Finder(importlib.metadata.DistributionFinder, importlib.abc.Loader):
    """Import hook that makes the modules of `equinox` and provides their version."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != EQUINOX:
            return None
        is_absent = "._" in fullname or importlib.util.find_spec(_replacement_of(fullname)) is None
        if fullname not in _PRIVATE and is_absent:
            # If `importlib.util.find_spec` is the caller, this method must return `None` for a
            # missing module. For an import, it must raise an error.
            if sys._getframe(2).f_globals.get("__name__") == importlib.util.__name__:
                return None
            # If the error named the module that is being imported, Python would replace the error
            # by its own. So the error names the module of eqxlike.
            raise ModuleNotFoundError(_missing_message(fullname), name=_replacement_of(fullname))
        return importlib.machinery.ModuleSpec(fullname, self, origin=EQXLIKE, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Part(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        ours = importlib.import_module(_replacement_of(_part_of(module.__name__)))
        module.__doc__ = f"eqxlike's `{ours.__name__}`, under its name in Equinox."
        vars(module)["__all__"] = [name for name in dir(ours) if not name.startswith("_")]
        if module.__name__ == EQUINOX:
            vars(module)["__version__"] = EQUINOX_VERSION

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterable[importlib.metadata.Distribution]:
        is_asked_for = context is None or context.name in (None, EQUINOX)
        return [_Distribution()] if is_asked_for else []


class _Part(types.ModuleType):
    """A module of `equinox` whose names come from eqxlike."""

    def __getattr__(self, name: str) -> Any:
        theirs, path = self.__name__, f"{self.__name__}.{name}"
        if path in _PRIVATE:
            return importlib.import_module(path)
        if path in _NAMES:
            home, _, own = f"{EQXLIKE}.{_NAMES[path]}".rpartition(".")
            return getattr(importlib.import_module(home), own)
        parts = [_part_of(theirs), *PARTS] if theirs in _PRIVATE else [theirs]
        for part in () if name.startswith("_") else parts:
            value = getattr(importlib.import_module(_replacement_of(part)), name, None)
            if isinstance(value, types.ModuleType) and theirs not in _PRIVATE:
                return importlib.import_module(path)
            if value is not None and not isinstance(value, types.ModuleType):
                return value
        raise AttributeError(_missing_message(path), name=name, obj=self)

    def __dir__(self) -> list[str]:
        return sorted({*vars(self), *self.__all__})


class _Distribution(importlib.metadata.Distribution):
    """The distribution that `importlib.metadata` finds for Equinox."""

    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        return f"Metadata-Version: 2.1\nName: {EQUINOX}\nVersion: {EQUINOX_VERSION}\n"

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(f"{path}: eqxlike stands in for Equinox, and has none of its files")


# --- Replacements of private names ---


def default_floating_dtype() -> Any:
    """The dtype of a Python float."""
    return getattr(jnp, jax.dtypes.canonicalize_dtype(float).name)


named_scope = jax.named_scope


def is_abstract_module(cls: type) -> bool:
    """Whether a Module class is abstract."""
    return bool(abstract_names(cls) | cls.__abstractmethods__)


class _HasDataclassInit:
    """Maps a Module class to whether its `__init__` is generated."""

    def __getitem__(self, cls: type) -> bool:
        record = own_record(cls)
        if record is None:
            raise KeyError(cls)
        return record.makes_init


has_dataclass_init = _HasDataclassInit()
currently_initialising = types.SimpleNamespace(
    add=lambda module: set_cached(module, Initialising), remove=clear_slot
)
"""Makes it possible to assign fields of a Module between `add(module)` and `remove(module)`."""
