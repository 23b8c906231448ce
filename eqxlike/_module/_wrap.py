"""`functools.update_wrapper` for Modules."""

import copy
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from ._cached import stored_fields
from ._dataclass import found_in_class
from ._metadata import make_metadata, shown_by, write_metadata
from ._module import Module

_P = ParamSpec("_P")
_T = TypeVar("_T")


def module_update_wrapper(
    wrapper: Module, wrapped: Callable[_P, _T] | None = None
) -> Callable[_P, _T]:
    """A copy of a Module that shows the name and documentation of the callable that it wraps.

    **Arguments:**

    - `wrapper`: an instance of a class with a property `__wrapped__`, which returns what it wraps.
    - `wrapped`: the callable whose metadata to show; `wrapper.__wrapped__` if left out.

    **Returns:** a copy of `wrapper` with the `__module__`, `__name__`, `__qualname__`, `__doc__`
    and `__annotations__` of `wrapped`, as far as it has them. They are no leaves, and stay when the
    copy is mapped over or passes through a transformation.

    **Raises:** `ValueError` if the class of `wrapper` has no property `__wrapped__`.

    !!! example

        >>> import eqxlike as eqx
        >>> from collections.abc import Callable
        >>> class Twice(eqx.Module):
        ...     function: Callable
        ...     def __call__(self, x):
        ...         return self.function(self.function(x))
        ...     @property
        ...     def __wrapped__(self):
        ...         return self.function
        >>> def increment(x):
        ...     return x + 1
        >>> twice = eqx.module_update_wrapper(Twice(increment))
        >>> twice.__name__, twice(3)
        ('increment', 5)
    """
    cls: Any = type(wrapper)
    if not isinstance(getattr(cls, "__wrapped__", None), property):
        raise ValueError(
            f"`module_update_wrapper` expects a Module whose class has a property `__wrapped__`, "
            f"which returns what it wraps; {cls.__name__} has none. Write\n"
            "    @property\n"
            "    def __wrapped__(self):\n"
            "        return self.<field>"
        )
    described: Any = wrapper.__wrapped__ if wrapped is None else wrapped  # pyright: ignore
    copied: Any = copy.copy(wrapper)
    # A property of the class has the first word, and would hide what is put here.
    shown = {
        name: value
        for name, value in shown_by(described).items()
        if not hasattr(found_in_class(cls, name), "__set__")
    }
    write_metadata(make_metadata(shown), stored_fields(copied))
    return copied
