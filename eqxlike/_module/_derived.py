"""Generated subclasses of Module classes, each of which passes for the class itself."""

import threading
from collections.abc import Callable, Hashable
from typing import Any

from ._class import Traits
from ._module import ModuleMeta


class _Quiet:
    """A first base that keeps the `__init_subclass__` of the other bases from being called."""

    __slots__ = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass


_lock = threading.RLock()


def derived_class(cls: Any, key: Hashable, make: Callable[[], type]) -> type:
    """The subclass of `cls` that `make` makes: the same one each time for the same `key`."""
    derived = cls._eqxlike_class.derived
    with _lock:
        if key not in derived:
            derived[key] = make()
        return derived[key]


def derive(cls: Any, body: dict[str, Any], traits: Traits) -> Any:
    """A subclass of `cls` with its name and docstring, and with `body` and `traits` of its own."""
    namespace = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        **body,
    }
    bases = (cls,) if issubclass(cls, _Quiet) else (_Quiet, cls)
    # A metaclass that extends ours stays, and is not asked: it may take other arguments.
    metaclass: Any = type(cls)
    return ModuleMeta.__new__(metaclass, cls.__name__, bases, namespace, _traits=traits)
