"""Pooling over sliding windows, and adaptive pooling to a given output size."""

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
from ._inputs import (
    OverAxes,
    Padding,
    Pads,
    Sizes,
    axis_names,
    check_input,
    check_window_fits,
    describe,
    padding_by_axis,
    pads_for,
    sizes_by_axis,
)


class Pool(Module):
    """Reduces each sliding window of an input, separately in each channel.

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
        """Arguments with one value for each spatial axis also accept a single integer.

        **Arguments:**

        - `init`: initial value of the reduction of each window, and value of the padding. `init`
          should be the identity of `operation`, `operation(init, x) == x`, such as 0 for a sum.
        - `operation`: an elementwise function of two arrays of the same shape: the reduction so far
          and the next entries. The layer is differentiable only if `operation` is.
        - `num_spatial_dims`: number of spatial axes, 2 for images.
        - `kernel_size`: size of the window along each spatial axis.
        - `stride`: step of the window along each spatial axis; 1 by default. (In PyTorch the
          default is `kernel_size`.)
        - `padding`: number of entries added at both ends of each spatial axis; or one pair
          `(before, after)` for each axis. `"VALID"` adds none. `"SAME"` gives an output of
          `ceil(size / stride)` entries; if the total padding is odd, the additional entry is at the
          end, or at the beginning with `"SAME_LOWER"`.
        - `use_ceil`: whether to round the output size up, so that the last window may reach beyond
          the padding. As in PyTorch, no window starts in the padding at the end.

        **Raises:**

        - `ValueError` if a size is not a positive integer.
        - `ValueError` if a sequence does not have the length `num_spatial_dims`.
        - `ValueError` if `padding` is an unknown string.
        """
        self.init = init
        self.operation = operation
        self.num_spatial_dims = num_axes = whole_number(num_spatial_dims, "num_spatial_dims")
        self.kernel_size = sizes_by_axis(kernel_size, num_axes, "kernel_size")
        self.stride = sizes_by_axis(stride, num_axes, "stride")
        self.padding = padding_by_axis(padding, num_axes)
        self.use_ceil = use_ceil

    def __call__(
        self, x: Shaped[Array, "channels *sizes"], *, key: PRNGKeyArray | None = None
    ) -> Shaped[Array, "channels *new_sizes"]:
        """**Arguments:**

        - `x`: shape `(channels, dim_1, ..., dim_N)` with `N = num_spatial_dims`.
        - `key`: ignored; accepted so that all layers have the same signature.

        **Returns:** shape `(channels, new_dim_1, ..., new_dim_N)`.

        **Raises:**

        - `ValueError` if `x` has the wrong number of axes, or is smaller than a window.
        - `RuntimeError` if the padding is larger than a window.
        """
        return self._reduce(x, self._pads(x))

    def _pads(self, x: Array) -> Pads:
        check_input(self, x, ("channels", *axis_names(self.num_spatial_dims)))
        sizes = x.shape[1:]
        pads = pads_for(self.padding, sizes, self.kernel_size, self.stride)
        if any(max(pad) > extent for pad, extent in zip(pads, self.kernel_size, strict=True)):
            raise RuntimeError(
                f"{describe(self)} expected padding that is no larger than its window, since a "
                f"window must overlap the input; got padding={pads} and "
                f"kernel_size={self.kernel_size}."
            )
        if self.use_ceil:
            pads = tuple(map(_pad_for_last_window, pads, sizes, self.kernel_size, self.stride))
        check_window_fits(self, x, pads, self.kernel_size)
        return pads

    def _reduce(self, x: Array, pads: Pads) -> Array:
        """Reduces each window of `x`, shape `(channels, *sizes)`, padded with `init`."""
        init, operation, kernel_size = self.init, self.operation, self.kernel_size
        if min(map(min, pads)) < 0:
            # XLA aborts the process for a window of one entry with negative padding.
            cut = [(min(before, 0), min(after, 0), 0) for before, after in pads]
            x = jax.lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *cut])
            pads = tuple((max(before, 0), max(after, 0)) for before, after in pads)
        # Compared by identity, because `operation` may be unhashable.
        if isinstance(init, (int, float)) and any(
            operation is known and init == identity for known, identity in _DIFFERENTIABLE.items()
        ):
            # On a CPU, convolutions use the layout with channels last. This layer uses the same
            # layout, so that XLA inserts no transposes between the layer and a convolution.
            x = jnp.moveaxis(x, 0, -1)
            # The padding may be infinite, and some 8-bit floats have no infinity.
            is_floating = jnp.issubdtype(x.dtype, jnp.floating)
            has_infinity = is_floating and np.isinf(np.array(np.inf, x.dtype))
            if max(kernel_size) <= _LONGEST_SLICED and has_infinity:
                edges = [*((*pad, 0) for pad in pads), (0, 0, 0)]
                x = jax.lax.pad(x, jnp.asarray(init, x.dtype), edges)
                x = self._reduce_by_axis(x)
            else:
                windows = (*kernel_size, 1), (*self.stride, 1), (*pads, (0, 0))
                x = jax.lax.reduce_window(x, init, operation, *windows)
            return jnp.moveaxis(x, -1, 0)
        # JAX cannot differentiate `reduce_window` for other operations. All windows are reduced
        # together instead, one entry of each window at a time.
        start = jnp.asarray(init).astype(x.dtype)
        padded = jax.lax.pad(x, start, [(0, 0, 0), *((*pad, 0) for pad in pads)])
        room = [size - extent for size, extent in zip(padded.shape[1:], kernel_size, strict=True)]

        def entries_at(offset: tuple[int, ...]) -> Array:
            limits = [first + each + 1 for first, each in zip(offset, room, strict=True)]
            return jax.lax.slice(padded, (0, *offset), (x.shape[0], *limits), (1, *self.stride))

        entries = [entries_at(offset) for offset in itertools.product(*map(range, kernel_size))]
        return functools.reduce(operation, entries, jnp.full_like(entries[0], start))

    def _reduce_by_axis(self, x: Array) -> Array:
        """Reduces each window of `x`, shape `(*sizes, channels)`, one axis at a time."""

        def first_extreme(one: Array, other: Array) -> Array:
            # The first of equal entries gets the whole gradient. NaN propagates.
            return jnp.where((one == self.operation(one, other)) | jnp.isnan(one), one, other)

        combine = jax.lax.add if self.operation is jax.lax.add else first_extreme
        # Starts at the last axis, so that the gradient goes to the first of equal entries in
        # row-major order.
        for axis in reversed(range(self.num_spatial_dims)):
            entries = _entries_of_windows(x, axis, self.kernel_size[axis], self.stride[axis])
            x = functools.reduce(combine, entries)
        return x


def _pad_for_last_window(
    pad: tuple[int, int], size: int, extent: int, step: int
) -> tuple[int, int]:
    """Returns `pad`, enlarged at the end if the last entries do not fill a window."""
    before, after = pad
    room = before + size + after - extent
    left_over = room % step
    start = room - left_over + step
    return (before, after + step - left_over) if left_over and start < before + size else pad


_DIFFERENTIABLE = {jax.lax.add: 0, jax.lax.max: -math.inf, jax.lax.min: math.inf}
"""Reductions that JAX can differentiate, with the initial value that each one requires."""

_LONGEST_SLICED = 3
"""Windows up to this size are reduced entry by entry. Larger windows use `reduce_window`.

For small windows `reduce_window` is slower on a CPU. Its gradient is much slower: the gradient of a
maximum is a scatter. Between two convolutions and with the gradient, a reduction entry by entry
took 0.1 times the time of `reduce_window` for a maximum over 2 x 2 entries, 0.5 times for 3 x 3
entries with stride 2, and 2 times for a window of eight entries.
"""


def _entries_of_windows(x: Array, axis: int, extent: int, step: int) -> list[Array]:
    """A list of arrays. Array `i` has the i-th entries of all windows along an axis."""
    room = x.shape[axis] - extent
    if extent != step:
        starts = range(extent)
        return [jax.lax.slice_in_dim(x, i, i + room + 1, step, axis) for i in starts]
    # Without overlap, a split is faster: its gradient is a concatenation, while the gradient of
    # strided slices adds padded arrays.
    count = room // step + 1
    x = jax.lax.slice_in_dim(x, 0, count * extent, axis=axis)
    x = x.reshape(*x.shape[:axis], count, extent, *x.shape[axis + 1 :])
    parts = jax.lax.split(x, (1,) * extent, axis + 1)
    return [jnp.squeeze(part, axis + 1) for part in parts]


class _AvgPool(OverAxes, Pool):
    """The base of `AvgPool1d`, `AvgPool2d` and `AvgPool3d`.

    To add a pool, write a base like this one and a class for each number of axes (see `OverAxes`).
    List the classes in `nn/__init__.py` and `tests/nn/test_sizes.py`.
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
        """**Arguments:** as for `Pool`, without `init`, `operation` and `num_spatial_dims`, and

        - `count_include_pad`: whether the average includes the padding. If `False`, the sum of a
          window is divided by the number of entries in the window that are not padding.
        """
        window = kernel_size, stride, padding, use_ceil
        super().__init__(0, jax.lax.add, self._num_axes, *window)
        self.count_include_pad = count_include_pad

    def __call__(
        self, x: Shaped[Array, "channels *sizes"], *, key: PRNGKeyArray | None = None
    ) -> Shaped[Array, "channels *new_sizes"]:
        """**Arguments:**

        - `x`: shape `(channels, dim_1, ..., dim_N)` with `N = num_spatial_dims`.
        - `key`: ignored; accepted so that all layers have the same signature.

        **Returns:** shape `(channels, new_dim_1, ..., new_dim_N)`; the dtype of `x` if this dtype
        is floating or complex, otherwise the dtype of `jnp.mean(x)`. Sums are computed in at least
        float32.

        **Raises:**

        - `ValueError` if `x` has the wrong number of axes, or is smaller than a window.
        - `RuntimeError` if the padding is larger than a window.
        """
        pads = self._pads(x)
        is_inexact = jnp.issubdtype(x.dtype, jnp.inexact)
        dtype = x.dtype if is_inexact else jax.eval_shape(jnp.mean, x).dtype
        total = self._reduce(jnp.asarray(x, at_least_float32(dtype)), pads)
        if self.count_include_pad:
            return (total / math.prod(self.kernel_size)).astype(dtype)
        counts = map(_num_not_padding, pads, x.shape[1:], self.kernel_size, self.stride)
        count = functools.reduce(np.multiply.outer, counts, np.ones(1))
        return (total / count.astype(total.dtype)).astype(dtype)


def _num_not_padding(pad: tuple[int, int], size: int, extent: int, step: int) -> np.ndarray:
    """For each window along one axis, the number of its entries that are not padding."""
    starts = np.arange(-pad[0], size + pad[1] - extent + 1, step)
    count = np.clip(starts + extent, 0, size) - np.clip(starts, 0, size)
    # If a window contains only padding, its average is then 0 / 1 and not 0 / 0.
    return np.maximum(count, 1)


class AvgPool1d(_AvgPool, num_axes=1, init=False):
    """Average pooling over one spatial axis.

    >>> import jax.numpy as jnp
    >>> AvgPool1d(kernel_size=2, stride=2)(jnp.ones((3, 8))).shape
    (3, 4)
    """


class AvgPool2d(_AvgPool, num_axes=2, init=False):
    """Average pooling over two spatial axes.

    >>> import jax.numpy as jnp
    >>> AvgPool2d(kernel_size=2, stride=2)(jnp.ones((3, 8, 8))).shape
    (3, 4, 4)
    """


class AvgPool3d(_AvgPool, num_axes=3, init=False):
    """Average pooling over three spatial axes.

    >>> import jax.numpy as jnp
    >>> AvgPool3d(kernel_size=2, stride=2)(jnp.ones((3, 8, 8, 8))).shape
    (3, 4, 4, 4)
    """


class _MaxPool(OverAxes, Pool):
    """The base of `MaxPool1d`, `MaxPool2d` and `MaxPool3d`."""

    def __init__(
        self, kernel_size: Sizes, stride: Sizes = 1, padding: Padding = 0, use_ceil: bool = False
    ):
        """**Arguments:** as for `Pool`, without `init`, `operation` and `num_spatial_dims`."""
        window = kernel_size, stride, padding, use_ceil
        super().__init__(-math.inf, jax.lax.max, self._num_axes, *window)


class MaxPool1d(_MaxPool, num_axes=1, init=False):
    """Max pooling over one spatial axis.

    >>> import jax.numpy as jnp
    >>> MaxPool1d(kernel_size=2, stride=2)(jnp.ones((3, 8))).shape
    (3, 4)
    """


class MaxPool2d(_MaxPool, num_axes=2, init=False):
    """Max pooling over two spatial axes.

    >>> import jax.numpy as jnp
    >>> MaxPool2d(kernel_size=2, stride=2)(jnp.ones((3, 8, 8))).shape
    (3, 4, 4)
    """


class MaxPool3d(_MaxPool, num_axes=3, init=False):
    """Max pooling over three spatial axes.

    >>> import jax.numpy as jnp
    >>> MaxPool3d(kernel_size=2, stride=2)(jnp.ones((3, 8, 8, 8))).shape
    (3, 4, 4, 4)
    """


# --- Adaptive pooling ---


class AdaptivePool(Module):
    """Reduces an input to a given output size, separately in each channel.

    The spatial axes are reduced one after another. An axis of `n` entries is divided into `target`
    windows, and each window is reduced to one entry. If `n` is not divisible by `target`, the first
    `n % target` windows have one entry more. With `overlap=True`, window `i` instead has the
    entries from `floor(i n / target)` to `ceil((i + 1) n / target) - 1`, as in PyTorch.

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

        - `target_shape`: sizes of the output's spatial axes, or one integer for all axes.
        - `num_spatial_dims`: number of spatial axes, 2 for images.
        - `operation`: function that reduces the entries of a window along one axis, shape
          `(size,)`, to an array of shape `()`.
        - `overlap`: whether windows overlap if an axis is not divisible by its target.

        **Raises:** `ValueError` if a size is not a positive integer, or if a sequence does not have
        the length `num_spatial_dims`.
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
        - `key`: ignored; accepted so that all layers have the same signature.

        **Returns:** shape `(channels, *target_shape)`.

        **Raises:**

        - `ValueError` if `x` has the wrong number of axes, or an empty axis.
        - `ValueError` if `overlap` is `False` and an axis is shorter than its target.
        """
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


class _AdaptiveAvgPool(OverAxes, AdaptivePool):
    """The base of `AdaptiveAvgPool1d`, `AdaptiveAvgPool2d` and `AdaptiveAvgPool3d`."""

    def __init__(self, target_shape: int | Sequence[int], *, overlap: bool = False):
        """**Arguments:** as for `AdaptivePool`, without `num_spatial_dims` and `operation`."""
        super().__init__(target_shape, self._num_axes, jnp.mean, overlap=overlap)


class AdaptiveAvgPool1d(_AdaptiveAvgPool, num_axes=1, init=False):
    """Adaptive average pooling over one spatial axis.

    >>> import jax.numpy as jnp
    >>> AdaptiveAvgPool1d(3)(jnp.ones((4, 8))).shape
    (4, 3)
    """


class AdaptiveAvgPool2d(_AdaptiveAvgPool, num_axes=2, init=False):
    """Adaptive average pooling over two spatial axes.

    >>> import jax.numpy as jnp
    >>> AdaptiveAvgPool2d(2)(jnp.ones((4, 8, 8))).shape
    (4, 2, 2)
    """


class AdaptiveAvgPool3d(_AdaptiveAvgPool, num_axes=3, init=False):
    """Adaptive average pooling over three spatial axes.

    >>> import jax.numpy as jnp
    >>> AdaptiveAvgPool3d(2)(jnp.ones((4, 8, 8, 8))).shape
    (4, 2, 2, 2)
    """


class _AdaptiveMaxPool(OverAxes, AdaptivePool):
    """The base of `AdaptiveMaxPool1d`, `AdaptiveMaxPool2d` and `AdaptiveMaxPool3d`."""

    def __init__(self, target_shape: int | Sequence[int], *, overlap: bool = False):
        """**Arguments:** as for `AdaptivePool`, without `num_spatial_dims` and `operation`."""
        super().__init__(target_shape, self._num_axes, jnp.max, overlap=overlap)


class AdaptiveMaxPool1d(_AdaptiveMaxPool, num_axes=1, init=False):
    """Adaptive max pooling over one spatial axis.

    >>> import jax.numpy as jnp
    >>> AdaptiveMaxPool1d(3)(jnp.ones((4, 8))).shape
    (4, 3)
    """


class AdaptiveMaxPool2d(_AdaptiveMaxPool, num_axes=2, init=False):
    """Adaptive max pooling over two spatial axes.

    >>> import jax.numpy as jnp
    >>> AdaptiveMaxPool2d(2)(jnp.ones((4, 8, 8))).shape
    (4, 2, 2)
    """


class AdaptiveMaxPool3d(_AdaptiveMaxPool, num_axes=3, init=False):
    """Adaptive max pooling over three spatial axes.

    >>> import jax.numpy as jnp
    >>> AdaptiveMaxPool3d(2)(jnp.ones((4, 8, 8, 8))).shape
    (4, 2, 2, 2)
    """
