"""Enumerations whose items are pytrees, so that a compiled program can choose an item."""

import textwrap
import warnings
from typing import TYPE_CHECKING, Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
import wadler_lindig as wl
from jaxtyping import Array, Bool, Int, PyTree

from .._compat import Tracer
from .._module import Module, field
from .._pytree import is_array
from ._error_if import branched_error_if

if TYPE_CHECKING:
    # Type checkers see a Python enumeration. Its items are its instances, so `E.name` has type `E`,
    # although the body assigns a `str` to `name`.
    from enum import EnumMeta as _Meta
else:
    _Meta = type


class EnumerationMeta(_Meta):
    """The metaclass of enumerations. It defines `len(E)`, `E[item]` and `isinstance(item, E)`."""

    _eqxlike_messages: dict[str, str]

    def __len__(cls) -> int:
        return len(cls._eqxlike_messages)

    def __instancecheck__(cls, instance: Any) -> bool:
        # An item of a base enumeration is not an instance of a subclass, because the same index
        # means another item in the subclass.
        return isinstance(instance, EnumerationItem) and instance._enumeration is cls

    def __getitem__(cls, item: Any) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The message of `item`, or `"traced"` if the item is traced."""
        name = class_name(cls)
        expect_item(f"{name}[...] expects an item of {name} and returns its message", cls, item)
        if item.is_traced():
            return "traced"
        # `eqxlike.filter`, `jax.eval_shape` and other functions may replace the index by something
        # that is not an integer array.
        if not is_array(item._value) or not jnp.issubdtype(item._value.dtype, np.integer):
            return "unknown"
        indices = np.asarray(item._value)
        if not np.all((indices >= 0) & (indices < len(cls))):
            return "unknown"
        return str(np.array([*cls._eqxlike_messages.values()], dtype=object)[indices])


class Enumeration(metaclass=EnumerationMeta):
    """Base class of enumerations: the possible results of a program, with a message for each.

    The body of a subclass `E` gives each item a name and a message. `E.name` is an item, which is a
    pytree with one integer array. `E[item]` is the message of the item, and `len(E)` is the number
    of items. `==` compares two items of one enumeration and returns a boolean array. `E.where`
    selects one of two items.

    A subclass of an enumeration has the items of its base, followed by its own items. `promote`
    converts items of the base into items of the subclass.

    **Raises:** when a subclass is defined, `TypeError` if a message is not a `str`, and
    `ValueError` if an item has the name of a method. The definition warns if a name has two
    different messages.

    !!! example

        >>> import eqxlike as eqx, jax, jax.numpy as jnp
        >>> class Result(eqx.Enumeration):
        ...     successful = "all went well"
        ...     diverged = "the iteration diverged"
        >>> @jax.jit
        ... def inspect(x):
        ...     return Result.where(jnp.isfinite(x), Result.successful, Result.diverged)
        >>> result = inspect(jnp.inf)
        >>> Result[result], bool(result == Result.successful)
        ('the iteration diverged', False)
    """

    if TYPE_CHECKING:

        def __eq__(self, other: object) -> Bool[Array, "..."]: ...
        def __ne__(self, other: object) -> Bool[Array, "..."]: ...
        def is_traced(self) -> bool: ...
        def error_if(self, token: PyTree, pred: bool | Bool[Array, "..."]) -> PyTree: ...
    else:
        _eqxlike_messages: ClassVar[dict[str, str]] = {}

        def __new__(cls) -> Any:
            raise TypeError(
                f"{class_name(cls)} has no instances but its items: write "
                f"`{cls.__name__}.<name of an item>`."
            )

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own = [
            (name, value)
            for name, value in vars(cls).items()
            if not (name.startswith("__") and name.endswith("__"))
        ]
        for name, message in own:
            _check_item(cls, name, message)
        bases = (base for base in cls.__bases__ if isinstance(base, EnumerationMeta))
        inherited = (item for base in bases for item in base._eqxlike_messages.items())
        messages: dict[str, str] = {}
        for name, message in (*inherited, *own):
            if messages.get(name, message) != message:
                warnings.warn(
                    f"{class_name(cls)}.{name} has two different messages, {messages[name]!r} and "
                    f"{message!r}: the latter is used.",
                    stacklevel=2,
                )
            messages[name] = message
        cls._eqxlike_messages = messages
        for index, name in enumerate(messages):
            setattr(cls, name, EnumerationItem(np.array(index, np.int32), cls))
        if cls.__doc__ is None:
            cls.__doc__ = _describe_items(messages)

    @classmethod
    def promote(cls, item: Any) -> Self:
        """Converts an item of a base enumeration to an item of this enumeration.

        **Arguments:**

        - `item`: an item of a base of this enumeration, traced or not.

        **Returns:** the item of this enumeration that has the same name.

        **Raises:** `ValueError` if `item` is not an item of a base.

        !!! example

            >>> import eqxlike as eqx
            >>> class Result(eqx.Enumeration):
            ...     successful = "all went well"
            >>> class SolverResult(Result):
            ...     diverged = "the iteration diverged"
            >>> bool(SolverResult.promote(Result.successful) == SolverResult.successful)
            True
        """
        source = item._enumeration if isinstance(item, EnumerationItem) else cls
        if source is cls or not issubclass(cls, source):
            name = class_name(cls)
            raise ValueError(
                f"{name}.promote(...) expects an item of an enumeration that {name} extends; it "
                f"got {describe(item)}."
            )
        places = [*cls._eqxlike_messages]
        indices = [places.index(name) for name in source._eqxlike_messages]
        is_prefix = indices == [*range(len(indices))]
        with jax.ensure_compile_time_eval():
            index = item._value if is_prefix else jnp.array(indices, jnp.int32)[item._value]
        promoted: Any = EnumerationItem(index, cls)
        return promoted

    @classmethod
    def where(cls, pred: bool | np.bool_ | Bool[Array, ""], a: Self, b: Self) -> Self:
        """Returns item `a` if `pred` is true, and item `b` otherwise.

        **Arguments:**

        - `pred`: a boolean scalar, traced or not.
        - `a`, `b`: items of this enumeration.

        **Returns:** an item of this enumeration.

        **Raises:** `ValueError` if `pred` is not a boolean scalar, or if `a` or `b` is not an item
        of this enumeration.

        !!! example

            >>> import eqxlike as eqx, jax.numpy as jnp
            >>> class Result(eqx.Enumeration):
            ...     successful = "all went well"
            ...     diverged = "the iteration diverged"
            >>> result = Result.where(jnp.array(3.0) < 2.0, Result.successful, Result.diverged)
            >>> Result[result]
            'the iteration diverged'
        """
        is_scalar = is_array(pred) and jnp.shape(pred) == () and jnp.result_type(pred) == np.bool_
        if not isinstance(pred, bool) and not is_scalar:
            raise ValueError(
                f"The first argument of {class_name(cls)}.where(...) must be a boolean scalar; it "
                f"got {describe(pred)}. For a batch, use `jax.vmap`."
            )
        name = class_name(cls)
        items: Any = (a, b)
        for item in items:
            expect_item(f"{name}.where(...) selects one of two items of {name}", cls, item)
        index, other_index = (item._value for item in items)
        if index is other_index:
            return a
        # An item that is known at trace time stays concrete.
        with jax.ensure_compile_time_eval():
            chosen: Any = EnumerationItem(jnp.where(pred, index, other_index), cls)
        return chosen


def _check_item(cls: type, name: str, message: Any) -> None:
    if name in vars(Enumeration):
        raise ValueError(
            f"{class_name(cls)} cannot have an item named `{name}`: every enumeration has a method "
            "with this name."
        )
    if not isinstance(message, str):
        raise TypeError(
            f"{class_name(cls)}.{name} must be a str, the message of an item; it is of type "
            f"{type(message).__name__}. The body of an enumeration may contain only items."
        )


def _describe_items(messages: dict[str, str]) -> str:
    lines = [
        f"- `{name}`: {textwrap.indent(message, '    ').strip()}" if message else f"- `{name}`"
        for name, message in messages.items()
    ]
    return "\n".join(["An enumeration with the items:", "", *lines])


# --- The items of enumerations, and their descriptions in errors ---


class EnumerationItem(Module):
    """An item of an `Enumeration`, or an array of items.

    Like an array, an item can be an input or an output of functions transformed by `jax.jit` or
    `jax.vmap`, and of the body of `jax.lax.scan`.
    """

    _value: Int[Array, "..."] | Int[np.ndarray, "..."]
    _enumeration: Any = field(static=True)

    def __eq__(self, other: object) -> Bool[Array, "..."]:
        # A result that is known at trace time stays concrete.
        with jax.ensure_compile_time_eval():
            return jnp.asarray(self._value == self._comparable(other)._value)

    def __ne__(self, other: object) -> Bool[Array, "..."]:
        with jax.ensure_compile_time_eval():
            return jnp.asarray(self._value != self._comparable(other)._value)

    # Items are not hashable: `==` returns an array, so a dict could not compare items.
    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def _comparable(self, other: Any) -> "EnumerationItem":
        name = class_name(self._enumeration)
        expectation = f"An item of {name} can only be compared with an item of {name}"
        expect_item(expectation, self._enumeration, other)
        return other

    def __repr__(self) -> str:
        return f"{class_name(self._enumeration)}<{self._enumeration[self]}>"

    def __pdoc__(self, **options: Any) -> wl.AbstractDoc:
        return wl.TextDoc(repr(self))

    def is_traced(self) -> bool:
        """Whether the item is unknown until the program runs.

        >>> import eqxlike as eqx, jax
        >>> class Shape(eqx.Enumeration):
        ...     circle = "a circle"
        ...     square = "a square"
        >>> Shape.circle.is_traced()
        False
        >>> bool(jax.jit(lambda item: jnp.array(item.is_traced()))(Shape.circle))
        True
        """
        return isinstance(self._value, Tracer)

    def error_if(self, token: PyTree, pred: bool | Bool[Array, "..."]) -> PyTree:
        """Raises an error with this item's message if `pred` is true, also in compiled code.

        **Arguments:**

        - `token`: any pytree with an array in it.
        - `pred`: a boolean or a boolean array; raises if any element is true.

        **Returns:** `token`, unchanged. The check runs where the program uses the returned `token`.

        **Raises:** the errors of `error_if`.
        """
        messages = list(self._enumeration._eqxlike_messages.values())
        return branched_error_if(token, pred, self._value, messages)


def class_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def describe(value: Any) -> str:
    """A description of `value` for an error that expected something else."""
    if isinstance(value, EnumerationItem):
        return f"an item of {class_name(value._enumeration)}"
    if is_array(value):
        return f"an array of shape {value.shape} and dtype {value.dtype}"
    return f"{value!r} of type {type(value).__name__}"


def expect_item(expectation: str, cls: Any, value: Any) -> None:
    """Raises `ValueError`, with a hint to use `promote`, unless `value` is an item of `cls`."""
    if isinstance(value, cls):
        return
    hint = ""
    if isinstance(value, EnumerationItem):
        for upper, lower in ((value._enumeration, cls), (cls, value._enumeration)):
            if upper is not lower and issubclass(lower, upper):
                hint = (
                    f" `{lower.__name__}.promote(...)` turns items of {class_name(upper)} into "
                    f"items of {class_name(lower)}."
                )
    raise ValueError(f"{expectation}; it got {describe(value)}.{hint}")
