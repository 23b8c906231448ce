"""Reverse mode that computes again what it did not keep."""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float

from ..._module import field
from ._mode import Arrays, Mode, OfArrays, Pullback
from ._reverse import Reverse
from ._segments import in_segments


class Checkpointed(Mode):
    """Reverse mode that keeps a few values of the forward pass, and computes the others again.

    The function is cut into about as many segments as the square root of its length, where few
    values pass from one to the next. Those are kept, and a segment is computed again when the pass
    back comes to it (Chen et al., 2016, arXiv:1604.06174). `jax.lax.scan` is cut likewise. So a
    network of `n` layers needs memory for about `2 sqrt(n)` of them, and a second evaluation of the
    function.

    - `policy`: what to keep beside that, inside a segment: one of `jax.checkpoint_policies`.

    !!! example

        >>> import eqxlike as eqx, jax.numpy as jnp
        >>> from eqxlike import ad
        >>> def deep(x):
        ...     for _ in range(64):
        ...         x = jnp.sin(x)
        ...     return x
        >>> print(eqx.filter_grad(deep, mode=ad.Checkpointed())(jnp.array(0.0)))
        1.0
    """

    policy: Callable[..., bool] | None = field(static=True, default=None)

    def __check_init__(self):
        if self.policy is not None and not callable(self.policy):
            raise TypeError(
                "Checkpointed: policy must be one of `jax.checkpoint_policies`, or None; got "
                f"{self.policy!r}."
            )

    def value_and_grad(
        self, function: OfArrays, arrays: Arrays
    ) -> tuple[tuple[Float[Array, ""], Arrays], Arrays]:
        return Reverse().value_and_grad(self._cut(function, arrays), arrays)

    def vjp(self, function: OfArrays, arrays: Arrays) -> tuple[Arrays, Pullback, Arrays]:
        return Reverse().vjp(self._cut(function, arrays), arrays)

    def jvp(self, function: OfArrays, arrays: Arrays, tangents: Arrays) -> Arrays:
        return Reverse().jvp(function, arrays, tangents)

    def _cut(self, function: OfArrays, arrays: Arrays) -> Callable[[Arrays], Any]:
        return in_segments(function, arrays, self.policy)
