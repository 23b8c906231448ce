"""Numbers of features, of which a layer may have the word "scalar"."""

from typing import Any, Literal

from ..._numbers import integer

Features = int | Literal["scalar"]
"""A number of features, or `"scalar"` for arrays of shape `()`."""


def number_of_features(value: Any, name: str) -> Features:
    """`value` as an `int`, or `"scalar"`.

    **Raises:** `ValueError` unless it is an integer of at least 0, or that word.
    """
    if isinstance(value, str) and value == "scalar":
        return "scalar"
    number = integer(value)
    if number is None or number < 0:
        raise ValueError(f"{name} must be an integer of at least 0 or 'scalar', got {value!r}.")
    return number


def feature_count(features: Features) -> int:
    """The length of the vector that stands for `features`: 1 for `"scalar"`."""
    return 1 if features == "scalar" else features


def feature_shape(features: Features) -> tuple[int, ...]:
    """The shape of one input or output with so many features: `()` for `"scalar"`."""
    return () if features == "scalar" else (features,)
