"""A check that nothing depends on an array."""

from typing import Any, Literal, TypeVar

import jax.numpy as jnp

from .._compat import Tracer
from .._transforms import error_if

Tree = TypeVar("Tree")


def assert_dce(
    x: Tree,
    msg: str,
    *,
    on_error: Literal["default", "raise", "breakpoint", "nan", "off"] = "default",
) -> Tree:
    """The identity, whose outcome must be of no use: a compiled program that uses it fails.

    Outside of a jit nothing is removed, and nothing is checked.

    **Arguments:**

    - `x`: any pytree.
    - `msg`: the message of the error.
    - `on_error`: as of `error_if`.

    **Raises:** `EqxlikeRuntimeError` when the compiled program runs.
    """
    # Whatever is calculated from constants alone is a tracer only where a jit records it all.
    is_used: Any = jnp.ones((), bool)
    return error_if(x, is_used, msg, on_error=on_error) if isinstance(is_used, Tracer) else x
