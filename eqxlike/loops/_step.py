"""The forward pass of a scan, the backward pass of one step, and the cotangents of buffers.

Reverse mode of a scan with a fixed number of saved carries is here too, for any number of steps.
The steps are differentiated from the last to the first. To compute the carry before a step, the
scan runs again from the nearest saved carry. On the way, it saves further carries in the free
slots. Griewank and Walther (2000), "Algorithm 799: revolve", give a closed form of the schedule
that recomputes the fewest steps.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Bool, Int

from .._compat import varying_axes
from .._transforms._derivatives._linear_call import batch_first, fill, linear_call, select
from ._primitives import select_if_vmap, unvmap_max
from ._scan import Arrays, Nonzero, Operands, Parts, Scan, row_of, row_types, with_row, zero_rows


def with_jvp(
    function: Callable[[Arrays], Any], jvp: Callable[[Arrays, Arrays], Any], flat: Arrays
) -> Any:
    """Returns `function(flat)`, with the derivative rule `jvp(flat, tangents)`.

    The rule gets a `SymbolicZero` for each zero tangent.
    """
    with_rule = jax.custom_jvp(batch_first(function))
    rule = batch_first(lambda primals, tangents: jvp(*primals, *tangents))
    with_rule.defjvp(rule, symbolic_zeros=True)
    return with_rule(flat)


def run(scan: Scan, operands: Operands) -> tuple[list[Array], list[Array]]:
    """Runs a scan. Returns the last carry and the ys. Rows of the ys beyond `count` are zero.

    A batch runs until its longest member has ended.
    """
    if operands.count is None:
        return _run_whole(scan, operands)
    consts, count, xs = operands.consts, operands.count, operands.xs
    carry = list(operands.carry)
    _, y = jax.eval_shape(lambda x: scan.step(consts, carry, x, count > 0), row_types(xs))
    ys = [zero_rows(scan.length, row, varying_axes(count)) for row in y]
    longest = unvmap_max(count)

    def body(number: Array, state: tuple[list[Array], list[Array]]) -> Any:
        carry, ys = state
        index = longest - 1 - number if scan.is_reversed else number
        is_active = jax.lax.lt(index, count)
        new, y = scan.step(consts, carry, row_of(xs, index), is_active)
        ys = with_row(ys, index, _where_active(is_active, y))
        return select_active(scan.is_masked, is_active, new, carry), ys

    return jax.lax.fori_loop(0, longest, body, (carry, ys))


def _run_whole(scan: Scan, operands: Operands) -> tuple[list[Array], list[Array]]:
    def step(carry: list[Array], x: list[Array]) -> tuple[list[Array], list[Array]]:
        new, y = scan.step(operands.consts, carry, x, True)
        return list(new), list(y)

    return jax.lax.scan(
        step,
        list(operands.carry),
        list(operands.xs),
        scan.length,
        reverse=scan.is_reversed,
        unroll=scan.unroll,
    )


def _where_active(is_active: Bool[Array, ""], arrays: Arrays) -> list[Array]:
    """Returns the arrays, with zeros for batch members that are not active."""
    return [select_if_vmap(is_active, array, jnp.zeros_like(array)) for array in arrays]


def select_active(
    is_masked: Sequence[bool], is_active: Any, new: Arrays, old: Arrays
) -> list[Array]:
    """The carry after a step: `new` for active batch members, and `old` for all other members."""
    return [
        after if masked else select_if_vmap(is_active, after, before)
        for masked, after, before in zip(is_masked, new, old, strict=True)
    ]


# --- The backward pass of one step, for one batch member and for a batch ---


@dataclasses.dataclass(frozen=True)
class Reversal:
    """The static part of reverse mode of a scan.

    - `nonzero`: flags the arrays for which cotangents are computed.
    - `is_shared`: for each nonzero const, whether its cotangent is summed over a batch.
    """

    scan: Scan
    nonzero: Nonzero
    is_shared: tuple[bool, ...]

    @property
    def is_masked(self) -> list[bool]:
        """`Scan.is_masked` of the nonzero arrays of the carry."""
        return select(self.scan.is_masked, self.nonzero.carry)

    def step_back(
        self, consts: Arrays, carry: Arrays, x: Arrays, is_active: Any, ct_outputs: Any
    ) -> Parts:
        """Computes the cotangents of the nonzero operands of a step.

        The cotangents of the consts and of x are zero for batch members that are not active.

        **Arguments:**

        - `ct_outputs`: the pair of the cotangents of the carry and y that the step returns.
        """

        def of_one(consts: Any, carry: Any, x: Any, is_active: Any, ct_outputs: Any) -> Parts:
            function = self.scan.step_of_nonzero(self.nonzero, consts, carry, x, is_active)
            _, vjp, _ = jax.vjp(function, *self.nonzero.select(consts, carry, x), has_aux=True)
            ct_consts, ct_carry, ct_x = vjp(ct_outputs)
            return _where_active(is_active, ct_consts), ct_carry, _where_active(is_active, ct_x)

        ct_outputs = tuple(map(list, ct_outputs))
        args = list(consts), list(carry), list(x), jnp.asarray(is_active), ct_outputs
        if not any(self.is_shared):
            return of_one(*args)
        mappable = custom_vmap(of_one)

        @mappable.def_vmap
        def _of_batch(size: int, is_batched: Any, *args: Any) -> Any:
            cotangents = _step_back_batch(self, size, is_batched, *args)
            of_consts = [not shared for shared in self.is_shared]
            return cotangents, (of_consts, *([True] * len(part) for part in cotangents[1:]))

        return mappable(*args)


def _step_back_batch(reversal: Reversal, size: int, is_batched: Any, *args: Any) -> Parts:
    """Differentiates one step of a whole batch as one function, and returns the cotangents.

    Suppose that each member multiplies a vector by a shared matrix. Then the cotangent of the
    matrix is computed as one matrix product, not as a sum of outer products.
    """
    scan, nonzero = reversal.scan, reversal.nonzero
    consts, carry, x, is_active, ct_outputs = args
    *are_batched, is_mixed, have_batches = is_batched
    are_active = jnp.broadcast_to(is_active, (size,))

    def where_active(new: Array, old: Any) -> Array:
        if not is_mixed:
            # `is_active` is the same for all members of this batch, but an outer batch may map it.
            return select_if_vmap(
                is_active, new, jnp.broadcast_to(old, new.shape).astype(new.dtype)
            )
        return jnp.where(are_active.reshape((-1,) + (1,) * (new.ndim - 1)), new, old)

    def spread(array: Array, is_spread: Any) -> Array:
        return array if is_spread else jnp.broadcast_to(array, (size, *jnp.shape(array)))

    # The derivatives of a member that has ended may be infinite at its last carry. So this member
    # gets the arrays of an active member, and zero cotangents. For masked arrays, the step itself
    # does this.
    example = jnp.argmax(are_active)

    def of_active(array: Array, has_batch: Any, stays: bool) -> Array:
        return where_active(array, array[example]) if has_batch and not stays else array

    stay = [[False] * len(consts), list(scan.is_masked), [False] * len(x)]
    consts, carry, x = jax.tree.map(of_active, [consts, carry, x], are_batched, stay)
    parts = nonzero.select(consts, carry, x)
    are_mapped = (
        [not shared for shared in reversal.is_shared],
        *([True] * len(part) for part in parts[1:]),
    )
    had_batches = nonzero.select(*are_batched)
    parts = jax.tree.map(
        lambda array, had_batch, is_mapped: spread(array, had_batch or not is_mapped),
        parts,
        had_batches,
        are_mapped,
    )

    def of_batch(*parts: Any) -> Any:
        def of_member(*args: Any) -> Any:
            *parts, consts, carry, x, is_active = args
            return scan.step_of_nonzero(nonzero, consts, carry, x, is_active)(*parts)[0]

        in_axes = jax.tree.map(
            lambda is_mapped: 0 if is_mapped else None, (*are_mapped, *are_batched)
        )
        return jax.vmap(of_member, (*in_axes, 0))(*parts, consts, carry, x, are_active)

    ct_carry, ct_y = jax.tree.map(spread, ct_outputs, have_batches)
    ct_active = [
        ct if masked else where_active(ct, 0)
        for ct, masked in zip(ct_carry, reversal.is_masked, strict=True)
    ]
    _, vjp = jax.vjp(of_batch, *parts)
    ct_consts, ct_start, ct_x = vjp((ct_active, [where_active(ct, 0) for ct in ct_y]))
    # In nested batches, all members of this batch may have ended while another batch still runs.
    is_any = jnp.any(are_active)
    ct_consts = [
        jnp.where(is_any, ct, 0) if shared else where_active(ct, 0)
        for ct, shared in zip(ct_consts, reversal.is_shared, strict=True)
    ]
    ct_start = [
        new if masked else where_active(new, old)
        for new, old, masked in zip(ct_start, ct_carry, reversal.is_masked, strict=True)
    ]
    return ct_consts, ct_start, [where_active(ct, 0) for ct in ct_x]


# --- The cotangents of the initial buffers ---


def clear_written(
    is_buffer: Sequence[bool],
    operands: Operands,
    run: Callable[[Operands], Arrays],
    *,
    is_inside: bool = False,
) -> Operands:
    """Returns the operands. Cotangents of the carry are zeroed where the loop writes to a buffer.

    The loop overwrites entries of a buffer, so the cotangents of the initial entries must be zero.
    But reverse mode leaves nonzero cotangents for these entries. Zeroing the cotangents in each
    step would make XLA copy the buffer, so this function zeroes them once. To find the overwritten
    entries, this function runs the loop twice, from different initial values. An entry was
    overwritten if both runs end with the same value.

    **Arguments:**

    - `is_buffer`: for each array of the carry, whether to zero the cotangents.
    - `run`: function from operands to the last carry.
    - `is_inside`: whether an outer loop zeroes the cotangents. If so, this function leaves the
      cotangents unchanged, except in higher-order derivatives, where a buffer is full from the
      start.
    """
    carry = operands.carry
    is_buffer = [
        is_chosen and jnp.issubdtype(array.dtype, jnp.inexact)
        for is_chosen, array in zip(is_buffer, carry, strict=True)
    ]
    if not any(is_buffer):
        return operands

    def transpose(residuals: Arrays, cotangents: Arrays, _: tuple[bool, ...]) -> list[Array]:
        filled = operands.unflatten(residuals)
        others = [
            jnp.where(array == 0, 1, 0).astype(array.dtype) if is_written else array
            for array, is_written in zip(filled.carry, is_buffer, strict=True)
        ]
        starts = filled, dataclasses.replace(filled, carry=others)
        ends = [select(run(start), is_buffer) for start in starts]
        return [
            jnp.where(_equal_or_nan(end, other_end), jnp.zeros_like(ct), ct)
            for end, other_end, ct in zip(*ends, cotangents, strict=True)
        ]

    residuals = list(map(jax.lax.stop_gradient, operands.flatten()))
    buffers = select(carry, is_buffer)
    cleared = linear_call(
        lambda _, buffers: list(buffers),
        (lambda _, cotangents, __: list(cotangents)) if is_inside else transpose,
        residuals,
        buffers,
        like=buffers,
        transpose_beside_tangents=transpose,
        is_of_members=True,
    )
    return dataclasses.replace(operands, carry=fill(cleared, carry, is_buffer))


def _equal_or_nan(array: Array, other: Array) -> Array:
    return (array == other) | (jnp.isnan(array) & jnp.isnan(other))


# --- The backward pass of a scan with few saved carries ---


def revolve(
    reversal: Reversal, operands: Operands, last: Arrays, ct_carry: Arrays, ct_ys: Arrays
) -> list[Array]:
    """Computes the cotangents of the nonzero operands of a scan with few checkpoints.

    A batch runs until all members have ended.

    **Arguments:**

    - `last`: the last carry. Its buffers are used in all steps.
    - `ct_carry`, `ct_ys`: the cotangents of the outputs.
    """
    scan, nonzero = reversal.scan, reversal.nonzero
    checkpoints, consts, xs, count = scan.checkpoints, operands.consts, operands.xs, operands.count
    assert checkpoints is not None
    assert count is not None

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
        more, ct_new_carry, ct_x = reversal.step_back(
            consts, carry, x, is_active, (ct_carry, row_of(ct_ys, row))
        )
        ct_carry = select_active(reversal.is_masked, is_active, ct_new_carry, ct_carry)
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
