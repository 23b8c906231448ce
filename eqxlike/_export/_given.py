"""What is passed to a program for an array: what fits, or an error that says what would."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._pytree import is_array
from ._form import ArrayForm, describe, describe_other, form_of_array


def as_given(form: ArrayForm, array: Any, path: str, sizes: dict[str, Any]) -> Any:
    """What to pass to the program for an array.

    **Arguments:**

    - `sizes`: the sizes of the named axes so far; those of this array are added.

    **Raises:** `TypeError`, with the path, for what is no array, or of another dtype;
    `ValueError` for another shape.
    """
    if is_number(array):
        array = _as_scalar(array, form)
    if not (is_array(array) or isinstance(array, np.generic)):
        raise TypeError(f"{path} must be {describe(form)}; it is {describe_other(array)}.")
    came = form_of_array(array)
    if str(jax.dtypes.canonicalize_dtype(array.dtype, allow_extended_dtype=True)) != form.dtype:
        raise TypeError(f"{path} must be {describe(form)}; it is {describe(came)}.{_hint(form)}")
    is_alike = len(came.shape) == len(form.shape)
    for size, expected in zip(came.shape, form.shape, strict=False):
        if isinstance(expected, int):
            is_alike &= size == expected
        elif expected.isidentifier():
            if size == 0:
                raise ValueError(
                    f"{path} must be {describe(form)}, with {expected} of any size from 1 upwards; "
                    f"it is {describe(came)}."
                )
            if sizes.setdefault(expected, size) != size:
                raise ValueError(
                    f"{path} must be {describe(form)}; it is {describe(came)}, and {expected} is "
                    f"{sizes[expected]} in what came before it."
                )
    if not is_alike:
        raise ValueError(f"{path} must be {describe(form)}; it is {describe(came)}.")
    return array


def is_number(leaf: Any) -> bool:
    """Whether this is a number of Python, which may stand for an array."""
    return isinstance(leaf, bool | int | float | complex)


def _as_scalar(number: bool | int | float | complex, form: ArrayForm) -> Any:
    """A Python number as such an array, if it can be one without loss of what kind it is."""
    kinds: list[tuple[type, Callable[[np.dtype], bool]]] = [
        (bool, lambda dtype: dtype == np.bool_),
        (int, lambda dtype: jnp.issubdtype(dtype, np.number)),
        (float, lambda dtype: jnp.issubdtype(dtype, np.inexact)),
        (complex, lambda dtype: jnp.issubdtype(dtype, np.complexfloating)),
    ]
    if form.dtype.startswith("key<"):
        return number
    dtype = jnp.dtype(form.dtype)
    fits = next(fits for number_type, fits in kinds if isinstance(number, number_type))
    if not fits(dtype):
        return number
    if isinstance(number, int) and jnp.issubdtype(dtype, np.integer):
        limits = jnp.iinfo(dtype)
        is_held = int(limits.min) <= number <= int(limits.max)
        return np.asarray(number, dtype) if is_held else number
    try:
        return np.asarray(number, dtype)
    except OverflowError:  # The largest integers are no floating-point numbers.
        return number


def _hint(form: ArrayForm) -> str:
    is_wide = form.dtype in ("float64", "int64", "uint64", "complex128")
    is_off = not jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
    return " Set `jax.config.update('jax_enable_x64', True)`." if is_wide and is_off else ""
