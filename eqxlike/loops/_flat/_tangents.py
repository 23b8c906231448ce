"""Which of the operands of a scan have tangents, and its steps as functions of those alone."""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..._transforms._derivatives._linear_call import has_tangent, is_inexact
from ._scan import Arrays, Operands, Scan, Step, fill, select, split

Parts = tuple[list[Array], list[Array], list[Array]]
"""Of the consts, of the carry and of the x."""


@dataclasses.dataclass(frozen=True)
class Nonzero:
    """Of the operands and outputs of a scan, whether each has a tangent that is not known to be
    zero: JAX calls them nonzero.
    """

    consts: list[bool]
    carry: list[bool]
    xs: list[bool]
    ys: list[bool]

    def flatten(self) -> list[bool]:
        return [*self.consts, *self.carry, *self.xs]

    def or_of(self, tangents: list[Any]) -> "Nonzero":
        """What is nonzero here or has one of these tangents, of the operands."""
        flags = map(operator.or_, self.flatten(), map(has_tangent, tangents))
        consts, carry, xs = split(list(flags), len(self.consts), len(self.carry))
        return Nonzero(consts, carry, xs, self.ys)

    def split(self, arrays: Arrays) -> list[list[Array]]:
        """Tangents of the operands, as those of consts, carry and xs."""
        return split(arrays, sum(self.consts), sum(self.carry))

    def select(self, consts: Arrays, carry: Arrays, x: Arrays) -> Parts:
        """Those that have a tangent, of the operands of a step."""
        return select(consts, self.consts), select(carry, self.carry), select(x, self.xs)

    def fill(self, parts: Any, consts: Arrays, carry: Arrays, x: Arrays) -> Parts:
        """The operands of a step, with `parts` in the places of those that have a tangent."""
        return (
            fill(parts[0], consts, self.consts),
            fill(parts[1], carry, self.carry),
            fill(parts[2], x, self.xs),
        )


def with_tangents(
    scan: Scan, operands: Operands, nonzero: Nonzero, *, with_ys: bool = False
) -> Scan:
    """The scan together with that of its tangents.

    The nonzero tangents follow what it is run on, and those of the carry follow the carry.
    Its steps return the tangents of what the steps of `scan` return; with `with_ys`, after that.
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
    """A step as a function of what has a tangent, to what then has one, and to all it returns."""

    def function(*parts: Any) -> Any:
        new, y = scan.step(*nonzero.fill(parts, consts, carry, x), is_active)
        return (select(new, nonzero.carry), select(y, nonzero.ys)), (list(new), list(y))

    return function


def nonzero_at_start(operands: Operands, tangents: Arrays, ys: Arrays) -> Nonzero:
    """What has one of these tangents, of the operands; all of the `ys` may come to have one."""
    parts = split(list(map(has_tangent, tangents)), len(operands.consts), len(operands.carry))
    return Nonzero(*parts, ys=list(map(is_inexact, ys)))


def find_nonzero(scan: Scan, operands: Operands, nonzero: Nonzero) -> Nonzero:
    """What gets a tangent in a scan, where at its start `nonzero` has one.

    The carry is followed step by step, until no more of it gets one.
    """
    while True:
        if all(map(operator.eq, nonzero.carry, map(is_inexact, operands.carry))):
            return nonzero
        nonzero_carry, nonzero_ys = _nonzero_after_step(scan, operands, nonzero)
        carry = list(map(operator.or_, nonzero.carry, nonzero_carry))
        if carry == nonzero.carry:
            if scan.has_few_checkpoints:
                # `_revolve` may come to have more of them: all of the ys count from the start.
                return nonzero
            return dataclasses.replace(nonzero, ys=nonzero_ys)
        nonzero = dataclasses.replace(nonzero, carry=carry)


def _nonzero_after_step(scan: Scan, operands: Operands, nonzero: Nonzero) -> list[list[bool]]:
    """For each array of the carry and of what a step returns, whether a step gives it a tangent."""
    num_carry = len(operands.carry)
    found = [False] * (num_carry + len(nonzero.ys))

    @jax.custom_jvp
    def noted(arrays: list[Array]) -> list[Array]:
        return arrays

    @functools.partial(noted.defjvp, symbolic_zeros=True)
    def _note(primals: Any, tangents: Any) -> Any:
        found[:] = map(has_tangent, tangents[0])
        return primals[0], tangents[0]

    def tangents_of_step(consts: Arrays, carry: Arrays, x: Arrays, is_active: Array) -> Any:
        def function(*parts: Any) -> list[Array]:
            new, y = scan.step(*nonzero.fill(parts, consts, carry, x), is_active)
            return noted([*new, *y])

        parts = nonzero.select(consts, carry, x)
        return jax.jvp(function, parts, jax.tree.map(jnp.zeros_like, parts))

    jax.eval_shape(
        tangents_of_step,
        [jax.typeof(each) for each in operands.consts],
        [jax.typeof(each) for each in operands.carry],
        [jax.ShapeDtypeStruct(each.shape[1:], each.dtype) for each in operands.xs],
        jax.ShapeDtypeStruct((), jnp.bool_),
    )
    return split(found, num_carry)
