"""Buffers: arrays in the carry of a loop whose places are written once each."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool

from .._compat import vary, varying_axes
from .._module import Module, field
from .._partition import split
from .._pytree import is_array, is_array_like, tree_pformat
from .._transforms._derivatives._linear_call import linear_call
from ._flat._batched import select_if_vmap
from ._flat._scan import Arrays


class Buffer(Module):
    """An array in the carry of a loop, as its body gets it. Each place is written once.

    The body writes by `buffer.at[index].set(x)` or `buffer_at_set`, and reads by `buffer[index]`
    where it has written. So reverse mode need not save the array step by step, and in a batch of
    loops of different lengths a step writes one place, not the whole array.
    """

    array: Array
    is_active: Bool[Array, ""] | bool
    is_writable: bool = field(static=True, default=True)

    def holding(self, array: Array) -> "Buffer":
        """The same buffer with another array in it."""
        return Buffer(array, self.is_active, self.is_writable)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    @property
    def ndim(self) -> int:
        return self.array.ndim

    @property
    def size(self) -> int:
        return self.array.size

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: Any) -> Array:
        entry = self.array[index]
        # Members of a batch that have ended read too: their cotangents must be zero.
        return select_if_vmap(jnp.asarray(self.is_active), entry, jnp.zeros_like(entry))

    @property
    def at(self) -> "_At":
        return _At(self)


class _At:
    """`buffer.at`."""

    def __init__(self, buffer: Buffer):
        self._buffer = buffer

    def __getitem__(self, index: Any) -> "_Place":
        return _Place(self._buffer, index)


class _Place:
    """`buffer.at[index]`."""

    def __init__(self, buffer: Buffer, index: Any):
        self._buffer = buffer
        self._index = index

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a buffer of a loop has no `.at[index].{name}`: each of its places is written once, "
            "by `.at[index].set(x)`, and read by `buffer[index]`."
        )

    def set(self, x: ArrayLike, *, pred: Any = None, **kwargs: Any) -> Buffer:
        """The buffer with `x` written at the index.

        **Arguments:**

        - `x`: cast to the dtype of the buffer.
        - `pred`: shape `()`; nothing is written where it is false.
        - `**kwargs`: of `jax.Array.at[...].set`.
        """
        buffer = self._buffer
        if not buffer.is_writable:
            return buffer
        is_active = jnp.asarray(buffer.is_active)
        array = _write(buffer.array, self._index, x, pred, is_active, kwargs)
        return buffer.holding(array)


def _write(
    array: Array, index: Any, x: ArrayLike, pred: Any, is_active: Array, options: dict[str, Any]
) -> Array:
    """`array` with `x` at `index`, where `pred` and `is_active` are true.

    Its transpose reads the place once. The transpose that JAX would make writes to it as well, for
    which XLA copies the whole array in each step of a loop: 1 MB of buffers made a step backwards
    15 times as long.
    """
    is_integer = is_array_like(index) and jnp.issubdtype(jnp.result_type(index), jnp.integer)
    if not options and is_integer and jnp.ndim(index) == 0:
        return _write_row(array, jnp.asarray(index), x, pred, is_active)
    indices, rest = split(index, is_array)

    def read(array: Array, residuals: Arrays) -> Array:
        return array[rest.merge(residuals)]

    def write(array: Array, residuals: Arrays, x: Array) -> Array:
        return array.at[rest.merge(residuals)].set(x, **options)

    return _write_where(array, indices, x, pred, is_active, read, write)


def _write_row(array: Array, index: Array, x: ArrayLike, pred: Any, is_active: Array) -> Array:
    """Writes at one integer: as a slice, in half the time of a scatter."""
    length = array.shape[0]
    # As in `jax.numpy`, a negative index counts from the end, and one out of bounds is dropped.
    index = jnp.where(index < 0, index + length, index)
    is_inside = (index >= 0) & (index < length)
    pred = is_inside if pred is None else is_inside & pred

    def read(array: Array, residuals: Arrays) -> Array:
        return jax.lax.dynamic_index_in_dim(array, residuals[0], keepdims=False)

    def write(array: Array, residuals: Arrays, x: Array) -> Array:
        return jax.lax.dynamic_update_index_in_dim(array, x, residuals[0], 0)

    return _write_where(array, [index], x, pred, is_active, read, write)


def _write_where(
    array: Array,
    indices: Arrays,
    x: ArrayLike,
    pred: Any,
    is_active: Array,
    read: Callable[[Array, Arrays], Array],
    write: Callable[[Array, Arrays, Array], Array],
) -> Array:
    """`write(array, indices, x)`; the place is unchanged where `pred` or `is_active` is false."""
    masks = [is_active] if pred is None else [is_active, jnp.asarray(pred)]
    x = jnp.broadcast_to(jnp.asarray(x, array.dtype), jax.eval_shape(read, array, indices).shape)
    axes = frozenset().union(*map(varying_axes, (array, x, *masks, *indices)))
    array, value = vary(array, axes), vary(x, axes)

    def select(residuals: Arrays, new: Array, old: Array) -> Array:
        if len(masks) > 1:
            new = jnp.where(residuals[1], new, old)
        return select_if_vmap(residuals[0], new, old)

    def forward(residuals: Arrays, linear: Arrays) -> list[Array]:
        array, x = linear
        indices = residuals[len(masks) :]
        return [write(array, indices, select(residuals, x, read(array, indices)))]

    def transpose(residuals: Arrays, cotangents: Arrays, _: tuple[bool, ...]) -> list[Array]:
        indices = residuals[len(masks) :]
        ct_x = read(cotangents[0], indices)
        # The cotangent of the old value is needed only at the loop's start, where `clear_written`
        # zeroes it. Zeroing it here would make XLA copy the array in each step.
        return [cotangents[0], select(residuals, ct_x, jnp.zeros_like(ct_x))]

    def transpose_all(residuals: Arrays, cotangents: Arrays, _: tuple[bool, ...]) -> list[Array]:
        # In derivatives of derivatives a step writes to a buffer that is full already.
        ct_array, ct_x = transpose(residuals, cotangents, ())
        indices = residuals[len(masks) :]
        kept = select(residuals, jnp.zeros_like(ct_x), read(ct_array, indices))
        return [write(ct_array, indices, kept), ct_x]

    residuals = [*masks, *indices]
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        return forward(residuals, [array, value])[0]
    return linear_call(
        forward,
        transpose,
        residuals,
        [array, value],
        like=[array],
        transpose_beside_tangents=transpose_all,
    )[0]


MaybeBuffer = Buffer | Array
"""The type of an argument that is a buffer in the body of a loop, and an array elsewhere."""


def buffer_at_set(
    buffer: MaybeBuffer, index: Any, x: ArrayLike, *, pred: Any = None, **kwargs: Any
) -> Any:
    """`buffer.at[index].set(x)`, for buffers of loops and for arrays.

    **Arguments:**

    - `buffer`: shape `(*buffer)`.
    - `index`: whatever an array can be indexed with.
    - `x`: of the shape of `buffer[index]`, or one that broadcasts to it.
    - `pred`: shape `()`; nothing is written where it is false.
    - `**kwargs`: of `jax.Array.at[...].set`.

    **Returns:** a buffer for a buffer, an array for an array.

    **Raises:** `TypeError` if `buffer` is neither.

    !!! example

        >>> import jax.numpy as jnp
        >>> print(buffer_at_set(jnp.zeros(3), 1, 2.0))
        [0. 2. 0.]
    """
    if isinstance(buffer, Buffer):
        return buffer.at[index].set(x, pred=pred, **kwargs)
    if not is_array(buffer):
        raise TypeError(
            f"buffer_at_set expected an array or a buffer of a loop, got {tree_pformat(buffer)}."
        )
    buffer = jnp.asarray(buffer)
    if pred is not None:
        x = jnp.where(pred, jnp.asarray(x, buffer.dtype), buffer[index])
    return buffer.at[index].set(x, **kwargs)
