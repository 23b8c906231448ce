"""Pooling to an output of given sizes."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray, Shaped

from .._module import Module, field
from .._numbers import whole_number
from ._common import axis_names, check_input, describe, sizes_by_axis


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
    size = x.shape[axis]
    entries = [
        jnp.apply_along_axis(
            operation,
            axis,
            jax.lax.slice_in_dim(x, i * size // target, -(-(i + 1) * size // target), axis=axis),
        )
        for i in range(target)
    ]
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
