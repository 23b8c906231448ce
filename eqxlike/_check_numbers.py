"""Checks of the numbers that a caller gives: integers, real numbers, positive scales."""

import argparse
import math
import numbers
import operator
from typing import Any

import jax.numpy as jnp


def integer(value: Any) -> int | None:
    """`value` as an `int` of Python, whichever library's integer it is; `None` for others."""
    # A bool is an int to Python, never a size to anyone.
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def whole_number(value: Any, name: str, least: int = 1) -> int:
    """`value`, the argument `name`, as an `int`.

    **Raises:** `ValueError` unless it is an integer of at least `least`.
    """
    number = integer(value)
    if number is None or number < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}.")
    return number


def whole_number_in(text: str, least: int = 1) -> int:
    """The integer that `text` spells. It serves as the `type` of an argument of a command.

    **Raises:** `argparse.ArgumentTypeError` unless it is an integer of at least `least`.
    """
    try:
        number = int(text)
    except ValueError:
        number = None
    if number is None or number < least:
        raise argparse.ArgumentTypeError(f"must be an integer of at least {least}, got {text!r}")
    return number


def real_number(value: Any, name: str) -> float:
    """`value`, the argument `name`, as a `float`.

    **Raises:** `TypeError` unless it is a real number.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r}.")
    return float(value)


def positive_number(value: Any, name: str) -> float:
    """`value`, the argument `name`, as a `float`.

    **Raises:** `TypeError` unless it is a real number, `ValueError` unless that is positive and
    finite.
    """
    number = real_number(value, name)
    if not 0 < number < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {value!r}.")
    return number


def check_number(value: Any, name: str) -> None:
    """Raises `TypeError` unless `value`, the argument `name`, is a number or an array of them."""
    dtype = getattr(value, "dtype", object)
    if not isinstance(value, numbers.Real) and not jnp.issubdtype(dtype, jnp.number):
        raise TypeError(f"{name} must be a number, got {value!r}.")


def check_scale(scale: Any, name: str) -> None:
    """Raises `ValueError` unless `scale`, a number or an array, is one positive number, and
    `TypeError` if it is neither.

    The values of arrays are not checked: they may be traced.
    """
    check_number(scale, name)
    if isinstance(scale, (int, float)) and not (scale > 0 and math.isfinite(scale)):
        raise ValueError(f"{name} must be positive and finite, got {scale!r}.")
    if jnp.shape(scale) != ():
        raise ValueError(f"{name} must have shape (), got shape {jnp.shape(scale)}.")
