"""A linear function whose transpose somebody has written, under every transformation.

`jax.custom_vjp` takes the forward mode away from a function. A `jax.custom_jvp` whose tangents are
a `linear_call` keeps it: the forward mode runs `forward`, and the reverse mode `transpose`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

Linear = Callable[[list[Array], list[Array]], list[Array]]
Sum = Callable[[Any], Any]
"""From part of a cotangent to its sum over all members of the batches that share the tangent."""
Transpose = Callable[[list[Array], list[Array], list[Sum]], list[Array]]


def linear_call(
    forward: Linear, transpose: Transpose, residuals: Sequence[Array], tangents: Sequence[Array]
) -> list[Array]:
    """`forward(residuals, tangents)`.

    **Arguments:**

    - `forward`: linear in the second of its arguments, and differentiable in both.
    - `transpose`: from the residuals, cotangents of what `forward` returns and a `Sum` for each of
        the tangents to their cotangents, which it has summed by that. In a loop that is done in
        each step: the weights of a batch of networks then have one cotangent, and not one a member.
    """
    output = jax.eval_shape(forward, list(residuals), list(tangents))
    return _linear.bind(
        *residuals,
        *tangents,
        forward=forward,
        transpose=transpose,
        num_residuals=len(residuals),
        avals=tuple(ShapedArray(each.shape, each.dtype) for each in output),
    )


def _run(*args: Array, forward: Linear, num_residuals: int, **_: Any) -> list[Array]:
    return forward(list(args[:num_residuals]), list(args[num_residuals:]))


def _impl(*args: Array, **params: Any) -> list[Array]:
    return jax.jit(lambda *args: _run(*args, **params))(*args)


_linear = Primitive("linear_call_of_loop")
_linear.multiple_results = True
_linear.def_impl(_impl)
_linear.def_abstract_eval(lambda *args, avals, **_: avals)
mlir.register_lowering(_linear, mlir.lower_fun(_run, multiple_results=True))


def _jvp(primals: Any, dots: Any, *, num_residuals: int, **params: Any) -> tuple[Any, Any]:
    params = {**params, "num_residuals": num_residuals}
    if all(type(dot) is ad.Zero for dot in dots[:num_residuals]):
        directions = map(ad.instantiate_zeros, dots[num_residuals:])
        return (
            _linear.bind(*primals, **params),
            _linear.bind(*primals[:num_residuals], *directions, **params),
        )
    moving = [place for place, dot in enumerate(dots) if type(dot) is not ad.Zero]

    def of_moving(*values: Array) -> list[Array]:
        args = list(primals)
        for place, value in zip(moving, values, strict=True):
            args[place] = value
        return _run(*args, **params)

    return jax.jvp(
        of_moving, tuple(primals[place] for place in moving), tuple(dots[place] for place in moving)
    )


def _transpose(
    cotangents: Any, *args: Any, transpose: Transpose, num_residuals: int, **_: Any
) -> list[Any]:
    found = transpose(
        list(args[:num_residuals]),
        list(map(ad.instantiate_zeros, cotangents)),
        [as_it_is] * (len(args) - num_residuals),
    )
    of_tangents = [
        each if ad.is_undefined_primal(arg) else None
        for each, arg in zip(found, args[num_residuals:], strict=True)
    ]
    return [None] * num_residuals + of_tangents


def _batch(
    axis: Any,
    args: Any,
    dims: Any,
    *,
    forward: Linear,
    transpose: Transpose,
    num_residuals: int,
    avals: Any,
) -> tuple[Any, Any]:
    if all(dim is None for dim in dims):
        params = {"num_residuals": num_residuals, "avals": avals}
        output = _linear.bind(*args, forward=forward, transpose=transpose, **params)
        return output, [None] * len(output)
    axes = [None if dim is None else 0 for dim in dims]
    args = [
        arg if dim is None else jnp.moveaxis(arg, dim, 0)
        for arg, dim in zip(args, dims, strict=True)
    ]
    of_residuals, of_tangents = axes[:num_residuals], axes[num_residuals:]

    # A name that the user gave the axis is for what is done along it inside.
    name = axis.name if isinstance(axis.name, str) else _Axis()

    def mapped(function: Any, in_axes: Any, out_axes: Any) -> Any:
        return jax.vmap(function, in_axes, out_axes, axis_name=name, axis_size=axis.size)

    def batched_transpose(
        residuals: list[Array], cotangents: list[Array], sums: list[Sum]
    ) -> list[Array]:
        def of_member_with(sums: list[Sum]) -> Linear:
            return lambda residuals, cotangents: transpose(residuals, cotangents, sums)

        @jax.custom_jvp
        def summed_inside(residuals: list[Array], cotangents: list[Array]) -> list[Array]:
            over_members = [
                _then_over(name, each) if axis is None else each
                for each, axis in zip(sums, of_tangents, strict=True)
            ]
            return mapped(of_member_with(over_members), (of_residuals, 0), of_tangents)(
                residuals, cotangents
            )

        def summed_outside(residuals: list[Array], cotangents: list[Array]) -> list[Array]:
            found = mapped(of_member_with(sums), (of_residuals, 0), 0)(residuals, cotangents)
            return [
                each.sum(0) if axis is None else each
                for each, axis in zip(found, of_tangents, strict=True)
            ]

        @summed_inside.defjvp
        def _differentiate(primals: Any, tangents: Any) -> Any:
            # The transpose of a sum over a named axis is not what is needed here.
            return jax.jvp(summed_outside, primals, tangents)

        return summed_inside(residuals, cotangents)

    output = _linear.bind(
        *args,
        forward=mapped(forward, (of_residuals, of_tangents), 0),
        transpose=batched_transpose,
        num_residuals=num_residuals,
        avals=tuple(ShapedArray((axis.size, *each.shape), each.dtype) for each in avals),
    )
    return output, [0] * len(output)


class _Axis:
    """The name of an axis that has none."""


def as_it_is(part: Any) -> Any:
    return part


def _then_over(name: Any, inner: Sum) -> Sum:
    return lambda part: jax.lax.psum(inner(part), name)


ad.primitive_jvps[_linear] = _jvp
ad.primitive_transposes[_linear] = _transpose
batching.fancy_primitive_batchers[_linear] = _batch
