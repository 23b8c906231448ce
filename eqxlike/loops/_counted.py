"""Scans and while loops that are differentiable in every mode, to every order.

Reverse mode divides the scan into segments, and saves the carry at the start of each segment. It
then runs the segments again, from the last to the first. In each segment, reverse mode saves the
carry of each step, and then differentiates each step. If a segment has `sqrt(length)` steps, this
method saves `2 * sqrt(length)` carries. The method takes three runs of the scan and one run of the
derivative of the scan. A segment is not divided further. If the method would save more carries than
the allowed `checkpoints`, `revolve` reverses the scan instead.

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

The forward pass of a while loop counts the steps. Its derivatives treat the loop as a scan with
this number of steps.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from .._compat import vary, varying_axes
from .._transforms._derivatives._linear_call import (
    fill,
    instantiate,
    jvp_of_moving,
    linear_call,
    select,
    zero_tangent,
)
from ._primitives import unvmap_any, with_transpose
from ._scan import Arrays, Nonzero, Operands, Scan, Step, find_nonzero, split, with_row, zero_rows
from ._step import Reversal, clear_written, revolve, run, select_active, with_jvp

Saved = tuple[list[Array], list[Array], list[Array]]
"""`(carry, ys, saved)`: the two outputs of a scan, and the saved carry before each segment."""


def counted_scan(scan: Scan, operands: Operands) -> tuple[list[Array], list[Array]]:
    """Runs a scan. Returns the last carry and the ys. Rows of the ys beyond `count` are zero."""

    def run_flat(flat: Arrays) -> tuple[list[Array], list[Array]]:
        return run(scan, operands.unflatten(flat))

    def differentiate(flat: Arrays, tangents: Arrays) -> Any:
        filled = operands.unflatten(flat)
        tangents = tangents if operands.count is None else tangents[:-1]
        carry, ys, saved = save(scan, filled)
        return (carry, ys), tangents_of(scan, filled, tangents, carry, ys, saved)

    return with_jvp(run_flat, differentiate, operands.flatten())


def save(scan: Scan, operands: Operands) -> Saved:
    """Runs a scan and saves the carry before each segment."""
    if scan.has_few_checkpoints:
        return *counted_scan(scan, operands), []
    segments = scan.segments(operands)

    def step_over(segment: Scan) -> Step:
        def run_carry(operands: Operands) -> list[Array]:
            return run(segment, operands)[0]

        def run_segment(consts: Arrays, carry: Arrays, x: Arrays, is_active: Any) -> Any:
            consts, total = split(consts, len(operands.consts))
            index, *xs = x
            if segment.length == 1:
                new, y = segment.step(consts, carry, [rows[0] for rows in xs], is_active)
                y = [array[None] for array in y]
            else:
                inner = Operands(consts, carry, xs, segments.count_in(index, total, is_active))
                # The scan over segments zeroes the cotangents of buffers.
                inner = clear_written(segment.is_written_once, inner, run_carry, is_inside=True)
                new, y = counted_scan(segment, inner)
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


def tangents_of(
    scan: Scan, operands: Operands, tangents: Any, carry: Arrays, ys: Arrays, saved: Arrays
) -> tuple[list[Any], list[Any]]:
    """The tangents of the last carry and of the ys, as a linear function of `tangents`.

    **Arguments:**

    - `tangents`: the tangents of the consts, the carry and the xs, with a `SymbolicZero` for each
      zero tangent.
    - `carry`, `ys`, `saved`: the outputs of `save`.
    """
    nonzero = find_nonzero(scan, operands, Nonzero.at_start(operands, tangents, ys))
    directions = list(map(instantiate, select(tangents, nonzero.flatten())))
    flat, num_saved = operands.flatten(), len(saved)

    def forward(residuals: Arrays, directions: Arrays) -> list[Array]:
        filled = operands.unflatten(residuals[: len(flat)])
        return _push_forward(scan, filled, nonzero, directions)

    def transpose(residuals: Arrays, cotangents: Arrays, is_shared: Any) -> list[Array]:
        residuals, saved, last = split(residuals, len(flat), num_saved)
        filled = operands.unflatten(residuals)
        ct_carry, ct_ys = split(cotangents, sum(nonzero.carry))
        _check_consts(filled, nonzero)
        reversal = Reversal(scan, nonzero, is_shared)
        if scan.has_few_checkpoints:
            return _pull_back_by_revolve(reversal, filled, last, ct_carry, ct_ys)
        ct_consts = list(map(jnp.zeros_like, select(filled.consts, nonzero.consts)))
        ct_carry, ct_consts, ct_xs = _pull_back(
            reversal, filled, saved, last, ct_carry, ct_ys, ct_consts
        )
        return [*ct_consts, *ct_carry, *ct_xs]

    residuals = [*flat, *saved, *carry]
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
    with_directions = operands.followed_by(*nonzero.split(directions))
    carry, ys_dot = counted_scan(scan.with_tangents(operands, nonzero), with_directions)
    return [*carry[len(operands.carry) :], *ys_dot]


def _pull_back(
    reversal: Reversal,
    operands: Operands,
    saved: Arrays,
    last: Arrays,
    ct_carry: Arrays,
    ct_ys: Arrays,
    ct_consts: Arrays,
) -> tuple[list[Array], list[Array], list[Array]]:
    """Computes the cotangents of the initial carry, of the consts and of the xs.

    **Arguments:**

    - `saved`: the saved carry before each segment.
    - `last`: the last carry. Its buffers are used in all steps.
    - `ct_carry`, `ct_ys`: the cotangents of the outputs.
    - `ct_consts`: the cotangents of the consts, summed over the steps that are already reversed.
    """
    scan = reversal.scan
    segment, segments = scan.segment, scan.segments(operands)
    num_consts, num_carry, num_xs = map(len, (operands.consts, last, operands.xs))

    def pull_back_segment(consts: Arrays, state: Arrays, x: Arrays, is_active: Any) -> Any:
        consts, last, total = split(consts, num_consts, num_carry)
        ct_carry, ct_consts = split(state, len(state) - len(reversal.is_shared))
        [index], saved, xs, ct_ys = split(x, 1, len(scan.saved(last)), num_xs)
        carry = scan.restored(saved, last)
        if segment.length > 1:
            inner = Operands(consts, carry, xs, segments.count_in(index, total, is_active))
            _, _, saved = save(segment.reading, inner)
            in_segment = dataclasses.replace(reversal, scan=segment)
            ct_carry, ct_consts, ct_xs = _pull_back(
                in_segment, inner, saved, last, ct_carry, ct_ys, ct_consts
            )
            return [*ct_carry, *ct_consts], ct_xs
        x, ct_y = ([rows[0] for rows in of_segment] for of_segment in (xs, ct_ys))
        more, ct_carry, ct_x = reversal.step_back(consts, carry, x, is_active, (ct_carry, ct_y))
        ct_consts = list(map(jax.lax.add, ct_consts, more))
        return [*ct_carry, *ct_consts], [array[None] for array in ct_x]

    is_masked = (*reversal.is_masked, *[True] * len(ct_consts))
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


# --- The scan with few saved carries ---


def _pull_back_by_revolve(
    reversal: Reversal, operands: Operands, last: Arrays, ct_carry: Arrays, ct_ys: Arrays
) -> list[Array]:
    """A differentiable `revolve`, with the same arguments."""
    scan, nonzero = reversal.scan, reversal.nonzero
    if operands.count is None:
        operands = dataclasses.replace(operands, count=jnp.asarray(scan.length))
    numbers = len(operands.flatten()), len(last), len(ct_carry)

    def run_flat(flat: Arrays) -> list[Array]:
        flat, last, ct_carry, ct_ys = split(flat, *numbers)
        filled = operands.unflatten(flat)
        return revolve(reversal, filled, last, ct_carry, ct_ys)

    def run_wider(wider: Nonzero, flat: Arrays) -> list[Array]:
        """Computes cotangents of more operands, `wider`. Returns the cotangents of `nonzero`."""
        flat, last, ct_carry, ct_ys = split(flat, *numbers)
        ct_carry = select(fill(ct_carry, map(jnp.zeros_like, last), nonzero.carry), wider.carry)
        of_wider = Reversal(scan, wider, (False,) * sum(wider.consts))
        filled = operands.unflatten(flat)
        more = _pull_back_by_revolve(of_wider, filled, last, ct_carry, ct_ys)
        return select(more, select(nonzero.flatten(), wider.flatten()))

    def differentiate(arrays: Arrays, tangents: Arrays) -> Any:
        flat, last, ct_carry, ct_ys = split(arrays, *numbers)
        filled = operands.unflatten(flat)
        # The tangents of `last` are not used, because they follow from the tangents of the
        # operands. The last operand is the count, which has no tangent.
        (*dots, _), _, ct_outputs_dot = split(tangents, *numbers[:2])
        wider = find_nonzero(scan, filled, nonzero.union(dots))
        if wider != nonzero:
            return jvp_of_moving(functools.partial(run_wider, wider), arrays, tangents)
        output = _pull_back_by_revolve(reversal, filled, last, ct_carry, ct_ys)
        second = _SecondDerivative(scan, operands, nonzero)
        directions = list(map(instantiate, [*select(dots, nonzero.flatten()), *ct_outputs_dot]))
        return output, linear_call(
            second.forward, second.transpose, arrays, directions, like=output
        )

    arrays = [*operands.flatten(), *last, *ct_carry, *ct_ys]
    return with_jvp(run_flat, differentiate, arrays)


@dataclasses.dataclass(frozen=True)
class _SecondDerivative:
    """The derivative of `_pull_back_by_revolve`, and the transpose of this derivative.

    Let `F` be the scan. `_pull_back_by_revolve` is `P(x, c) = F'(x)^T c`. The scan with tangents is
    `G(x, x_dot) = (F(x), F'(x) x_dot)`.

    - `forward`: the tangent of `P` along `(x_dot, c_dot)` is the cotangent of `x` in
      `G'(x, x_dot)^T (c_dot, c)`.
    - `transpose`: for a cotangent `w` of `P`, the cotangent of `c_dot` is `F'(x) w`. Second
      derivatives are symmetric, so the cotangent of `x_dot` is the cotangent of `x` in
      `G'(x, w)^T (0, c)`.
    """

    scan: Scan
    operands: Operands
    nonzero: Nonzero

    def forward(self, residuals: Arrays, directions: Arrays) -> list[Array]:
        dots, ct_outputs_dot = split(directions, sum(self.nonzero.flatten()))
        return self._pull_back(residuals, dots, ct_outputs_dot)

    def transpose(self, residuals: Arrays, cotangents: Arrays, _: Any) -> list[Array]:
        operands, _, ct_outputs = self._unpack(residuals)
        zeros = list(map(jnp.zeros_like, ct_outputs))
        return [
            *self._pull_back(residuals, cotangents, zeros),
            *_push_forward(self.scan, operands, self.nonzero, cotangents),
        ]

    def _unpack(self, residuals: Arrays) -> tuple[Operands, list[Array], list[Array]]:
        num_flat, num_carry = len(self.operands.flatten()), len(self.operands.carry)
        flat, last, ct_outputs = split(residuals, num_flat, num_carry)
        return self.operands.unflatten(flat), last, ct_outputs

    def _pull_back(
        self, residuals: Arrays, directions: Arrays, ct_outputs_dot: Arrays
    ) -> list[Array]:
        """The cotangent of `x` in `G'(x, directions)^T (ct_outputs_dot, c)`."""
        operands, last, ct_outputs = self._unpack(residuals)
        nonzero = self.nonzero
        dots = nonzero.split(directions)
        consts_dot, carry_dot, xs_dot = dots
        last_dot = carry_dot
        if any(self.scan.is_written_once):
            last_dot = _push_forward(self.scan, operands, nonzero, directions)
        num_carry = len(carry_dot)
        ct_carry, ct_ys = split(ct_outputs, num_carry)
        ct_carry_dot, ct_ys_dot = split(ct_outputs_dot, num_carry)
        doubled = Nonzero(
            [*nonzero.consts, *[False] * len(consts_dot)],
            [*nonzero.carry, *[True] * num_carry],
            [*nonzero.xs, *[False] * len(xs_dot)],
            [*nonzero.ys, *[True] * len(ct_ys)],
        )
        scan = self.scan.with_tangents(operands, nonzero, with_ys=True)
        cotangents = _pull_back_by_revolve(
            Reversal(scan, doubled, (False,) * sum(doubled.consts)),
            operands.followed_by(*dots),
            [*last, *last_dot[:num_carry]],
            [*ct_carry_dot, *ct_carry],
            [*ct_ys_dot, *ct_ys],
        )
        ct_consts, ct_carry, ct_xs = doubled.split(cotangents)
        return [*ct_consts, *ct_carry[:num_carry], *ct_xs]


# --- Loops of unknown length ---


Condition = Callable[[Arrays, Arrays], Bool[Array, ""]]
"""`condition(consts, carry)`."""


@dataclasses.dataclass(frozen=True)
class While:
    """The static part of a while loop.

    - `condition`: function that returns whether there is another step.
    - `scan`: a `Scan` without `xs`, which has the step and the largest number of steps.
    - `num_body_consts`: the number of consts that the step uses. Only the condition uses the other
      consts, which come last. They have no effect on derivatives.
    """

    condition: Condition
    scan: Scan
    num_body_consts: int

    def scan_operands(self, operands: Operands, tangents: Arrays) -> tuple[Operands, list[Any]]:
        """The operands and tangents of the scan, which has no consts of the condition."""
        consts, rest = operands.consts[: self.num_body_consts], tangents[len(operands.consts) :]
        of_scan = dataclasses.replace(operands, consts=consts)
        return of_scan, [*tangents[: self.num_body_consts], *rest]


def counted_while(loop: While, operands: Operands) -> list[Array]:
    """Runs a differentiable while loop, and returns the last carry."""

    def run_flat(flat: Arrays) -> list[Array]:
        return with_transpose(
            lambda flat: run_while(loop, operands.unflatten(flat)),
            lambda flat: counted_while(loop, operands.unflatten(flat)),
            lambda flat, flags: _check_linear(loop, operands.unflatten(flat), flags),
            flat,
        )

    def differentiate(flat: Arrays, tangents: Arrays) -> Any:
        filled = operands.unflatten(flat)
        count, carry, saved = save_while(loop, filled)
        of_scan, tangents = loop.scan_operands(dataclasses.replace(filled, count=count), tangents)
        carry_dot, _ = tangents_of(loop.scan, of_scan, tangents, carry, [], saved)
        return carry, carry_dot

    return with_jvp(run_flat, differentiate, operands.flatten())


def _check_linear(loop: While, operands: Operands, flags: Sequence[bool]) -> None:
    """Raises `ValueError` unless a step is linear in all arrays that depend on flagged operands."""
    flags_of_parts = split(list(flags), len(operands.consts), len(operands.carry))
    nonzero = find_nonzero(loop.scan, operands, Nonzero(*flags_of_parts, ys=[]))

    def step(*parts: Arrays) -> list[Array]:
        consts, carry, _ = nonzero.fill(parts, operands.consts, operands.carry, [])
        start = jnp.asarray(0), jnp.asarray(True), carry
        _, goes_on, new = _run_step(loop, Operands(consts, carry, []), *start)
        # Check that the condition does not depend on the flagged operands. The outputs of `step`
        # depend on the condition, so the transpose fails if the condition depends on these
        # operands.
        return [jnp.where(goes_on, each, 0) for each in select(new, nonzero.carry)]

    parts = nonzero.select(operands.consts, operands.carry, [])
    try:
        jax.eval_shape(jax.linear_transpose(step, *parts), jax.eval_shape(step, *parts))
    except Exception as error:
        raise ValueError(
            "jax.linear_transpose needs a loop whose steps are linear in the input, and whose "
            "number of steps does not depend on the input. Use `jax.vjp` for other loops."
        ) from error


def run_while(loop: While, operands: Operands) -> list[Array]:
    """Runs the loop without saving carries. A batch runs until its longest member has ended."""
    start = jnp.asarray(0), _is_first_active(loop, operands), list(operands.carry)
    return jax.lax.while_loop(
        _is_any_active, lambda state: _run_step(loop, operands, *state), start
    )[2]


def _run_step(
    loop: While, operands: Operands, number: Array, is_active: Array, carry: list[Array]
) -> tuple[Array, Array, list[Array]]:
    new, _ = loop.scan.step(operands.consts, carry, [], is_active)
    carry = select_active(loop.scan.is_masked, is_active, new, carry)
    # These functions are used because JAX takes three times as long to trace `+`, `<` and `&`.
    number = jax.lax.add(number, 1)
    goes_on = loop.condition(operands.consts, carry)
    is_inside = jax.lax.lt(number, loop.scan.length)
    is_active = jax.lax.bitwise_and(is_active, jax.lax.bitwise_and(goes_on, is_inside))
    return number, is_active, carry


def _is_first_active(loop: While, operands: Operands) -> Bool[Array, ""]:
    is_active = loop.condition(operands.consts, operands.carry)
    return is_active if loop.scan.length > 0 else is_active & False


def _is_any_active(state: Any) -> Bool[Array, ""]:
    return unvmap_any(state[1])


SavedWhile = tuple[Int[Array, ""], list[Array], list[Array]]
"""`(count, carry, saved)`: number of steps, last carry, and the saved carry before each segment."""


def save_while(loop: While, operands: Operands) -> SavedWhile:
    """Runs the loop, and saves the carry before each segment."""

    def run_flat(flat: Arrays) -> SavedWhile:
        return _run_and_save(loop, operands.unflatten(flat))

    def differentiate(flat: Arrays, tangents: Arrays) -> Any:
        filled = operands.unflatten(flat)
        count, carry, saved = save_while(loop, filled)
        of_scan, tangents = loop.scan_operands(filled, tangents)

        def replayed(flat: Arrays) -> list[Array]:
            counted = dataclasses.replace(of_scan.unflatten(flat), count=count)
            carry, _, saved = save(loop.scan, counted)
            return [*carry, *saved]

        nonzero = find_nonzero(loop.scan, of_scan, Nonzero.at_start(of_scan, tangents, []))
        flags = [*nonzero.carry, *(loop.scan.saved(nonzero.carry) if saved else [])]
        _, outputs_dot = jvp_of_moving(replayed, of_scan.flatten(), tangents)
        zeros = map(zero_tangent, [*carry, *saved])
        carry_dot, saved_dot = split(fill(select(outputs_dot, flags), zeros, flags), len(carry))
        return (count, carry, saved), (zero_tangent(count), carry_dot, saved_dot)

    return with_jvp(run_flat, differentiate, operands.flatten())


def _run_and_save(loop: While, operands: Operands) -> SavedWhile:
    scan, carry, number = loop.scan, list(operands.carry), jnp.asarray(0)
    is_active = _is_first_active(loop, operands)
    start = number, is_active, vary(number, varying_axes(is_active)), carry

    def step(state: Any) -> Any:
        number, is_active, count, carry = state
        count = count + is_active.astype(count.dtype)
        number, is_active, carry = _run_step(loop, operands, number, is_active, carry)
        return number, is_active, count, carry

    if scan.has_few_checkpoints:
        _, _, count, carry = jax.lax.while_loop(_is_any_active, step, start)
        return count, carry, []
    segment_length = scan.segment.length

    def run_segment(state: Any) -> Any:
        *inner, saved = state
        number, _, _, carry = inner
        index = number // segment_length
        saved = with_row(saved, index, scan.saved(carry))

        def is_inside(state: Any) -> Any:
            return unvmap_any(state[1]) & (state[0] < (index + 1) * segment_length)

        return *jax.lax.while_loop(is_inside, step, tuple(inner)), saved

    rows = [zero_rows(scan.levels[0], array) for array in scan.saved(carry)]
    _, _, count, carry, saved = jax.lax.while_loop(_is_any_active, run_segment, (*start, rows))
    return count, carry, saved
