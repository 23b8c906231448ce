"""Buffers: arrays in the carry of a loop, in which each entry is written at most once."""

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
from ._primitives import select_if_vmap
from ._scan import Arrays


class Buffer(Module):
    """An array in the carry of a loop, in which each entry is written at most once.

    The loop body gets a `Buffer` for each array that the argument `buffers` of the loop chooses.
    The body writes an entry with `buffer.at[index].set(x)` or `buffer_at_set`. Afterwards, the body
    may read the entry with `buffer[index]`. Buffers save memory and time. Reverse mode does not
    save a buffer in each step. Under `jax.vmap`, a step writes one entry for each member of the
    batch, even if some members have ended. For an ordinary array, the step would copy the whole
    array.
    """

    array: Array
    is_active: Bool[Array, ""] | bool
    is_writable: bool = field(static=True, default=True)

    def holding(self, array: Array) -> "Buffer":
        """A copy of this buffer that holds `array`."""
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
        # Batch members that have ended also read an entry. For these members, the cotangent of the
        # entry must be zero.
        return select_if_vmap(jnp.asarray(self.is_active), entry, jnp.zeros_like(entry))

    @property
    def at(self) -> "_At":
        return _At(self)


class _At:
    """The object `buffer.at`."""

    def __init__(self, buffer: Buffer):
        self._buffer = buffer

    def __getitem__(self, index: Any) -> "_Place":
        return _Place(self._buffer, index)


class _Place:
    """The object `buffer.at[index]`."""

    def __init__(self, buffer: Buffer, index: Any):
        self._buffer = buffer
        self._index = index

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a buffer of a loop has no `.at[index].{name}`: each entry is written once, with "
            "`.at[index].set(x)`, and read with `buffer[index]`."
        )

    def set(self, x: ArrayLike, *, pred: Any = None, **kwargs: Any) -> Buffer:
        """A copy of the buffer with `x` written at the index.

        **Arguments:**

        - `x`: array or number. It is cast to the dtype of the buffer.
        - `pred`: boolean of shape `()`; if it is false, nothing is written.
        - `**kwargs`: passed to `jax.Array.at[...].set`.
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
    """Writes `x` to `array` at `index` if `pred` and `is_active` are true.

    The transpose reads the written entry from the cotangent, and leaves the cotangent unchanged.
    JAX's own transpose of an update also writes to the cotangent, so XLA copies the whole array in
    each step of a loop. With 1 MB of buffers, a backward step took 15 times as long.
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
    """Writes at one integer index. Updates a slice, which takes half the time of a scatter."""
    length = array.shape[0]
    # As in `jax.numpy`, negative indices count from the end, and out-of-bounds writes are dropped.
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
    """Returns `write(array, indices, x)` if `pred` and `is_active` are true, and else `array`."""
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
        # The cotangent of the old value should become zero here. Zeroing it in each step would make
        # XLA copy the array in each step. So `clear_written` zeroes it once, at the start of the
        # loop.
        return [cotangents[0], select(residuals, ct_x, jnp.zeros_like(ct_x))]

    def transpose_all(residuals: Arrays, cotangents: Arrays, _: tuple[bool, ...]) -> list[Array]:
        # In higher-order derivatives a step writes to a buffer that is already full. Then the
        # cotangent of the old value must be zeroed here.
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
"""The type of an argument that is a `Buffer` inside a loop body and an array elsewhere."""


def buffer_at_set(
    buffer: MaybeBuffer, index: Any, x: ArrayLike, *, pred: Any = None, **kwargs: Any
) -> Any:
    """Returns `buffer.at[index].set(x)` for a `Buffer` or an array.

    **Arguments:**

    - `buffer`: a `Buffer` or an array.
    - `index`: any index of an array.
    - `x`: array whose shape broadcasts to the shape of `buffer[index]`.
    - `pred`: boolean of shape `()`; if it is false, nothing is written.
    - `**kwargs`: passed to `jax.Array.at[...].set`.

    **Returns:** a `Buffer` if `buffer` is a `Buffer`, else an array.

    **Raises:** `TypeError` if `buffer` is neither a `Buffer` nor an array.

    !!! example

        >>> import jax.numpy as jnp
        >>> print(buffer_at_set(jnp.zeros(3), 1, 2.0))
        [0. 2. 0.]
    """
    if isinstance(buffer, Buffer):
        return buffer.at[index].set(x, pred=pred, **kwargs)
    if not is_array(buffer):
        raise TypeError(
            f"buffer_at_set expected an array or a loop buffer, got {tree_pformat(buffer)}."
        )
    buffer = jnp.asarray(buffer)
    if pred is not None:
        x = jnp.where(pred, jnp.asarray(x, buffer.dtype), buffer[index])
    return buffer.at[index].set(x, **kwargs)
