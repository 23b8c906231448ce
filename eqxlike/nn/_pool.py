"""Pooling over a sliding window, and to a size that is given."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray, Shaped

from .._check_numbers import whole_number
from .._dtypes import at_least_float32
from .._module import Module, field
from ._inputs import check_input, describe
from ._windows import (
    OverAxes,
    Padding,
    Pads,
    Sizes,
    axis_names,
    check_window_fits,
    padding_by_axis,
    pads_for,
    sizes_by_axis,
)


class Pool(Module):
    """Reduces each window of an input, in each channel by itself.

    >>> import jax, jax.numpy as jnp
    >>> layer = Pool(0, jax.lax.add, num_spatial_dims=1, kernel_size=2)
    >>> layer(jnp.array([[1.0, 2.0, 3.0, 4.0]])).tolist()
    [[3.0, 5.0, 7.0]]
    """

    init: int | float | Array
    operation: Callable[[Array, Array], Array]
    num_spatial_dims: int = field(static=True)
    kernel_size: tuple[int, ...] = field(static=True)
    stride: tuple[int, ...] = field(static=True)
    padding: str | Pads = field(static=True)
    use_ceil: bool = field(static=True)

    def __init__(
        self,
        init: int | float | Array,
        operation: Callable[[Array, Array], Array],
        num_spatial_dims: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Padding = 0,
        use_ceil: bool = False,
    ):
        """An argument for each spatial axis may be one integer, which then holds for all.

        **Arguments:**

        - `init`: what the reduction of each window starts at; the padding consists of it too. It
          should change nothing, `operation(init, x) == x`, as 0 does in a sum.
        - `operation`: takes what is reduced so far and the entries that come next, two arrays of
          one shape, entry by entry. Its derivative is that of the layer.
        - `num_spatial_dims`: number of spatial axes, 2 for images.
        - `kernel_size`: number of entries of a window along each spatial axis.
        - `stride`: how far apart two windows begin. It is 1 if it is not given, not `kernel_size`
          as in PyTorch.
        - `padding`: how many entries are added at both ends of each spatial axis; or pairs
          `(before, after)`, one for each axis; or `"VALID"` for none; or `"SAME"` for an output of
          `ceil(size / stride)` entries, with an odd one added at the end, with `"SAME_LOWER"` at
          the beginning.
        - `use_ceil`: whether entries at the end that fill no window have a window of their own,
          which reaches beyond the padding. As in PyTorch, there is none that would begin there.

        **Raises:** `ValueError`, naming the argument, for a size that is not a positive integer, a
        sequence of another length than `num_spatial_dims`, and an unknown word.
        """
        self.init = init
        self.operation = operation
        num_spatial_dims = whole_number(num_spatial_dims, "num_spatial_dims")
        self.num_spatial_dims = num_spatial_dims
        self.kernel_size = sizes_by_axis(kernel_size, num_spatial_dims, "kernel_size")
        self.stride = sizes_by_axis(stride, num_spatial_dims, "stride")
        self.padding = padding_by_axis(padding, num_spatial_dims)
        self.use_ceil = use_ceil

    def __call__(
        self, x: Shaped[Array, "channels *sizes"], *, key: PRNGKeyArray | None = None
    ) -> Shaped[Array, "channels *new_sizes"]:
        """**Arguments:**

        - `x`: shape `(channels, dim_1, ..., dim_N)` with `N = num_spatial_dims`.
        - `key`: ignored; layers share one signature.

        **Returns:** shape `(channels, new_dim_1, ..., new_dim_N)`.

        **Raises:** `ValueError` if `x` has another number of axes or is smaller than a window;
        `RuntimeError` if the padding is longer than a window.
        """
        del key
        return self._reduce(x, self._pads(x))

    def _pads(self, x: Array) -> Pads:
        check_input(self, x, ("channels", *axis_names(self.num_spatial_dims)))
        sizes = x.shape[1:]
        pads = pads_for(self.padding, sizes, self.kernel_size, self.stride)
        if any(max(pad) > extent for pad, extent in zip(pads, self.kernel_size, strict=True)):
            raise RuntimeError(
                f"{describe(self)} expected padding that is no longer than its window, so that "
                f"each window meets the input; got padding={pads} and "
                f"kernel_size={self.kernel_size}."
            )
        if self.use_ceil:
            pads = tuple(map(_pad_for_last_window, pads, sizes, self.kernel_size, self.stride))
        check_window_fits(self, x, pads, self.kernel_size)
        return pads

    def _reduce(self, x: Array, pads: Pads) -> Array:
        return _reduce_windows(x, self.init, self.operation, self.kernel_size, self.stride, pads)


def _pad_for_last_window(
    pad: tuple[int, int], size: int, extent: int, step: int
) -> tuple[int, int]:
    """`pad`, with more at the end if entries there fill no window."""
    before, after = pad
    room = before + size + after - extent
    left_over = room % step
    start = room - left_over + step
    return (before, after + step - left_over) if left_over and start < before + size else pad


_DIFFERENTIABLE = {jax.lax.add: 0, jax.lax.max: -math.inf, jax.lax.min: math.inf}
"""Reductions of which JAX knows the derivative, each with the one number that it may start at."""

_LONGEST_SLICED = 3
"""Windows that are no longer along any axis are reduced entry by entry.

On a CPU `reduce_window` is slower, and its gradient far slower: that of a maximum scatters. Between
two convolutions a maximum of 2 x 2 and its gradient take 0.1 of its time, one of 3 x 3 with a
stride of 2 takes 0.5; a maximum of eight entries takes 2.
"""


def _reduce_windows(
    x: Array,
    init: int | float | Array,
    operation: Callable[[Array, Array], Array],
    kernel_size: tuple[int, ...],
    stride: tuple[int, ...],
    pads: Pads,
) -> Array:
    """Reduces each window of `x`, of shape `(channels, *sizes)`, with `init` around it."""
    if min(map(min, pads)) < 0:
        # XLA ends the process over a window of one entry with negative padding.
        cut = [(min(before, 0), min(after, 0), 0) for before, after in pads]
        x = jax.lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *cut])
        pads = tuple((max(before, 0), max(after, 0)) for before, after in pads)
    # By identity: `operation` may be anything, and need not be hashable.
    if isinstance(init, (int, float)) and any(
        operation is known and init == identity for known, identity in _DIFFERENTIABLE.items()
    ):
        # With the channels last, side by side in memory: between two convolutions on a CPU XLA then
        # keeps the layout that it likes for them.
        x = jnp.moveaxis(x, 0, -1)
        # Some floats of 8 bits have no infinity to start at.
        has_infinity = jnp.issubdtype(x.dtype, jnp.floating) and np.isinf(np.array(np.inf, x.dtype))
        if max(kernel_size) <= _LONGEST_SLICED and has_infinity:
            around = [*((*pad, 0) for pad in pads), (0, 0, 0)]
            x = jax.lax.pad(x, jnp.asarray(init, x.dtype), around)
            x = _reduce_by_axis(x, operation, kernel_size, stride)
        else:
            windows = (*kernel_size, 1), (*stride, 1), (*pads, (0, 0))
            x = jax.lax.reduce_window(x, init, operation, *windows)
        return jnp.moveaxis(x, -1, 0)
    # JAX has no derivative of another reduction. So all windows are reduced side by side, from
    # their first entries to their last.
    start = jnp.asarray(init).astype(x.dtype)
    padded = jax.lax.pad(x, start, [(0, 0, 0), *((*pad, 0) for pad in pads)])
    spare = [size - extent for size, extent in zip(padded.shape[1:], kernel_size, strict=True)]

    def entries_at(offset: tuple[int, ...]) -> Array:
        limits = [first + each + 1 for first, each in zip(offset, spare, strict=True)]
        return jax.lax.slice(padded, (0, *offset), (x.shape[0], *limits), (1, *stride))

    entries = [entries_at(offset) for offset in itertools.product(*map(range, kernel_size))]
    return functools.reduce(operation, entries, jnp.full_like(entries[0], start))


def _reduce_by_axis(
    x: Array,
    operation: Callable[[Array, Array], Array],
    kernel_size: tuple[int, ...],
    stride: tuple[int, ...],
) -> Array:
    """Reduces each window of `x`, of shape `(*sizes, channels)`, along one axis after the other."""

    def first_extreme(one: Array, other: Array) -> Array:
        # The first of equal entries has all of the gradient. NaN is more extreme than any number.
        return jnp.where((one == operation(one, other)) | jnp.isnan(one), one, other)

    combine = operation if operation is jax.lax.add else first_extreme
    # From the last axis on: the first of equal entries is then the first one row by row.
    for axis in reversed(range(len(kernel_size))):
        entries = _entries_of_windows(x, axis, kernel_size[axis], stride[axis])
        x = functools.reduce(combine, entries)
    return x


def _entries_of_windows(x: Array, axis: int, extent: int, step: int) -> list[Array]:
    """The first entries of all windows along an axis, the second ones, and so on."""
    spare = x.shape[axis] - extent
    if extent != step:
        starts = range(extent)
        return [jax.lax.slice_in_dim(x, i, i + spare + 1, step, axis) for i in starts]
    # The gradient concatenates. That of strided slices adds padded arrays.
    count = spare // step + 1
    x = jax.lax.slice_in_dim(x, 0, count * extent, axis=axis)
    x = x.reshape(*x.shape[:axis], count, extent, *x.shape[axis + 1 :])
    parts = jax.lax.split(x, (1,) * extent, axis + 1)
    return [jnp.squeeze(part, axis + 1) for part in parts]


class _AvgPool(OverAxes, Pool):
    """The base of `AvgPool1d`, `AvgPool2d` and `AvgPool3d`.

    Another pool has such a base, a class for each number of axes, and lines in `nn/__init__.py`.
    `tests/nn/test_sizes.py` lists all of them. For `num_axes` and `init=False` in the
    header of a class see `OverAxes`.
    """

    count_include_pad: bool = field(static=True)

    def __init__(
        self,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Padding = 0,
        use_ceil: bool = False,
        *,
        count_include_pad: bool = True,
    ):
        """**Arguments:** those of `Pool`, but for the first three, and

        - `count_include_pad`: whether the sum of a window is divided by the number of all its
          entries; if not, by the number of those that are in the input.
        """
        window = kernel_size, stride, padding, use_ceil
        super().__init__(0, jax.lax.add, self._num_axes, *window)
        self.count_include_pad = count_include_pad

    def __call__(
        self, x: Shaped[Array, "channels *sizes"], *, key: PRNGKeyArray | None = None
    ) -> Shaped[Array, "channels *new_sizes"]:
        """**Arguments:**

        - `x`: shape `(channels, dim_1, ..., dim_N)` with `N = num_spatial_dims`.
        - `key`: ignored; layers share one signature.

        **Returns:** shape `(channels, new_dim_1, ..., new_dim_N)`; the dtype of `x` if that is
        floating or complex, else that of `jnp.mean(x)`. The sum is taken in at least float32.

        **Raises:** `ValueError` if `x` has another number of axes or is smaller than a window;
        `RuntimeError` if the padding is longer than a window.
        """
        del key
        pads = self._pads(x)
        is_inexact = jnp.issubdtype(x.dtype, jnp.inexact)
        dtype = x.dtype if is_inexact else jax.eval_shape(jnp.mean, x).dtype
        total = self._reduce(jnp.asarray(x, at_least_float32(dtype)), pads)
        if self.count_include_pad:
            return (total / math.prod(self.kernel_size)).astype(dtype)
        counts = map(_num_inside, pads, x.shape[1:], self.kernel_size, self.stride)
        count = functools.reduce(np.multiply.outer, counts, np.ones(1))
        return (total / count.astype(total.dtype)).astype(dtype)


def _num_inside(pad: tuple[int, int], size: int, extent: int, step: int) -> np.ndarray:
    """The number of entries in each window along one axis that are not padding."""
    starts = np.arange(-pad[0], size + pad[1] - extent + 1, step)
    count = np.clip(starts + extent, 0, size) - np.clip(starts, 0, size)
    # A window of padding alone has the sum 0, of which 0 should be the average.
    return np.maximum(count, 1)


class AvgPool1d(_AvgPool, num_axes=1, init=False):
    """The average of each window over one spatial axis.

    >>> import jax.numpy as jnp
    >>> AvgPool1d(kernel_size=2, stride=2)(jnp.ones((3, 8))).shape
    (3, 4)
    """


class AvgPool2d(_AvgPool, num_axes=2, init=False):
    """The average of each window over two spatial axes.

    >>> import jax.numpy as jnp
    >>> AvgPool2d(kernel_size=2, stride=2)(jnp.ones((3, 8, 8))).shape
    (3, 4, 4)
    """


class AvgPool3d(_AvgPool, num_axes=3, init=False):
    """The average of each window over three spatial axes.

    >>> import jax.numpy as jnp
    >>> AvgPool3d(kernel_size=2, stride=2)(jnp.ones((3, 8, 8, 8))).shape
    (3, 4, 4, 4)
    """


class _MaxPool(OverAxes, Pool):
    """The base of `MaxPool1d`, `MaxPool2d` and `MaxPool3d`."""

    def __init__(
        self, kernel_size: Sizes, stride: Sizes = 1, padding: Padding = 0, use_ceil: bool = False
    ):
        """**Arguments:** those of `Pool`, but for the first three."""
        window = kernel_size, stride, padding, use_ceil
        super().__init__(-math.inf, jax.lax.max, self._num_axes, *window)


class MaxPool1d(_MaxPool, num_axes=1, init=False):
    """The maximum of each window over one spatial axis.

    >>> import jax.numpy as jnp
    >>> MaxPool1d(kernel_size=2, stride=2)(jnp.ones((3, 8))).shape
    (3, 4)
    """


class MaxPool2d(_MaxPool, num_axes=2, init=False):
    """The maximum of each window over two spatial axes.

    >>> import jax.numpy as jnp
    >>> MaxPool2d(kernel_size=2, stride=2)(jnp.ones((3, 8, 8))).shape
    (3, 4, 4)
    """


class MaxPool3d(_MaxPool, num_axes=3, init=False):
    """The maximum of each window over three spatial axes.

    >>> import jax.numpy as jnp
    >>> MaxPool3d(kernel_size=2, stride=2)(jnp.ones((3, 8, 8, 8))).shape
    (3, 4, 4, 4)
    """


# --- Pooling to an output of given sizes ---


class AdaptivePool(Module):
    """Reduces an input to given sizes, in each channel by itself, one spatial axis after the other.

    An axis of `n` entries is cut into as many windows as the target has entries, each one reduced
    to one entry. If the target does not divide `n`, the first `n % target` windows are longer by
    one; or, with `overlap=True`, window `i` goes from `floor(i n / target)` up to
    `ceil((i + 1) n / target)`, as in PyTorch.

    >>> import jax.numpy as jnp
    >>> x = jnp.array([[1.0, 2.0, 3.0, 4.0, 5.0]])
    >>> AdaptivePool(2, num_spatial_dims=1, operation=jnp.median)(x).tolist()
    [[2.0, 4.5]]
    >>> AdaptivePool(2, num_spatial_dims=1, operation=jnp.median, overlap=True)(x).tolist()
    [[2.0, 4.0]]
    """

    target_shape: tuple[int, ...] = field(static=True)
    operation: Callable[[Array], Array]
    overlap: bool = field(static=True)

    def __init__(
        self,
        target_shape: int | Sequence[int],
        num_spatial_dims: int,
        operation: Callable[[Array], Array],
        *,
        overlap: bool = False,
    ):
        """**Arguments:**

        - `target_shape`: the sizes of the spatial axes of the output; one integer holds for all.
        - `num_spatial_dims`: number of spatial axes, 2 for images.
        - `operation`: takes the entries of a window along one axis, of shape `(size,)`, and
          returns one of shape `()`.
        - `overlap`: whether windows may share entries where they cannot all be of one length.

        **Raises:** `ValueError` for a size that is not a positive integer, and a sequence of
        another length than `num_spatial_dims`.
        """
        num_spatial_dims = whole_number(num_spatial_dims, "num_spatial_dims")
        self.target_shape = sizes_by_axis(target_shape, num_spatial_dims, "target_shape")
        self.operation = operation
        self.overlap = overlap

    def __call__(
        self, x: Shaped[Array, "channels *sizes"], *, key: PRNGKeyArray | None = None
    ) -> Shaped[Array, "channels *target_shape"]:
        """**Arguments:**

        - `x`: shape `(channels, dim_1, ..., dim_N)` with `N = num_spatial_dims`.
        - `key`: ignored; layers share one signature.

        **Returns:** shape `(channels, *target_shape)`.

        **Raises:** `ValueError` if `x` has another number of axes, an empty one, or one of fewer
        entries than the target has, unless windows may overlap.
        """
        del key
        check_input(self, x, ("channels", *axis_names(len(self.target_shape))))
        for axis, target in enumerate(self.target_shape, start=1):
            least = 1 if self.overlap else target
            if x.shape[axis] < least:
                raise ValueError(
                    f"{describe(self)} expected at least {least} entries along axis {axis} of x, "
                    f"which it reduces to {target}; got x of shape {x.shape}."
                )
        for axis, target in enumerate(self.target_shape, start=1):
            is_divisible = x.shape[axis] % target == 0
            reduce = _overlapping if self.overlap and not is_divisible else _disjoint
            x = reduce(self.operation, x, axis, target)
        return x


def _disjoint(operation: Callable, x: Array, axis: int, target: int) -> Array:
    length, num_longer = divmod(x.shape[axis], target)
    cut = num_longer * (length + 1)
    parts = []
    for start, stop, count in ((0, cut, num_longer), (cut, x.shape[axis], target - num_longer)):
        if count:
            part = jax.lax.slice_in_dim(x, start, stop, axis=axis)
            before, after = x.shape[:axis], x.shape[axis + 1 :]
            windows = jnp.reshape(part, (*before, count, (stop - start) // count, *after))
            parts.append(jnp.apply_along_axis(operation, axis + 1, windows))
    return jnp.concatenate(parts, axis)


def _overlapping(operation: Callable, x: Array, axis: int, target: int) -> Array:
    size, entries = x.shape[axis], []
    for i in range(target):
        start, stop = i * size // target, -(-(i + 1) * size // target)
        window = jax.lax.slice_in_dim(x, start, stop, axis=axis)
        entries.append(jnp.apply_along_axis(operation, axis, window))
    return jnp.stack(entries, axis)


class AdaptiveAvgPool1d(AdaptivePool):
    """`AdaptivePool` over one spatial axis, with the average of each window.

    >>> import jax.numpy as jnp
    >>> AdaptiveAvgPool1d(3)(jnp.ones((4, 8))).shape
    (4, 3)
    """

    def __init__(self, target_shape: int | Sequence[int], *, overlap: bool = False):
        """**Arguments:** those of `AdaptivePool`, with `num_spatial_dims=1`."""
        super().__init__(target_shape, 1, jnp.mean, overlap=overlap)


class AdaptiveAvgPool2d(AdaptivePool):
    """`AdaptivePool` over two spatial axes, with the average of each window.

    >>> import jax.numpy as jnp
    >>> AdaptiveAvgPool2d(2)(jnp.ones((4, 8, 8))).shape
    (4, 2, 2)
    """

    def __init__(self, target_shape: int | Sequence[int], *, overlap: bool = False):
        """**Arguments:** those of `AdaptivePool`, with `num_spatial_dims=2`."""
        super().__init__(target_shape, 2, jnp.mean, overlap=overlap)


class AdaptiveAvgPool3d(AdaptivePool):
    """`AdaptivePool` over three spatial axes, with the average of each window.

    >>> import jax.numpy as jnp
    >>> AdaptiveAvgPool3d(2)(jnp.ones((4, 8, 8, 8))).shape
    (4, 2, 2, 2)
    """

    def __init__(self, target_shape: int | Sequence[int], *, overlap: bool = False):
        """**Arguments:** those of `AdaptivePool`, with `num_spatial_dims=3`."""
        super().__init__(target_shape, 3, jnp.mean, overlap=overlap)


class AdaptiveMaxPool1d(AdaptivePool):
    """`AdaptivePool` over one spatial axis, with the maximum of each window.

    >>> import jax.numpy as jnp
    >>> AdaptiveMaxPool1d(3)(jnp.ones((4, 8))).shape
    (4, 3)
    """

    def __init__(self, target_shape: int | Sequence[int], *, overlap: bool = False):
        """**Arguments:** those of `AdaptivePool`, with `num_spatial_dims=1`."""
        super().__init__(target_shape, 1, jnp.max, overlap=overlap)


class AdaptiveMaxPool2d(AdaptivePool):
    """`AdaptivePool` over two spatial axes, with the maximum of each window.

    >>> import jax.numpy as jnp
    >>> AdaptiveMaxPool2d(2)(jnp.ones((4, 8, 8))).shape
    (4, 2, 2)
    """

    def __init__(self, target_shape: int | Sequence[int], *, overlap: bool = False):
        """**Arguments:** those of `AdaptivePool`, with `num_spatial_dims=2`."""
        super().__init__(target_shape, 2, jnp.max, overlap=overlap)


class AdaptiveMaxPool3d(AdaptivePool):
    """`AdaptivePool` over three spatial axes, with the maximum of each window.

    >>> import jax.numpy as jnp
    >>> AdaptiveMaxPool3d(2)(jnp.ones((4, 8, 8, 8))).shape
    (4, 2, 2, 2)
    """

    def __init__(self, target_shape: int | Sequence[int], *, overlap: bool = False):
        """**Arguments:** those of `AdaptivePool`, with `num_spatial_dims=3`."""
        super().__init__(target_shape, 3, jnp.max, overlap=overlap)
