"""Mutable arrays, `jax.Ref`: no arrays to filters, and traced like arrays."""

from typing import Any

import jax

from .._compat import Tracer
from ._predicates import is_array


def is_traced_reference(element: Any) -> bool:
    """`True` for a `jax.Ref` as a function finds it that is traced."""
    # In this order: to ask whether something is a `jax.Ref` takes JAX a microsecond.
    return isinstance(element, Tracer) and not is_array(element) and isinstance(element, jax.Ref)


def is_reference(element: Any) -> bool:
    """`True` for a `jax.Ref`.

    >>> import jax.numpy as jnp
    >>> is_reference(jax.new_ref(jnp.ones(2))), is_reference(jnp.ones(2))
    (True, False)
    """
    return type(element) is jax.Ref or is_traced_reference(element)


def is_array_or_traced_reference(element: Any) -> bool:
    """`True` for what must come out of a traced function as an output, and in no other way."""
    return is_array(element) or is_traced_reference(element)
