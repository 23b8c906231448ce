"""The floating-point numbers beside one."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact


@jax.custom_jvp
def nextafter(x: Inexact[Array, "..."]) -> Inexact[Array, "..."]:
    """The floating-point number after `x`. Its derivative is that of the identity.

    After zero, and after what XLA takes for zero, comes the smallest normal number.

    >>> print(nextafter(jnp.array(1.0)) - 1)
    1.1920929e-07
    """
    return _beside(x, 1)


@jax.custom_jvp
def prevbefore(x: Inexact[Array, "..."]) -> Inexact[Array, "..."]:
    """The floating-point number before `x`. Its derivative is that of the identity.

    Before zero, and before what XLA takes for zero, comes the smallest normal number with a minus.

    >>> print(prevbefore(jnp.array(1.0)) - 1)
    -5.9604645e-08
    """
    return _beside(x, -1)


def _beside(x: Array, sign: int) -> Array:
    """The number beside `x`. In `jax.lax`, which is traced faster: solvers ask for it often."""
    dtype = jnp.result_type(x)
    x = jnp.asarray(x, dtype)
    tiny = jax.lax.full_like(x, sign * jnp.finfo(dtype).tiny)
    beside = jax.lax.nextafter(x, dtype.type(sign * float("inf")))
    return jax.lax.select(jax.lax.eq(x, dtype.type(0)), tiny, beside)


nextafter.defjvp(lambda primals, tangents: (nextafter(*primals), *tangents))
prevbefore.defjvp(lambda primals, tangents: (prevbefore(*primals), *tangents))
