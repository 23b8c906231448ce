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
from ._plan import Arrays, Operands, Scan, Step, split


@dataclasses.dataclass(frozen=True)
class Moving:
    """Of the operands and outputs of a scan, whether each has a tangent."""

    consts: list[bool]
    carry: list[bool]
    xs: list[bool]
    ys: list[bool]

    def flat(self) -> list[bool]:
        return [*self.consts, *self.carry, *self.xs]

    def or_of(self, tangents: list[Any]) -> "Moving":
        """What moves here or has one of these tangents, of the operands."""
        moves = map(operator.or_, self.flat(), map(has_tangent, tangents))
        consts, carry, xs = split(list(moves), len(self.consts), len(self.carry))
        return Moving(consts, carry, xs, self.ys)

    def split(self, arrays: Arrays) -> list[list[Array]]:
        """Tangents of the operands, as those of consts, carry and xs."""
        return split(arrays, sum(self.consts), sum(self.carry))


def with_tangents(scan: Scan, operands: Operands, moving: Moving, *, with_ys: bool = False) -> Scan:
    """The scan beside that of its tangents.

    The tangents of what moves follow what it is run on, and those of the carry follow the carry.
    Its steps return the tangents of what the steps of `scan` return; with `with_ys`, after that.
    """
    num_consts, num_carry, num_xs = map(len, (operands.consts, operands.carry, operands.xs))

    def step_of(scan: Scan) -> Step:
        def step(consts: Arrays, carry: Arrays, x: Arrays, is_active: Any) -> Any:
            consts, consts_dot = split(consts, num_consts)
            carry, carry_dot = split(carry, num_carry)
            x, x_dot = split(x, num_xs)
            function = of_moving(scan, moving, consts, carry, x, is_active)
            primals = moving_parts(moving, consts, carry, x)
            _, (new_dot, y_dot), (new, y) = jax.jvp(
                function, primals, (consts_dot, carry_dot, x_dot), has_aux=True
            )
            return [*new, *new_dot], [*y, *y_dot] if with_ys else y_dot

        return step

    return dataclasses.replace(
        scan,
        step=step_of(scan),
        reading_step=step_of(scan.reading),
        is_masked=(*scan.is_masked, *moved(scan.is_masked, moving.carry)),
        is_written_once=(*scan.is_written_once, *moved(scan.is_written_once, moving.carry)),
    )


def of_moving(
    scan: Scan, moving: Moving, consts: Arrays, carry: Arrays, x: Arrays, is_active: Any
) -> Callable[..., Any]:
    """A step as a function of what moves, to what moves; beside it all that it returns."""

    def function(*parts: Any) -> Any:
        new, y = scan.step(*putting(moving, parts, consts, carry, x), is_active)
        return (moved(new, moving.carry), moved(y, moving.ys)), (list(new), list(y))

    return function


def moving_parts(
    moving: Moving, consts: Arrays, carry: Arrays, x: Arrays
) -> tuple[list[Array], list[Array], list[Array]]:
    return moved(consts, moving.consts), moved(carry, moving.carry), moved(x, moving.xs)


def moved(values: Any, is_moving: list[bool]) -> list[Any]:
    return [value for value, moves in zip(values, is_moving, strict=True) if moves]


def putting(
    moving: Moving, parts: Any, consts: Arrays, carry: Arrays, x: Arrays
) -> tuple[list[Array], list[Array], list[Array]]:
    """All consts, carry and x, with `parts` in the places of what moves."""
    return (
        _put(parts[0], consts, moving.consts),
        _put(parts[1], carry, moving.carry),
        _put(parts[2], x, moving.xs),
    )


def _put(moved: Arrays, values: Arrays, is_moving: list[bool]) -> list[Array]:
    """`values` with those `moved` in the places of what moves."""
    rest = iter(moved)
    return [next(rest) if moves else value for value, moves in zip(values, is_moving, strict=True)]


def moving_at_start(operands: Operands, tangents: Arrays, ys: Arrays) -> Moving:
    """What has one of these tangents, of the operands; all of the `ys` may come to have one."""
    of_consts, of_carry, of_xs = split(tangents, len(operands.consts), len(operands.carry))
    moves = (list(map(has_tangent, each)) for each in (of_consts, of_carry, of_xs))
    return Moving(*moves, ys=list(map(is_inexact, ys)))


def find_moving(scan: Scan, operands: Operands, moving: Moving) -> Moving:
    """What gets a tangent in a scan, where at its start `moving` has one.

    The carry is asked about step by step, until no more of it moves.
    """
    while True:
        if all(map(operator.eq, moving.carry, map(is_inexact, operands.carry))):
            return moving
        moved_carry, moved_ys = _moved_by_step(scan, operands, moving)
        carry = list(map(operator.or_, moving.carry, moved_carry))
        if carry == moving.carry:
            # Where nothing is saved row by row, all of them are counted: more may move later.
            return moving if scan.checkpoints else dataclasses.replace(moving, ys=moved_ys)
        moving = dataclasses.replace(moving, carry=carry)


def _moved_by_step(scan: Scan, operands: Operands, moving: Moving) -> list[list[bool]]:
    """For each array of the carry and of what a step returns, whether a step gives it a tangent."""
    num_carry = len(operands.carry)
    found = [False] * (num_carry + len(moving.ys))

    @jax.custom_jvp
    def noted(arrays: list[Array]) -> list[Array]:
        return arrays

    @functools.partial(noted.defjvp, symbolic_zeros=True)
    def _note(primals: Any, tangents: Any) -> Any:
        found[:] = map(has_tangent, tangents[0])
        return primals[0], tangents[0]

    def tangents_of_step(consts: Arrays, carry: Arrays, x: Arrays, is_active: Array) -> Any:
        def function(*parts: Any) -> list[Array]:
            new, y = scan.step(*putting(moving, parts, consts, carry, x), is_active)
            return noted([*new, *y])

        parts = moving_parts(moving, consts, carry, x)
        return jax.jvp(function, parts, jax.tree.map(jnp.zeros_like, parts))

    jax.eval_shape(
        tangents_of_step,
        [jax.typeof(each) for each in operands.consts],
        [jax.typeof(each) for each in operands.carry],
        [jax.ShapeDtypeStruct(each.shape[1:], each.dtype) for each in operands.xs],
        jax.ShapeDtypeStruct((), jnp.bool_),
    )
    return split(found, num_carry)
