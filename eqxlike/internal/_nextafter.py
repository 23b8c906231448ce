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
    tiny = jnp.finfo(jnp.result_type(x)).tiny
    return jnp.where(x == 0, tiny, jnp.nextafter(x, jnp.inf)).astype(jnp.result_type(x))


@jax.custom_jvp
def prevbefore(x: Inexact[Array, "..."]) -> Inexact[Array, "..."]:
    """The floating-point number before `x`. Its derivative is that of the identity.

    Before zero, and before what XLA takes for zero, comes the smallest normal number with a minus.

    >>> print(prevbefore(jnp.array(1.0)) - 1)
    -5.9604645e-08
    """
    tiny = jnp.finfo(jnp.result_type(x)).tiny
    return jnp.where(x == 0, -tiny, jnp.nextafter(x, -jnp.inf)).astype(jnp.result_type(x))


nextafter.defjvp(lambda primals, tangents: (nextafter(*primals), *tangents))
prevbefore.defjvp(lambda primals, tangents: (prevbefore(*primals), *tangents))
