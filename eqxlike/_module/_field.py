"""The fields of a Module and their options."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from .._pytree import is_array

_STATIC = "static"
_CONVERTER = "converter"
"""Equinox uses these names too: other libraries read and write them."""


def field(
    *, converter: Callable[[Any], Any] | None = None, static: bool = False, **kwargs: Any
) -> Any:
    """A field of a Module; `dataclasses.field` with two more arguments.

    **Arguments:**

    - `converter`: a function called on the field's value once, after `__init__`.
    - `static`: whether the field is part of the tree's structure, not a leaf or subtree. Its value
      must be hashable and hold no arrays; functions are traced anew for each new value.
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
    """The old name of `field(static=True)`, as in Equinox. It warns.

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


def check_static(owner: type, name: str, value: Any) -> None:
    """Raises `TypeError` if `value` cannot stand in the static field `name` of `owner`."""
    # A NumPy scalar is as immutable and hashable as a Python number.
    if is_array(value) and not isinstance(value, np.generic):
        raise TypeError(
            f"{owner.__name__}.{name} is a static field and was given an array of shape "
            f"{value.shape} and dtype {value.dtype}. A static field is part of the tree's "
            "structure and must be hashable; make the field an ordinary one, or pass a number or "
            "a tuple."
        )
    try:
        hash(value)
    except TypeError as error:
        arrays = [leaf for leaf in jax.tree_util.tree_leaves(value) if is_array(leaf)]
        if arrays:
            raise TypeError(
                f"{owner.__name__}.{name} is a static field and was given a value of type "
                f"{type(value).__name__} that holds an array of shape {arrays[0].shape} and dtype "
                f"{arrays[0].dtype}. A static field is part of the tree's structure and holds no "
                "arrays; make the field an ordinary one."
            ) from None
        raise TypeError(
            f"{owner.__name__}.{name} is a static field and was given a value of type "
            f"{type(value).__name__}, which is not hashable ({error}). A static field is part of "
            "the tree's structure; use a tuple for a list and a frozen dataclass or a tuple of "
            "pairs for a dict, or make the field an ordinary one."
        ) from None
