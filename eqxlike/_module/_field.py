"""The fields of a Module and their options."""

import array
import collections
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from .._pytree import is_array

_STATIC = "static"
_CONVERTER = "converter"
"""The keys in the metadata of a field: Equinox's keys, since other libraries read them."""


def field(
    *, converter: Callable[[Any], Any] | None = None, static: bool = False, **kwargs: Any
) -> Any:
    """Declares a field of a Module. This is `dataclasses.field` with two more arguments.

    **Arguments:**

    - `converter`: a function applied to the field's value once, after `__init__`.
    - `static`: if `True`, the field is part of the tree's structure, not a leaf or subtree. A
      static value must not contain arrays, and each new value causes a new trace. The value should
      be hashable. If the value is a list, a dict or a mutable dataclass, `filter_jit` compares its
      elements in each call. `jax.jit` does not notice if the value is changed in place.
    - `**kwargs`: passed to `dataclasses.field`.

    **Returns:** the field, as `dataclasses.field` returns it.

    !!! example

        >>> import eqxlike as eqx, jax.numpy as jnp
        >>> class Scale(eqx.Module):
        ...     factor: jnp.ndarray = eqx.field(converter=jnp.asarray)
        ...     axis: int = eqx.field(static=True, default=0)
        >>> Scale(2.0)
        Scale(factor=weak_f32[])
    """
    metadata = dict(kwargs.pop("metadata", None) or {})
    for name, value in ((_STATIC, static or None), (_CONVERTER, converter)):
        if name in metadata:
            raise ValueError(f"Cannot use metadata with name {name!r}: `field` takes `{name}=`.")
        if value is not None:
            metadata[name] = value
    return dataclasses.field(metadata=metadata, **kwargs)


def static_field(**kwargs: Any) -> Any:
    """The old name of `field(static=True)`, as in Equinox. Deprecated.

    **Arguments:**

    - `**kwargs`: as for `field`.

    **Returns:** the field, as `field` returns it.
    """
    warnings.warn(
        "`eqxlike.static_field` is deprecated: write `eqxlike.field(static=True)`.", stacklevel=2
    )
    return field(static=True, **kwargs)


def is_static(field: dataclasses.Field) -> bool:
    return field.metadata.get(_STATIC, False)


def converter_of(field: dataclasses.Field) -> Callable[[Any], Any] | None:
    return field.metadata.get(_CONVERTER)


def is_field(cls: Any, name: str) -> bool:
    """Whether `name` is a field of the dataclass `cls`, not a `ClassVar` nor an `InitVar`."""
    field = cls.__dataclass_fields__.get(name)
    return field is not None and field._field_type is dataclasses._FIELD  # pyright: ignore


def found_in_class(cls: type, name: str) -> Any:
    """Looks up the attribute `name` in a class and its bases, without calling a descriptor."""
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)


def check_static(owner: type, name: str, value: Any) -> None:
    """Raises `TypeError` if the static field `name` of `owner` cannot hold `value`."""
    # For most values the check ends here, which keeps construction fast.
    if error_of_hash(value) is None and not is_array(value):
        return
    found = _find_array_or_opaque(value, "", set())
    if found is None:
        return
    path, part, error = found
    at = f" at {owner.__name__}.{name}{path}" if path else ""
    if is_array(part):
        raise TypeError(
            f"{owner.__name__}.{name} is a static field and was given an array of shape "
            f"{part.shape} and dtype {part.dtype}{at}. A static field is part "
            "of the tree's structure and cannot hold arrays. Remove `static=True`, or pass a "
            "number or a tuple."
        ) from None
    raise TypeError(
        f"{owner.__name__}.{name} is a static field and was given a value of type "
        f"{type(part).__name__}{at}, which is not hashable ({error}) and cannot be "
        "compared by its elements or attributes. A static field is part of the tree's structure: "
        "pass numbers, strings and functions, or tuples, lists, dicts and dataclasses of them, or "
        "remove `static=True`."
    ) from None


def _find_array_or_opaque(
    value: Any, path: str, inside: set[int]
) -> tuple[str, Any, Exception | None] | None:
    """Finds a part of `value` that is an array, or is neither hashable nor a container of parts.

    **Returns:** the path of the first such part, the part itself, and the error that prevents
    hashing (`None` for an array). The result is `None` if there is no such part.
    """
    # A NumPy scalar is an array to `is_array`, but immutable and hashable like a Python number.
    if error_of_hash(value) is None and (not is_array(value) or isinstance(value, np.generic)):
        return None
    if is_array(value):
        return path, value, None
    if id(value) in inside:
        return path, value, RecursionError("it contains itself")
    parts = _parts(value)
    if parts is None:
        return path, value, error_of_hash(value)
    inside.add(id(value))
    for key, part in parts:
        if found := _find_array_or_opaque(part, path + key, inside):
            return found
    inside.discard(id(value))
    return None


def error_of_hash(value: Any) -> Exception | None:
    try:
        hash(value)
    except Exception as error:  # A `__hash__` may raise any exception.
        return error
    return None


def _parts(value: Any) -> list[tuple[str, Any]] | None:
    """The parts of an unhashable value, with their paths; `None` if it cannot be taken apart."""
    elements: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        elements = [(f"[{key!r}]", each) for key, each in value.items()]
    elif isinstance(value, list | tuple | collections.deque):
        elements = [(f"[{index}]", each) for index, each in enumerate(value)]
    elif isinstance(value, slice):
        # Slices are not hashable up to Python 3.11.
        elements = [(f".{name}", getattr(value, name)) for name in ("start", "stop", "step")]
    elif not isinstance(value, set | bytearray | array.array):
        is_compared_by_value = type(value).__hash__ is None and hasattr(value, "__dict__")
        if not (is_compared_by_value or dataclasses.is_dataclass(value)):
            return None
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    names = {field.name: None for field in fields} | getattr(value, "__dict__", {})
    return elements + [(f".{name}", getattr(value, name, None)) for name in names]
