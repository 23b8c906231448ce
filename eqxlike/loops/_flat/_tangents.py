"""Which operands of a scan have tangents, and its steps as functions of those alone."""

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
"""`(consts, carry, x)`: operands of a step or their cotangents, all or some."""


@dataclasses.dataclass(frozen=True)
class Nonzero:
    """Which operands and outputs of a scan are nonzero: JAX calls an array so if it has a tangent
    that is not known to be zero.
    """

    consts: list[bool]
    carry: list[bool]
    xs: list[bool]
    ys: list[bool]

    def flatten(self) -> list[bool]:
        return [*self.consts, *self.carry, *self.xs]

    def or_of(self, tangents: list[Any]) -> "Nonzero":
        """The same, with the operands that have one of these `tangents` nonzero too."""
        flags = map(operator.or_, self.flatten(), map(has_tangent, tangents))
        consts, carry, xs = split(list(flags), len(self.consts), len(self.carry))
        return Nonzero(consts, carry, xs, self.ys)

    def split(self, arrays: Arrays) -> list[list[Array]]:
        """A list for the nonzero operands, split into consts, carry and xs."""
        return split(arrays, sum(self.consts), sum(self.carry))

    def select(self, consts: Arrays, carry: Arrays, x: Arrays) -> Parts:
        """The operands of a step that have a tangent."""
        return select(consts, self.consts), select(carry, self.carry), select(x, self.xs)

    def fill(self, parts: Any, consts: Arrays, carry: Arrays, x: Arrays) -> Parts:
        """The operands of a step, with `parts` in place of those that have a tangent."""
        return (
            fill(parts[0], consts, self.consts),
            fill(parts[1], carry, self.carry),
            fill(parts[2], x, self.xs),
        )


def with_tangents(
    scan: Scan, operands: Operands, nonzero: Nonzero, *, with_ys: bool = False
) -> Scan:
    """The scan together with that of its tangents.

    In its consts, carry and xs the nonzero tangents follow the arrays of `scan`. Its ys are the
    tangents of the ys of `scan`; with `with_ys` they follow those ys.
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
    """A step as a function of its nonzero operands, to its nonzero outputs and to all outputs."""

    def function(*parts: Any) -> Any:
        new, y = scan.step(*nonzero.fill(parts, consts, carry, x), is_active)
        return (select(new, nonzero.carry), select(y, nonzero.ys)), (list(new), list(y))

    return function


def nonzero_at_start(operands: Operands, tangents: Arrays, ys: Arrays) -> Nonzero:
    """The operands that have one of these `tangents`, and all of the `ys` that could have one."""
    parts = split(list(map(has_tangent, tangents)), len(operands.consts), len(operands.carry))
    return Nonzero(*parts, ys=list(map(is_inexact, ys)))


def find_nonzero(scan: Scan, operands: Operands, nonzero: Nonzero) -> Nonzero:
    """All that has a tangent at some step of a scan, if `nonzero` has one at the start.

    A step is traced again as long as more of the carry gets one.
    """
    while True:
        if all(map(operator.eq, nonzero.carry, map(is_inexact, operands.carry))):
            return nonzero
        nonzero_carry, nonzero_ys = _nonzero_after_step(scan, operands, nonzero)
        carry = list(map(operator.or_, nonzero.carry, nonzero_carry))
        if carry == nonzero.carry:
            if scan.has_few_checkpoints:
                # A derivative in `_revolve` may need more tangents: all of the ys count at once.
                return nonzero
            return dataclasses.replace(nonzero, ys=nonzero_ys)
        nonzero = dataclasses.replace(nonzero, carry=carry)


def _nonzero_after_step(scan: Scan, operands: Operands, nonzero: Nonzero) -> list[list[bool]]:
    """For each array of the carry and of what a step returns, whether a step gives it a tangent."""
    num_carry = len(operands.carry)
    flags = [False] * (num_carry + len(nonzero.ys))

    @jax.custom_jvp
    def noted(arrays: list[Array]) -> list[Array]:
        return arrays

    @functools.partial(noted.defjvp, symbolic_zeros=True)
    def _note(primals: Any, tangents: Any) -> Any:
        flags[:] = map(has_tangent, tangents[0])
        return primals[0], tangents[0]

    def tangents_of_step(consts: Arrays, carry: Arrays, x: Arrays, is_active: Array) -> Any:
        def function(*parts: Any) -> list[Array]:
            new, y = scan.step(*nonzero.fill(parts, consts, carry, x), is_active)
            return noted([*new, *y])

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
