"""Functions of arrays and abstract arrays."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.core import ShapedArray
from jax.interpreters import ad
from jaxtyping import Array, ArrayLike, Inexact, PyTree

from .._pytree import is_array_like
from .._transforms import filter_eval_shape
from ..loops import Buffer

# --- Broadcasting that begins with the leading axis ---


def left_broadcast_to(arr: ArrayLike, shape: tuple[int, ...]) -> Array:
    """`arr` with axes of length one behind its own, broadcast to `shape`.

    **Raises:** `ValueError` if `shape` has fewer axes, or its leading ones are others.

    >>> print(left_broadcast_to(jnp.arange(2), (2, 3)))
    [[0 0 0]
     [1 1 1]]
    """
    arr = jnp.asarray(arr)
    if arr.ndim > len(shape):
        raise ValueError(
            f"left_broadcast_to expected at least the {arr.ndim} axes of an array of shape "
            f"{arr.shape}; got shape {shape}."
        )
    return jnp.broadcast_to(arr.reshape(arr.shape + (1,) * (len(shape) - arr.ndim)), shape)


# --- Arrays of the shapes that a function would return ---


def eval_zero(fn: Callable[..., Any], *inputs: PyTree) -> PyTree:
    """Zeros of the shapes and dtypes of what `fn(*inputs)` returns. Nothing is computed.

    Leaves that are not arrays are as `fn` returned them.

    >>> eval_zero(lambda x: (x > 0, 2 * x), jnp.ones(2))
    (Array([False, False], dtype=bool), Array([0., 0.], dtype=float32))
    """
    return _filled(jnp.zeros, fn, inputs)


def eval_empty(fn: Callable[..., Any], *inputs: PyTree) -> PyTree:
    """As `eval_zero`, with arrays whose values do not matter."""
    return _filled(jnp.empty, fn, inputs)


def _filled(make: Callable[..., Any], fn: Callable[..., Any], inputs: tuple[PyTree, ...]) -> PyTree:
    def fill(leaf: Any) -> Any:
        return make(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf

    return jtu.tree_map(fill, filter_eval_shape(fn, *inputs))


# --- Tangents that are zero, as arrays ---


def materialise_zeros(primal: Any, tangent: Any, allow_struct: bool = False) -> Any:
    """The tangent, or if it is `None` one of zeros beside `primal`.

    **Arguments:**

    - `primal`: an array or a number; for anything else the tangent stays `None`.
    - `tangent`: an array, or `None` for zero.
    - `allow_struct`: whether a `jax.ShapeDtypeStruct` may stand for an array as `primal`.

    **Returns:** an array of the shape of the primal and of the dtype of its tangents, which for
    integers is JAX's `float0`.

    >>> import jax.numpy as jnp
    >>> materialise_zeros(jnp.ones(2), None)
    Array([0., 0.], dtype=float32)
    """
    if tangent is not None:
        return tangent
    if is_array_like(primal):
        aval = jax.typeof(primal)
    elif allow_struct and isinstance(primal, jax.ShapeDtypeStruct):
        aval = ShapedArray(primal.shape, primal.dtype)
    else:
        return None
    return ad.instantiate_zeros(ad.Zero(aval.to_tangent_aval()))


# --- The type of what is a buffer inside of a loop, and an array elsewhere ---


class MaybeBuffer:
    """`MaybeBuffer[T]` is the type of a `T` or of the buffer that a loop makes of it.

    >>> isinstance(3, MaybeBuffer[int])
    True
    """

    def __class_getitem__(cls, item: Any) -> Any:
        return item | Buffer


# --- The floating-point numbers beside one ---


@jax.custom_jvp
def nextafter(x: Inexact[Array, "..."]) -> Inexact[Array, "..."]:
    """The floating-point number after `x`. Its derivative is that of the identity.

    After zero, and after what XLA takes for zero, comes the smallest normal number.

    >>> print(nextafter(jnp.array(1.0)) - 1)
    1.1920929e-07
    """
    return _beside(x, 1)


@jax.custom_jvp
def prevbefore(x: Inexact[Array, "..."]) -> Inexact[Array, "..."]:
    """The floating-point number before `x`. Its derivative is that of the identity.

    Before zero, and before what XLA takes for zero, comes the smallest normal number with a minus.

    >>> print(prevbefore(jnp.array(1.0)) - 1)
    -5.9604645e-08
    """
    return _beside(x, -1)


def _beside(x: Array, sign: int) -> Array:
    """The number beside `x`. In `jax.lax`, which is traced faster: solvers ask for it often."""
    dtype = jnp.result_type(x)
    x = jnp.asarray(x, dtype)
    tiny = jax.lax.full_like(x, sign * jnp.finfo(dtype).tiny)
    beside = jax.lax.nextafter(x, dtype.type(sign * float("inf")))
    return jax.lax.select(jax.lax.eq(x, dtype.type(0)), tiny, beside)


nextafter.defjvp(lambda primals, tangents: (nextafter(*primals), *tangents))
prevbefore.defjvp(lambda primals, tangents: (prevbefore(*primals), *tangents))
