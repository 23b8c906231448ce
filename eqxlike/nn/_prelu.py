"""An activation with a learnt slope."""

import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray, Shaped

from .._module import Module
from ._common import check_input


class PReLU(Module):
    """The parametric rectifier: `x` where positive, `negative_slope * x` elsewhere.

    He, Zhang, Ren & Sun (2015), "Delving Deep into Rectifiers: Surpassing Human-Level Performance
    on ImageNet Classification".

    >>> import jax.numpy as jnp
    >>> PReLU(0.25)(jnp.array([-4.0, 2.0])).tolist()
    [-1.0, 2.0]
    """

    negative_slope: Shaped[Array, "*channels"]

    def __init__(self, init_alpha: float | Shaped[Array, "*channels"] | None = 0.25):
        """**Arguments:**

        - `init_alpha`: the initial slope: a number for one slope, an array for one along each of
          the last axes.

        **Raises:** `ValueError` if it is neither.
        """
        if init_alpha is None:
            raise ValueError("PReLU expected a number or an array for `init_alpha`, got None.")
        self.negative_slope = jnp.asarray(init_alpha)

    def __call__(
        self, x: Shaped[Array, "*shape"], *, key: PRNGKeyArray | None = None
    ) -> Shaped[Array, "*shape"]:
        """**Arguments:**

        - `x`: any shape that ends in that of `negative_slope`.
        - `key`: ignored; layers share one signature.

        **Returns:** the shape and dtype of `x`.

        **Raises:** `ValueError` if `x` ends in another shape.
        """
        del key
        check_input(self, x, ("...", *self.negative_slope.shape))
        slope = jnp.broadcast_to(self.negative_slope, x.shape).astype(x.dtype)
        return jnp.where(x >= 0, x, slope * x)
