"""Checks of numeric arguments: integers, real numbers, positive scales.

`hint_to_call` serves checks of other arguments too.
"""

import argparse
import inspect
import math
import numbers
import operator
from typing import Any

import jax.numpy as jnp


def integer(value: Any) -> int | None:
    """Converts an integer of any library to an `int`; returns `None` for any other value."""
    # A bool is rejected: in Python it is an `int`, but nobody means `True` as a size.
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def whole_number(value: Any, name: str, least: int = 1) -> int:
    """Returns `value` as an `int`. `name` is the name of the argument in the error message.

    **Raises:** `ValueError` unless `value` is an integer >= `least`.
    """
    number = integer(value)
    if number is None or number < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}.")
    return number


def whole_number_in(text: str, least: int = 1) -> int:
    """Parses an integer. It is meant for the `type=` of an `argparse` argument.

    **Raises:** `argparse.ArgumentTypeError` unless `text` is an integer >= `least`.
    """
    try:
        number = int(text)
    except ValueError:
        number = None
    if number is None or number < least:
        raise argparse.ArgumentTypeError(f"must be an integer of at least {least}, got {text!r}")
    return number


def real_number(value: Any, name: str) -> float:
    """Returns `value` as a `float`. `name` is the name of the argument in the error message.

    **Raises:** `TypeError` unless `value` is a real number.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r}.")
    return float(value)


def positive_number(value: Any, name: str) -> float:
    """Returns `value` as a `float`. `name` is the name of the argument in the error message.

    **Raises:** `TypeError` unless `value` is a real number; `ValueError` unless it is positive and
    finite.
    """
    number = real_number(value, name)
    if not 0 < number < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {value!r}.")
    return number


def hint_to_call(value: Any) -> str:
    """The end of an error message: a hint to call a class or function; otherwise `""`."""
    is_uncalled = isinstance(value, type) or inspect.isroutine(value)
    return f": call it, `{value.__name__}(...)`" if is_uncalled else ""


def check_number(value: Any, name: str) -> None:
    """Raises `TypeError` unless `value` is a number or an array of numbers.

    `name` is the name of the argument in the error message.
    """
    dtype = getattr(value, "dtype", object)
    if not isinstance(value, numbers.Real) and not jnp.issubdtype(dtype, jnp.number):
        raise TypeError(f"{name} must be a number, got {value!r}{hint_to_call(value)}.")


def check_scale(scale: Any, name: str) -> None:
    """Checks that `scale` is a positive number, or an array of shape `()`.

    The values of arrays are not checked, since they may be traced. `name` is the name of the
    argument in the error message.

    **Raises:** `TypeError` unless `scale` is a number or an array of numbers; `ValueError` if the
    number is not positive and finite, or the array has another shape.
    """
    check_number(scale, name)
    if isinstance(scale, (int, float)) and not (scale > 0 and math.isfinite(scale)):
        raise ValueError(f"{name} must be positive and finite, got {scale!r}.")
    if jnp.shape(scale) != ():
        raise ValueError(f"{name} must have shape (), got shape {jnp.shape(scale)}.")
