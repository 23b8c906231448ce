"""Central finite differences."""

import functools
import operator
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..._check_numbers import positive_number
from ..._compat import Tracer
from ..._module import field
from ..._transforms import error_if
from ..._transforms._derivatives._grad import CannotDifferentiate
from ._forward_reverse import along_directions, gradients_of
from ._mode import Arrays, Mode, OfArrays, Pullback, ValueAndGrad, real_dot, to_widest

# `_WEIGHTS[order][k]` is the weight of `(f(x + k h) - f(x - k h)) / h` in the formula for f'(x).
_WEIGHTS = {2: {1: 1 / 2}, 4: {1: 2 / 3, 2: -1 / 12}}


class FiniteDifference(Mode):
    """Central finite differences.

    Finite differences only evaluate the function. So they can check derivative rules, and
    differentiate functions without derivative rules, such as `jax.pure_callback`. They evaluate the
    function `order` times for each number in the inputs, one evaluation after another. At most half
    of the digits of the result are right, so use float64.

    - `order`: 2 or 4, the order of the truncation error. Order 2 is `(f(x + h) - f(x - h)) / 2h`;
      order 4 is `(8 f(x + h) - 8 f(x - h) - f(x + 2h) + f(x - 2h)) / 12h`.
    - `step`: the step `h`. `None` chooses a step for each number `x` of the input, about
      `max(1, |x|)` times the cube root of the machine epsilon. For order 2, this step balances
      rounding and truncation errors (Numerical Recipes, section 5.7). Order 4 uses the same step,
      because a larger step would cross more kinks, such as the kink of a `relu`.

    **Raises:**

    - `ValueError` if `order` is not 2 or 4.
    - `ValueError` if `step` is not positive.
    - `ValueError`, when called, if `step` is too small for a number `x` of the input, that is, if
      `x + step == x`.

    !!! example

        >>> import eqxlike as eqx, jax, jax.numpy as jnp
        >>> from eqxlike import ad
        >>> gradient = eqx.filter_grad(jnp.sin, mode=ad.FiniteDifference(order=4))
        >>> print(bool(jnp.allclose(gradient(jnp.array(0.5)), jnp.cos(0.5), atol=1e-4)))
        True
    """

    only_evaluates: ClassVar[bool] = True

    order: int = field(static=True, default=2)
    step: float | None = field(static=True, default=None)

    def __check_init__(self):
        if self.order not in _WEIGHTS:
            raise ValueError(f"FiniteDifference: order must be 2 or 4, got {self.order!r}.")
        if self.step is not None:
            positive_number(self.step, "FiniteDifference: step")

    def value_and_grad(self, function: OfArrays, arrays: Arrays) -> ValueAndGrad:
        value, aux = function(arrays)
        derivatives = self._derivatives(lambda arrays: [function(arrays)[0]], arrays, [value])
        return (value, aux), gradients_of(derivatives[0], arrays)

    def vjp(self, function: OfArrays, arrays: Arrays) -> tuple[Arrays, Pullback, Arrays]:
        outputs, aux = function(arrays)

        def pull_back(cotangents: Arrays) -> Arrays:
            # Take the differences before the dot product. In the dot product, rounding of a large
            # output would hide the difference of a small output.
            derivatives = self._derivatives(
                lambda arrays: function(arrays)[0],
                arrays,
                outputs,
                lambda found: [real_dot(found, cotangents)],
            )
            return gradients_of(derivatives[0], arrays)

        return outputs, pull_back, aux

    def jvp(self, function: OfArrays, arrays: Arrays, tangents: Arrays) -> Arrays:
        outputs, _ = function(arrays)
        steps = self._steps(arrays, outputs)
        # `steps` has a step for each number. `h` is the largest step along the tangent for which no
        # number moves further than its own step.
        reach = [
            jnp.where(size == 0, jnp.inf, step / size).min(initial=jnp.inf)
            for size, step in zip(map(jnp.abs, jax.lax.stop_gradient(tangents)), steps, strict=True)
        ]
        h = jnp.stack(to_widest(reach)).min()
        h = jnp.where(jnp.isfinite(h), h, 1)
        return self._difference(lambda arrays: function(arrays)[0], arrays, tangents, h)

    def jacobian(self, function: OfArrays, arrays: Arrays) -> tuple[Arrays, Arrays, list[Arrays]]:
        outputs, aux = function(arrays)
        derivatives = self._derivatives(lambda arrays: function(arrays)[0], arrays, outputs)
        return outputs, aux, [gradients_of(each, arrays) for each in derivatives]

    def _derivatives(
        self,
        function: Any,
        arrays: Arrays,
        outputs: Arrays,
        weigh: Callable[[Arrays], Arrays] = list,
    ) -> Arrays:
        """The derivatives along all `n` directions, of shape `(n, *output.shape)` for each output.

        **Arguments:**

        - `weigh`: a linear function that is applied to the derivatives along each direction.
        """
        steps = self._steps(arrays, outputs)

        def along(tangents: Arrays) -> Arrays:
            h = to_widest(
                jnp.sum(jnp.where(tangent != 0, step, 0))
                for step, tangent in zip(steps, tangents, strict=True)
            )
            return weigh(self._difference(function, arrays, tangents, sum(h[1:], h[0])))

        return along_directions(along, arrays, 1)

    def _difference(
        self, function: Any, arrays: Arrays, tangents: Arrays, h: Float[Array, ""]
    ) -> Arrays:
        def moved(by: Float[Array, ""]) -> Arrays:
            return function(
                [
                    array + tangent * by.astype(array.dtype)
                    for array, tangent in zip(arrays, tangents, strict=True)
                ]
            )

        terms = [
            [(above - below) * w for above, below in zip(moved(k * h), moved(-k * h), strict=True)]
            for k, w in _WEIGHTS[self.order].items()
        ]
        sums = [functools.reduce(operator.add, each) for each in zip(*terms, strict=True)]
        return [each / h.astype(each.dtype) for each in sums]

    def _steps(self, arrays: Arrays, outputs: Arrays) -> list[Float[Array, "..."]]:
        """The step for each number of each array. The steps are not differentiated."""
        arrays = jax.lax.stop_gradient(arrays)
        epsilon = max((float(jnp.finfo(each.dtype).eps) for each in outputs), default=0.0)
        steps = []
        for place, array in enumerate(arrays):
            finfo = jnp.finfo(array.dtype)
            size = jnp.abs(array).astype(finfo.dtype)
            if self.step is None:
                relative = max(float(finfo.eps), epsilon) ** (1 / 3)
                wanted = relative * jnp.maximum(size, 1)
                # The difference of the rounded numbers is exact, so use it as the step.
                steps.append((size + wanted) - size)
            else:
                wanted = jnp.full(size.shape, self.step, finfo.dtype)
                lost = ((array.real + wanted) == array.real) & jnp.isfinite(size)
                if jnp.iscomplexobj(array):
                    lost |= (array.imag + wanted) == array.imag
                steps.append(self._check_steps(wanted, lost, place, array))
        return steps

    def _check_steps(self, steps: Array, lost: Array, place: int, array: Array) -> Array:
        """Returns `steps`; raises an error if a step is too small to change its number."""
        what = (
            f"has a number that is too large for the step {self.step}: x + step == x in "
            f"{array.dtype}. Use a larger step, float64, or FiniteDifference(step=None), which "
            "chooses a step for each number."
        )
        if not isinstance(lost, Tracer):
            if np.any(lost):
                raise CannotDifferentiate(place, what)
            return steps
        which = f"the differentiated array {place}, of shape {array.shape},"
        return error_if(steps, lost, f"FiniteDifference: {which} {what}")
