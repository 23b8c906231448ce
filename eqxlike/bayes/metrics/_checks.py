"""Checks of what metrics are given."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array


def check_array(value: Any, name: str, call: str) -> None:
    """Raises `TypeError` for a distribution, such as a prediction, in the place of an array."""
    if is_distribution(value):
        raise TypeError(
            f"Expected an array as {name}, got a {type(value).__name__}: write `{call}`."
        )


def is_distribution(value: Any) -> bool:
    return callable(getattr(value, "log_prob", None))


def check_same_shape(call: str, /, **arrays: Array) -> None:
    """Raises `ValueError` unless all arrays have one shape, `TypeError` for a prediction.

    `call` is how the function is called with parts of a prediction.
    """
    for name, array in arrays.items():
        check_array(array, name, call)
    shapes = {name: jnp.shape(array) for name, array in arrays.items()}
    if len(set(shapes.values())) != 1:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"Expected arrays of one shape, got {listed}.")


def check_classification(scores: Array, labels: Array, name: str) -> None:
    """Raises `ValueError` unless there are scores `(N, C)` and integer labels `(N,)`, `TypeError`
    for a prediction.
    """
    check_array(scores, name, "prediction.probabilities")
    shape, label_shape = jnp.shape(scores), jnp.shape(labels)
    if len(shape) != 2 or label_shape != shape[:1]:
        raise ValueError(
            f"Expected {name} of shape (N, C) and labels of shape (N,), got {shape} and "
            f"{label_shape}."
        )
    if not jnp.issubdtype(jnp.result_type(labels), jnp.integer):
        raise ValueError(f"Expected integer labels, got dtype {jnp.result_type(labels)}.")
