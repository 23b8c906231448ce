"""Which of the operands of a scan have tangents, and its steps as functions of those alone."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

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

    def function(moving_consts: Arrays, moving_carry: Arrays, moving_x: Arrays) -> Any:
        new, y = scan.step(
            _put(moving_consts, consts, moving.consts),
            _put(moving_carry, carry, moving.carry),
            _put(moving_x, x, moving.xs),
            is_active,
        )
        return (moved(new, moving.carry), moved(y, moving.ys)), (list(new), list(y))

    return function


def moving_parts(
    moving: Moving, consts: Arrays, carry: Arrays, x: Arrays
) -> tuple[list[Array], list[Array], list[Array]]:
    return moved(consts, moving.consts), moved(carry, moving.carry), moved(x, moving.xs)


def moved(values: Any, is_moving: list[bool]) -> list[Any]:
    return [value for value, moves in zip(values, is_moving, strict=True) if moves]


def _put(moved: Arrays, values: Arrays, is_moving: list[bool]) -> list[Array]:
    """`values` with those `moved` in the places of what moves."""
    rest = iter(moved)
    return [next(rest) if moves else value for value, moves in zip(values, is_moving, strict=True)]


def is_inexact(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jnp.inexact)
