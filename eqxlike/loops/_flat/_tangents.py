"""Finds the operands of a scan that have tangents, and builds steps that propagate tangents."""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..._transforms._derivatives._linear_call import has_tangent, is_inexact
from ._scan import Arrays, Operands, Scan, Step, fill, row_types, select, split

Parts = tuple[list[Array], list[Array], list[Array]]
"""`(consts, carry, x)`: all or some operands of a step, or their cotangents."""


@dataclasses.dataclass(frozen=True)
class Nonzero:
    """Flags those operands and outputs of a scan whose tangents are not known to be zero."""

    consts: list[bool]
    carry: list[bool]
    xs: list[bool]
    ys: list[bool]

    def flatten(self) -> list[bool]:
        return [*self.consts, *self.carry, *self.xs]

    def union(self, tangents: list[Any]) -> "Nonzero":
        """These flags, and also `True` for each operand that has a tangent in `tangents`."""
        flags = map(operator.or_, self.flatten(), map(has_tangent, tangents))
        consts, carry, xs = split(list(flags), len(self.consts), len(self.carry))
        return Nonzero(consts, carry, xs, self.ys)

    def split(self, arrays: Arrays) -> list[list[Array]]:
        """Splits a list with one item for each nonzero operand into consts, carry and xs."""
        return split(arrays, sum(self.consts), sum(self.carry))

    def select(self, consts: Arrays, carry: Arrays, x: Arrays) -> Parts:
        """The nonzero operands of a step."""
        return select(consts, self.consts), select(carry, self.carry), select(x, self.xs)

    def fill(self, parts: Any, consts: Arrays, carry: Arrays, x: Arrays) -> Parts:
        """The operands of a step, with `parts` in place of the nonzero operands."""
        return (
            fill(parts[0], consts, self.consts),
            fill(parts[1], carry, self.carry),
            fill(parts[2], x, self.xs),
        )


def with_tangents(
    scan: Scan, operands: Operands, nonzero: Nonzero, *, with_ys: bool = False
) -> Scan:
    """Makes a scan that computes `scan` and propagates its nonzero tangents.

    The consts, the carry and the xs each have the arrays of `scan` first, and then their tangents.
    The ys are the tangents of the ys of `scan`. If `with_ys` is true, the ys of `scan` come before
    these tangents.
    """
    num_consts, num_carry, num_xs = map(len, (operands.consts, operands.carry, operands.xs))

    def step_of(scan: Scan) -> Step:
        def step(consts: Arrays, carry: Arrays, x: Arrays, is_active: Any) -> Any:
            consts, consts_dot = split(consts, num_consts)
            carry, carry_dot = split(carry, num_carry)
            x, x_dot = split(x, num_xs)
            function = step_of_nonzero(scan, nonzero, consts, carry, x, is_active)
            primals = nonzero.select(consts, carry, x)
            _, (new_dot, y_dot), (new, y) = jax.jvp(
                function, primals, (consts_dot, carry_dot, x_dot), has_aux=True
            )
            return [*new, *new_dot], [*y, *y_dot] if with_ys else y_dot

        return step

    return dataclasses.replace(
        scan,
        step=step_of(scan),
        reading_step=step_of(scan.reading),
        is_masked=(*scan.is_masked, *select(scan.is_masked, nonzero.carry)),
        is_written_once=(*scan.is_written_once, *select(scan.is_written_once, nonzero.carry)),
    )


def step_of_nonzero(
    scan: Scan, nonzero: Nonzero, consts: Arrays, carry: Arrays, x: Arrays, is_active: Any
) -> Callable[..., Any]:
    """A step as a function of its nonzero operands.

    The function returns a pair: the nonzero outputs, and, as auxiliary output, all outputs.
    """

    def function(*parts: Any) -> Any:
        new, y = scan.step(*nonzero.fill(parts, consts, carry, x), is_active)
        return (select(new, nonzero.carry), select(y, nonzero.ys)), (list(new), list(y))

    return function


def nonzero_at_start(operands: Operands, tangents: Arrays, ys: Arrays) -> Nonzero:
    """The flags before the first step: `True` for operands with a tangent and for inexact `ys`."""
    parts = split(list(map(has_tangent, tangents)), len(operands.consts), len(operands.carry))
    return Nonzero(*parts, ys=list(map(is_inexact, ys)))


def find_nonzero(scan: Scan, operands: Operands, nonzero: Nonzero) -> Nonzero:
    """Flags the arrays that are nonzero in any step, given the flags `nonzero` at the start.

    A step is traced again and again until no further array of the carry becomes nonzero.
    """
    while True:
        if all(map(operator.eq, nonzero.carry, map(is_inexact, operands.carry))):
            return nonzero
        nonzero_carry, nonzero_ys = _nonzero_after_step(scan, operands, nonzero)
        carry = list(map(operator.or_, nonzero.carry, nonzero_carry))
        if carry == nonzero.carry:
            if scan.has_few_checkpoints:
                # A derivative in `_revolve` may need more tangents, so all inexact ys stay flagged.
                return nonzero
            return dataclasses.replace(nonzero, ys=nonzero_ys)
        nonzero = dataclasses.replace(nonzero, carry=carry)


def _nonzero_after_step(scan: Scan, operands: Operands, nonzero: Nonzero) -> list[list[bool]]:
    """Returns, for each array of the carry and each y, whether it is nonzero after one step."""
    num_carry = len(operands.carry)
    flags = [False] * (num_carry + len(nonzero.ys))

    @jax.custom_jvp
    def recorder(arrays: list[Array]) -> list[Array]:
        return arrays

    @functools.partial(recorder.defjvp, symbolic_zeros=True)
    def _record(primals: Any, tangents: Any) -> Any:
        flags[:] = map(has_tangent, tangents[0])
        return primals[0], tangents[0]

    def tangents_of_step(consts: Arrays, carry: Arrays, x: Arrays, is_active: Array) -> Any:
        def function(*parts: Any) -> list[Array]:
            new, y = scan.step(*nonzero.fill(parts, consts, carry, x), is_active)
            return recorder([*new, *y])

        parts = nonzero.select(consts, carry, x)
        return jax.jvp(function, parts, jax.tree.map(jnp.zeros_like, parts))

    jax.eval_shape(
        tangents_of_step,
        [jax.typeof(array) for array in operands.consts],
        [jax.typeof(array) for array in operands.carry],
        row_types(operands.xs),
        jax.ShapeDtypeStruct((), jnp.bool_),
    )
    return split(flags, num_carry)
