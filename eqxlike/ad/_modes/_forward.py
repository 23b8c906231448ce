"""Forward mode."""

import jax
from jaxtyping import Array, Float

from ..._module import field
from ..._numbers import whole_number
from ._directions import along_directions, gradients_of, is_one_block
from ._mode import Arrays, Mode, OfArrays


class Forward(Mode):
    """Forward mode: Jacobian-vector products, one for each number among the inputs.

    It keeps no intermediate values. It costs as many passes as there are inputs, so it is for few
    inputs, or for many outputs, and for what has no reverse mode, such as `jax.lax.while_loop`.

    - `chunk`: how many products to take at once, as a batch; all where `None`. The memory needed
      grows with it, and the number of passes one after another falls.

    **Raises:** `ValueError` if `chunk` is no positive integer.

    !!! example

        >>> import eqxlike as eqx, jax, jax.numpy as jnp
        >>> from eqxlike import ad
        >>> def halvings(x):
        ...     return jax.lax.while_loop(lambda x: x > 1, lambda x: x / 2, x)
        >>> print(eqx.filter_grad(halvings, mode=ad.Forward())(jnp.array(10.0)))
        0.0625
    """

    chunk: int | None = field(static=True, default=None)

    def __check_init__(self):
        if self.chunk is not None:
            whole_number(self.chunk, "Forward: chunk")

    def value_and_grad(
        self, function: OfArrays, arrays: Arrays
    ) -> tuple[tuple[Float[Array, ""], Arrays], Arrays]:
        (value,), aux, (gradient,) = self.jacobian(_as_list(function), arrays)
        return (value, aux), gradient

    def jvp(self, function: OfArrays, arrays: Arrays, tangents: Arrays) -> Arrays:
        _, directions, _ = jax.jvp(function, (arrays,), (tangents,), has_aux=True)
        return directions

    def jacobian(self, function: OfArrays, arrays: Arrays) -> tuple[Arrays, Arrays, list[Arrays]]:
        def along(tangents: Arrays) -> tuple[Arrays, tuple[Arrays, Arrays]]:
            outputs, directions, aux = jax.jvp(function, (arrays,), (tangents,), has_aux=True)
            return directions, (outputs, aux)

        if is_one_block(arrays, self.chunk):
            derivatives, (outputs, aux) = along_directions(along, arrays, None, (0, None))
        else:
            outputs, aux = function(arrays)
            derivatives = along_directions(lambda each: along(each)[0], arrays, self.chunk)
        return outputs, aux, [gradients_of(each, arrays) for each in derivatives]


def _as_list(function: OfArrays) -> OfArrays:
    def of_arrays(arrays: Arrays) -> tuple[Arrays, Arrays]:
        value, aux = function(arrays)
        return [value], aux

    return of_arrays
