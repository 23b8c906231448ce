"""Finite differences that look to one side, and so tell a kink."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from ..._module import field
from .._modes import FiniteDifference
from .._modes._mode import Arrays


class OneSided(FiniteDifference):
    """Differences of second order: `(4 f(x + h) - 3 f(x) - f(x + 2h)) / 2h`.

    - `side`: 1 or -1, the sign of `h`.
    """

    side: int = field(static=True, kw_only=True)

    def _difference(
        self, function: Any, arrays: Arrays, tangents: Arrays, h: Float[Array, ""]
    ) -> Arrays:
        h = self.side * h

        def moved(by: Float[Array, ""]) -> Arrays:
            pairs = zip(arrays, tangents, strict=True)
            return function([a + t * by.astype(jnp.finfo(a.dtype).dtype) for a, t in pairs])

        values = zip(function(arrays), moved(h), moved(2 * h), strict=True)
        return [(4 * b - 3 * a - c) / (2 * h).astype(a.dtype) for a, b, c in values]
