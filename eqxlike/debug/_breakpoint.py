"""A breakpoint in a compiled program that is entered only where it should be."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from .._compat import register_exclusion

# The debugger opens in the frame of whoever called `breakpoint_if`.
register_exclusion(__file__)


@jax.custom_batching.custom_vmap
def _any_of_all(pred: Array) -> Array:
    """Whether `pred` is true anywhere, in any member of the batches that it is mapped over.

    Not batched itself, so that a `cond` on it stays one under `vmap`: `select` runs both branches.
    """
    return jnp.any(pred)


@_any_of_all.def_vmap
def _any_of_batch(axis_size: int, in_batched: list[bool], pred: Array) -> tuple[Array, bool]:
    del axis_size, in_batched
    return _any_of_all(pred), False


def breakpoint_if(pred: Bool[Array, "..."], **kwargs: Any) -> None:
    r"""`jax.debug.breakpoint`, entered only if `pred` is true.

    **Arguments:**

    - `pred`: a boolean or an array of them, of which one must be true. Under `jax.vmap` the
      breakpoint is entered for all members of the batch if it is for one.
    - `**kwargs`: passed to `jax.debug.breakpoint`.

    **Raises:** `TypeError` if `pred` is neither a boolean nor a number nor an array of them, or for
    `token`, which needs a returned value to be of use.

    !!! example

        >>> import eqxlike as eqx, io, jax.numpy as jnp
        >>> @eqx.filter_jit
        ... def reciprocal(x):
        ...     eqx.debug.breakpoint_if(x == 0, stdin=io.StringIO("p x\nc\n"), backend="cli")
        ...     return 1 / x
        >>> print(reciprocal(jnp.array(2.0)))
        0.5
        >>> print(reciprocal(jnp.array(0.0)))
        Entering jdb:
        (jdb) Array(0., dtype=float32)
        (jdb) inf
    """
    if "token" in kwargs:
        raise TypeError(
            "`breakpoint_if` takes no `token`: it returns nothing that a later computation could "
            "depend on. Pass `ordered=True` to keep breakpoints in order."
        )
    try:
        pred = jnp.asarray(pred)
    except (TypeError, ValueError):
        raise TypeError(
            "`breakpoint_if` expects a boolean or an array of booleans as `pred`; it was given an "
            f"object of type {type(pred).__name__}."
        ) from None
    enter = functools.partial(jax.debug.breakpoint, **kwargs)
    jax.lax.cond(_any_of_all(pred), enter, lambda: None)
