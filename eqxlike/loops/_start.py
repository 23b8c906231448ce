"""Buffers as a loop starts with them, for the derivatives of what it leaves in them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ._linear_call import linear_call
from ._plan import Arrays


def started(
    starts_here: tuple[bool, ...],
    operands: Arrays,
    carry: Arrays,
    run: Callable[[Arrays, Arrays], Arrays],
) -> list[Array]:
    """The carry to start with.

    The reverse mode leaves in the cotangent of a buffer what belonged to places that were written:
    to take it out step by step, XLA would copy the buffer in each. Here it is taken out at once. A
    place was written if the loop leaves the same there whatever it held before.

    **Arguments:**

    - `starts_here`: which of the carry are buffers, but for those of a loop outside, which takes
      it out itself.
    - `operands`: what else the loop is run on.
    - `run`: from the operands and a carry to start with to the last carry.
    """
    is_buffer = [
        starts and jnp.issubdtype(each.dtype, jnp.inexact)
        for starts, each in zip(starts_here, carry, strict=True)
    ]
    if not any(is_buffer):
        return list(carry)
    num_operands = len(operands)

    def only_buffers(carry: Arrays) -> list[Array]:
        return [each for each, is_one in zip(carry, is_buffer, strict=True) if is_one]

    def forward(residuals: Arrays, buffers: Arrays) -> list[Array]:
        return list(buffers)

    def transpose(residuals: Arrays, cotangents: Arrays, _: tuple[bool, ...]) -> list[Array]:
        operands, carry = residuals[:num_operands], residuals[num_operands:]
        others = [
            jnp.where(each == 0, 1, 0).astype(each.dtype) if is_one else each
            for each, is_one in zip(carry, is_buffer, strict=True)
        ]
        ends = [only_buffers(run(operands, each)) for each in (carry, others)]
        return [
            jnp.where(_is_same(one, other), jnp.zeros_like(cotangent), cotangent)
            for one, other, cotangent in zip(*ends, cotangents, strict=True)
        ]

    residuals = [jax.lax.stop_gradient(each) for each in (*operands, *carry)]
    buffers = only_buffers(carry)
    buffers = iter(linear_call(forward, transpose, residuals, buffers, buffers))
    return [
        next(buffers) if is_one else each for each, is_one in zip(carry, is_buffer, strict=True)
    ]


def _is_same(one: Array, other: Array) -> Array:
    return (one == other) | (jnp.isnan(one) & jnp.isnan(other))
