"""Primitives with which a batch of loops stays one loop under `jax.vmap`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, ArrayLike, Bool, Shaped

from ..._compat import set_batching_rule
from ..._transforms._derivatives._linear_call import to_front


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


_any = _reducing("unvmap_any", jnp.any, np.dtype(bool))
_all = _reducing("unvmap_all", jnp.all, np.dtype(bool))
_max = _reducing("unvmap_max", jnp.max)


def unvmap_any(x: Bool[ArrayLike, "..."]) -> Bool[Array, ""]:
    """Whether any element of `x` is true, in any batch member. The result is never mapped."""
    return _any.bind(_as_jax_array(x))


def unvmap_all(x: Bool[ArrayLike, "..."]) -> Bool[Array, ""]:
    """Whether all elements of `x` are true, in all batch members. The result is never mapped."""
    return _all.bind(_as_jax_array(x))


def unvmap_max(x: Shaped[ArrayLike, "..."]) -> Shaped[Array, ""]:
    """The largest element of `x` in all batch members. The result is never mapped."""
    return _max.bind(_as_jax_array(x))


def _as_jax_array(x: Any) -> Array:
    return x if isinstance(x, jax.Array) else jnp.asarray(x)


def select_if_vmap(is_active: Bool[Array, ""], new: Array, old: Array) -> Array:
    """Returns `new` for active members of a batch, and `old` for all other members.

    If `is_active` is not mapped, it must be true. Then the result is `new`, and the selection costs
    nothing.
    """
    return _select.bind(is_active, new, old)


_select = Primitive("select_if_vmap")
_select.def_impl(lambda is_active, new, old: new)
_select.def_abstract_eval(lambda is_active, new, old: new)
mlir.register_lowering(_select, mlir.lower_fun(lambda *args: args[1], multiple_results=False))


def _select_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    is_active, new, old = primals
    output = _select.bind(is_active, new, old)
    if all(type(tangent) is ad.Zero for tangent in tangents[1:]):
        return output, ad.Zero(jax.typeof(output).to_tangent_aval())
    nonzero = map(ad.instantiate_zeros, tangents[1:])
    return output, _select.bind(is_active, *nonzero)


def _select_transpose(cotangent: Any, is_active: Any, new: Any, old: Any) -> list[Any]:
    if type(cotangent) is ad.Zero:
        return [None, None, None]
    zero = jnp.zeros_like(cotangent)
    return [
        None,
        _select.bind(is_active, cotangent, zero) if ad.is_undefined_primal(new) else None,
        _select.bind(is_active, zero, cotangent) if ad.is_undefined_primal(old) else None,
    ]


def _select_batch(args: tuple[Any, ...], dims: tuple[Any, ...]) -> tuple[Any, int | None]:
    size = next(arg.shape[dim] for arg, dim in zip(args, dims, strict=True) if dim is not None)
    if dims[0] is None:
        new, old = (_at_front(arg, dim, size) for arg, dim in zip(args[1:], dims[1:], strict=True))
        return _select.bind(args[0], new, old), 0
    is_active, new, old = (_at_front(arg, dim, size) for arg, dim in zip(args, dims, strict=True))
    # In nested batches, this rule handles the innermost batch, and calls `jnp.where`. JAX's own
    # rules then batch this `jnp.where` for the outer batches.
    shape = is_active.shape + (1,) * (new.ndim - is_active.ndim)
    return jnp.where(is_active.reshape(shape), new, old), 0


def _at_front(array: Any, dim: int | None, size: int) -> Any:
    if dim is None:
        return jnp.broadcast_to(array, (size, *jnp.shape(array)))
    return to_front(array, dim)


ad.primitive_jvps[_select] = _select_jvp
ad.primitive_transposes[_select] = _select_transpose
batching.primitive_batchers[_select] = _select_batch
