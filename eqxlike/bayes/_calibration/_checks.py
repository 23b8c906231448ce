"""Checks of the held-out data that corrections are fitted on."""

import jax.numpy as jnp
from jaxtyping import Array

from ..._compat import Tracer


def check_labels(labels: Array, batch_shape: tuple[int, ...], num_classes: int, name: str) -> None:
    """Raises `ValueError` unless `labels` are classes of the one batch axis of the predictions.

    Traced labels are not looked at.
    """
    shape = jnp.shape(labels)
    if len(batch_shape) != 1 or shape != batch_shape:
        raise ValueError(
            f"{name} expects predictions of shape (N, C) and labels of shape (N,), got "
            f"{(*batch_shape, num_classes)} and {shape}."
        )
    if shape == (0,):
        raise ValueError(f"{name}: there is no example.")
    if not jnp.issubdtype(jnp.result_type(labels), jnp.integer):
        raise ValueError(f"{name} expects integer labels, got dtype {jnp.result_type(labels)}.")
    if isinstance(labels, Tracer):
        return
    least, most = int(jnp.min(labels)), int(jnp.max(labels))
    if least < 0 or most >= num_classes:
        raise ValueError(
            f"{name} expects labels from 0 to {num_classes - 1}, got labels from {least} to {most}."
        )


def check_finite(values: Array, name: str, hint: str) -> None:
    """Raises `ValueError`, which ends in `hint`, unless all are finite. Traced ones pass."""
    if isinstance(values, Tracer):
        return
    num_bad = int(jnp.sum(~jnp.isfinite(values)))
    if num_bad:
        raise ValueError(f"{name}: {num_bad} of {values.size} are not finite{hint}.")
