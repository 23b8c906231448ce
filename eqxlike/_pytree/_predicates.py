"""Predicates over leaves: what is an array, and what is as good as one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def is_array(element: Any) -> bool:
    """`True` for a JAX array (tracers included), a NumPy array or a NumPy scalar.

    >>> import jax.numpy as jnp
    >>> is_array(jnp.ones(2)), is_array(np.float32(1)), is_array(1.0)
    (True, True, False)
    """
    return isinstance(element, jax.Array | np.ndarray | np.generic)


def is_array_like(element: Any) -> bool:
    """`True` for an array, a Python number, or what has `__jax_array__`.

    >>> is_array_like(1.0), is_array_like("1.0")
    (True, False)
    """
    is_number = isinstance(element, bool | int | float | complex)
    return is_array(element) or is_number or _has_jax_array(element)


def is_inexact_array(element: Any) -> bool:
    """`True` for an array (see `is_array`) of floating-point or complex dtype.

    >>> import jax.numpy as jnp
    >>> is_inexact_array(jnp.ones(2)), is_inexact_array(jnp.arange(2)), is_inexact_array(1.0)
    (True, False, False)
    """
    return is_array(element) and bool(jnp.issubdtype(element.dtype, jnp.inexact))


def _has_jax_array(element: Any) -> bool:
    # A tracer has the attribute too, as `None`.
    return getattr(element, "__jax_array__", None) is not None


def is_inexact_array_like(element: Any) -> bool:
    """`True` for what is array-like (see `is_array_like`) and floating-point or complex.

    >>> is_inexact_array_like(1.0), is_inexact_array_like(1), is_inexact_array_like(1j)
    (True, False, True)
    """
    if not is_array(element) and _has_jax_array(element):
        element = element.__jax_array__()
    return is_inexact_array(element) or isinstance(element, float | complex)
