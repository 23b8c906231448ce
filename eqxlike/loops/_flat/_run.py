"""A scan as it runs, where nothing is differentiated."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ._batched import select_if_vmap, unvmap_max
from ._plan import Arrays, Operands, Scan


def run(scan: Scan, operands: Operands) -> tuple[list[Array], list[Array]]:
    """The last carry, and what the steps returned in rows; zeros for steps beyond the count.

    A batch runs as long as the longest of its members.
    """
    if operands.count is None:
        return _run_whole(scan, operands)
    consts, count, xs = operands.consts, operands.count, operands.xs
    carry = list(operands.carry)
    x = [jax.ShapeDtypeStruct(each.shape[1:], each.dtype) for each in xs]
    _, y = jax.eval_shape(lambda x: scan.step(consts, carry, x, count > 0), x)
    ys = [jnp.zeros((scan.length, *each.shape), each.dtype) for each in y]
    longest = unvmap_max(count)

    def body(number: Array, state: tuple[list[Array], list[Array]]) -> Any:
        carry, ys = state
        index = longest - 1 - number if scan.is_reversed else number
        is_active = index < count
        x = [jax.lax.dynamic_index_in_dim(each, index, keepdims=False) for each in xs]
        new, y = scan.step(consts, carry, x, is_active)
        ys = [
            jax.lax.dynamic_update_index_in_dim(
                rows, select_if_vmap(is_active, each, jnp.zeros_like(each)), index, 0
            )
            for rows, each in zip(ys, y, strict=True)
        ]
        return put_aside(scan, is_active, new, carry), ys

    return jax.lax.fori_loop(0, longest, body, (carry, ys))


def _run_whole(scan: Scan, operands: Operands) -> tuple[list[Array], list[Array]]:
    def step(carry: list[Array], x: list[Array]) -> tuple[list[Array], list[Array]]:
        new, y = scan.step(operands.consts, carry, x, True)
        return list(new), list(y)

    return jax.lax.scan(
        step, list(operands.carry), list(operands.xs), scan.length, reverse=scan.is_reversed
    )


def put_aside(scan: Scan, is_active: Any, new: Arrays, old: Arrays) -> list[Array]:
    """The carry after a step: the new one for the members of a batch that are active."""
    return [
        one if is_masked else select_if_vmap(is_active, one, other)
        for is_masked, one, other in zip(scan.is_masked, new, old, strict=True)
    ]
