"""Questions about a whole batch at once, by which a loop stays one loop under `jax.vmap`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Bool, Shaped


def _reducing(reduce: Callable[[Any, int], Any]) -> Callable[[Any], Any]:
    """A function that gives its argument, reduced over each axis that it is mapped over."""

    @custom_vmap
    def unvmapped(x: Any) -> Any:
        return x

    @unvmapped.def_vmap
    def _reduce(size: int, is_batched: list[bool], x: Any) -> tuple[Any, bool]:
        return unvmapped(reduce(x, 0)), False

    return unvmapped


_any = _reducing(jnp.any)
_all = _reducing(jnp.all)
_max = _reducing(jnp.max)


def unvmap_any(x: Bool[Array, "..."]) -> Bool[Array, ""]:
    """Whether any of `x` is true, in any member of any batch: never mapped itself."""
    return _any(jnp.any(x))


def unvmap_all(x: Bool[Array, "..."]) -> Bool[Array, ""]:
    """Whether all of `x` are true, in all members of all batches: never mapped itself."""
    return _all(jnp.all(x))


def unvmap_max(x: Shaped[Array, "..."]) -> Shaped[Array, ""]:
    """The largest of `x` in all members of all batches: never mapped itself."""
    return _max(jnp.max(x))


def select_if_vmap(is_active: Bool[Array, ""], new: Array, old: Array) -> Array:
    """`new` for the members of a batch that are active, else `old`.

    Whoever calls this sees to it that `is_active` is true where it is not mapped: then it is `new`,
    and nothing is computed.
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
    moving = map(ad.instantiate_zeros, tangents[1:])
    return output, _select.bind(is_active, *moving)


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
    # Of several batches, one inside the other, this is the innermost: the others map a `select`.
    shape = is_active.shape + (1,) * (new.ndim - is_active.ndim)
    return jnp.where(is_active.reshape(shape), new, old), 0


def _at_front(array: Any, dim: int | None, size: int) -> Any:
    if dim is None:
        return jnp.broadcast_to(array, (size, *jnp.shape(array)))
    return jnp.moveaxis(array, dim, 0)


ad.primitive_jvps[_select] = _select_jvp
ad.primitive_transposes[_select] = _select_transpose
batching.primitive_batchers[_select] = _select_batch
