"""Functions of arrays that are differentiated by a mode, whatever mode the caller is in."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jaxtyping import Array

from ..._transforms._derivatives._advice import advised
from ..._transforms._derivatives._linear_call import linear_call
from ..._transforms._derivatives._zero_tangents import has_tangent, is_inexact, zero_tangent
from ._mode import Arrays, Mode

OfList = Callable[[Arrays], Arrays]


def differentiated_by(mode: Mode, function: OfList, name: str | None) -> OfList:
    """`function`, with the derivatives that `mode` finds for it.

    In a pass forward they are those of `mode.jvp`, and in one backward those of `mode.vjp`, in the
    arrays alone that the caller differentiates by.

    **Arguments:**

    - `function`: from a list of arrays to a list of arrays. It closes over no tracer.
    - `name`: its name in messages; `None` if a caller names it.
    """

    @jax.custom_jvp
    def run(arrays: Arrays) -> Arrays:
        return function(arrays)

    @functools.partial(run.defjvp, symbolic_zeros=True)
    def _differentiate(primals: Any, tangents: Any) -> tuple[Arrays, list[Any]]:
        arrays, dots = (list(map(_as_array, each)) for (each,) in (primals, tangents))
        is_moving = list(map(has_tangent, dots))
        # A mode that only evaluates may be differentiated in turn by the rule.
        within = run if mode.only_evaluates else function
        is_smooth: list[bool] = []

        def of_moving(arrays: Arrays) -> Callable[[Arrays], tuple[Arrays, Arrays]]:
            def moved(values: Arrays) -> tuple[Arrays, Arrays]:
                values_left = iter(values)
                outputs = within(
                    [
                        next(values_left) if moves else array
                        for array, moves in zip(arrays, is_moving, strict=True)
                    ]
                )
                outputs = list(map(_as_array, outputs))
                is_smooth[:] = map(is_inexact, outputs)
                smooth = [each for each in outputs if is_inexact(each)]
                return smooth, [each for each in outputs if not is_inexact(each)]

            return moved

        moving = _where(is_moving, arrays)
        with advised(mode, name):
            smooth, pullback, others = mode.vjp(of_moving(arrays), moving)
            if not smooth:
                return others, list(map(zero_tangent, others))
            # Whatever the pullback needs becomes a residual, what it closes over too.
            closed = jax.make_jaxpr(pullback)(smooth)

        def forward(residuals: Arrays, directions: Arrays) -> Arrays:
            arrays = residuals[: len(is_moving)]
            with advised(mode, name):
                return mode.jvp(of_moving(arrays), _where(is_moving, arrays), directions)

        def transpose(residuals: Arrays, cotangents: Arrays, _: Any) -> Arrays:
            consts = residuals[len(is_moving) :]
            return jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, consts))(*cotangents)

        found = linear_call(
            forward,
            transpose,
            [*arrays, *closed.consts],
            _where(is_moving, dots),
            like=smooth,
            # So a batch in reverse mode does without `forward`, which a mode may not have.
            is_of_members=True,
        )
        values, directions, rest = iter(smooth), iter(found), iter(others)
        outputs = [next(values if each else rest) for each in is_smooth]
        return outputs, [
            next(directions) if each else zero_tangent(output)
            for each, output in zip(is_smooth, outputs, strict=True)
        ]

    return run


def _as_array(value: Any) -> Any:
    """`value`, which may be a Python number where a user differentiates by one."""
    is_array = hasattr(value, "shape") or isinstance(value, SymbolicZero)
    return value if is_array else jnp.asarray(value)


def _where(flags: list[bool], values: list[Any]) -> list[Array]:
    return [value for value, flag in zip(values, flags, strict=True) if flag]
