"""Reverse mode of a scan with a fixed number of saved carries, for any number of steps.

The steps are differentiated from the last to the first. To compute the carry before a step, the
scan runs again from the nearest saved carry. On the way, it saves further carries in the free
slots. Griewank and Walther (2000), "Algorithm 799: revolve", give a closed form of the schedule
that recomputes the fewest steps.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from .._transforms._derivatives._linear_call import select
from ._primitives import unvmap_max
from ._scan import Arrays, Nonzero, Operands, Scan, row_of, with_row, zero_rows
from ._step import pull_back_step, select_active


def revolve(
    scan: Scan,
    operands: Operands,
    nonzero: Nonzero,
    last: Arrays,
    ct_carry: Arrays,
    ct_ys: Arrays,
    is_shared: tuple[bool, ...],
) -> list[Array]:
    """Computes the cotangents of the nonzero operands of a scan with few checkpoints.

    A batch runs until all members have ended.

    **Arguments:**

    - `last`: the last carry. Its buffers are used in all steps.
    - `ct_carry`, `ct_ys`: the cotangents of the outputs.
    - `is_shared`: for each nonzero const, whether its cotangent is summed over a batch.
    """
    checkpoints, consts, xs, count = scan.checkpoints, operands.consts, operands.xs, operands.count
    assert checkpoints is not None
    assert count is not None
    is_masked = select(scan.is_masked, nonzero.carry)

    def row_at(index: Array) -> Array:
        """The index of the row of `xs` that step `index` gets."""
        return longest - 1 - index if scan.is_reversed else index

    def advance(saved: Arrays, start: Any, stop: Any) -> list[Array]:
        """Runs the scan from step `start` to step `stop`, with only the saved part of the carry."""

        def step(index: Array, saved: list[Array]) -> list[Array]:
            carry, row = scan.restored(saved, last), row_at(index)
            new, _ = scan.reading.step(consts, carry, row_of(xs, row), row < count)
            return scan.saved(select_active(scan.is_masked, row < count, new, carry))

        return jax.lax.fori_loop(start, stop, step, list(saved))

    def save_before(index: Array, saved: _Saved) -> _Saved:
        """Saves carries between the last saved carry and step `index`."""

        def has_room(saved: _Saved) -> Any:
            return (saved.positions[saved.top] < index) & (saved.top < checkpoints - 1)

        def fill(saved: _Saved) -> _Saved:
            start = saved.positions[saved.top]
            distance = _distance(index + 1 - start, checkpoints - saved.top, checkpoints)
            stop = start + distance
            top, carry = saved.top + 1, advance(row_of(saved.rows, saved.top), start, stop)
            return _Saved(top, saved.positions.at[top].set(stop), with_row(saved.rows, top, carry))

        return jax.lax.while_loop(has_room, fill, saved)

    def step_back(number: Array, state: Any) -> Any:
        saved, ct_carry, ct_consts, ct_xs = state
        index = longest - 1 - number
        saved = save_before(index, saved)
        start = saved.positions[saved.top]
        carry = scan.restored(advance(row_of(saved.rows, saved.top), start, index), last)
        row = row_at(index)
        x, is_active = row_of(xs, row), row < count
        more, ct_new_carry, ct_x = pull_back_step(
            scan, nonzero, is_shared, consts, carry, x, is_active, ct_carry, row_of(ct_ys, row)
        )
        ct_carry = select_active(is_masked, is_active, ct_new_carry, ct_carry)
        ct_consts = list(map(jax.lax.add, ct_consts, more))
        top = jnp.where(start == index, saved.top - 1, saved.top)
        return saved._replace(top=top), ct_carry, ct_consts, with_row(ct_xs, row, ct_x)

    longest = unvmap_max(count)
    first = scan.saved(operands.carry)
    top = jnp.zeros_like(longest)
    rows = [zero_rows(checkpoints, array).at[0].set(array) for array in first]
    saved = _Saved(top, zero_rows(checkpoints, top), rows)
    ct_consts, ct_xs = (
        list(map(jnp.zeros_like, arrays))
        for arrays in (select(consts, nonzero.consts), select(xs, nonzero.xs))
    )
    state = saved, list(ct_carry), ct_consts, ct_xs
    _, ct_carry, ct_consts, ct_xs = jax.lax.fori_loop(0, longest, step_back, state)
    return [*ct_consts, *ct_carry, *ct_xs]


class _Saved(NamedTuple):
    """A stack of saved carries.

    - `top`: the index of the slot with the latest saved carry.
    - `positions`: for each slot, the number of steps that come before the saved carry.
    - `rows`: the carries, with one row for each slot.
    """

    top: Int[Array, ""]
    positions: Int[Array, "checkpoints"]
    rows: list[Array]


_MAX_RUNS = 64
"""The schedule is optimal if no step runs more often than this."""


@functools.cache
def _most_steps(checkpoints: int) -> np.ndarray:
    """`table[c, r]` is the largest number of steps that can be reversed with `c` saved carries, if
    no step runs more than `r` times.
    """
    table = np.ones((checkpoints + 1, _MAX_RUNS + 1))
    for carries in range(1, checkpoints + 1):
        runs = np.arange(1, _MAX_RUNS + 1)
        table[carries, 1:] = np.cumprod((carries + runs) / runs)
    return np.minimum(np.round(table), np.iinfo(np.int32).max).astype(np.int32)


def _distance(steps: Int[Array, ""], carries: Any, checkpoints: int) -> Int[Array, ""]:
    """The number of steps from the latest saved carry to the next carry to save.

    **Arguments:**

    - `steps`: the number of steps to reverse, at least 2.
    - `carries`: the number of carries that may be saved for these steps.
    """
    table = jnp.asarray(_most_steps(checkpoints))
    runs = jnp.clip(jnp.sum(table[carries] < steps), 1, _MAX_RUNS)
    # The steps before the next carry can use one run less: `distance <= table[carries, runs - 1]`.
    # The steps after that carry can use one carry less:
    # `steps - distance <= table[carries - 1, runs]`.
    # Within these bounds, the schedule has `steps - distance >= table[carries - 1, runs - 1]`.
    distance = jnp.minimum(table[carries, runs - 1], steps - table[carries - 1, runs - 1])
    return jnp.clip(jnp.maximum(distance, steps - table[carries - 1, runs]), 1, steps - 1)
