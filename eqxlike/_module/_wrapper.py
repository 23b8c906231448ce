"""Two functions of `functools` for Modules: `update_wrapper`, and `partial`.

Most wrappers read the metadata from the callable that their `__wrapped__` returns. But
`module_update_wrapper` stores the metadata in the `__dict__` of the instance, under `METADATA_KEY`.
When the instance is flattened, the metadata is in the static part.
"""

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

from .._traceback import hide_our_frames
from ._fields import METADATA_KEY, carries_metadata, found_in_class, stored_fields
from ._module import METADATA, Module

_P = ParamSpec("_P")
_T = TypeVar("_T")


def module_update_wrapper(
    wrapper: Module, wrapped: Callable[_P, _T] | None = None
) -> Callable[_P, _T]:
    """Returns a copy of a Module that shows the name and documentation of the callable it wraps.

    **Arguments:**

    - `wrapper`: an instance of a class whose property `__wrapped__` returns the wrapped callable.
    - `wrapped`: the callable whose metadata to show; by default `wrapper.__wrapped__`.

    **Returns:** a copy of `wrapper` with the `__module__`, `__name__`, `__qualname__`, `__doc__`
    and `__annotations__` of `wrapped`, if it has them. These attributes are not leaves of the copy.
    `jax.tree.map` and transformations preserve them.

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
    if not carries_metadata(cls):
        raise ValueError(
            f"`module_update_wrapper` expects a Module whose class has a property `__wrapped__` "
            f"that returns the wrapped callable; {cls.__name__} has none. Write\n"
            "    @property\n"
            "    def __wrapped__(self):\n"
            "        return self.<field>"
        )
    described: Any = wrapper.__wrapped__ if wrapped is None else wrapped  # pyright: ignore
    copied: Any = copy.copy(wrapper)
    # A property of the class would hide a stored value of the same name, so it is left out.
    shown = {
        name: value
        for name, value in shown_by(described).items()
        if not hasattr(found_in_class(cls, name), "__set__")
    }
    annotations = shown.pop(_ANNOTATIONS, None)
    if annotations is not None:
        annotations = tuple((name, _hashable(value)) for name, value in annotations.items())
    named = tuple((name, _hashable(shown[name])) for name in sorted(shown))
    Metadata(named, annotations).write(stored_fields(copied))
    return copied


def shown_by(described: Any) -> dict[str, Any]:
    """The metadata of a callable, by name."""
    return {name: getattr(described, name) for name in METADATA if hasattr(described, name)}


_ANNOTATIONS = "__annotations__"


@dataclasses.dataclass(frozen=True)
class Metadata:
    """The metadata that `module_update_wrapper` gave to an instance.

    The metadata is part of the structure of the tree, so it must be hashable. Therefore annotations
    are stored as pairs, and an unhashable value is compared by identity.
    """

    named: tuple[tuple[str, Any], ...]
    annotations: tuple[tuple[str, Any], ...] | None

    def write(self, fields: dict[str, Any]) -> None:
        """Adds the metadata to `fields`, the `__dict__` of an instance."""
        fields[METADATA_KEY] = self
        fields.update((name, _plain(value)) for name, value in self.named)
        if self.annotations is not None:
            fields[_ANNOTATIONS] = {name: _plain(value) for name, value in self.annotations}


class _Itself:
    """A hashable wrapper of an unhashable value. It equals wrappers of the same object."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return type(other) is _Itself and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _hashable(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return _Itself(value)
    return value


def _plain(value: Any) -> Any:
    return value.value if type(value) is _Itself else value


# --- `functools.partial` as a Module ---


_Return = TypeVar("_Return")


class Partial(Module, Generic[_Return]):
    """A `functools.partial` that is a pytree. The function and the arguments are its children.

    A transformation of a `Partial` sees the arrays among the arguments of the `Partial`. If `func`
    is a Module, the transformation also sees the arrays of `func`. In `jax.tree_util.Partial`, only
    the arguments are children, and the arrays of `func` are hidden.

    **Arguments:**

    - `func`: any callable.
    - `*args`, `**kwargs`: passed to `func` in each call, before the arguments of the call. A
      keyword argument of the call overrides a keyword argument given here.

    Its fields are `func`, `args` (a tuple) and `keywords` (a dict).

    !!! example

        >>> import eqxlike as eqx, jax, jax.numpy as jnp
        >>> def affine(scale, x, *, shift):
        ...     return scale * x + shift
        >>> double = eqx.Partial(affine, jnp.array(2.0), shift=1.0)
        >>> double
        Partial(func=<function affine>, args=(weak_f32[],), keywords={'shift': 1.0})
        >>> print(double(3.0), double(3.0, shift=0.0))
        7.0 6.0
        >>> jax.tree.leaves(double)[1:]
        [Array(2., dtype=float32, weak_type=True), 1.0]
    """

    func: Callable[..., _Return]
    args: tuple[Any, ...]
    keywords: dict[str, Any]

    def __init__(self, func: Callable[..., _Return], /, *args: Any, **kwargs: Any):
        self.func = func
        self.args = args
        self.keywords = kwargs

    def __call__(self, /, *args: Any, **kwargs: Any) -> _Return:
        try:
            return self.func(*self.args, *args, **{**self.keywords, **kwargs})
        except Exception as error:
            hide_our_frames(error)
            raise

    @property
    def __signature__(self) -> inspect.Signature:
        try:
            return inspect.signature(functools.partial(self.func, *self.args, **self.keywords))
        except (TypeError, ValueError):
            # Some C functions have no signature.
            return inspect.signature(self.__call__)
