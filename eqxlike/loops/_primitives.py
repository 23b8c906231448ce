"""Primitives: loops that stay one loop under `jax.vmap`, and transposes of while loops."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, ArrayLike, Bool, Shaped

from .._compat import set_batching_rule
from .._transforms._derivatives._linear_call import (
    fill,
    flag_batched,
    has_tangent,
    is_inexact,
    jvp_of_moving,
    select,
    to_front,
)
from ._scan import Arrays


def _reducing(name: str, reduce: Callable[[Any], Any], dtype: Any = None) -> Primitive:
    """A reduction over all axes, including mapped axes.

    The tangent of the output is zero. `dtype` is the dtype of the output. By default, it is the
    dtype of the input.
    """
    reduction = Primitive(name)
    reduction.def_impl(reduce)

    @reduction.def_abstract_eval
    def _shape(x: Any) -> Any:
        return x.update(shape=(), dtype=dtype or x.dtype, weak_type=False)

    def differentiate(primals: Any, tangents: Any) -> tuple[Any, Any]:
        output = reduction.bind(*primals)
        return output, ad.Zero(jax.typeof(output).to_tangent_aval())

    def batch(axis: Any, arrays: Any, axes: Any) -> tuple[Any, None]:
        return reduction.bind(*arrays), None

    mlir.register_lowering(reduction, mlir.lower_fun(reduce, multiple_results=False))
    ad.primitive_jvps[reduction] = differentiate
    set_batching_rule(reduction, batch)
    return reduction


unvmap_any_p = _reducing("unvmap_any", jnp.any, np.dtype(bool))
unvmap_all_p = _reducing("unvmap_all", jnp.all, np.dtype(bool))
unvmap_max_p = _reducing("unvmap_max", jnp.max)


def unvmap_any(x: Bool[ArrayLike, "..."]) -> Bool[Array, ""]:
    """Whether any element of `x` is true, in any batch member. The result is never mapped."""
    return unvmap_any_p.bind(_as_jax_array(x))


def unvmap_all(x: Bool[ArrayLike, "..."]) -> Bool[Array, ""]:
    """Whether all elements of `x` are true, in all batch members. The result is never mapped."""
    return unvmap_all_p.bind(_as_jax_array(x))


def unvmap_max(x: Shaped[ArrayLike, "..."]) -> Shaped[Array, ""]:
    """The largest element of `x` in all batch members. The result is never mapped."""
    return unvmap_max_p.bind(_as_jax_array(x))


def _as_jax_array(x: Any) -> Array:
    return x if isinstance(x, jax.Array) else jnp.asarray(x)


def select_if_vmap(is_active: Bool[Array, ""], new: Array, old: Array) -> Array:
    """Returns `new` for active members of a batch, and `old` for all other members.

    If `is_active` is not mapped, it must be true. Then the result is `new`, and the selection costs
    nothing.
    """
    return select_if_vmap_p.bind(is_active, new, old)


select_if_vmap_p = Primitive("select_if_vmap")
select_if_vmap_p.def_impl(lambda is_active, new, old: new)
select_if_vmap_p.def_abstract_eval(lambda is_active, new, old: new)
mlir.register_lowering(select_if_vmap_p, lambda context, is_active, new, old: [new])


def _select_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    is_active, new, old = primals
    output = select_if_vmap(is_active, new, old)
    if all(type(tangent) is ad.Zero for tangent in tangents[1:]):
        return output, ad.Zero(jax.typeof(output).to_tangent_aval())
    nonzero = map(ad.instantiate_zeros, tangents[1:])
    return output, select_if_vmap(is_active, *nonzero)


def _select_transpose(cotangent: Any, is_active: Any, new: Any, old: Any) -> list[Any]:
    if type(cotangent) is ad.Zero:
        return [None, None, None]
    zero = jnp.zeros_like(cotangent)
    return [
        None,
        select_if_vmap(is_active, cotangent, zero) if ad.is_undefined_primal(new) else None,
        select_if_vmap(is_active, zero, cotangent) if ad.is_undefined_primal(old) else None,
    ]


def _select_batch(args: tuple[Any, ...], dims: tuple[Any, ...]) -> tuple[Any, int | None]:
    size = next(arg.shape[dim] for arg, dim in zip(args, dims, strict=True) if dim is not None)
    if dims[0] is None:
        new, old = (_at_front(arg, dim, size) for arg, dim in zip(args[1:], dims[1:], strict=True))
        return select_if_vmap(args[0], new, old), 0
    is_active, new, old = (_at_front(arg, dim, size) for arg, dim in zip(args, dims, strict=True))
    # In nested batches, this rule handles the innermost batch, and calls `jnp.where`. JAX's own
    # rules then batch this `jnp.where` for the outer batches.
    shape = is_active.shape + (1,) * (new.ndim - is_active.ndim)
    return jnp.where(is_active.reshape(shape), new, old), 0


def _at_front(array: Any, dim: int | None, size: int) -> Any:
    if dim is None:
        return jnp.broadcast_to(array, (size, *jnp.shape(array)))
    return to_front(array, dim)


ad.primitive_jvps[select_if_vmap_p] = _select_jvp
ad.primitive_transposes[select_if_vmap_p] = _select_transpose
batching.primitive_batchers[select_if_vmap_p] = _select_batch


# --- Transposes of while loops, for `jax.linear_transpose`. With `kind="lax"`, they raise ---


def without_transpose(arrays: Arrays, message: str) -> list[Array]:
    """Returns `arrays`. The transpose of this function raises `ValueError(message)`."""
    return [
        _untransposed.bind(array, message=message) if is_inexact(array) else array
        for array in arrays
    ]


def _refuse(cotangent: Any, array: Any, *, message: str) -> Any:
    raise ValueError(message)


_untransposed = Primitive("without_transpose")
_untransposed.def_impl(lambda array, message: array)
_untransposed.def_abstract_eval(lambda array, message: array)
mlir.register_lowering(_untransposed, lambda context, array, message: [array])
ad.deflinear2(_untransposed, _refuse)
batching.primitive_batchers[_untransposed] = lambda arrays, dims, message: (
    _untransposed.bind(*arrays, message=message),
    dims[0],
)


def with_transpose(
    run: Callable[[Arrays], list[Array]],
    function: Callable[[Arrays], list[Array]],
    check: Callable[[Arrays, Sequence[bool]], None],
    operands: Arrays,
) -> list[Array]:
    """Returns `run(operands)`, with the transpose of `function`.

    `function` computes the same values as `run`. `with_transpose` is needed for
    `jax.linear_transpose`, which ignores custom derivatives, and cannot transpose a
    `jax.lax.while_loop`.

    **Arguments:**

    - `check`: function called as `check(operands, flags)`. It raises an error unless `run` is
      linear in the flagged operands.
    """
    jaxpr = jax.make_jaxpr(run)(list(operands))
    if jaxpr.effects or not any(map(is_inexact, operands)):
        return jaxpr_as_fun(jaxpr)(*operands)
    return _transposed.bind(*operands, jaxpr=jaxpr, function=function, check=check)


def _run(*operands: Array, jaxpr: ClosedJaxpr, **_: Any) -> list[Array]:
    return jaxpr_as_fun(jaxpr)(*operands)


def _jvp(primals: Any, dots: Any, *, function: Any, **_: Any) -> tuple[Any, Any]:
    outputs, tangents = jvp_of_moving(function, primals, dots)
    zeros = [ad.Zero(jax.typeof(output).to_tangent_aval()) for output in outputs]
    pairs = zip(tangents, zeros, strict=True)
    return outputs, [each if has_tangent(each) else zero for each, zero in pairs]


def _transpose(cotangents: Any, *operands: Any, function: Any, check: Any, **_: Any) -> list[Any]:
    is_linear = list(map(ad.is_undefined_primal, operands))
    is_smooth = list(map(has_tangent, cotangents))

    def of_linear(*linear: Array) -> list[Array]:
        return select(function(fill(linear, operands, is_linear)), is_smooth)

    zeros = [ad.instantiate_zeros(ad.Zero(each.aval)) for each in select(operands, is_linear)]
    check(fill(zeros, operands, is_linear), is_linear)
    found = jax.vjp(of_linear, *zeros)[1](select(cotangents, is_smooth))
    return fill(found, [None] * len(operands), is_linear)


def _transposed_batch(
    axis: Any, args: Any, dims: Any, *, jaxpr: Any, function: Any, check: Any
) -> Any:
    args = [arg if dim is None else to_front(arg, dim) for arg, dim in zip(args, dims, strict=True)]
    axes = [None if dim is None else 0 for dim in dims]

    def mapped(function: Any, in_axes: Any, out_axes: Any) -> Callable[..., Any]:
        return jax.vmap(function, in_axes, out_axes, axis_name=axis.name, axis_size=axis.size)

    def run(_: Any, args: Arrays) -> list[Array]:
        return jaxpr_as_fun(jaxpr)(*args)

    is_batched = flag_batched(run, mapped, ([], axes), args)
    of_outputs = [0 if is_one else None for is_one in is_batched]

    def derived(args: Arrays) -> list[Array]:
        rows = mapped(function, (axes,), 0)(args)
        return [each if is_one else each[0] for each, is_one in zip(rows, is_batched, strict=True)]

    def check_member(args: Arrays, flags: Sequence[bool]) -> None:
        mapped(lambda args: check(args, flags), (axes,), None)(args)

    return with_transpose(
        lambda args: mapped(run, (None, axes), of_outputs)(None, args), derived, check_member, args
    ), of_outputs


_transposed = Primitive("while_with_transpose")
_transposed.multiple_results = True
_transposed.def_impl(_run)
_transposed.def_abstract_eval(lambda *_, jaxpr, **__: jaxpr.out_avals)
mlir.register_lowering(_transposed, mlir.lower_fun(_run, multiple_results=True))
ad.primitive_jvps[_transposed] = _jvp
ad.primitive_transposes[_transposed] = _transpose
set_batching_rule(_transposed, _transposed_batch)
