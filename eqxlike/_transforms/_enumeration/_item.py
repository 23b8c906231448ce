"""The items of enumerations, and their descriptions in errors."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import wadler_lindig as wl
from jaxtyping import Array, Bool, Int, PyTree

from ..._compat import Tracer
from ..._module import Module, field
from ..._pytree import is_array
from .._checks import branched_error_if


class EnumerationItem(Module):
    """One item of an `Enumeration`; or several of one enumeration, if its array has a shape.

    An item can be computed wherever an array can, as in `jax.jit`, `jax.lax.scan` or `jax.vmap`.
    """

    _value: Int[Array, "..."] | Int[np.ndarray, "..."]
    _enumeration: Any = field(static=True)

    def __eq__(self, other: object) -> Bool[Array, "..."]:
        # What is known while tracing stays known.
        with jax.ensure_compile_time_eval():
            return jnp.asarray(self._value == self._comparable(other)._value)

    def __ne__(self, other: object) -> Bool[Array, "..."]:
        with jax.ensure_compile_time_eval():
            return jnp.asarray(self._value != self._comparable(other)._value)

    # The equality of two items is an array, which may be known too late for a dict.
    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def _comparable(self, other: Any) -> "EnumerationItem":
        if isinstance(other, EnumerationItem) and other._enumeration is self._enumeration:
            return other
        raise ValueError(
            f"An item of {class_name(self._enumeration)} can only be compared with another; it was "
            f"compared with {origin(other)}.{advise_promotion(self._enumeration, other)}"
        )

    def __repr__(self) -> str:
        return f"{class_name(self._enumeration)}<{self._enumeration[self]}>"

    def __pdoc__(self, **options: Any) -> wl.AbstractDoc:
        return wl.TextDoc(repr(self))

    def is_traced(self) -> bool:
        """Whether it is not known which item this is until the program runs.

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
        """Raises an error at runtime, with the message of this item.

        **Arguments:**

        - `token`: any pytree with an array in it.
        - `pred`: whether to raise; an array of any shape, of which one `True` is enough.

        **Returns:** `token`. The error is raised where the program uses this one.

        **Raises:** the errors of `error_if`.
        """
        messages = list(self._enumeration._eqxlike_messages.values())
        return branched_error_if(token, pred, self._value, messages)


def class_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def origin(value: Any) -> str:
    """The description of `value` to somebody who expected an item."""
    if isinstance(value, EnumerationItem):
        return f"an item of {class_name(value._enumeration)}"
    return describe(value)


def describe(value: Any) -> str:
    if is_array(value):
        return f"an array of shape {value.shape} and dtype {value.dtype}"
    return f"{value!r} of type {type(value).__name__}"


def advise_promotion(wanted: type, value: Any) -> str:
    if isinstance(value, EnumerationItem):
        for upper, lower in ((value._enumeration, wanted), (wanted, value._enumeration)):
            if upper is not lower and issubclass(lower, upper):
                return (
                    f" `{lower.__name__}.promote(...)` turns items of {class_name(upper)} into "
                    f"items of {class_name(lower)}."
                )
    return ""
