"""Checks of what metrics are given."""

import jax.numpy as jnp
from jaxtyping import Array


def check_same_shape(**arrays: Array) -> None:
    """Raises `ValueError` unless all arrays have one shape."""
    shapes = {name: jnp.shape(array) for name, array in arrays.items()}
    if len(set(shapes.values())) != 1:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"Expected arrays of one shape, got {listed}.")


def check_classification(scores: Array, labels: Array, name: str) -> None:
    """Raises `ValueError` unless there are scores `(N, C)` and integer labels `(N,)`."""
    shape, label_shape = jnp.shape(scores), jnp.shape(labels)
    if len(shape) != 2 or label_shape != shape[:1]:
        raise ValueError(
            f"Expected {name} of shape (N, C) and labels of shape (N,), got {shape} and "
            f"{label_shape}."
        )
    if not jnp.issubdtype(jnp.result_type(labels), jnp.integer):
        raise ValueError(f"Expected integer labels, got dtype {jnp.result_type(labels)}.")
