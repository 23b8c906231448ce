"""Reverse mode."""

import jax
from jaxtyping import Array, Float

from .._equations import equations_in
from ._mode import Arrays, Mode, OfArrays, Pullback


class Reverse(Mode):
    """Reverse mode: one pass forward that keeps intermediate values, and one back.

    It costs a few times the function, however many inputs there are, and as much memory as the
    values that it keeps. It is JAX's own, and what `filter_grad` does where no mode is named.

    !!! example

        >>> import eqxlike as eqx, jax.numpy as jnp
        >>> from eqxlike import ad
        >>> print(eqx.filter_grad(lambda x: jnp.sum(x**2), mode=ad.Reverse())(jnp.arange(3.0)))
        [0. 2. 4.]
    """

    def value_and_grad(
        self, function: OfArrays, arrays: Arrays
    ) -> tuple[tuple[Float[Array, ""], Arrays], Arrays]:
        return jax.value_and_grad(function, has_aux=True)(arrays)

    def vjp(self, function: OfArrays, arrays: Arrays) -> tuple[Arrays, Pullback, Arrays]:
        outputs, pullback, aux = jax.vjp(function, arrays, has_aux=True)
        return outputs, lambda cotangents: pullback(cotangents)[0], aux

    def jvp(self, function: OfArrays, arrays: Arrays, tangents: Arrays) -> Arrays:
        equations = equations_in(jax.make_jaxpr(function)(arrays).jaxpr)
        if any(each.primitive.name.startswith("custom_vjp_call") for each in equations):
            # Its one JVP is the transpose of its VJP.
            return super().jvp(function, arrays, tangents)
        _, directions, _ = jax.jvp(function, (arrays,), (tangents,), has_aux=True)
        return directions
