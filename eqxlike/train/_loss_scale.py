"""Loss scaling, which keeps small float16 gradients from underflowing."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32, PyTree

from .. import Module, field, is_array, is_inexact_array, tree_at
from .._check_numbers import whole_number
from .._dtypes import at_least_float32

_LARGEST = float(jnp.finfo(jnp.float32).max)


class DynamicLossScale(Module):
    """An adaptive factor for the loss that keeps gradients in the range of float16.

    Gradients below 6e-8 are 0 in float16. Therefore the loss is multiplied by `scale`, and the
    gradients are divided by `scale` in float32. If a gradient overflows, the update is skipped and
    the scale is divided by `factor`. After `period` steps without an overflow, the scale is
    multiplied by `factor`. So the scale stays as large as possible (Micikevicius et al., 2018,
    "Mixed Precision Training").

    - `scale`: shape `()`, float32. Scaling is exact for powers of two.
    - `counter`: shape `()`, int32. Number of steps since the scale last changed, or would have
      changed if it were not at a bound.

    With `make_step`, use `TrainState.create(..., loss_scale=DynamicLossScale())`. bfloat16 has the
    range of float32 and does not need a loss scale.

    !!! example

        In a step of your own:

        >>> import eqxlike as eqx, jax, jax.numpy as jnp, optax
        >>> from eqxlike import nn, train
        >>> optimiser = optax.sgd(1e-3)
        >>> @eqx.filter_jit
        ... def step(model, optimiser_state, loss_scale, x):
        ...     def scaled_loss(model):
        ...         return loss_scale.scale_loss(jnp.mean(jax.vmap(model)(x) ** 2))
        ...     gradients = loss_scale.unscale(eqx.filter_grad(scaled_loss)(model))
        ...     is_finite = train.all_finite(gradients)
        ...     updates, new_state = optimiser.update(gradients, optimiser_state)
        ...     new = eqx.apply_updates(model, updates), new_state
        ...     model, optimiser_state = train.tree_where(is_finite, new, (model, optimiser_state))
        ...     return model, optimiser_state, loss_scale.adjust(is_finite)
        >>> linear = nn.Linear(2, 1, key=jax.random.key(0))
        >>> model = nn.MixedPrecision(linear, "params=float32,compute=float16,output=float32")
        >>> optimiser_state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))
        >>> loss_scale = train.DynamicLossScale()
        >>> model, _, loss_scale = step(model, optimiser_state, loss_scale, jnp.ones((4, 2)))
        >>> float(loss_scale.scale), int(loss_scale.counter)
        (32768.0, 1)
    """

    scale: Float32[Array, ""]
    counter: Int32[Array, ""]
    period: int = field(static=True)
    factor: float = field(static=True)
    minimum: float = field(static=True)
    maximum: float = field(static=True)

    def __init__(
        self,
        scale: float = 2.0**15,
        *,
        period: int = 2000,
        factor: float = 2.0,
        minimum: float = 1.0,
        maximum: float = 2.0**24,
    ):
        """**Arguments:**

        - `scale`: initial scale. If it is too large, the first steps are skipped until the scale is
          small enough.
        - `period`: number of steps with finite gradients after which the scale grows.
        - `factor`: factor by which the scale grows and shrinks.
        - `minimum`, `maximum`: bounds of the scale. The scale reaches `maximum` if no gradient ever
          overflows, as in float32.

        **Raises:** `ValueError` unless `0 < minimum <= scale <= maximum`, all in the range of
        float32. `ValueError` if `factor` is not above 1, or `period` is not an integer of at least
        1.
        """
        if not 0 < minimum <= scale <= maximum <= _LARGEST:
            raise ValueError(
                "DynamicLossScale expects 0 < minimum <= scale <= maximum, all in the range of "
                f"float32; got minimum={minimum}, scale={scale} and maximum={maximum}."
            )
        if not 1 < factor < math.inf:
            raise ValueError(f"DynamicLossScale expects a factor above 1, got {factor}.")
        self.scale = jax.device_put(np.float32(scale))
        self.counter = jax.device_put(np.int32(0))
        self.period = whole_number(period, "period")
        self.factor = float(factor)
        self.minimum = float(minimum)
        self.maximum = float(maximum)

    @property
    def is_smallest(self) -> Bool[Array, ""]:
        """True if the scale is at its minimum."""
        return self.scale <= self.minimum

    def scale_loss(self, loss: Float[Array, ""]) -> Float[Array, ""]:
        """**Arguments:**

        - `loss`: shape `()`.

        **Returns:** the loss times the scale. A loss of a 16-bit dtype is converted to float32,
        because the product would overflow in float16.
        """
        if not isinstance(loss, float) and not _is_floating(loss):
            # A loss that is not a floating-point number has no gradient. Differentiation raises an
            # error for it.
            return loss
        loss = jnp.asarray(loss)
        dtype = at_least_float32(loss.dtype)
        return loss.astype(dtype) * self.scale.astype(dtype)

    def unscale(self, gradients: PyTree) -> PyTree:
        """**Arguments:**

        - `gradients`: gradients of the scaled loss.

        **Returns:** gradients of the loss, with the same dtypes. Store parameters in float32, so
        that the gradients are in float32 too. In float16, unscaled gradients may underflow.
        """

        def unscale(leaf: Any) -> Any:
            if not is_inexact_array(leaf):
                return leaf
            dtype = at_least_float32(leaf.dtype)
            return (leaf.astype(dtype) / self.scale.astype(dtype)).astype(leaf.dtype)

        return jax.tree_util.tree_map(unscale, gradients)

    def adjust(self, is_finite: Bool[Array, ""]) -> "DynamicLossScale":
        """**Arguments:**

        - `is_finite`: whether all gradients were finite; see `all_finite`.

        **Returns:** the scale for the next step.
        """
        counter = jnp.where(is_finite, self.counter + 1, 0)
        is_due = counter >= self.period
        larger = jnp.minimum(self.scale * self.factor, self.maximum)
        smaller = jnp.maximum(self.scale / self.factor, self.minimum)
        scale = jnp.where(is_finite, jnp.where(is_due, larger, self.scale), smaller)
        return tree_at(
            lambda loss_scale: (loss_scale.scale, loss_scale.counter),
            self,
            (scale, jnp.where(is_due, 0, counter)),
        )


def _is_floating(leaf: Any) -> bool:
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)
