"""Buffers as a loop starts with them, for the derivatives of what it leaves in them."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..._transforms._derivatives._linear_call import linear_call
from ._plan import Arrays


def started(
    is_buffer: Sequence[bool],
    operands: Arrays,
    carry: Arrays,
    run: Callable[[Arrays, Arrays], Arrays],
    *,
    is_inside: bool = False,
) -> list[Array]:
    """The carry to start with.

    The reverse mode leaves in the cotangent of a buffer what belonged to places that were written:
    to take it out step by step, XLA would copy the buffer in each. Here it is taken out at once. A
    place was written if the loop leaves the same there whatever it held before.

    **Arguments:**

    - `is_buffer`: which of the carry are such buffers.
    - `operands`: what else the loop is run on.
    - `run`: from the operands and a carry to start with to the last carry.
    - `is_inside`: whether the loop is a part of another whose buffers they are, and which takes it
      out. Only in derivatives of derivatives, where the buffer is full from the start, it is
      taken out here too.
    """
    is_buffer = [
        is_one and jnp.issubdtype(each.dtype, jnp.inexact)
        for is_one, each in zip(is_buffer, carry, strict=True)
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
    buffers = iter(
        linear_call(
            forward,
            _as_it_is if is_inside else transpose,
            residuals,
            buffers,
            like=buffers,
            transpose_beside_tangents=transpose,
            is_of_members=True,
        )
    )
    return [
        next(buffers) if is_one else each for each, is_one in zip(carry, is_buffer, strict=True)
    ]


def _as_it_is(residuals: Arrays, cotangents: Arrays, _: tuple[bool, ...]) -> list[Array]:
    return list(cotangents)


def _is_same(one: Array, other: Array) -> Array:
    return (one == other) | (jnp.isnan(one) & jnp.isnan(other))
