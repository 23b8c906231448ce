"""The mode that goes by the numbers of inputs and outputs."""

import math

import jax
from jaxtyping import Array, Float

from ._forward import Forward, num_directions
from ._mode import Arrays, Mode, OfArrays, Pullback
from ._reverse import Reverse

# `python -m benchmarks.ad_modes` shows where the one becomes slower than the other.
_FEW = 1


class Auto(Mode):
    """Forward mode for few inputs, reverse mode for many.

    Forward mode takes a pass for each number among the inputs, and reverse mode one for each among
    the outputs, which costs more. `ad.choose` measures instead.

    !!! example

        >>> import eqxlike as eqx, jax.numpy as jnp
        >>> from eqxlike import ad
        >>> print(eqx.filter_grad(lambda x: jnp.sum(x**2), mode=ad.Auto())(jnp.arange(3.0)))
        [0. 2. 4.]
    """

    def value_and_grad(
        self, function: OfArrays, arrays: Arrays
    ) -> tuple[tuple[Float[Array, ""], Arrays], Arrays]:
        return self._mode(arrays, num_outputs=1).value_and_grad(function, arrays)

    def vjp(self, function: OfArrays, arrays: Arrays) -> tuple[Arrays, Pullback, Arrays]:
        return Reverse().vjp(function, arrays)

    def jvp(self, function: OfArrays, arrays: Arrays, tangents: Arrays) -> Arrays:
        return Forward().jvp(function, arrays, tangents)

    def jacobian(self, function: OfArrays, arrays: Arrays) -> tuple[Arrays, Arrays, list[Arrays]]:
        outputs, _ = jax.eval_shape(function, arrays)
        num_outputs = sum(math.prod(each.shape) for each in outputs)
        return self._mode(arrays, num_outputs).jacobian(function, arrays)

    def _mode(self, arrays: Arrays, num_outputs: int) -> Mode:
        return Forward() if num_directions(arrays) <= _FEW * num_outputs else Reverse()
