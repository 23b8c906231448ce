"""A while loop that is differentiable in every mode.

The forward pass counts the steps. Derivatives treat the loop as a scan with this number of steps.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from ..._compat import vary, varying_axes
from ..._transforms._derivatives._linear_call import batch_first, jvp_of_moving, zero_tangent
from ._batched import unvmap_any
from ._counted_scan import save, tangents_of
from ._scan import Arrays, Operands, Scan, fill, select, split, with_row, zero_rows
from ._step import select_active
from ._tangents import Nonzero, find_nonzero, nonzero_at_start
from ._transposes import with_transpose

Condition = Callable[[Arrays, Arrays], Bool[Array, ""]]
"""`condition(consts, carry)`."""


@dataclasses.dataclass(frozen=True)
class While:
    """The static part of a while loop.

    - `condition`: function that returns whether there is another step.
    - `scan`: a `Scan` without `xs`, which has the step and the largest number of steps.
    """

    condition: Condition
    scan: Scan


@dataclasses.dataclass(frozen=True)
class WhileOperands:
    """The inputs of a while loop: the consts of its condition and body, and the initial carry."""

    cond_consts: Arrays
    body_consts: Arrays
    carry: Arrays

    def flatten(self) -> list[Array]:
        return [*self.cond_consts, *self.body_consts, *self.carry]

    def unflatten(self, flat: Arrays) -> "WhileOperands":
        """The inverse of `flatten`. Converts numbers, which JAX may pass, to arrays."""
        return WhileOperands(
            *split(list(map(jnp.asarray, flat)), len(self.cond_consts), len(self.body_consts))
        )

    def scan_operands(self, count: Int[Array, ""]) -> Operands:
        return Operands(self.body_consts, self.carry, [], count)


def counted_while(loop: While, operands: WhileOperands) -> list[Array]:
    """Runs a differentiable while loop, and returns the last carry."""

    @jax.custom_jvp
    @batch_first
    def run_flat(flat: Arrays) -> list[Array]:
        return with_transpose(
            lambda flat: run_while(loop, operands.unflatten(flat)),
            lambda flat: counted_while(loop, operands.unflatten(flat)),
            lambda flat, flags: _check_linear(loop, operands.unflatten(flat), flags),
            flat,
        )

    @functools.partial(run_flat.defjvp, symbolic_zeros=True)
    @batch_first
    def _differentiate(primals: Any, tangents: Any) -> Any:
        filled = operands.unflatten(primals[0])
        count, carry, saved = save_while(loop, filled)
        scan_operands = filled.scan_operands(count)
        _, tangents = split(tangents[0], len(filled.cond_consts))
        carry_dot, _ = tangents_of(loop.scan, scan_operands, tangents, carry, [], saved)
        return carry, carry_dot

    return run_flat(operands.flatten())


def _check_linear(loop: While, operands: WhileOperands, flags: Sequence[bool]) -> None:
    """Raises `ValueError` unless a step is linear in all arrays that depend on flagged operands."""
    condition_flags, body_flags, carry_flags = split(
        list(flags), len(operands.cond_consts), len(operands.body_consts)
    )
    scan_operands = operands.scan_operands(jnp.asarray(1))
    nonzero = find_nonzero(loop.scan, scan_operands, Nonzero(body_flags, carry_flags, [], []))

    def step(cond_consts: Arrays, *parts: Arrays) -> list[Array]:
        cond_consts = fill(cond_consts, operands.cond_consts, condition_flags)
        consts, carry, _ = nonzero.fill((*parts, []), operands.body_consts, operands.carry, [])
        start = jnp.asarray(0), jnp.asarray(True), carry
        _, goes_on, new = _step(loop, WhileOperands(cond_consts, consts, carry), *start)
        # Check that the condition does not depend on the flagged operands. The outputs of `step`
        # depend on the condition, so the transpose fails if the condition depends on these
        # operands.
        return [jnp.where(goes_on, each, 0) for each in select(new, nonzero.carry)]

    parts = (
        select(operands.cond_consts, condition_flags),
        *nonzero.select(operands.body_consts, operands.carry, [])[:2],
    )
    try:
        jax.eval_shape(jax.linear_transpose(step, *parts), jax.eval_shape(step, *parts))
    except Exception as error:
        raise ValueError(
            "jax.linear_transpose needs a loop whose steps are linear in the input, and whose "
            "number of steps does not depend on the input. Use `jax.vjp` for other loops."
        ) from error


def run_while(loop: While, operands: WhileOperands) -> list[Array]:
    """Runs the loop without saving carries. A batch runs until its longest member has ended."""
    start = jnp.asarray(0), _is_first_active(loop, operands), list(operands.carry)
    return jax.lax.while_loop(_is_any_active, lambda state: _step(loop, operands, *state), start)[2]


def _step(
    loop: While, operands: WhileOperands, number: Array, is_active: Array, carry: list[Array]
) -> tuple[Array, Array, list[Array]]:
    new, _ = loop.scan.step(operands.body_consts, carry, [], is_active)
    carry = select_active(loop.scan, is_active, new, carry)
    # These functions are used because JAX takes three times as long to trace `+`, `<` and `&`.
    number = jax.lax.add(number, 1)
    goes_on = loop.condition(operands.cond_consts, carry)
    is_inside = jax.lax.lt(number, loop.scan.length)
    is_active = jax.lax.bitwise_and(is_active, jax.lax.bitwise_and(goes_on, is_inside))
    return number, is_active, carry


def _is_first_active(loop: While, operands: WhileOperands) -> Bool[Array, ""]:
    is_active = loop.condition(operands.cond_consts, operands.carry)
    return is_active if loop.scan.length > 0 else is_active & False


def _is_any_active(state: Any) -> Bool[Array, ""]:
    return unvmap_any(state[1])


SavedWhile = tuple[Int[Array, ""], list[Array], list[Array]]
"""`(count, carry, saved)`: number of steps, last carry, and the saved carry before each segment."""


def save_while(loop: While, operands: WhileOperands) -> SavedWhile:
    """Runs the loop, and saves the carry before each segment."""

    @jax.custom_jvp
    @batch_first
    def run_flat(flat: Arrays) -> SavedWhile:
        return _run_and_save(loop, operands.unflatten(flat))

    @functools.partial(run_flat.defjvp, symbolic_zeros=True)
    @batch_first
    def _differentiate(primals: Any, tangents: Any) -> Any:
        filled = operands.unflatten(primals[0])
        count, carry, saved = save_while(loop, filled)
        scan_operands = filled.scan_operands(count)
        _, flat = split(primals[0], len(filled.cond_consts))
        _, dots = split(tangents[0], len(filled.cond_consts))

        def replayed(flat: Arrays) -> list[Array]:
            carry, _, saved = save(loop.scan, scan_operands.unflatten(flat, count))
            return [*carry, *saved]

        nonzero = find_nonzero(loop.scan, scan_operands, nonzero_at_start(scan_operands, dots, []))
        flags = [*nonzero.carry, *(loop.scan.saved(nonzero.carry) if saved else [])]
        _, outputs_dot = jvp_of_moving(replayed, flat, dots)
        zeros = map(zero_tangent, [*carry, *saved])
        carry_dot, saved_dot = split(fill(select(outputs_dot, flags), zeros, flags), len(carry))
        return (count, carry, saved), (zero_tangent(count), carry_dot, saved_dot)

    return run_flat(operands.flatten())


def _run_and_save(loop: While, operands: WhileOperands) -> SavedWhile:
    scan, carry, number = loop.scan, list(operands.carry), jnp.asarray(0)
    is_active = _is_first_active(loop, operands)
    start = number, is_active, vary(number, varying_axes(is_active)), carry

    def step(state: Any) -> Any:
        number, is_active, count, carry = state
        count = count + is_active.astype(count.dtype)
        number, is_active, carry = _step(loop, operands, number, is_active, carry)
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
