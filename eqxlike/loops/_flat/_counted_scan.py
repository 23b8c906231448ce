"""A scan that is differentiable in every mode, even if its length is known only at run time.

Reverse mode divides the scan into segments, and saves the carry at the start of each segment. It
then runs the segments again, from the last to the first. In each segment, reverse mode saves the
carry of each step, and then differentiates each step. If a segment has `sqrt(length)` steps, this
method saves `2 * sqrt(length)` carries. The method takes three runs of the scan and one run of the
derivative of the scan. A segment is not divided further. If the method would save more carries than
the allowed `checkpoints`, `_revolve` reverses the scan instead.

    def pull_back(body, starts, ct, segment_length):  # starts: the carry before each segment
        def segment_back(ct, start):
            _, carries = scan(lambda carry, _: (body(carry), carry), start, length=segment_length)
            return scan(step_back, ct, carries, reverse=True)[0], None

        def step_back(ct, carry):
            _, vjp = jax.vjp(body, carry)
            return vjp(ct)[0], None

        return scan(segment_back, ct, starts, reverse=True)[0]

`_pull_back` is the same function with consts, xs, batches and buffers.

The loops in the derivatives are counted scans too. So the scan has derivatives of every order in
every mode.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..._compat import varying_axes
from ..._transforms._derivatives._linear_call import (
    batch_first,
    instantiate,
    linear_call,
    zero_tangent,
)
from ._revolve import pull_back_any_length
from ._scan import Arrays, Operands, Scan, Step, fill, segments_of, select, split
from ._step import clear_written, pull_back_step, run
from ._tangents import Nonzero, find_nonzero, nonzero_at_start, with_tangents

Saved = tuple[list[Array], list[Array], list[Array]]
"""`(carry, ys, saved)`: the two outputs of a scan, and the saved carry before each segment."""


def counted_scan(scan: Scan, operands: Operands) -> tuple[list[Array], list[Array]]:
    """Runs a scan. Returns the last carry and the ys. Rows of the ys beyond `count` are zero."""

    @jax.custom_jvp
    @batch_first
    def run_flat(flat: Arrays, count: Array | None) -> tuple[list[Array], list[Array]]:
        return run(scan, operands.unflatten(flat, count))

    @functools.partial(run_flat.defjvp, symbolic_zeros=True)
    @batch_first
    def _differentiate(primals: Any, tangents: Any) -> Any:
        filled = operands.unflatten(*primals)
        carry, ys, saved = save(scan, filled)
        return (carry, ys), tangents_of(scan, filled, tangents[0], carry, ys, saved)

    return run_flat(operands.flatten(), operands.count)


def save(scan: Scan, operands: Operands) -> Saved:
    """Runs a scan and saves the carry before each segment."""
    if scan.has_few_checkpoints:
        return *counted_scan(scan, operands), []
    segments = segments_of(scan, operands)

    def step_over(segment: Scan) -> Step:
        def run_segment(consts: Arrays, carry: Arrays, x: Arrays, is_active: Any) -> Any:
            consts, total = split(consts, len(operands.consts))
            index, *xs = x
            if segment.length == 1:
                new, y = segment.step(consts, carry, [rows[0] for rows in xs], is_active)
                y = [array[None] for array in y]
            else:
                count = segments.count_in(index, total, is_active)
                new, y = _run_inside(segment, Operands(consts, carry, xs, count))
            return new, [*scan.saved(carry), *y]

        return run_segment

    over_segments = Operands(
        [*operands.consts, *segments.total],
        operands.carry,
        [segments.indices, *segments.split(operands.xs)],
        segments.count,
    )
    outer = scan.over_segments(step_over(scan.segment), step_over(scan.segment.reading))
    carry, rows = counted_scan(outer, over_segments)
    saved, ys = split(rows, len(scan.saved(operands.carry)))
    return carry, segments.join(ys), saved


def _run_inside(segment: Scan, operands: Operands) -> tuple[list[Array], list[Array]]:
    """Runs a segment. The scan that contains the segment zeroes the cotangents of buffers."""
    count = [] if operands.count is None else [operands.count]

    def run_from(shared: Arrays, carry: Arrays) -> list[Array]:
        consts, xs, count = split(shared, len(operands.consts), len(operands.xs))
        return run(segment, Operands(consts, carry, xs, count[0] if count else None))[0]

    shared = [*operands.consts, *operands.xs, *count]
    carry = clear_written(segment.is_written_once, shared, operands.carry, run_from, is_inside=True)
    return counted_scan(segment, dataclasses.replace(operands, carry=carry))


def tangents_of(
    scan: Scan, operands: Operands, tangents: Any, carry: Arrays, ys: Arrays, saved: Arrays
) -> tuple[list[Any], list[Any]]:
    """The tangents of the last carry and of the ys, as a linear function of `tangents`.

    **Arguments:**

    - `tangents`: the tangents of the flat operands, with a `SymbolicZero` for each zero tangent.
    - `carry`, `ys`, `saved`: the outputs of `save`.
    """
    nonzero = find_nonzero(scan, operands, nonzero_at_start(operands, tangents, ys))
    directions = list(map(instantiate, select(tangents, nonzero.flatten())))
    num_operands, num_saved = len(tangents), len(saved)
    has_count = operands.count is not None
    count = [operands.count] if has_count else []

    def unpack(residuals: Arrays) -> tuple[Operands, list[Array], list[Array]]:
        flat, saved, last, count = split(residuals, num_operands, num_saved, len(carry))
        return operands.unflatten(flat, count[0] if has_count else None), saved, last

    def forward(residuals: Arrays, directions: Arrays) -> list[Array]:
        filled, _, _ = unpack(residuals)
        return _push_forward(scan, filled, nonzero, directions)

    def transpose(residuals: Arrays, cotangents: Arrays, is_shared: Any) -> list[Array]:
        filled, saved, last = unpack(residuals)
        ct_carry, ct_ys = split(cotangents, sum(nonzero.carry))
        _check_consts(filled, nonzero)
        if scan.has_few_checkpoints:
            return pull_back_any_length(
                scan, filled, nonzero, last, ct_carry, ct_ys, is_shared, _push_forward
            )
        ct_consts = list(map(jnp.zeros_like, select(filled.consts, nonzero.consts)))
        ct_carry, ct_consts, ct_xs = _pull_back(
            scan, filled, nonzero, saved, last, ct_carry, ct_ys, ct_consts, is_shared
        )
        return [*ct_consts, *ct_carry, *ct_xs]

    residuals = [*operands.flatten(), *saved, *carry, *count]
    like = [*select(carry, nonzero.carry), *select(ys, nonzero.ys)]
    num_summed = sum(nonzero.consts)
    dots = linear_call(forward, transpose, residuals, directions, like, num_summed=num_summed)
    carry_dot, ys_dot = split(dots, sum(nonzero.carry))
    return (
        fill(carry_dot, map(zero_tangent, carry), nonzero.carry),
        fill(ys_dot, map(zero_tangent, ys), nonzero.ys),
    )


def _check_consts(operands: Operands, nonzero: Nonzero) -> None:
    """Raises `ValueError` if devices that run different numbers of steps share a const.

    In each step, the cotangent of such a const would be summed over the devices. Devices with more
    steps would wait forever for devices with fewer steps.
    """
    for const in select(operands.consts, nonzero.consts):
        if axes := varying_axes(operands.count) - varying_axes(const):
            raise ValueError(
                "Inside `jax.shard_map` the devices run different numbers of steps of this loop. "
                f"In reverse mode the array {jax.typeof(const)}, which the body closes over, must "
                f"then vary along the axes {sorted(axes)}. Before the loop, write "
                f"`array = jax.lax.pcast(array, {tuple(sorted(axes))}, to='varying')`."
            )


def _push_forward(
    scan: Scan, operands: Operands, nonzero: Nonzero, directions: Arrays
) -> list[Array]:
    """The tangents of the last carry and of the ys.

    `directions` has a tangent for each operand that is marked in `nonzero`.
    """
    consts_dot, carry_dot, xs_dot = nonzero.split(directions)
    with_directions = Operands(
        [*operands.consts, *consts_dot],
        [*operands.carry, *carry_dot],
        [*operands.xs, *xs_dot],
        operands.count,
    )
    carry, ys_dot = counted_scan(with_tangents(scan, operands, nonzero), with_directions)
    return [*carry[len(operands.carry) :], *ys_dot]


def _pull_back(
    scan: Scan,
    operands: Operands,
    nonzero: Nonzero,
    saved: Arrays,
    last: Arrays,
    ct_carry: Arrays,
    ct_ys: Arrays,
    ct_consts: Arrays,
    is_shared: tuple[bool, ...],
) -> tuple[list[Array], list[Array], list[Array]]:
    """Computes the cotangents of the initial carry, of the consts and of the xs.

    **Arguments:**

    - `saved`: the saved carry before each segment.
    - `last`: the last carry. Its buffers are used in all steps.
    - `ct_carry`, `ct_ys`: the cotangents of the outputs.
    - `ct_consts`: the cotangents of the consts, summed over the steps that are already reversed.
    - `is_shared`: for each nonzero const, whether its cotangent is summed over a batch.
    """
    segment, segments = scan.segment, segments_of(scan, operands)
    num_consts, num_carry, num_xs = map(len, (operands.consts, last, operands.xs))

    def pull_back_segment(consts: Arrays, state: Arrays, x: Arrays, is_active: Any) -> Any:
        consts, last, total = split(consts, num_consts, num_carry)
        ct_carry, ct_consts = split(state, len(state) - sum(nonzero.consts))
        [index], saved, xs, ct_ys = split(x, 1, len(scan.saved(last)), num_xs)
        carry = scan.restored(saved, last)
        if segment.length > 1:
            inner = Operands(consts, carry, xs, segments.count_in(index, total, is_active))
            _, _, saved = save(segment.reading, inner)
            ct_carry, ct_consts, ct_xs = _pull_back(
                segment, inner, nonzero, saved, last, ct_carry, ct_ys, ct_consts, is_shared
            )
            return [*ct_carry, *ct_consts], ct_xs
        x, ct_y = ([rows[0] for rows in of_segment] for of_segment in (xs, ct_ys))
        more, ct_carry, ct_x = pull_back_step(
            scan, nonzero, is_shared, consts, carry, x, is_active, ct_carry, ct_y
        )
        ct_consts = list(map(jax.lax.add, ct_consts, more))
        return [*ct_carry, *ct_consts], [array[None] for array in ct_x]

    is_masked = (*select(scan.is_masked, nonzero.carry), *[True] * len(ct_consts))
    backward = dataclasses.replace(
        scan.over_segments(pull_back_segment),
        is_masked=is_masked,
        # No array is a buffer here. An entry of a buffer is written before it is read, but the
        # cotangent of an entry is read before it is written.
        is_written_once=(False,) * len(is_masked),
        is_reversed=not scan.is_reversed,
    )
    over_segments = Operands(
        [*operands.consts, *last, *segments.total],
        [*ct_carry, *ct_consts],
        [segments.indices, *saved, *segments.split(operands.xs), *segments.split(ct_ys)],
        segments.count,
    )
    state, ct_xs = counted_scan(backward, over_segments)
    ct_carry, ct_consts = split(state, len(ct_carry))
    return ct_carry, ct_consts, segments.join(ct_xs)
